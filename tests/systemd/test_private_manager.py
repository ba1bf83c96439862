"""packaging/private-manager: a real manager, and nothing left behind however it ends. Run in one, it nests."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging/private-manager"
OWN_FAILURE = 125
LIMIT = 60
CGROUPS = Path("/sys/fs/cgroup")


def run(*args: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, check=False, timeout=LIMIT, **options)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """For what no event tells: another process's files, the end of somebody else's child."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {LIMIT} s"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No cgroup, and with it no process, survives a test."""
    before = set(CGROUPS.glob("private-manager-*"))
    yield
    wait_until(lambda: set(CGROUPS.glob("private-manager-*")) <= before, "cgroups removed")


def test_a_command_runs_under_a_real_manager_and_its_status_comes_back():
    done = run("sh", "-c", 'systemctl --user is-system-running && cat && echo "$HOME" && exit 7', input="from stdin\n")
    assert done.stdout.splitlines() == ["running", "from stdin", "/run/home"]
    assert (done.returncode, done.stderr) == (7, "")


def test_units_run_in_it_and_those_of_others_are_not_seen(unit_dir):
    unit_dir.service("outside.service", "/bin/sleep infinity")
    done = run("sh", "-c", "systemd-run --user --wait --quiet --pipe echo inside; systemctl --user cat outside.service")
    assert done.stdout == "inside\n"
    assert "No files found for outside.service" in done.stderr


def test_the_bus_is_there_from_the_first_moment():
    assert run("busctl", "--user", "--no-pager", "status", "org.freedesktop.systemd1").returncode == 0


def test_a_command_that_a_signal_killed_counts_as_in_a_shell():
    assert run("sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


def test_a_command_that_is_not_there():
    done = run("no-such-command")
    assert done.returncode == 127
    assert done.stderr == "private-manager: cannot run no-such-command: No such file or directory\n"


def test_processes_that_the_command_leaves_are_ended():
    # The first of them holds the pipe that ``run`` reads to its end.
    done = run(
        "sh",
        "-c",
        "setsid sleep 1000 & sleep 1000 >/dev/null & systemd-run --user -q sleep 1000",
    )
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_command_may_tidy_up(tmp_path, number):
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo tidied; exit 3' {name}; touch {tmp_path}/up; while :; do sleep 1000 & wait; done"
    with subprocess.Popen(
        [SCRIPT, "sh", "-c", script], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    ) as process:
        wait_until((tmp_path / "up").exists, "the command's start")
        process.send_signal(number)
        assert process.communicate(timeout=LIMIT)[0] == "tidied\n"
    assert process.returncode == 3


def test_killed_it_leaves_nothing(tmp_path):
    with subprocess.Popen([SCRIPT, "sh", "-c", f"touch {tmp_path}/up; sleep 1000"]) as process:
        wait_until((tmp_path / "up").exists, "the command's start")
        [group] = CGROUPS.glob("private-manager-*")
        inside = pids(group)
        process.kill()
    assert len(inside) >= 3
    wait_until(lambda: not group.exists(), "the cgroup's end")
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


def pids(group: Path) -> list[str]:
    return [pid for file in group.rglob("cgroup.procs") for pid in file.read_text().split()]


def test_one_that_stays_is_entered_and_stopped(tmp_path):
    state = tmp_path / "state"
    assert run("--running", state).returncode == 1
    assert run("--detach", "--state", state).returncode == 0
    try:
        assert run("--running", state).returncode == 0
        again = run("--detach", "--state", state)
        assert (again.returncode, again.stderr) == (
            OWN_FAILURE,
            f"private-manager: cannot start: the manager of {state} already runs\n",
        )
        assert (
            run("--enter", state, "systemd-run", "--user", "--quiet", "--unit=stays", "sleep", "1000").returncode == 0
        )
        entered = run(
            "--enter",
            state,
            "sh",
            "-c",
            "pwd; cat; systemctl --user is-active stays; exit 9",
            cwd=tmp_path,
            input="in\n",
        )
        assert (entered.stdout, entered.returncode) == (f"{tmp_path}\nin\nactive\n", 9)
        assert run("--enter", state, "no-such-command").returncode == 127
    finally:
        assert run("--stop", state).returncode == 0
    assert run("--running", state).returncode == 1
    missing = run("--enter", state, "true")
    assert (missing.returncode, missing.stderr) == (
        OWN_FAILURE,
        f"private-manager: cannot start: no manager of {state} runs\n",
    )
    assert run("--stop", state).returncode == 0


def test_what_is_entered_ends_with_the_manager(tmp_path):
    state = tmp_path / "state"
    assert run("--detach", "--state", state).returncode == 0
    with subprocess.Popen([SCRIPT, "--enter", state, "sh", "-c", f"touch {tmp_path}/up; sleep 1000"]) as inside:
        wait_until((tmp_path / "up").exists, "the command's start")
        assert run("--stop", state).returncode == 0
        assert inside.wait(LIMIT) != 0


def test_a_detached_one_that_is_killed_is_not_taken_for_running(tmp_path):
    state = tmp_path / "state"
    assert run("--detach", "--state", state).returncode == 0
    supervisor = int(
        subprocess.check_output(["sed", 's/.*"supervisor": \\([0-9]*\\).*/\\1/', state / "private-manager.json"])
    )
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: run("--running", state).returncode == 1, "the manager's end")
    assert run("--detach", "--state", state).returncode == 0
    assert run("--stop", state).returncode == 0


def test_a_home_may_be_given_and_is_kept(tmp_path):
    assert run("--home", tmp_path / "home", "sh", "-c", 'echo kept >"$HOME/file"').returncode == 0
    assert (tmp_path / "home/file").read_text() == "kept\n"
    refused = run("--home", "/run/mine", "true")
    assert (refused.returncode, refused.stderr) == (
        OWN_FAILURE,
        "private-manager: cannot start: /run/mine is in /run, which is a new one inside\n",
    )


def test_without_root_it_says_so(tmp_path):
    python = shutil.which("python3", path="/usr/bin")
    command = ["setpriv", "--reuid=65534", "--clear-groups", python, "-", "true"]
    done = subprocess.run(command, input=SCRIPT.read_text(), capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == OWN_FAILURE
    assert "cannot start: a private user manager needs root" in done.stderr


def test_where_no_cgroup_can_be_made_nothing_is_started():
    read_only = 'mount -o remount,bind,ro /sys/fs/cgroup && exec "$0" touch /run/started'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", read_only, SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == OWN_FAILURE
    assert "cannot start: no cgroup can be made in /sys/fs/cgroup: Read-only file system" in done.stderr
    assert not Path("/run/started").exists()
