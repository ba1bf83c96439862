"""A real bus daemon on an address of its own, a fake supervisor behind the service, and callers with raw messages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dbus_next import Message, MessageFlag, MessageType, Variant
from dbus_next.aio import MessageBus

from supervisord.bus import names
from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService
from supervisord.control import ControlError, Failover, Verb
from supervisord.core.admission import Bid, Explanation
from supervisord.core.states import Health, Hold, Life
from supervisord.core.view import FleetView, ModelView, ReplicaView

#: Seconds for what takes milliseconds; a test that needs it has failed.
PATIENCE = 20.0

_DAEMON_CONFIG = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""

REPLICA = ReplicaView(
    name="qwen-a",
    model="qwen3-8b",
    state=Life.READY,
    sleep_level=0,
    health=Health.OK,
    hold=Hold.NONE,
    step="",
    unit="vllm@qwen-a.service",
    endpoint="unix:/run/user/1000/vllm/qwen-a/engine.sock",
    gpus=(0, 1),
    in_flight=3,
    last_error="",
    state_since=1_700_000_000.25,
    idle_since=0.0,
    wake_seconds=2.5,
    start_seconds=41.0,
    max_model_len=114_688,
    served_names=("qwen3-8b", "Qwen/Qwen3-8B"),
    simulated=False,
    can_sleep=True,
    retry_at=0.0,
)
MODEL = ModelView(
    name="qwen3-8b",
    aliases=("default", "gpt-4"),
    routing="adaptive",
    state=Life.READY,
    held=False,
    in_flight=3,
    waiting=2,
    waiting_for_kv=1,
    idle_since=0.0,
    wake_seconds=2.5,
    max_model_len=114_688,
    replicas=("qwen-a",),
)
FLEET = FleetView(models=(MODEL,), replicas=(REPLICA,), draining=False)
FACTS = ManagerFacts(
    version="0.1.0",
    listen=("127.0.0.1:8000",),
    config_files=("/home/u/.config/vllm-supervisord/config.toml",),
    state_directory="/home/u/.local/state/vllm-supervisord",
    simulated=False,
)


class FakeControl:
    """A supervisor whose state a test sets, and whose work ends when the test says so."""

    def __init__(self, fleet: FleetView = FLEET) -> None:
        self.fleet = fleet
        self.views = 0
        self.commands: list[tuple[str, Verb, int]] = []
        self.outcome: ControlError | Exception | None = None
        self.reload_result: Sequence[str] = ()
        #: Cleared: commands take until it is set. ``begun`` counts those that came so far.
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Semaphore(0)
        self.finished = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []
        self.on_failover: list[Callable[[Failover], None]] = []

    def view(self) -> FleetView:
        self.views += 1
        return self.fleet

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self.on_change.append(on_change)
        return lambda: self.on_change.remove(on_change)

    def subscribe_failovers(self, on_failover: Callable[[Failover], None]) -> Callable[[], None]:
        self.on_failover.append(on_failover)
        return lambda: self.on_failover.remove(on_failover)

    def become(self, fleet: FleetView) -> None:
        self.fleet = fleet
        for on_change in self.on_change:
            on_change()

    def set_replica(self, **changes: object) -> None:
        replica = dataclasses.replace(self.fleet.replicas[0], **changes)
        self.become(dataclasses.replace(self.fleet, replicas=(replica, *self.fleet.replicas[1:])))

    async def _work(self, target: str, verb: Verb, level: int) -> None:
        self.commands.append((target, verb, level))
        self.begun.release()
        await self.gate.wait()
        self.finished.set()
        if self.outcome is not None:
            raise self.outcome

    async def command_model(self, model: str, verb: Verb, level: int = 0) -> None:
        await self._work(f"model {model}", verb, level)

    async def command_replica(self, replica: str, verb: Verb, level: int = 0) -> None:
        await self._work(f"replica {replica}", verb, level)

    def explain_route(self, model: str, route: str, body: bytes) -> Explanation:
        if self.outcome is not None:
            raise self.outcome
        bids = (Bid("qwen-a", 0.31, 0.0, 0.29, 89_700), Bid("qwen-b", 5.42, 1.0, 4.4, 0))
        return Explanation("qwen-a", f"{model} at {route}: {body.decode()}", bids)

    async def reload(self) -> Sequence[str]:
        if self.outcome is not None:
            raise self.outcome
        return self.reload_result


class BusDaemon:
    """``dbus-daemon`` on a socket in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "bus.conf"
        self._config.write_text(_DAEMON_CONFIG.format(socket=folder / "bus"))
        self.address = f"unix:path={folder / 'bus'}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            "dbus-daemon",
            f"--config-file={self._config}",
            "--nofork",
            "--nopidfile",
            "--print-address=1",
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert await asyncio.wait_for(self._process.stdout.readline(), PATIENCE), "the bus daemon did not start"

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()
            self._process = None


class Remote(Exception):
    """The D-Bus error that a call was answered with."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.text = name, text


class Caller:
    """A client by raw dbus-next messages; keeps the signals it got in order."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        self.signals: asyncio.Queue[Message] = asyncio.Queue()
        bus.add_message_handler(self._on_message)

    @classmethod
    async def connect(cls, address: str) -> Caller:
        return cls(await MessageBus(bus_address=address).connect())

    async def call(
        self,
        path: str,
        interface: str | None,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        *,
        destination: str = names.BUS_NAME,
    ) -> list[Any]:
        answer = await asyncio.wait_for(
            self._bus.call(Message(destination, path, interface, member, signature=signature, body=list(body))),
            PATIENCE,
        )
        if answer.message_type is MessageType.ERROR:
            raise Remote(answer.error_name, answer.body[0])
        return answer.body

    async def get(self, path: str, interface: str, name: str) -> Any:
        [value] = await self.call(path, "org.freedesktop.DBus.Properties", "Get", "ss", [interface, name])
        return value.value

    async def post(self, path: str, interface: str, member: str) -> None:
        """Call and want no answer; returns when the message is sent."""
        await self._bus.send(
            Message(names.BUS_NAME, path, interface, member, flags=MessageFlag.NO_REPLY_EXPECTED),
        )

    async def listen(self) -> None:
        """Get every signal of the service from now on."""
        bus = "org.freedesktop.DBus"
        rule = f"type='signal',sender='{names.BUS_NAME}'"
        await self.call("/org/freedesktop/DBus", bus, "AddMatch", "s", [rule], destination=bus)

    async def signal(self, member: str) -> Message:
        """The next signal of that name; others before it are dropped."""
        while True:
            message = await asyncio.wait_for(self.signals.get(), PATIENCE)
            if message.member == member:
                return message

    async def owner(self) -> str:
        bus = "org.freedesktop.DBus"
        [owner] = await self.call("/org/freedesktop/DBus", bus, "GetNameOwner", "s", [names.BUS_NAME], destination=bus)
        return owner

    def _on_message(self, message: Message) -> bool:
        if message.message_type is MessageType.SIGNAL and message.path.startswith(names.ROOT_PATH):
            self.signals.put_nowait(message)
        return False

    async def close(self) -> None:
        self._bus.disconnect()
        with suppress(EOFError, OSError):
            await self._bus.wait_for_disconnect()
        self._bus._stream.close()
        self._bus._sock.close()


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """No task and no descriptor outlives a test."""
    tasks, descriptors = asyncio.all_tasks(), _open_descriptors()
    yield
    assert asyncio.all_tasks() - tasks - {asyncio.current_task()} == set()
    assert _open_descriptors() == descriptors


def _open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
async def daemon(tmp_path: Path, nothing_left: None) -> AsyncIterator[BusDaemon]:
    bus_daemon = BusDaemon(tmp_path)
    await bus_daemon.start()
    yield bus_daemon
    await bus_daemon.kill()


@pytest.fixture
async def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
async def service(daemon: BusDaemon, control: FakeControl) -> AsyncIterator[BusService]:
    bus_service = BusService(control, lambda: FACTS, daemon.address)
    await bus_service.start()
    yield bus_service
    await bus_service.stop()


@pytest.fixture
async def connect(daemon: BusDaemon) -> AsyncIterator[Callable[[], Any]]:
    """Makes callers, and closes them."""
    callers: list[Caller] = []

    async def make() -> Caller:
        callers.append(await Caller.connect(daemon.address))
        return callers[-1]

    yield make
    for caller in callers:
        await caller.close()


@pytest.fixture
async def caller(service: BusService, connect: Callable[[], Any]) -> Caller:
    return await connect()


@pytest.fixture
def remote_error() -> type[Remote]:
    """What ``Caller.call`` raises."""
    return Remote


@pytest.fixture
def variant() -> type[Variant]:
    return Variant


@pytest.fixture
def facts() -> ManagerFacts:
    return FACTS
