"""The Debian package (``make deb``) on a Debian 13: built, installed, used by an ordinary user, upgraded, removed.

One boot; each test looks at some of the steps of ``scenario-package``.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.machine
Steps = Any  # what conftest.py has under this name


@pytest.fixture(scope="module")
def steps(play: Callable[[str], Steps]) -> Steps:
    return play("bash $source/tests/machine/scenario-package")


def test_is_built_by_an_ordinary_user_and_depends_on_what_it_runs_with(steps: Steps) -> None:
    assert re.search(r"/vllm-supervisord_0\.1\.0\+20231114\.221320~deb13_\w+\.deb$", steps.output("build").strip())
    package = steps.folder / "first.deb"
    fields = ["dpkg-deb", "--field", package, "Depends"]
    depends = subprocess.check_output(fields, text=True).strip().split(", ")
    assert {"python3.13", "dbus-user-session", "libpam-systemd"} <= set(depends)
    assert {each.split()[0] for each in depends} >= {"libc6", "libsystemd0"}
    listing = subprocess.check_output(["dpkg-deb", "--contents", package], text=True)
    rows = [line.split() for line in listing.splitlines()]
    assert {row[1] for row in rows} == {"root/root"}
    assert {row[0] for row in rows} == {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x", "lrwxrwxrwx"}
    assert not [row for row in rows if row[5].endswith((".pyc", ".egg-info"))]


def test_debians_own_checker_has_nothing_to_say(steps: Steps) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("there is no lintian")
    command = ["lintian", "--allow-root", "--fail-on=error,warning", steps.folder / "first.deb"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_installs_everything_and_starts_nothing(steps: Steps) -> None:
    steps.output("install")
    assert steps.output("verify-files") == ""
    assert "/site-packages/supervisord/__pycache__/app.cpython-313.pyc" in steps.output("compiled")
    assert steps.output("units-installed") == ""
    assert set((steps.folder / "enabled-by-itself.out").read_text().split()) == {"disabled"}
    assert steps.output("verify-units") + steps.errors("verify-units") == ""
    assert steps.output("man").strip() == "/usr/share/man/man1/vllmctl.1.gz"
    assert "complete -F" in steps.output("completion")


def test_a_user_enables_it_with_the_first_configuration_that_it_brings(steps: Steps) -> None:
    assert steps.status("unconfigured") != 0
    said = (steps.folder / "unconfigured.out").read_text() + steps.errors("unconfigured")
    assert "/usr/share/doc/vllm-supervisord/config.first.toml" in said
    steps.output("configure")
    steps.output("enable")
    assert "status 200" in steps.output("chat")
    assert {replica["name"] for replica in steps.data("status")["replicas"]} == {"sim-a", "sim-b"}
    assert steps.status("doctor") == 0, steps.output("doctor")


def test_the_bus_starts_it(steps: Steps) -> None:
    steps.output("stop")
    assert '"simulated"' in steps.output("bus-starts-it")


def test_what_runs_through_an_upgrade_keeps_its_own_files_until_it_is_restarted(steps: Steps) -> None:
    text = steps.output("upgrade")
    assert "The old version of vllm-supervisord still runs, of: tester" in text
    assert "systemctl --user restart vllm-supervisord.service" in text
    assert steps.output("invocations-before").count("InvocationID=") == 2
    assert steps.output("invocations-after") == steps.output("invocations-before")
    assert steps.data("still-old")["daemon"]["version"] == "0.1.0"
    assert "/usr/lib/vllm-supervisord/venv-0.1.0+" in steps.output("commands-anew")
    steps.output("restart")
    assert steps.data("now-new")["daemon"]["version"] == "0.1.1"
    assert "status 200" in steps.output("chat-upgraded")


def test_old_files_go_when_nothing_runs_from_them(steps: Steps) -> None:
    steps.output("all-anew")
    assert "still runs" not in steps.output("reinstall")
    assert [name.partition("+")[0] for name in steps.output("environments").split()] == ["0.1.1", "venv", "venv-0.1.1"]


def test_taking_it_away_ends_what_runs_and_leaves_only_what_is_the_users(steps: Steps) -> None:
    steps.output("enable-global")
    assert "Stopping vllm-supervisord of tester" in steps.output("remove")
    assert "vllm" not in steps.output("processes-after-remove")
    steps.output("purge")
    # What the user enabled is left in the user's own folder, and leads nowhere.
    assert all(" not-found " in line for line in steps.output("units-after").splitlines())
    theirs = tuple(f"/home/tester/{name}" for name in (".config", ".local"))
    new = set(steps.output("files-after").splitlines()) - set(steps.output("files-before").splitlines())
    assert {name for name in new if not name.startswith(theirs)} == set()
    assert "[models.simulated.serve]" in steps.output("config")
