"""The unit files as they are installed, with stand-ins for the programs, under a user manager of the test run's own."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RENDER = ROOT / "packaging" / "render"
COMMAND = "packaging/private-manager .venv/bin/python -m pytest -m systemd tests/units"

Render = Callable[..., Path]


@pytest.fixture
def render(tmp_path: Path) -> Render:
    """Render the templates; returns the folder."""

    def run(bindir: Path | str = "/usr/bin", listen: str = "127.0.0.1:8000") -> Path:
        target = tmp_path / "units"
        subprocess.run([RENDER, target, bindir, listen], check=True)
        return target

    return run


class Manager:
    """The user manager, with our units in its runtime folder."""

    def __init__(self, runtime: Path) -> None:
        self.folder = runtime / "systemd" / "user"

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"systemctl {arguments}: {done.stderr}"
        return done.stdout.strip()

    def value(self, unit: str, name: str) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def drop_in(self, unit: str, *lines: str) -> None:
        folder = self.folder / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text("\n".join(lines) + "\n")
        self.systemctl("daemon-reload")


@pytest.fixture
def bindir(tmp_path: Path) -> Path:
    """Where the test puts the programs that the units start."""
    folder = tmp_path / "a folder with 100% of the rights"
    folder.mkdir()
    return folder


@pytest.fixture
def manager(render: Render, bindir: Path) -> Iterator[Manager]:
    """The manager with our units installed; afterwards they are stopped and gone."""
    if os.environ.get("PRIVATE_MANAGER") != "1":
        pytest.fail(f"this needs a user manager of its own; run (as root): {COMMAND}", pytrace=False)
    manager = Manager(Path(os.environ["XDG_RUNTIME_DIR"]))
    ours = render(bindir, "%t/port")  # a path is never taken by somebody else
    shutil.copytree(ours, manager.folder, dirs_exist_ok=True)
    manager.systemctl("daemon-reload")
    yield manager
    units = ["vllm-supervisord.socket", "vllm-supervisord.service", "vllm@*.service"]
    manager.systemctl("kill", "--signal=KILL", *units, check=False)
    manager.systemctl("stop", *units, check=False)
    manager.systemctl("reset-failed", *units, check=False)
    for file in ours.iterdir():
        (manager.folder / file.name).unlink()
        shutil.rmtree(manager.folder / f"{file.name}.d", ignore_errors=True)
    manager.systemctl("daemon-reload")
