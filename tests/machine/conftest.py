"""A booted Debian 13 (journald, logind, a lingering user, systemd 257, Python 3.13), and what a scenario in it left."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = os.environ.get("LIMIT", "900")
#: As root in the machine: the checkout into the user's home, then the scenario.
SCRIPT = """
set -e
systemctl start user@1000.service
cp -r /share/source /home/tester/source
chown -R tester: /home/tester/source /share/results /share/pip-cache
. /home/tester/source/tests/machine/steps
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


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Steps]]:
    """Boot the machine, run a line of shell in it as root, and switch it off."""
    if os.geteuid() != 0:
        pytest.fail("booting a machine needs root: run `make test-machine`", pytrace=False)
    image = subprocess.check_output([HERE / "build-image"], text=True).strip()
    wheels = subprocess.check_output([HERE / "wheelhouse"], text=True).strip()
    cache = tmp_path_factory.mktemp("pip-cache")
    made = [cache]

    def run(line: str) -> Steps:
        share = tmp_path_factory.mktemp("machine")
        made.append(share)
        share.chmod(0o755)
        copy_checkout(share / "source")
        shutil.copytree(wheels, share / "wheels")
        (share / "results").mkdir()
        shutil.copytree(cache, share / "pip-cache")
        (share / "script").write_text(f"{SCRIPT}{line}\n")
        done = subprocess.run([HERE / "boot", image, share], env=os.environ | {"LIMIT": LIMIT}, check=False)
        log = (share / "log").read_text() if (share / "log").exists() else ""
        print(log)
        kept = os.environ.get("MACHINE_RESULTS")
        if kept:
            shutil.copytree(share / "results", kept, dirs_exist_ok=True)
        assert done.returncode == 0, f"the scenario did not end; it printed:\n{log}\n{(share / 'console').read_text()}"
        shutil.copytree(share / "pip-cache", cache, dirs_exist_ok=True)
        return Steps(share / "results")

    yield run
    for folder in made:
        shutil.rmtree(folder)


def copy_checkout(target: Path) -> None:
    """The files as they are, without what git ignores."""
    names = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT).decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
