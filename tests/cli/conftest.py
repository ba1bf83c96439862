"""vllmctl against the real D-Bus service with a made-up fleet behind it, on a bus daemon of the test's own.

The service runs in a thread with a loop of its own, so that a test can call ``main`` as the entry point does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService
from supervisord.cli.main import main
from supervisord.control import Failover, Verb
from supervisord.core.admission import Explanation
from supervisord.core.states import Health, Hold, Life
from supervisord.core.view import FleetView, ModelView, ReplicaView

#: Seconds for what takes milliseconds; a test that needs it has failed.
PATIENCE = 20.0
ROOT = Path(__file__).parents[2]
sys.path += [str(Path(__file__).parent), str(ROOT / "tests/proxy")]  # for ``recordedhost``, and ``pki``
_PYTHONPATH = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]

_BUS_CONFIG = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path={folder}/bus</listen>
  <servicedir>{folder}/services</servicedir>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""

T = TypeVar("T")


def replica(name: str, model: str, **changes: object) -> ReplicaView:
    now = time.time()
    return dataclasses.replace(
        ReplicaView(
            name=name,
            model=model,
            state=Life.READY,
            sleep_level=0,
            health=Health.OK,
            hold=Hold.NONE,
            step="",
            unit=f"vllm@{name}.service",
            endpoint=f"unix:/run/user/1000/vllm/{name}/engine.sock",
            gpus=(0,),
            in_flight=0,
            last_error="",
            state_since=now - 720,
            idle_since=now - 190,
            wake_seconds=3.1,
            start_seconds=41.0,
            max_model_len=32768,
            served_names=(model,),
            simulated=False,
            can_sleep=True,
            retry_at=0.0,
        ),
        **changes,
    )


def model(name: str, replicas: Sequence[str], **changes: object) -> ModelView:
    return dataclasses.replace(
        ModelView(
            name=name,
            aliases=(),
            routing="adaptive",
            state=Life.READY,
            held=False,
            in_flight=0,
            waiting=0,
            idle_since=time.time() - 190,
            wake_seconds=3.1,
            max_model_len=32768,
            replicas=tuple(replicas),
        ),
        **changes,
    )


def usual_fleet() -> FleetView:
    """Two replicas of chat (alias gpt), a failed one of ocr, and a model and its only replica of one name."""
    now = time.time()
    return FleetView(
        models=(
            model("chat", ("chat-a", "chat-b"), aliases=("gpt",), in_flight=3, waiting=2, idle_since=0.0),
            model("embed", ("embed",), state=Life.ASLEEP),
            model("ocr", ("ocr-1",), state=Life.FAILED, max_model_len=0, wake_seconds=0.0),
        ),
        replicas=(
            replica("chat-a", "chat", in_flight=3, idle_since=0.0),
            replica("chat-b", "chat", state=Life.ASLEEP, sleep_level=1),
            replica("embed", "embed", state=Life.ASLEEP, sleep_level=2, wake_seconds=23.0),
            replica(
                "ocr-1",
                "ocr",
                state=Life.FAILED,
                last_error="CUDA out of memory\x1b[31m",
                retry_at=now + 3600.0,
                max_model_len=0,
                wake_seconds=0.0,
            ),
        ),
        draining=False,
    )


class FakeControl:
    """A supervisor whose state a test sets, and whose commands do what the test says. Lives in the service's thread."""

    def __init__(self, fleet: FleetView) -> None:
        self.fleet = fleet
        self.commands: list[tuple[str, str, Verb, int]] = []
        #: What a command on this name does: raise an exception, or run a coroutine function.
        self.scripts: dict[str, Exception | Callable[[], object]] = {}
        self.begun = threading.Semaphore(0)
        self.release = asyncio.Event()
        self.reloaded: Sequence[str] | Exception = ()
        self.explained: Explanation | Exception = Explanation("chat-a", "spread")
        self.asked: list[tuple[str, str, bytes]] = []
        self._on_change: list[Callable[[], None]] = []
        self._on_failover: list[Callable[[Failover], None]] = []

    def view(self) -> FleetView:
        return self.fleet

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._on_change.append(on_change)
        return lambda: self._on_change.remove(on_change)

    def subscribe_failovers(self, on_failover: Callable[[Failover], None]) -> Callable[[], None]:
        self._on_failover.append(on_failover)
        return lambda: self._on_failover.remove(on_failover)

    def become(self, fleet: FleetView) -> None:
        self.fleet = fleet
        for on_change in list(self._on_change):
            on_change()

    def set_replica(self, which: str, **changes: object) -> None:
        replicas = tuple(
            dataclasses.replace(each, **changes) if each.name == which else each for each in self.fleet.replicas
        )
        self.become(dataclasses.replace(self.fleet, replicas=replicas))

    def fail_over(self, failover: Failover) -> None:
        for on_failover in list(self._on_failover):
            on_failover(failover)

    async def wait_for_release(self) -> None:
        await self.release.wait()

    async def _command(self, kind: str, name: str, verb: Verb, level: int) -> None:
        self.commands.append((kind, name, verb, level))
        self.begun.release()
        script = self.scripts.get(name)
        if isinstance(script, Exception):
            raise script
        if script is not None:
            await script()

    async def command_model(self, model: str, verb: Verb, level: int = 0) -> None:
        await self._command("model", model, verb, level)

    async def command_replica(self, replica: str, verb: Verb, level: int = 0) -> None:
        await self._command("replica", replica, verb, level)

    def explain_route(self, model: str, route: str, body: bytes) -> Explanation:
        if isinstance(self.explained, Exception):
            raise self.explained
        self.asked.append((model, route, body))
        return self.explained

    async def reload(self) -> Sequence[str]:
        self.begun.release()
        if isinstance(self.reloaded, Exception):
            raise self.reloaded
        return self.reloaded


class BusDaemon:
    """``dbus-daemon`` with its socket in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "services").mkdir()
        (folder / "bus.conf").write_text(_BUS_CONFIG.format(folder=folder))
        self.address = f"unix:path={folder}/bus"
        self._process = subprocess.Popen(
            ["dbus-daemon", f"--config-file={folder}/bus.conf", "--nofork", "--nopidfile", "--print-address=1"],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the bus daemon did not start"

    def reload(self) -> None:
        """Have it look for services again."""
        call = ["--print-reply", "--dest=org.freedesktop.DBus", "/", "org.freedesktop.DBus.ReloadConfig"]
        subprocess.run(["dbus-send", f"--bus={self.address}", *call], stdout=subprocess.DEVNULL, check=True)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


class Supervisor:
    """The D-Bus service in a thread. ``stop`` is a daemon that ends, and may be followed by another ``start``."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.facts = ManagerFacts(
            version="0.1.0",
            listen=("127.0.0.1:8000",),
            config_files=("/home/u/.config/vllm-supervisord/config.toml",),
            state_directory="/home/u/.local/state/vllm-supervisord",
            simulated=False,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="supervisor")
        self._thread.start()
        self.control = self.do(lambda: FakeControl(usual_fleet()))
        self._service: BusService | None = None

    def do(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the service's thread."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE)

    def wait(self, until: Coroutine[object, object, None], seconds: float) -> None:
        """Wait in the service's thread, at most ``seconds``."""
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(until, seconds), self._loop).result(seconds + 1)

    def post(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the service's thread some time soon."""
        self._loop.call_soon_threadsafe(function)

    def start(self) -> None:
        async def start() -> BusService:
            service = BusService(self.control, lambda: self.facts, self.address)
            await service.start()
            return service

        self._service = asyncio.run_coroutine_threadsafe(start(), self._loop).result(PATIENCE)

    def stop(self) -> None:
        if self._service is not None:
            asyncio.run_coroutine_threadsafe(self._service.stop(), self._loop).result(PATIENCE)
            self._service = None

    def vanish(self) -> None:
        """End as a process that is killed does: no answer to pending calls."""
        service = self._service
        assert service is not None
        assert service._connection is not None

        def cut() -> None:
            service._keeper.cancel()
            service._connection._bus.disconnect()

        self.do(cut)
        self.stop()

    def close(self) -> None:
        self.do(self.control.release.set)
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


class Heard(io.StringIO):
    """A stream on which the service's thread can wait for a text. ``terminal``: it says that it is one."""

    def __init__(self, supervisor: Supervisor, *, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal
        self._supervisor = supervisor
        self._written = supervisor.do(asyncio.Event)

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        size = super().write(text)
        self._supervisor.post(self._written.set)
        return size

    async def until(self, text: str) -> None:
        """Wait until ``text`` was written."""
        while text not in self.getvalue():
            self._written.clear()
            if text not in self.getvalue():
                await self._written.wait()


@dataclasses.dataclass(frozen=True)
class Ended:
    """How vllmctl ended."""

    code: int
    out: str
    err: str


class Vllmctl:
    """Runs vllmctl in this process; ``env`` may be changed before."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __call__(self, *argv: str, out: io.StringIO | None = None, err: io.StringIO | None = None) -> Ended:
        out, err = out or io.StringIO(), err or io.StringIO()
        code = main(argv, env=self.env, out=out, err=err)
        return Ended(code, out.getvalue(), err.getvalue())

    def behind(self, *argv: str, out: io.StringIO | None = None, err: io.StringIO | None = None) -> Future[Ended]:
        """The same in a thread; the test waits for the future."""
        ended: Future[Ended] = Future()

        def run() -> None:
            try:
                ended.set_result(self(*argv, out=out, err=err))
            except BaseException as error:  # noqa: BLE001 - it is the test's to see
                ended.set_exception(error)

        thread = threading.Thread(target=run, name="vllmctl")
        thread.start()
        self._threads.append(thread)
        return ended

    def process(self, *argv: str, env: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        """The same as a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "supervisord.cli.main", *argv],
            env={**(self.env if env is None else env), "PYTHONPATH": os.pathsep.join([str(ROOT), *_PYTHONPATH])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self._processes.append(process)
        return process

    def join(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                process.communicate()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor outlives a test."""
    threads, descriptors = set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert set(threading.enumerate()) - threads == set()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.fixture
def bus(tmp_path: Path, nothing_left: None) -> Iterator[BusDaemon]:
    folder = tmp_path / "run"
    folder.mkdir()
    daemon = BusDaemon(folder)
    yield daemon
    daemon.kill()


@pytest.fixture
def stopped_supervisor(bus: BusDaemon) -> Iterator[Supervisor]:
    supervisor = Supervisor(bus.address)
    yield supervisor
    supervisor.close()


@pytest.fixture
def supervisor(stopped_supervisor: Supervisor) -> Supervisor:
    stopped_supervisor.start()
    return stopped_supervisor


@pytest.fixture
def hear(supervisor: Supervisor) -> Callable[..., Heard]:
    """Makes streams for vllmctl to write to."""
    return lambda *, terminal=False: Heard(supervisor, terminal=terminal)


@pytest.fixture
def control(supervisor: Supervisor) -> FakeControl:
    return supervisor.control


@pytest.fixture
def vllmctl(tmp_path: Path, bus: BusDaemon) -> Iterator[Vllmctl]:
    """vllmctl with the test's bus as its session bus, and a home of its own."""
    home = tmp_path / "home"
    home.mkdir()
    run = Vllmctl(
        {"DBUS_SESSION_BUS_ADDRESS": bus.address, "HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    )
    yield run
    run.join()
