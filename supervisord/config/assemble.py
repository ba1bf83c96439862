"""From checked values to the spec, and the rules that concern several keys at once."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from supervisord.config.check import BAD
from supervisord.config.endpoints import (
    Endpoint,
    bundled_endpoint,
    is_loopback,
    parse_address,
    parse_endpoint,
    why_no_network,
)
from supervisord.config.forms import REPLICA_NAME
from supervisord.config.keys import SERVE, TAKEN_OPTIONS
from supervisord.config.merge import Merged
from supervisord.config.problems import Path, Problem, spelled_key, spelled_path
from supervisord.config.quantities import spell_duration
from supervisord.core.spec import (
    Config,
    IdleLadder,
    ModelSpec,
    OptionValue,
    ProxySpec,
    ReplicaSpec,
    ServeSpec,
    SupervisorSpec,
    WakeLimits,
)

#: Units of this template are the bundled ones.
BUNDLED_TEMPLATE = "vllm@"


class Assembler:
    """Builds the spec; what breaks a rule is in ``problems``, and then the result is not to be used."""

    def __init__(self, merged: Merged, runtime_dir: FilePath) -> None:
        self._merged = merged
        self._runtime_dir = runtime_dir
        self.problems: list[Problem] = []
        # Who said it first, for everything that must be unique in the whole configuration.
        self._names: dict[str, Path] = {}
        self._replicas: dict[str, Path] = {}
        self._units: dict[str, Path] = {}
        self._endpoints: dict[tuple[str, int, str], Path] = {}

    def config(self, values: Mapping[str, Any]) -> Config:
        proxy = ProxySpec(**_given(values, "proxy"))
        supervisor = SupervisorSpec(**_given(values, "supervisor"))
        models = _given(values, "models")
        self._names = {name: ("models", name) for name in models}
        config = Config(
            proxy=proxy,
            supervisor=supervisor,
            models=tuple(self._model(name, table) for name, table in models.items() if table is not BAD),
            files=tuple(self._merged.files),
        )
        if "*" in proxy.cors_origins and len(proxy.cors_origins) > 1:
            self._complain(("proxy", "cors_origins"), "'*' means every origin: list either it alone, or origins")
        if supervisor.backoff_min > supervisor.backoff_max:
            longest = spell_duration(supervisor.backoff_max)
            self._complain(("supervisor", "backoff_min"), f"must not be longer than backoff_max ({longest})")
        self._listen("listen", proxy.listen, ": the proxy would talk to itself")
        if proxy.status_listen is not None:
            self._status_listen(proxy.status_listen, proxy.listen)
        self._allow_clients(_given(values, "proxy").get("allow_clients"))
        self._networks(("proxy", "trusted_proxies"), _given(values, "proxy").get("trusted_proxies"))
        self._tls(values.get("proxy"))
        return config

    def _complain(self, path: Path, reason: str) -> None:
        self.problems.append(Problem(self._merged.origin(path), spelled_path(path[:-1]), spelled_key(path[-1]), reason))

    def _once(self, seen: dict[Any, Path], what: Any, path: Path, word: str) -> None:
        """``what`` may be said once in the whole configuration."""
        if what in seen:
            self._complain(path, f"{word} is used already, by [{spelled_path(seen[what])}]")
        else:
            seen[what] = path

    def _status_listen(self, listen: str, public: str) -> None:
        path = ("proxy", "status_listen")
        if listen.startswith("unix:"):
            try:
                endpoint = parse_endpoint(listen)
            except ValueError as error:
                self._complain(path, str(error))
                return
            if endpoint.same_place() in self._endpoints:
                replica = self._endpoints[endpoint.same_place()]
                self._complain(path, f"is the endpoint of [{spelled_path(replica)}]")
        elif listen == public and not listen.endswith(":0"):
            self._complain(path, "is the public port's address: this listener is not for clients")
        else:
            self._listen("status_listen", listen)

    def _listen(self, key: str, listen: str, why: str = "") -> None:
        path = ("proxy", key)
        try:
            host, port = parse_address(listen)
        except ValueError as error:
            self._complain(path, str(error))
            return
        for (engine_host, engine_port, _), replica in self._endpoints.items():
            local = is_loopback(engine_host)
            if (
                port
                and engine_port == port
                and (engine_host == host or (local and host in ("0.0.0.0", "::", "localhost")))
            ):
                self._complain(path, f"is the endpoint of [{spelled_path(replica)}]{why}")

    def _allow_clients(self, networks: tuple[str, ...] | None) -> None:
        path = ("proxy", "allow_clients")
        if networks == ():
            self._complain(path, "is empty, so nobody could connect: leave it out to let everybody")
        self._networks(path, networks)

    def _networks(self, path: Path, networks: tuple[str, ...] | None) -> None:
        for network in networks or ():
            if reason := why_no_network(network):
                self._complain(path, reason)

    def _tls(self, table: object) -> None:
        for given, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
            if isinstance(table, dict) and given in table and other not in table:
                self._complain(("proxy", other), f"is required but missing: {given} is nothing without it")

    def _model(self, name: str, table: Mapping[str, Any]) -> ModelSpec:
        path: Path = ("models", name)
        aliases = _value(table, "aliases", ())
        for alias in aliases:
            owner = self._names.setdefault(alias, path)
            if alias == name:
                self._complain((*path, "aliases"), f"{alias!r} is the model's own name")
            elif owner != path:
                self._complain((*path, "aliases"), f"{alias!r} is a name of [{spelled_path(owner)}] already")
        serve = self._serve(table["serve"], (*path, "serve")) if isinstance(table.get("serve"), dict) else None
        return ModelSpec(
            name=name,
            replicas=self._replicas_of(name, table, path),
            aliases=aliases,
            routing=_value(table, "routing", "prefill"),
            admission=_value(table, "admission", "kv"),
            idle=self._idle(_given(table, "idle"), (*path, "idle")),
            wake=WakeLimits(**_given(table, "wake")),
            serve=serve,
        )

    def _idle(self, values: dict[str, Any], path: Path) -> IdleLadder:
        rungs = [(name, values[name]) for name in ("sleep1", "sleep2", "stop") if values.get(name) is not None]
        for (name, seconds), (later_name, later) in itertools.pairwise(rungs):
            if later <= seconds:
                times = f"{spell_duration(later)} is not later than {spell_duration(seconds)}"
                self._complain((*path, later_name), f"must come later than {name}: {times}")
        return IdleLadder(**values)

    def _serve(self, table: Mapping[str, Any], path: Path) -> ServeSpec:
        keys = {key.name for key in SERVE.keys}
        options: dict[str, OptionValue] = {}
        for name, value in table.items():
            if name in keys or value is BAD:
                continue
            # vLLM too reads '_' as '-' up to the first dot (its options for one field of a JSON value).
            head, dot, rest = name.partition(".")
            option = head.replace("_", "-") + dot + rest
            if option in options:
                self._complain((*path, name), f"is the same option as {option}, which is given too")
            if option.startswith("no-") and isinstance(value, bool):
                self._complain((*path, name), f"write {option.removeprefix('no-')} = {str(not value).lower()}")
            options[option] = value
        args = _value(table, "args", ())
        for arg in args:
            option = arg.partition("=")[0].removeprefix("--").replace("_", "-")
            if arg.startswith("--") and option in TAKEN_OPTIONS:
                self._complain((*path, "args"), f"{arg!r}: {option} {TAKEN_OPTIONS[option]}")
        return ServeSpec(
            model=_value(table, "model", ""),
            engine=_value(table, "engine", "vllm"),
            command=self._command(_value(table, "command", ()), (*path, "command")),
            options=options,
            args=args,
            env=_given(table, "env"),
        )

    def _command(self, value: str | tuple[str, ...], path: Path) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            words = shlex.split(value)
        except ValueError as error:
            self._complain(path, f"cannot split {value!r} as a shell does: {str(error).lower()}")
            return ()
        if not words:
            self._complain(path, "has no words")
        return tuple(words)

    def _replicas_of(self, model: str, table: Mapping[str, Any], path: Path) -> tuple[ReplicaSpec, ...]:
        tables = table.get("replicas", {})
        if tables is BAD:
            return ()
        if not tables:
            return self._implicit(model, table, path)
        replicas = []
        for name, values in tables.items():
            here = (*path, "replicas", name)
            self._once(self._replicas, name, here, f"the name {name!r}")
            if values is not BAD:
                replicas.append(self._replica(name, model, values, here, has_serve="serve" in table))
        bundled = any(values is BAD or "unit" not in values for values in tables.values())
        if "serve" in table and not bundled:
            self._complain((*path, "serve"), "is used by nobody: every replica has its own unit")
        return tuple(replicas)

    def _implicit(self, model: str, table: Mapping[str, Any], path: Path) -> tuple[ReplicaSpec, ...]:
        """Without a replicas table: one bundled replica under the model's name."""
        if "serve" not in table:
            self._complain(path, "has neither replicas nor serve, so nothing can answer for it")
            return ()
        if not re.fullmatch(REPLICA_NAME.pattern, model):
            table_name = spelled_path((*path, "replicas", "NAME"))
            reason = (
                f"is no name for a replica: add a table [{table_name}] with a NAME of letters, digits, '_', '.', '-'"
            )
            self._complain(path, reason)
            return ()
        self._once(self._replicas, model, path, f"the replica name {model!r}")
        return (self._replica(model, model, {}, path, has_serve=True),)

    def _replica(self, name: str, model: str, values: Mapping[str, Any], path: Path, *, has_serve: bool) -> ReplicaSpec:
        bundled = "unit" not in values
        unit = _value(values, "unit", f"{BUNDLED_TEMPLATE}{name}.service")
        endpoint = self._endpoint(name, values, path, bundled=bundled)
        if bundled and not has_serve:
            self._complain(path, "has neither a unit nor a serve table in its model, so nothing can start it")
        if not bundled and "endpoint" not in values:
            self._complain(
                (*path, "endpoint"), "is required but missing: a replica with its own unit must say where it answers"
            )
        if not bundled and unit.startswith(BUNDLED_TEMPLATE) and values["unit"] is not BAD:
            self._complain(
                (*path, "unit"), f"{unit!r} is a unit of ours: leave unit out, and a serve table says what it runs"
            )
        elif values.get("unit") is not BAD:
            self._once(self._units, unit, path, f"the unit {unit!r}")
        memory = _given(values, "memory")
        return ReplicaSpec(
            name=name,
            model=model,
            unit=unit,
            endpoint=endpoint,
            bundled=bundled,
            gpus=_value(values, "gpus", ()),
            gpu_memory=memory.get("gpu"),
            nap_memory=memory.get("nap"),
        )

    def _endpoint(self, name: str, values: Mapping[str, Any], path: Path, *, bundled: bool) -> str:
        if values.get("endpoint") is BAD or (not bundled and "endpoint" not in values):
            return ""
        key = (*path, "endpoint")
        text = _value(values, "endpoint", bundled_endpoint(self._runtime_dir, name))
        try:
            endpoint: Endpoint = parse_endpoint(text)
        except ValueError as error:
            self._complain(key, str(error))
            return ""
        if bundled and not endpoint.loopback:
            self._complain(
                key,
                f"{text!r} can be reached from outside: a bundled replica needs unix:/PATH or http://127.0.0.1:PORT",
            )
        self._once(self._endpoints, endpoint.same_place(), path, f"the endpoint {endpoint}")
        return str(endpoint)


def _value(table: Mapping[str, Any], name: str, default: Any) -> Any:
    value = table.get(name, default)
    return default if value is BAD else value


def _given(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The good values of a table that may be missing."""
    value = table.get(name)
    return {key: item for key, item in value.items() if item is not BAD} if isinstance(value, dict) else {}
