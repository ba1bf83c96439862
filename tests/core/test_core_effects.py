"""What effects do with engines whose configuration changes, and with a systemd that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from world import model

from supervisord import effects as effects_module
from supervisord.core.actions import Call, CallEngine, ProbeEngine, RunUnitJob, UnitVerb
from supervisord.core.events import EngineAnswered, Event, Probed, UnitJobDone
from supervisord.core.readings import EngineState, Probe
from supervisord.core.spec import ServeSpec
from supervisord.effects import Effects
from supervisord.engine import inspect
from supervisord.engine.inspect import ProcessInspector
from supervisord.ports import UnitError

CHAT = model()


class Engine:
    """Answers a call when it is let; a closed one fails, as a session does whose connections are cut."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.closed = False
        self.timeouts: list[float] = []

    async def wake_up(self, tags, timeout):
        await self.go_on.wait()
        assert not self.closed

    async def sleep(self, level, timeout):
        self.timeouts.append(timeout)

    async def probe(self, timeout):
        return Probe(EngineState.AWAKE)

    async def close(self):
        self.closed = True


class Owner:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.says: str | None = ""

    async def stranger(self, spec):
        self.asked += 1
        return self.says


class Memory:
    """Takes its time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def gpu_bytes(self, spec, engine, *, simulated):
        loop = asyncio.get_running_loop()
        later = loop.time() + self.seconds
        loop.time = lambda: later


class Rig:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.engines: list[Engine] = []
        self.owner, self.memory = Owner(), Memory()
        self.effects = Effects(None, None, self._make, self.memory, self.owner)
        self.effects.report_to(self.events.append)
        self.effects.configure((CHAT,))

    def _make(self, model, spec):
        self.engines.append(Engine())
        return self.engines[-1]

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    await made.effects.close()
    assert all(engine.closed for engine in made.engines)


WAKE = CallEngine("a", 1, Call.WAKE_UP, 10.0)


async def test_a_call_that_is_under_way_is_not_cut_when_its_engine_is_asked_otherwise_from_now_on(rig):
    rig.effects.perform(WAKE)
    await rig.turns()
    rig.effects.configure((replace(CHAT, serve=ServeSpec("another")),))
    await rig.turns()
    old, new = rig.engines
    assert not old.closed
    old.go_on.set()
    await rig.turns()
    assert rig.events == [EngineAnswered("a", 1)]
    assert (old.closed, new.closed) == (True, False)


async def test_one_that_is_not_configured_any_more_is_closed_when_its_call_has_ended(rig):
    rig.effects.perform(WAKE)
    await rig.turns()
    rig.effects.configure(())
    await rig.turns()
    assert not rig.engines[0].closed
    rig.engines[0].go_on.set()
    await rig.turns()
    assert rig.engines[0].closed


async def test_a_call_of_an_operation_that_was_given_up_ends_when_the_next_one_calls(rig):
    rig.effects.perform(WAKE)
    await rig.turns()
    rig.effects.perform(replace(WAKE, op=2))
    await rig.turns()
    rig.engines[0].go_on.set()
    await rig.turns()
    assert rig.events == [EngineAnswered("a", 2)]


async def test_what_changes_nothing_about_how_an_engine_is_asked_keeps_its_client(rig):
    rig.effects.configure((replace(CHAT, replicas=(replace(CHAT.replicas[0], gpus=(3,), gpu_memory=1),)),))
    assert len(rig.engines) == 1


async def test_the_last_look_of_a_sequence_is_answered_where_the_replica_is_gone_and_no_other_is(rig):
    rig.effects.configure(())
    for number, verify in ((1, True), (2, False)):
        rig.effects.perform(ProbeEngine("a", number, 5.0, verify=verify))
    await rig.turns()
    (event,) = rig.events
    assert isinstance(event, Probed)
    assert (event.op, event.probe.state) == (1, EngineState.UNREACHABLE)


async def test_no_sleep_is_asked_for_after_the_time_that_the_core_waits_for_it(rig):
    rig.memory.seconds = 7.0
    rig.effects.perform(CallEngine("a", 1, Call.SLEEP, 10.0, 1))
    await rig.turns()
    (timeout,) = rig.engines[0].timeouts
    assert timeout <= 3.0
    rig.memory.seconds = 12.0  # longer than there is time
    rig.effects.perform(CallEngine("a", 2, Call.SLEEP, 10.0, 1))
    await rig.turns()
    assert len(rig.engines[0].timeouts) == 1
    assert rig.events[-1].error


async def test_whose_socket_it_is_is_asked_again_when_systemd_did_not_tell(rig):
    rig.owner.says = None
    rig.effects.perform(ProbeEngine("a", 1, 5.0))
    await rig.turns()
    rig.owner.says = ""
    for number in (2, 3):
        rig.effects.perform(ProbeEngine("a", number, 5.0))
        await rig.turns()
    assert [event.probe.state for event in rig.events] == [EngineState.AWAKE] * 3
    assert rig.owner.asked == 2


class Systemd:
    """Refuses, or does not answer."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def stop(self, unit):
        raise UnitError(unit, "org.freedesktop.DBus.Error.Disconnected", "the service manager cannot be reached")

    async def last_lines(self, unit, count):
        await asyncio.get_running_loop().create_future()

    async def status(self, units):
        if self.how == "refuses":
            raise UnitError(units[0], "org.freedesktop.DBus.Error.Failed", "no")
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_without_a_word_of_systemd_nobody_is_a_stranger(monkeypatch, how):
    monkeypatch.setattr(inspect, "ASK_TIMEOUT", 0.001)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        spec = replace(CHAT.replicas[0], endpoint=f"http://127.0.0.1:{port}")
        inspector = ProcessInspector(Systemd(how))
        assert await inspector.stranger(spec) is None
        assert await inspector.gpu_bytes(spec, None, simulated=False) is None


async def test_a_job_that_failed_is_told_though_systemd_says_no_more(monkeypatch):
    monkeypatch.setattr(effects_module, "AFTERWARDS", 0.001)
    ended: asyncio.Queue[Event] = asyncio.Queue()
    effects = Effects(Systemd("is silent"), None, None, None, None)
    effects.report_to(ended.put_nowait)
    effects.perform(RunUnitJob("a", 1, "vllm@a.service", UnitVerb.STOP, 60.0))
    assert await ended.get() == UnitJobDone("a", 1, "error", None, "the service manager cannot be reached")
