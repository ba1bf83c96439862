"""An ordinary user's way from a fresh Debian 13 to a working endpoint and back.

On a booted machine (journald, logind, a lingering user, systemd 257, Python 3.13). One boot; each test looks at some of
its steps.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.machine
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = os.environ.get("LIMIT", "900")
#: As root in the machine: the checkout into the user's home, then the scenario as that user.
SCRIPT = """
set -e
systemctl start user@1000.service
cp -r /share/source /home/tester/source
chown -R tester: /home/tester/source /share/results
exec setpriv --reuid=tester --regid=tester --init-groups \\
  env -i HOME=/home/tester USER=tester LOGNAME=tester LANG=C.UTF-8 \\
  PATH=/usr/local/bin:/usr/bin:/bin XDG_RUNTIME_DIR=/run/user/1000 bash /home/tester/source/tests/machine/scenario
"""


class Steps:
    """What the scenario left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def status(self, step: str) -> int:
        return int((self.folder / f"{step}.rc").read_text())

    def output(self, step: str) -> str:
        """What the step printed; fails where the step failed."""
        text = (self.folder / f"{step}.out").read_text()
        assert self.status(step) == 0, f"{step} exited with {self.status(step)}\n{text}\n{self.errors(step)}"
        return text

    def errors(self, step: str) -> str:
        return (self.folder / f"{step}.err").read_text()

    def data(self, step: str) -> dict:
        return json.loads(self.output(step))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    if os.geteuid() != 0:
        pytest.fail("booting a machine needs root: run `make test-machine`", pytrace=False)
    image = subprocess.check_output([HERE / "build-image"], text=True).strip()
    wheels = subprocess.check_output([HERE / "wheelhouse"], text=True).strip()
    share = tmp_path_factory.mktemp("machine")
    share.chmod(0o755)
    copy_checkout(share / "source")
    shutil.copytree(wheels, share / "wheels")
    (share / "results").mkdir()
    (share / "script").write_text(SCRIPT)
    done = subprocess.run([HERE / "boot", image, share], env=os.environ | {"LIMIT": LIMIT}, check=False)
    log = (share / "log").read_text() if (share / "log").exists() else ""
    print(log)
    kept = os.environ.get("MACHINE_RESULTS")
    if kept:
        shutil.copytree(share / "results", kept, dirs_exist_ok=True)
    assert done.returncode == 0, f"the scenario did not end; it printed:\n{log}\n{(share / 'console').read_text()}"
    yield Steps(share / "results")
    shutil.rmtree(share)


def copy_checkout(target: Path) -> None:
    """The files as they are, without what git ignores."""
    names = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT).decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def test_runs_from_the_checkout_under_the_running_user_manager_and_leaves_nothing(steps: Steps) -> None:
    shown = steps.output("run")
    assert "Runs under your user manager" in shown
    assert "60 x 200" in shown
    assert {replica["name"] for replica in steps.data("run-status")["replicas"]} == {"demo-a", "demo-b"}
    assert "/run/user/1000/systemd/user/" in steps.output("run-unit")
    steps.output("stop")
    assert steps.output("after-stop") == ""
    assert steps.output("files-after-stop") == steps.output("files-before")


def test_does_not_run_over_an_installation_in_use(steps: Steps) -> None:
    assert steps.status("run-beside") != 0
    assert "is installed and in use" in steps.errors("run-beside")


def test_installs_without_root_and_says_how_to_go_on(steps: Steps) -> None:
    text = steps.output("install")
    assert "systemctl --user enable --now vllm-supervisord.socket vllm-supervisord.service" in text
    assert "vllmctl.1" in steps.output("man")


def test_systemd_257_knows_every_line_of_the_installed_units(steps: Steps) -> None:
    assert steps.output("verify") + steps.errors("verify") == ""


def test_every_restriction_restricts_an_ordinary_users_units_too(steps: Steps) -> None:
    assert {line for line, (_, with_it) in steps.data("hardening").items() if not with_it} == set()


def test_the_example_quadlet_becomes_a_unit(steps: Steps) -> None:
    text = steps.output("quadlet")
    assert "---replica-a.service---" in text
    assert "--sdnotify=healthy" in text


def test_enabling_the_units_is_all_it_takes(steps: Steps) -> None:
    steps.output("enable")
    assert "active (running)" in steps.output("status")
    assert [model["id"] for model in steps.data("models")["data"]] == ["simulated"]
    assert "status 200" in steps.output("chat")
    stream = steps.output("stream")
    assert "data: [DONE]" in stream
    assert "status 200" in stream


def test_vllmctl_and_busctl_find_it_without_a_bus_address(steps: Steps) -> None:
    replicas = {replica["name"]: replica for replica in steps.data("vllmctl")["replicas"]}
    assert set(replicas) == {"sim-a", "sim-b"}
    assert all(replica["simulated"] for replica in replicas.values() if replica["state"] == "ready")
    assert steps.output("cron").split()[0] == "simulated"
    assert '"simulated"' in steps.output("busctl")
    assert steps.status("doctor") == 0, steps.output("doctor")


def test_the_engines_words_are_in_the_journal(steps: Steps) -> None:
    assert "simulated" in steps.output("journal")
    assert steps.output("logs").strip()


def test_sleeps_when_told_and_wakes_on_a_request(steps: Steps) -> None:
    steps.output("sleep")
    assert "asleep" in steps.output("asleep")
    assert "data: [DONE]" in steps.output("wake")


@pytest.mark.parametrize("step", ["restart-under-load", "reload-under-load", "failover-under-load"])
def test_clients_see_no_error(steps: Steps, step: str) -> None:
    seen = steps.data(step)
    assert seen["command"] == 0
    assert set(seen["answers"]) == {"200"}, seen


def test_a_restart_of_the_supervisor_restarts_no_engine(steps: Steps) -> None:
    assert steps.output("invocations-before").count("InvocationID=") == 2
    assert steps.output("invocations-after") == steps.output("invocations-before")


def test_an_upgrade_keeps_the_engines_and_the_configuration(steps: Steps) -> None:
    assert "The old version still runs" in steps.output("upgrade")
    assert "wrote a first configuration" not in steps.output("upgrade")
    steps.output("restart")
    assert steps.output("invocations-upgraded") == steps.output("invocations-upgrading")
    assert "status 200" in steps.output("chat-upgraded")


def test_images_of_real_quadlets_are_pulled_by_the_real_podman_and_nothing_is_started(steps: Steps) -> None:
    steps.output("quadlets")
    results = {result["name"]: result for result in steps.data("pull")["results"]}
    assert set(results) == {"boxed", "based"}
    assert {result["result"] for result in results.values()} == {"pulled", "present"}
    assert steps.output("pull-again").endswith("127.0.0.1:5055/vllm:1: all of it is here\n")
    assert steps.output("pulled").startswith("127.0.0.1:5055/vllm:1 1")
    assert steps.status("pull-gone") == 1
    assert "vllmctl: gone: cannot pull 127.0.0.1:5055/vllm:2: " in steps.errors("pull-gone")
    assert "manifest unknown" in steps.errors("pull-gone")
    assert set((steps.folder / "not-started.out").read_text().split()) == {"inactive"}
    steps.output("no-quadlets")


def test_clients_and_the_bus_start_a_stopped_supervisor(steps: Steps) -> None:
    assert "status 200" in steps.output("client-starts-it")
    assert '"simulated"' in steps.output("bus-starts-it")


def test_uninstalling_leaves_nothing(steps: Steps) -> None:
    steps.output("uninstall")
    assert steps.output("files-after") == steps.output("files-before")
    assert steps.output("units-after") == ""
    assert "vllm" not in steps.output("processes-after")
