"""Where the daemon or the bus is not there: a clear sentence, exit code 3, and nobody is started by accident."""

from __future__ import annotations

import json
import os
import socket

import pytest

from supervisord.control import Verb

#: Seconds for what takes milliseconds.
PATIENCE = 20.0

NOT_RUNNING = (
    "vllmctl: vllm-supervisord is not running (no io.github.vllmctl1 on the session bus). "
    "Start it: systemctl --user start vllm-supervisord\n"
)


@pytest.fixture
def activatable(bus):
    """The bus knows how to start the supervisor; what it starts leaves a mark and ends at once."""
    mark = bus.folder / "started"
    program = bus.folder / "program"
    program.write_text(f"#!/bin/sh\n: > {mark}\nexit 1\n")
    program.chmod(0o755)
    service = bus.folder / "services" / "io.github.vllmctl1.service"
    service.write_text(f"[D-BUS Service]\nName=io.github.vllmctl1\nExec={program}\n")
    bus.reload()
    return mark


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["list"],
        ["watch"],
        ["reload"],
        ["down", "chat"],
        ["sleep", "--all"],
        ["restart", "chat"],
        ["drain", "chat"],
    ],
)
def test_without_the_daemon_it_says_how_to_start_it_and_does_not_start_it(vllmctl, activatable, argv):
    ended = vllmctl(*argv)
    assert ended.code == 3
    assert ended.err == NOT_RUNNING
    assert not activatable.exists()


@pytest.mark.parametrize("argv", [["up", "chat"], ["wake", "--all"]])
def test_up_and_wake_let_the_bus_start_the_daemon(vllmctl, activatable, argv):
    ended = vllmctl(*argv)
    assert activatable.exists()
    assert ended.code == 3
    assert "the bus could not start it" in ended.err


def test_up_waits_for_the_daemon_that_the_bus_starts_and_then_does_its_work(vllmctl, bus, stopped_supervisor):
    started, done = bus.folder / "started", bus.folder / "done"
    os.mkfifo(started)
    os.mkfifo(done)
    program = bus.folder / "program"
    program.write_text(f"#!/bin/sh\necho > {started}\nread line < {done}\n")
    program.chmod(0o755)
    service = bus.folder / "services" / "io.github.vllmctl1.service"
    service.write_text(f"[D-BUS Service]\nName=io.github.vllmctl1\nExec={program}\n")
    bus.reload()
    ended = vllmctl.behind("up", "chat")
    started.read_text()
    stopped_supervisor.start()
    assert ended.result(PATIENCE).code == 0
    assert stopped_supervisor.control.commands == [("model", "chat", Verb.START, 0)]
    done.write_text("\n")


def test_without_the_daemon_json_has_the_reason(vllmctl, bus):
    ended = vllmctl("status", "--json")
    assert ended.code == 3
    assert json.loads(ended.out)["error"]["code"] == "DaemonNotRunning"


def test_list_names_prints_nothing_without_the_daemon(vllmctl, bus):
    assert vllmctl("list", "--names").out == ""


def test_without_a_bus_it_speaks_of_lingering_and_dbus_user_session(vllmctl, tmp_path):
    del vllmctl.env["DBUS_SESSION_BUS_ADDRESS"]
    vllmctl.env["XDG_RUNTIME_DIR"] = str(tmp_path / "nowhere")
    ended = vllmctl("status")
    assert ended.code == 3
    assert f"{tmp_path}/nowhere/bus" in ended.err
    assert "loginctl enable-linger" in ended.err
    assert "dbus-user-session" in ended.err


def test_a_bus_address_that_leads_nowhere_is_named(vllmctl, tmp_path):
    vllmctl.env["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={tmp_path}/gone"
    ended = vllmctl("status")
    assert ended.code == 3
    assert f"cannot connect to the bus at unix:path={tmp_path}/gone: No such file or directory" in ended.err


def test_a_bus_that_hangs_up_during_authentication_is_no_endless_loop(vllmctl, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "rude"))
        listener.listen()
        vllmctl.env["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={tmp_path}/rude"
        ended = vllmctl.behind("status")
        listener.settimeout(PATIENCE)
        connection, _ = listener.accept()
        connection.close()
        result = ended.result(PATIENCE)
    assert result.code == 3
    assert "cannot connect to the bus" in result.err


def test_without_the_variable_as_in_cron_the_bus_in_the_runtime_directory_is_found(vllmctl, supervisor, bus):
    del vllmctl.env["DBUS_SESSION_BUS_ADDRESS"]
    vllmctl.env["XDG_RUNTIME_DIR"] = str(bus.folder)
    assert vllmctl("status").code == 0


def test_system_means_the_system_bus(vllmctl, supervisor, bus):
    vllmctl.env["DBUS_SYSTEM_BUS_ADDRESS"] = vllmctl.env.pop("DBUS_SESSION_BUS_ADDRESS")
    vllmctl.env["XDG_RUNTIME_DIR"] = str(bus.folder / "nowhere")
    assert vllmctl("status", "--system").code == 0
    assert vllmctl("status").code == 3
    supervisor.stop()
    ended = vllmctl("--system", "status")
    assert "on the system bus). Start it: systemctl start vllm-supervisord" in ended.err
