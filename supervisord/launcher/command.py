"""From the configuration to the engine's command line and environment. Pure: no file is looked at, nothing is run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from supervisord.config.endpoints import Endpoint, parse_endpoint
from supervisord.core.spec import Config, ModelSpec, OptionValue, ReplicaSpec, ServeSpec

#: What is for us and not for the engine: with NotifyAccess=all a program that happens to know sd_notify could end the
#: start too early (podman hands the socket on to its container).
OURS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
#: Variables that choose GPUs. If the person sets one of them in ``env``, we set none.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# How vLLM's parser differs for a few options (vllm/entrypoints/openai/cli_args.py, 0.32):
# given again for every value; one JSON list; true or nothing.
_REPEATED = frozenset({"middleware"})
_JSON_LISTS = frozenset({"allowed-origins", "allowed-methods", "allowed-headers"})
_TRUE_OR_NOTHING = frozenset({"disable-log-stats"})


class LaunchError(Exception):
    """The replica cannot be started as configured; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything about one start of an engine."""

    replica: str
    argv: tuple[str, ...]
    #: The engine's whole environment.
    env: Mapping[str, str]
    #: The variables that the configuration or the launcher set, in order.
    set_here: tuple[str, ...]
    endpoint: Endpoint
    #: The name that ``/v1/models`` must list before the engine is ready.
    served_name: str
    #: The model where it is a path that this process should see too, else empty.
    model_path: str
    #: The key that the engine will ask for on /v1, or empty.
    api_key: str


def find(config: Config, name: str) -> tuple[ModelSpec, ReplicaSpec]:
    """The bundled replica ``name`` and its model. Raises ``LaunchError`` when there is none."""
    replicas = {replica.name: (model, replica) for model in config.models for replica in model.replicas}
    bundled = [key for key, (_, replica) in replicas.items() if replica.bundled]
    if name not in replicas:
        near = get_close_matches(name, bundled, n=1)
        hint = f"did you mean {near[0]}?" if near else f"bundled replicas are: {', '.join(bundled) or 'none'}"
        raise LaunchError(f"no replica {name!r} in {', '.join(config.files)} ({hint})")
    model, replica = replicas[name]
    if not replica.bundled:
        raise LaunchError(f"replica {name!r} has its own unit, {replica.unit}: it is not started by this launcher")
    return model, replica


def launch(model: ModelSpec, replica: ReplicaSpec, environ: Mapping[str, str]) -> Launch:
    """How to start the engine of ``replica`` out of a process with the environment ``environ``."""
    serve = model.serve
    if serve is None:
        raise LaunchError(f"replica {replica.name!r} has no [models.{model.name}.serve] to run")
    home = environ.get("HOME", "")
    endpoint = parse_endpoint(replica.endpoint)
    added = _added_environment(replica, serve)
    env = {name: value for name, value in {**environ, **added}.items() if name not in OURS}
    argv = (
        *(_at_home(word, home) if index == 0 else word for index, word in enumerate(_command(serve))),
        _at_home(serve.model, home),
        "--served-model-name",
        model.name,
        *model.aliases,
        *_listen(endpoint),
        *_sleep_mode(model, serve),
        *(word for option, value in serve.options.items() for word in option_words(option, value)),
        *serve.args,
    )
    return Launch(
        replica=replica.name,
        argv=argv,
        env=env,
        set_here=tuple(added),
        endpoint=endpoint,
        served_name=model.name,
        model_path=_model_path(serve, home),
        api_key=api_key_of(serve, env),
    )


def option_words(option: str, value: OptionValue) -> Iterator[str]:
    """The words of one option. An explicit 0 is ``--option 0``, an explicit false is ``--no-option``."""
    flag = f"--{option}"
    if isinstance(value, bool):
        if value:
            yield flag
        elif option not in _TRUE_OR_NOTHING:
            yield f"--no-{option}"
    elif isinstance(value, list) and option in _JSON_LISTS:
        yield from (flag, _word(value))
    elif isinstance(value, list) and option in _REPEATED:
        for item in value:
            yield from (flag, _word(item))
    elif isinstance(value, list):
        yield from (flag, *(_word(item) for item in value))
    elif (word := _word(value)).startswith("-"):
        # Or argparse would take the value for the next option.
        yield f"{flag}={word}"
    else:
        yield from (flag, word)


def shell_line(launch: Launch) -> str:
    """The command for a person: can be pasted into a shell."""
    variables = [f"{name}={launch.env[name]}" for name in launch.set_here]
    return shlex.join(["env", *variables, *launch.argv])


def _word(value: OptionValue) -> str:
    """One value as one argument: texts as they are, the rest as JSON (``true``, ``0.5``, ``{"a": 1}``)."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=dict)


def _command(serve: ServeSpec) -> tuple[str, ...]:
    if serve.command:
        return serve.command
    if serve.engine == "simulator":
        return (sys.executable, "-m", "supervisord.simulator.main", "serve")
    return ("vllm", "serve")


def _listen(endpoint: Endpoint) -> tuple[str, ...]:
    if endpoint.path:
        return ("--uds", endpoint.path)
    return ("--host", endpoint.host, "--port", str(endpoint.port))


def _sleep_mode(model: ModelSpec, serve: ServeSpec) -> tuple[str, ...]:
    """Without ``--enable-sleep-mode`` vLLM accepts sleep, and gives no memory back."""
    said = "enable-sleep-mode" in serve.options or any(
        word.replace("_", "-") in ("--enable-sleep-mode", "--no-enable-sleep-mode") for word in serve.args
    )
    sleeps = model.idle.sleep1 is not None or model.idle.sleep2 is not None
    return ("--enable-sleep-mode",) if sleeps and not said else ()


def _added_environment(replica: ReplicaSpec, serve: ServeSpec) -> dict[str, str]:
    added = {"VLLM_SERVER_DEV_MODE": "1"}  # else there is no /sleep and no /wake_up
    if replica.gpus and not any(name in serve.env for name in GPU_VARIABLES):
        # CUDA's own order is "fastest first"; ours must be nvidia-smi's, by which the person counted.
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # HIP reads both names, and vLLM on ROCm insists that they are equal where both are set. ROCR_VISIBLE_DEVICES
        # is left alone: it filters below HIP, which would then count within what is left ("1" of one GPU is none).
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            added[name] = ",".join(str(gpu) for gpu in replica.gpus)
    return {**added, **serve.env}


def _at_home(word: str, home: str) -> str:
    """``~/x`` as a shell reads it; systemd and execve do not."""
    return str(Path(home, word[2:])) if home and word.startswith("~/") else word


def _model_path(serve: ServeSpec, home: str) -> str:
    model = _at_home(serve.model, home)
    # A command of the person's own may run in a container, where other paths hold.
    own = not serve.command or Path(serve.command[0]).name == "vllm"
    return model if own and model.startswith(("/", "./", "../")) else ""


def api_key_of(serve: ServeSpec, env: Mapping[str, str]) -> str:
    """The key that the engine asks its clients for; empty when it asks for none. ``env``: the engine's."""
    key = serve.options.get("api-key") or env.get("VLLM_API_KEY", "")
    if isinstance(key, list):
        key = key[0]
    return key if isinstance(key, str) else ""
