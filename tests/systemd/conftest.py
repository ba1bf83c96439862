"""Tests against a real `systemd --user`, one private manager for the whole run:

packaging/private-manager .venv/bin/python -m pytest tests/systemd
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for product, here and in the tests

from product import Clients, Fleet, Product, running

COMMAND = "packaging/private-manager .venv/bin/python -m pytest tests/systemd"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.systemd)


@pytest.fixture(autouse=True, scope="session")
def _private_manager() -> None:
    """Without a manager of their own these tests fail, rather than skip or touch the units of whoever runs them."""
    if os.environ.get("PRIVATE_MANAGER") != "1" or not Path(os.environ["XDG_RUNTIME_DIR"], "systemd/private").exists():
        pytest.fail(f"these tests need a user manager of their own; run (as root): {COMMAND}", pytrace=False)


class CrashPoints:
    """The points at which the supervisor was killed, and the garbage that engines answered to clients afterwards."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.garbage = 0

    def tried(self, points: Iterable[str], garbage: int) -> None:
        self.points += points
        self.garbage += garbage


CRASH_POINTS = pytest.StashKey[CrashPoints]()


@pytest.fixture(scope="session")
def crash_points(pytestconfig: pytest.Config) -> CrashPoints:
    """Where a test tells at which points it killed the supervisor; printed at the end of the run."""
    return pytestconfig.stash.setdefault(CRASH_POINTS, CrashPoints())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(CRASH_POINTS, None)
    if found is not None:
        terminalreporter.section("crash points")
        terminalreporter.write_line("\n".join(found.points))
        terminalreporter.write_line(f"{len(found.points)} points tried, {found.garbage} answers were garbage")


def systemctl(*args: str, check: bool = True) -> str:
    """Run `systemctl --user`; returns what it printed. For setting the stage: it shares no code with what is tested."""
    done = subprocess.run(["systemctl", "--user", "--no-pager", *args], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"systemctl --user {' '.join(args)} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture(name="systemctl")
def systemctl_fixture() -> Callable[..., str]:
    """The function above, for tests."""
    return systemctl


class UnitDir:
    """The manager's runtime unit directory, for the units of one test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[Path] = []

    def write(self, name: str, text: str, *, reload: bool = True) -> str:
        """Write a unit file, or ``NAME.d/x.conf``; returns ``name``."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self._files.append(file)
        if reload:
            systemctl("daemon-reload")
        return name

    def service(self, name: str, exec_start: str, *lines: str, unit: str = "", reload: bool = True) -> str:
        """Write a service of that command line and further lines of [Service]; ``unit``: lines of [Unit]."""
        body = "\n".join([f"ExecStart={exec_start}", *lines])
        return self.write(name, f"[Unit]\n{unit}\n[Service]\n{body}\n", reload=reload)

    def mask(self, name: str) -> None:
        file = self.path / name
        file.unlink(missing_ok=True)
        file.symlink_to("/dev/null")
        self._files.append(file)
        systemctl("daemon-reload")

    def remove(self) -> None:
        """Stop and forget every unit of these files, instances of templates too."""
        mine = {file.name for file in self._files}
        for socket in (name for name in mine if name.endswith(".socket")):
            systemctl("stop", socket, check=False)  # active without a file it would take the next file's place
        for unit in loaded_services():
            template = f"{unit.partition('@')[0]}@.{unit.rpartition('.')[2]}"
            if unit in mine or template in mine:
                systemctl("stop", unit, check=False)
                systemctl("reset-failed", unit, check=False)
        for file in self._files:
            file.unlink(missing_ok=True)
            if file.parent != self.path and file.parent.exists():
                file.parent.rmdir()
        systemctl("daemon-reload")


def loaded_services() -> set[str]:
    """Names of the services that the manager knows of, failed and missing ones included."""
    listed = systemctl("list-units", "--all", "--plain", "--no-legend", "--type=service")
    return {line.split()[0] for line in listed.splitlines()}


@pytest.fixture
def unit_dir(_private_manager: None) -> Iterator[UnitDir]:
    """Where a test writes its unit files; afterwards they, and all that they started, are gone."""
    before = loaded_services()
    directory = UnitDir(Path(os.environ["XDG_RUNTIME_DIR"], "systemd/user"))
    yield directory
    directory.remove()
    left = {unit for unit in loaded_services() - before if systemctl("is-active", unit, check=False) != "inactive"}
    assert not left, f"units left behind: {', '.join(sorted(left))}"


@pytest.fixture(autouse=True)
async def settled(_private_manager: None) -> AsyncIterator[None]:
    """No task, descriptor or child process may be left by a test."""
    before = descriptors()
    yield
    tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not tasks, f"tasks left behind: {tasks}"
    opened = {number: target for number, target in descriptors().items() if before.get(number) != target}
    assert not opened, f"descriptors left behind: {opened}"
    assert not children(), f"processes left behind: {children()}"


def descriptors() -> dict[int, str]:
    """The open descriptors and what each is."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def children() -> list[str]:
    """The child processes of this one, ended and unreaped ones too."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.fixture(scope="module")
def product(
    _private_manager: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    """The whole product, with the module's ``CONFIG`` (``SUPERVISOR``, if it has its own); one for all its tests."""
    supervisor = getattr(request.module, "SUPERVISOR", None)
    yield from running(tmp_path_factory.mktemp("product"), request.module.CONFIG, supervisor)


@pytest.fixture
async def clients(product: Product) -> AsyncIterator[Clients]:
    """HTTP clients of the product's port."""
    async with product.clients() as clients:
        yield clients


@pytest.fixture
async def fleet(product: Product) -> AsyncIterator[Fleet]:
    """The product's fleet, kept current by D-Bus signals."""
    async with product.fleet() as fleet:
        yield fleet
