"""What an engine was started with is known to a daemon that has not seen its start."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from supervisord.core.spec import Config, ModelSpec, ReplicaSpec, ServeSpec
from supervisord.launcher.command import launch
from supervisord.launcher.started import FILE, compare, read_all, write

ENV = {"HOME": "/home/somebody"}
SERVE = ServeSpec("org/model", options={"max-model-len": 4096, "api-key": "secret"}, env={"A": "1"})


def config(
    serve: ServeSpec = SERVE, *names: str, file: str = "/etc/config.toml", aliases: tuple[str, ...] = ()
) -> Config:
    replicas = tuple(
        ReplicaSpec(name, "m", f"vllm@{name}.service", f"unix:/run/{name}.sock", bundled=True, gpus=(1,))
        for name in names or ("a",)
    )
    return Config(models=(ModelSpec("m", replicas, aliases, serve=serve),), files=(file, "/etc/config.d/more.toml"))


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """Where `a` was started with ``config()``."""
    (tmp_path / "vllm" / "a").mkdir(parents=True)
    start(tmp_path, "a", config())
    return tmp_path


def start(runtime: Path, name: str, config: Config) -> None:
    (model,) = config.models
    (replica,) = (replica for replica in model.replicas if replica.name == name)
    write(launch(model, replica, {**ENV, "INVOCATION_ID": "another every time"}), config, runtime)


def test_the_same_configuration_is_the_same_command(runtime):
    assert compare(config(), read_all(runtime), ENV) == ((), ())
    # What is not part of the command is no difference.
    other = replace(config(), models=(replace(config().models[0], routing="roundrobin"),))
    assert compare(other, read_all(runtime), ENV) == ((), ())


@pytest.mark.parametrize(
    "changed",
    [
        config(replace(SERVE, options={"max-model-len": 8192, "api-key": "secret"})),
        config(replace(SERVE, options={"max-model-len": 4096, "api-key": "another"})),
        config(replace(SERVE, env={"A": "2"})),
        config(replace(SERVE, args=("--more",))),
        config(aliases=("alias",)),
    ],
)
def test_another_command_is_seen(runtime, changed):
    assert compare(changed, read_all(runtime), ENV) == (("a",), ())


def test_one_that_is_not_configured_any_more_is_left_over_with_what_is_known_of_it(runtime):
    (left,) = compare(config(SERVE, "b"), read_all(runtime), ENV)[1]
    assert left == ReplicaSpec("a", "m", "vllm@a.service", "unix:/run/a.sock", bundled=True, gpus=(1,))


def test_an_engine_of_another_configuration_is_nobody_elses_to_stop(runtime):
    assert compare(config(SERVE, "b", file="/home/somebody/mine.toml"), read_all(runtime), ENV) == ((), ())


def test_the_python_of_the_simulator_is_no_difference(runtime, monkeypatch):
    simulated = config(replace(SERVE, engine="simulator"))
    start(runtime, "a", simulated)
    running = read_all(runtime)
    monkeypatch.setattr(sys, "executable", "/usr/lib/another/python3")
    assert compare(simulated, running, ENV) == ((), ())


def test_no_word_is_no_difference_and_an_unreadable_one_is_said(runtime, caplog):
    file = runtime / "vllm" / "a" / FILE
    file.write_text("{")
    assert compare(config(), read_all(runtime), ENV) == ((), ())
    assert f"cannot tell what a was started with: {file}" in caplog.text
    file.unlink()
    assert read_all(runtime) == []


def test_a_start_without_a_folder_of_the_units_goes_on(tmp_path, capsys):
    start(tmp_path, "a", config())
    assert "cannot leave word of what is started" in capsys.readouterr().err


def test_the_word_holds_no_secret(runtime):
    assert "secret" not in (runtime / "vllm" / "a" / FILE).read_text()
