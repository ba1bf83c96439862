"""vllmctl doctor and logs against a real user manager: systemctl and systemd-analyze answer for themselves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0

CONFIG = """\
[models.chat.serve]
engine = "simulator"
model = "m"
[models.chat.replicas.chat-a]
[models.own.replicas.own]
unit = "cli-own.service"
endpoint = "http://127.0.0.1:9"
"""


@pytest.fixture
def vllmctl(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)

    def run(*argv, without=()):
        ended = subprocess.run(
            [sys.executable, "-m", "supervisord.cli.main", *argv, "--config", str(config)],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in without},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return ended.returncode, ended.stdout, ended.stderr

    return run


def free_port() -> int:
    """systemd takes no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def installed(unit_dir, tmp_path):
    """Our units as the installer writes them, with programs that are there but are never run."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for program in ("vllm-supervisord", "vllm-replica"):
        (bin_dir / program).write_text("#!/bin/sh\n")
        (bin_dir / program).chmod(0o755)
    for file in sorted((ROOT / "units").glob("vllm*")):
        text = file.read_text().replace("@BINDIR@", str(bin_dir)).replace("@LISTEN@", f"127.0.0.1:{free_port()}")
        unit_dir.write(file.name.removesuffix(".in"), text, reload=False)
    unit_dir.write("cli-own.service", "[Service]\nExecStart=/bin/true\n")
    return unit_dir


def findings(vllmctl):
    code, out, err = vllmctl("doctor", "--json")
    assert err == ""
    answer = json.loads(out)
    assert (code == 0) is answer["ok"]
    return {finding["check"]: finding for finding in answer["findings"]}


def test_doctor_finds_our_units_right_and_only_the_daemon_missing(vllmctl, installed, systemctl):
    systemctl("start", "vllm-supervisord.socket")
    found = findings(vllmctl)
    for check in (
        "systemd",
        "manager",
        "bus",
        "dbus-user-session",
        "runtime-directory",
        "units",
        "units-verify",
        "config",
    ):
        assert found[check]["level"] == "ok", found[check]
    for check in ("replica-units", "socket", "engines"):
        assert found[check]["level"] == "ok", found[check]
    assert "vllm-supervisord.socket holds 127.0.0.1:" in found["socket"]["text"]
    assert found["enabled"]["level"] == "warn"
    assert found["daemon"]["level"] == "fail"
    assert "inactive/dead" in found["daemon"]["text"]
    assert {check for check, finding in found.items() if finding["level"] == "fail"} == {"daemon"}


def test_doctor_finds_what_is_wrong_with_unit_files(vllmctl, installed, systemctl):
    own = installed.path / "vllm-supervisord.service"
    own.write_text(own.read_text().replace("Type=notify", "Typo=notify"))
    installed.mask("cli-own.service")
    found = findings(vllmctl)
    assert found["units-verify"]["level"] == "warn"
    assert "Typo" in found["units-verify"]["text"]
    assert found["replica-units"]["level"] == "fail"
    assert "cli-own.service of replica own is masked" in found["replica-units"]["text"]


def test_doctor_finds_a_program_that_is_not_there(vllmctl, installed, tmp_path):
    (tmp_path / "bin/vllm-replica").unlink()
    found = findings(vllmctl)
    assert found["units-verify"]["level"] in ("warn", "fail")
    assert "vllm-replica" in found["units-verify"]["text"]


def test_doctor_finds_that_nothing_is_installed(vllmctl, unit_dir):
    found = findings(vllmctl)
    assert found["units"]["level"] == "fail"
    assert found["replica-units"]["level"] == "fail"
    assert "cli-own.service of replica own is missing" in found["replica-units"]["text"]


def test_logs_of_a_unit_that_appends_to_a_file_come_from_there(vllmctl, unit_dir, systemctl):
    log = Path(os.environ["XDG_RUNTIME_DIR"]) / "cli-own.log"
    unit_dir.service("cli-own.service", "/bin/echo loading", "Type=oneshot", "StandardOutput=append:%t/%N.log")
    systemctl("start", "cli-own.service")
    assert vllmctl("logs", "own") == (0, "loading\n", "")
    # As cron has it.
    assert vllmctl("logs", "own", without=("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR")) == (0, "loading\n", "")
    log.unlink()


def test_logs_of_a_running_unit_come_from_the_file_that_it_has_open(vllmctl, unit_dir, systemctl, tmp_path):
    script = '/bin/sh -c "echo loading; systemd-notify --ready; exec sleep infinity"'
    lines = ("Type=notify", "NotifyAccess=all")
    unit_dir.service("cli-own.service", script, *lines, f"StandardOutput=append:{tmp_path}/first.log")
    systemctl("start", "cli-own.service")
    unit_dir.service("cli-own.service", script, *lines, f"StandardOutput=append:{tmp_path}/after-a-restart.log")
    assert vllmctl("logs", "own") == (0, "loading\n", "")


def test_logs_say_that_there_is_no_journal(vllmctl, installed):
    code, out, err = vllmctl("logs", "chat-a")
    assert (code, out) == (1, "")
    assert "there is no journal on this machine" in err
