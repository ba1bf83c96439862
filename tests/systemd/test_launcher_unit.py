"""The launcher under a real manager: when a unit counts as started, what its main process is, what a failure says."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisord.launcher.explain import LOG_VARIABLE

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tests" / "launcher" / "fake_engine.py"
LAUNCHER = f"{sys.executable} -m supervisord.launcher.main"


@pytest.fixture
def replica(tmp_path: Path, unit_dir) -> Callable[[str], str]:
    """Write the configuration and a unit like the bundled one; ``serve`` goes into the serve table."""

    def write(serve: str) -> str:
        config, log = tmp_path / "config.toml", tmp_path / "log"
        config.write_text(
            f"[models.chat.serve]\nmodel = 'org/chat'\n{serve}\n[models.chat.replicas.launched]\n", encoding="utf-8"
        )
        lines = [
            "Type=notify",
            "NotifyAccess=all",
            f"ExecStopPost=-{LAUNCHER} --config {config} launched --explain",
            f"WorkingDirectory={ROOT}",
            f"Environment={LOG_VARIABLE}={log}",
            f"StandardOutput=append:{log}",
            f"StandardError=append:{log}",
            "StandardInput=null",
            "TimeoutStartSec=20s",
            "TimeoutStopSec=5s",
            "RuntimeDirectory=vllm/launched",
            "RuntimeDirectoryMode=0700",
            "KillMode=control-group",
        ]
        return str(unit_dir.service("vllm@launched.service", f"{LAUNCHER} --config {config} launched", *lines))

    return write


def test_start_ends_when_the_model_answers_and_only_the_engine_is_left(replica, systemctl) -> None:
    unit = replica(f"command = ['{sys.executable}', '{ENGINE}']\nargs = ['--alone']")
    systemctl("start", unit)
    shown = dict(
        line.split("=", 1)
        for line in systemctl("show", unit, "-p", "ActiveState,SubState,MainPID,StatusText,ControlGroup").splitlines()
    )
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert shown["StatusText"] == "serving chat"
    command = Path(f"/proc/{shown['MainPID']}/cmdline").read_bytes().split(b"\0")
    assert command[1] == str(ENGINE).encode()
    systemctl("stop", unit)
    assert systemctl("show", unit, "-p", "Result", "--value") == "success"


def test_failed_start_says_why_in_the_engines_own_words(replica, systemctl, tmp_path) -> None:
    script = "import sys; sys.exit('ValueError: this model is no model')"
    unit = replica(f'command = ["{sys.executable}", "-c", "{script}"]')
    systemctl("start", unit, check=False)
    assert set(systemctl("show", unit, "-p", "ActiveState,Result,StatusText").splitlines()) == {
        "ActiveState=failed",
        "Result=exit-code",
        "StatusText=engine exited with status 1: ValueError: this model is no model",
    }
    assert "vllm-replica: launched: engine exited with status 1" in (tmp_path / "log").read_text()


def test_configuration_mistake_is_the_units_status(replica, systemctl) -> None:
    unit = replica("port = 1")
    systemctl("start", unit, check=False)
    assert systemctl("show", unit, "-p", "ExecMainStatus", "--value") == "78"
    status = systemctl("show", unit, "-p", "StatusText", "--value")
    assert status.startswith("the launcher did not start the engine: ")
    assert status.endswith("config.toml: [models.chat.serve] port: is set by the launcher from the replica's endpoint")
