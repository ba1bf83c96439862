"""From the configuration to the engine's command line and environment."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.spec import Config, IdleLadder, ModelSpec, ReplicaSpec, ServeSpec
from supervisord.launcher.command import LaunchError, find, launch, option_words, shell_line

REPLICA = ReplicaSpec(
    name="chat-a",
    model="chat",
    unit="vllm@chat-a.service",
    endpoint="unix:/run/u/vllm/chat-a/engine.sock",
    bundled=True,
)
SERVE = ServeSpec(model="org/chat")
MODEL = ModelSpec(name="chat", replicas=(REPLICA,), aliases=("default", "gpt"), serve=SERVE)


def argv(serve: ServeSpec = SERVE, replica: ReplicaSpec = REPLICA, **model: Any) -> list[str]:
    return list(launch(dataclasses.replace(MODEL, serve=serve, **model), replica, {"HOME": "/home/me"}).argv)


def env(serve: ServeSpec = SERVE, environ: dict[str, str] | None = None, **replica: Any) -> dict[str, str]:
    return dict(
        launch(dataclasses.replace(MODEL, serve=serve), dataclasses.replace(REPLICA, **replica), environ or {}).env
    )


def test_whole_command_line() -> None:
    serve = ServeSpec(model="org/chat", options={"max-model-len": 8192}, args=("-O3", "--seed", "0"))
    assert argv(serve) == [
        *("vllm", "serve", "org/chat", "--served-model-name", "chat", "default", "gpt"),
        *("--uds", "/run/u/vllm/chat-a/engine.sock", "--max-model-len", "8192", "-O3", "--seed", "0"),
    ]


def test_loopback_endpoint_is_host_and_port() -> None:
    words = argv(replica=dataclasses.replace(REPLICA, endpoint="http://[::1]:7771"))
    assert words[-4:] == ["--host", "::1", "--port", "7771"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("kv-cache-memory-bytes", 0, ["--kv-cache-memory-bytes", "0"]),
        ("gpu-memory-utilization", 0.0, ["--gpu-memory-utilization", "0.0"]),
        ("gpu-memory-utilization", 0.9, ["--gpu-memory-utilization", "0.9"]),
        ("enable-prefix-caching", True, ["--enable-prefix-caching"]),
        ("enable-prefix-caching", False, ["--no-enable-prefix-caching"]),
        ("disable-log-stats", True, ["--disable-log-stats"]),
        ("disable-log-stats", False, []),
        ("tokenizer", "", ["--tokenizer", ""]),
        ("quantization", "fp8 x", ["--quantization", "fp8 x"]),
        ("seed", -1, ["--seed=-1"]),
        ("chat-template", "--odd", ["--chat-template=--odd"]),
        ("api-key", ["a", "b"], ["--api-key", "a", "b"]),
        ("lora-modules", [{"name": "x", "path": "/x"}], ["--lora-modules", '{"name": "x", "path": "/x"}']),
        ("hf-overrides", {"a": {"b": [1, True, "ü"]}}, ["--hf-overrides", '{"a": {"b": [1, true, "ü"]}}']),
        ("middleware", ["a.b", "c.d"], ["--middleware", "a.b", "--middleware", "c.d"]),
        ("allowed-origins", ["*"], ["--allowed-origins", '["*"]']),
    ],
)
def test_option(option: str, value: Any, words: list[str]) -> None:
    assert list(option_words(option, value)) == words


@pytest.mark.parametrize(
    ("idle", "options", "args", "expected"),
    [
        (IdleLadder(sleep1=60.0), {}, (), ["--enable-sleep-mode"]),
        (IdleLadder(sleep2=60.0), {}, (), ["--enable-sleep-mode"]),
        (IdleLadder(stop=60.0), {}, (), []),
        (IdleLadder(), {}, (), []),
        (IdleLadder(sleep1=60.0), {"enable-sleep-mode": False}, (), ["--no-enable-sleep-mode"]),
        (IdleLadder(), {"enable-sleep-mode": True}, (), ["--enable-sleep-mode"]),
        (IdleLadder(sleep1=60.0), {}, ("--no-enable-sleep-mode",), ["--no-enable-sleep-mode"]),
    ],
)
def test_sleep_mode_follows_the_ladder_unless_it_was_set(
    idle: IdleLadder, options: dict[str, Any], args: tuple[str, ...], expected: list[str]
) -> None:
    words = argv(ServeSpec(model="m", options=options, args=args), idle=idle)
    assert [word for word in words if "sleep-mode" in word] == expected


def test_commands() -> None:
    simulator = [sys.executable, "-m", "supervisord.simulator.main", "serve", "m"]
    assert argv(ServeSpec(model="m", engine="simulator"))[:5] == simulator
    assert argv(ServeSpec(model="m", command=("~/venv/bin/vllm", "serve")))[:3] == [
        "/home/me/venv/bin/vllm",
        "serve",
        "m",
    ]
    assert argv(ServeSpec(model="~/models/m"))[2] == "/home/me/models/m"


def test_dev_mode_is_on_unless_it_was_set() -> None:
    assert env()["VLLM_SERVER_DEV_MODE"] == "1"
    assert env(ServeSpec(model="m", env={"VLLM_SERVER_DEV_MODE": "0"}))["VLLM_SERVER_DEV_MODE"] == "0"


def test_gpus_are_chosen_in_nvidia_smis_order_for_cuda_and_hip_alike() -> None:
    chosen = env(environ={"CUDA_VISIBLE_DEVICES": "7"}, gpus=(2, 0))
    assert {name: value for name, value in chosen.items() if "CUDA" in name or "VISIBLE" in name} == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,0",
        "HIP_VISIBLE_DEVICES": "2,0",
    }


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_gpus_that_the_person_chose_stay_as_they_are(name: str) -> None:
    chosen = env(ServeSpec(model="m", env={name: "5"}), gpus=(1,))
    assert {key: value for key, value in chosen.items() if "VISIBLE" in key} == {name: "5"}


def test_without_gpus_nothing_is_chosen() -> None:
    assert not [name for name in env() if "VISIBLE" in name or "CUDA" in name]


def test_notify_socket_is_not_the_engines() -> None:
    passed = env(environ={"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "LANG": "C", "INVOCATION_ID": "x"})
    assert passed == {"LANG": "C", "INVOCATION_ID": "x", "VLLM_SERVER_DEV_MODE": "1"}


def test_own_variables_win_over_inherited_ones() -> None:
    assert env(ServeSpec(model="m", env={"HF_HOME": "/mine"}), {"HF_HOME": "/theirs"})["HF_HOME"] == "/mine"


def test_shell_line_can_be_pasted() -> None:
    plan = launch(dataclasses.replace(MODEL, serve=ServeSpec(model="a b", env={"X": "1 2"})), REPLICA, {"SECRET": "s"})
    assert shell_line(plan).startswith(
        "env VLLM_SERVER_DEV_MODE=1 'X=1 2' vllm serve 'a b' --served-model-name chat default"
    )


@pytest.mark.parametrize(
    ("options", "environ", "key"),
    [({"api-key": "a"}, {}, "a"), ({"api-key": ["a", "b"]}, {}, "a"), ({}, {"VLLM_API_KEY": "c"}, "c"), ({}, {}, "")],
)
def test_key_that_the_engine_will_ask_for(options: dict[str, Any], environ: dict[str, str], key: str) -> None:
    assert (
        launch(dataclasses.replace(MODEL, serve=ServeSpec(model="m", options=options)), REPLICA, environ).api_key == key
    )


@pytest.mark.parametrize(
    ("serve", "path"),
    [
        (ServeSpec(model="/m"), "/m"),
        (ServeSpec(model="~/m"), "/home/me/m"),
        (ServeSpec(model="org/m"), ""),
        (ServeSpec(model="/m", command=("/x/vllm", "serve")), "/m"),
        (ServeSpec(model="/m", command=("podman", "run")), ""),
    ],
)
def test_model_path_that_must_be_there(serve: ServeSpec, path: str) -> None:
    assert launch(dataclasses.replace(MODEL, serve=serve), REPLICA, {"HOME": "/home/me"}).model_path == path


def test_finding_a_replica() -> None:
    own = ReplicaSpec(name="own", model="chat", unit="own.service", endpoint="unix:/x")
    config = Config(models=(dataclasses.replace(MODEL, replicas=(REPLICA, own)),), files=("/c.toml",))
    assert find(config, "chat-a")[1] is REPLICA
    with pytest.raises(LaunchError, match=r"no replica 'chat-b' in /c\.toml \(did you mean chat-a\?\)"):
        find(config, "chat-b")
    with pytest.raises(LaunchError, match=r"no replica 'zzz' in /c\.toml \(bundled replicas are: chat-a\)"):
        find(config, "zzz")
    with pytest.raises(LaunchError, match=r"replica 'own' has its own unit, own\.service"):
        find(config, "own")


def test_launcher_imports_nothing_heavy() -> None:
    """It is forked beside every engine: its memory and its start-up time count."""
    import subprocess

    code = "import sys, supervisord.launcher.main; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert not {"aiohttp", "asyncio", "dbus_next", "pystemd", "http", "ssl"} & set(done.stdout.split())
