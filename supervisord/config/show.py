"""A configuration as one TOML text that loads to the same values: what ``vllmctl config show`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from supervisord.config.keys import IDLE, PROXY, SUPERVISOR, WAKE
from supervisord.config.kinds import Duration, ListOf, Size, Table, Text
from supervisord.config.problems import Path, spelled_key, spelled_path, spelled_text
from supervisord.config.quantities import parse_duration, spell_duration, spell_size
from supervisord.core.spec import Config, ModelSpec, ReplicaSpec, ServeSpec


def show(config: Config) -> str:
    """The merged result: every effective value, defaults included, names and endpoints spelled out."""
    lines = [f"# from {file}" for file in config.files]
    lines += _table(("proxy",), _effective(PROXY, config.proxy))
    lines += _table(("supervisor",), _effective(SUPERVISOR, config.supervisor))
    for model in config.models:
        lines += _model(model)
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: object) -> str:
    """One value as TOML spells it."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return spelled_text(value)
        case Mapping():
            inside = ", ".join(f"{spelled_key(name)} = {toml_value(item)}" for name, item in value.items())
            return f"{{ {inside} }}" if inside else "{}"
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case _:
            raise TypeError(f"no TOML for {value!r}")


def _effective(table: Table, spec: object) -> Iterator[tuple[str, str]]:
    """The keys of a table whose names are the spec's own, with quantities in systemd's spelling."""
    for key in table.keys:
        value = getattr(spec, key.name)
        match key.kind:
            case Duration():
                yield key.name, _duration(value)
            case Size() if value is None:
                pass  # not known, and no value would say so
            case Text() | ListOf() if not value:
                pass  # not set, which is not the same as empty
            case Size():
                yield key.name, toml_value(spell_size(value))
            case _:
                yield key.name, toml_value(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return '"infinity"'
    text = spell_duration(seconds)
    try:
        exact = parse_duration(text) == seconds
    except ValueError:
        exact = False
    return toml_value(text) if exact else repr(seconds)


def _table(path: Path, keys: Iterator[tuple[str, str]]) -> list[str]:
    return ["", f"[{spelled_path(path)}]", *(f"{spelled_key(name)} = {value}" for name, value in keys)]


def _model(model: ModelSpec) -> list[str]:
    path: Path = ("models", model.name)
    heads = {"aliases": model.aliases, "routing": model.routing, "admission": model.admission}
    lines = _table(path, ((name, toml_value(value)) for name, value in heads.items()))
    lines += _table((*path, "idle"), _effective(IDLE, model.idle))
    lines += _table((*path, "wake"), _effective(WAKE, model.wake))
    if model.serve:
        lines += _table((*path, "serve"), _serve(model.serve))
    for replica in model.replicas:
        lines += _table((*path, "replicas", replica.name), _replica(replica))
    return lines


def _serve(serve: ServeSpec) -> Iterator[tuple[str, str]]:
    fixed: dict[str, Any] = {
        "model": serve.model,
        "engine": serve.engine,
        "command": serve.command,
        **serve.options,
        "args": serve.args,
        "env": serve.env,
    }
    return ((name, toml_value(value)) for name, value in fixed.items())


def _replica(replica: ReplicaSpec) -> Iterator[tuple[str, str]]:
    if not replica.bundled:
        yield "unit", toml_value(replica.unit)
    yield "endpoint", toml_value(replica.endpoint)
    yield "gpus", toml_value(replica.gpus)
    sizes = {"gpu": replica.gpu_memory, "nap": replica.nap_memory}
    yield "memory", toml_value({name: spell_size(size) for name, size in sizes.items() if size is not None})
