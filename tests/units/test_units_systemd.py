"""The units under a real user manager, with stand-ins for the supervisor and the launcher."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.systemd
HERE = Path(__file__).parent
UNITS = HERE.parents[1] / "units"


def until(condition: Callable[[], object], what: str, limit: float = 30.0) -> None:
    """For states that nobody announces to a test."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit} s for: {what}"
        time.sleep(0.02)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


NOTIFY = """
import os, signal, socket, subprocess, sys, time
def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\\0", 1))
        connection.send(text.encode())
if sys.argv[2:] == ["--explain"]:
    sys.exit()
"""
#: Answers one line to every connection on the socket that systemd hands over.
SUPERVISOR = (
    NOTIFY
    + """
assert os.environ["LISTEN_FDNAMES"] == "proxy", os.environ
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listener = socket.socket(fileno=3)
notify("READY=1\\nSTATUS=stand-in")
while True:
    connection, _ = listener.accept()
    connection.sendall(b"served by %d\\n" % os.getpid())
    connection.close()
"""
)
ENGINE = NOTIFY + "notify('READY=1')\nsignal.pause()\n"


def ask() -> bytes:
    """One client: connect, read to the end."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(f"{os.environ['XDG_RUNTIME_DIR']}/port")
        return client.recv(100)


def test_systemd_knows_every_line_of_our_units(manager, bindir: Path) -> None:
    for name in ("vllm-supervisord", "vllm-replica"):
        program(bindir / name, "")
    files = [manager.folder / name for name in ("vllm-supervisord.service", "vllm-supervisord.socket", "vllm.slice")]
    command = ["systemd-analyze", "--user", "verify", "--man=no", *files, f"{manager.folder}/vllm@.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = (manager.folder / "vllm.slice").read_text() + "[Slice]\nNoSuchKey=yes\n"
    (manager.folder / "vllm.slice").write_text(wrong)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "NoSuchKey" in done.stderr, "the check finds nothing"


def test_every_restriction_restricts(manager) -> None:
    files = [UNITS / "vllm-supervisord.service.in", UNITS / "vllm@.service.in"]
    measured = json.loads(subprocess.check_output([sys.executable, HERE / "hardening.py", *files]))
    assert {line for line, (_, with_it) in measured.items() if not with_it} == set()
    # And it is the line that does it; core files may be off already.
    assert {line for line, (without, _) in measured.items() if without} <= {"LimitCORE=0"}


def test_the_port_stays_open_while_the_supervisor_restarts_and_crashes(manager, bindir: Path) -> None:
    program(bindir / "vllm-supervisord", SUPERVISOR)
    manager.systemctl("start", "vllm-supervisord.service")
    for act in (["restart", "--no-block"], ["kill", "--signal=KILL"]):
        before = ask()
        manager.systemctl(*act, "vllm-supervisord.service")
        # Every client is answered, by the old one or by the new one; none is refused or cut.
        until(lambda: ask() not in (before, b""), f"an answer of the next supervisor after {act[0]}")  # noqa: B023


def test_a_client_starts_the_supervisor(manager, bindir: Path) -> None:
    program(bindir / "vllm-supervisord", SUPERVISOR)
    manager.systemctl("start", "vllm-supervisord.service")
    manager.systemctl("stop", "vllm-supervisord.service")
    assert ask().startswith(b"served by")


def test_a_configuration_that_only_a_person_can_mend_is_not_tried_again(manager, bindir: Path) -> None:
    program(bindir / "vllm-supervisord", "raise SystemExit(78)")
    manager.systemctl("start", "vllm-supervisord.service", check=False)
    assert manager.value("vllm-supervisord.service", "ActiveState") == "failed"
    assert manager.value("vllm-supervisord.service", "NRestarts") == "0"


def test_a_stuck_supervisor_is_killed_and_started_again(manager, bindir: Path) -> None:
    program(bindir / "vllm-supervisord", SUPERVISOR)  # never says WATCHDOG=1
    manager.drop_in("vllm-supervisord.service", "[Service]", "WatchdogSec=100ms", "RestartSec=10ms")
    manager.systemctl("start", "vllm-supervisord.service")
    until(lambda: manager.value("vllm-supervisord.service", "NRestarts") not in ("", "0"), "a watchdog restart")


def test_a_replica_is_up_when_its_engine_says_so_and_not_before(manager, bindir: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # As the launcher does it: the notification comes from a child, not from the main process.
    waiting = f"if os.fork() == 0:\n    open({str(gate)!r}).read()\n    notify('READY=1')\nsignal.pause()\n"
    program(bindir / "vllm-replica", NOTIFY + waiting)
    with subprocess.Popen(["systemctl", "--user", "start", "vllm@a.service"]) as start:
        with gate.open("w"):
            assert manager.value("vllm@a.service", "ActiveState") == "activating"
        assert start.wait(30) == 0
    assert manager.value("vllm@a.service", "Slice") == "vllm.slice"


def test_an_engine_that_ends_well_is_started_again_without_its_old_socket(manager, bindir: Path) -> None:
    socket_file = Path(os.environ["XDG_RUNTIME_DIR"], "vllm", "a", "engine.sock")
    # Dies with status 0 the first time, as vLLM does when its core is gone; refuses a stale socket, as vLLM does.
    text = f"""
path = {str(socket_file)!r}
first = not os.path.exists({str(bindir / "again")!r})
open({str(bindir / "again")!r}, "w").close()
assert os.environ["RUNTIME_DIRECTORY"] == os.path.dirname(path)
assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
socket.socket(socket.AF_UNIX).bind(path)
notify('READY=1')
if not first:
    signal.pause()
"""
    program(bindir / "vllm-replica", NOTIFY + text)
    manager.drop_in("vllm@.service", "[Service]", "RestartSec=10ms")
    manager.systemctl("start", "vllm@a.service", check=False)
    until(lambda: manager.value("vllm@a.service", "NRestarts") == "1", "the restart")
    until(lambda: manager.value("vllm@a.service", "ActiveState") == "active", "the second start")
    manager.systemctl("stop", "vllm@a.service")
    assert not socket_file.parent.exists()


def test_a_crash_loop_ends_in_failed(manager, bindir: Path) -> None:
    program(bindir / "vllm-replica", "raise SystemExit(1)")
    manager.drop_in("vllm@.service", "[Service]", "RestartSec=1ms")
    manager.systemctl("start", "vllm@a.service", check=False)
    until(lambda: manager.value("vllm@a.service", "SubState") == "failed", "the start limit")
    assert int(manager.value("vllm@a.service", "NRestarts")) >= 4


@pytest.mark.parametrize("status", [2, 78])
def test_a_start_that_cannot_work_is_not_tried_again(manager, bindir: Path, status: int) -> None:
    program(bindir / "vllm-replica", f"raise SystemExit({status})")
    manager.systemctl("start", "vllm@a.service", check=False)
    assert manager.value("vllm@a.service", "SubState") == "failed"
    assert manager.value("vllm@a.service", "NRestarts") == "0"


def test_what_an_engine_leaves_behind_ends_with_it(manager, bindir: Path) -> None:
    # The API server is killed and its core survives, deaf to SIGTERM: it would keep the GPU's memory.
    core = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    )
    text = f"""
core = subprocess.Popen([sys.executable, "-c", {core!r}], stdout=subprocess.PIPE)
core.stdout.readline()
open({str(bindir / "core")!r}, "w").write(str(core.pid))
notify('READY=1')
signal.pause()
"""
    program(bindir / "vllm-replica", NOTIFY + text)
    manager.drop_in("vllm@.service", "[Service]", "TimeoutStopSec=200ms", "Restart=no")
    manager.systemctl("start", "vllm@a.service")
    core_pid = int((bindir / "core").read_text())
    assert Path(f"/proc/{core_pid}").exists()
    manager.systemctl("kill", "--kill-whom=main", "--signal=KILL", "vllm@a.service")
    until(lambda: manager.value("vllm@a.service", "ActiveState") == "failed", "the unit's end")
    assert not Path(f"/proc/{core_pid}").exists()


def test_the_explanation_is_asked_for_after_the_end_with_its_reason(manager, bindir: Path) -> None:
    log = bindir / "asked"
    text = f"""
if sys.argv[1:] == ["a", "--explain"]:
    open({str(log)!r}, "w").write(os.environ["SERVICE_RESULT"] + " " + os.environ["EXIT_STATUS"])
    sys.exit(3)
sys.exit(2)
"""
    program(bindir / "vllm-replica", f"import os, sys\n{text}")
    manager.systemctl("start", "vllm@a.service", check=False)
    assert log.read_text() == "exit-code 2"


def test_a_person_may_run_the_rendered_command_line(manager, bindir: Path) -> None:
    """A folder with blanks and a per cent sign in its name reaches execve as it is."""
    program(bindir / "vllm-replica", ENGINE)
    manager.systemctl("start", "vllm@a.service")
    pid = manager.value("vllm@a.service", "MainPID")
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    assert str(bindir / "vllm-replica") in words, shlex.join(words)
