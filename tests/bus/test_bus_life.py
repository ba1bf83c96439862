"""The name is ours while there is a bus, whatever becomes of the bus; and nobody is left waiting at the end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.bus import service as service_module
from supervisord.bus.errors import BusUnavailable, NameTaken
from supervisord.bus.names import BUS_NAME, MANAGER_INTERFACE, MODEL_INTERFACE, REPLICA_INTERFACE, ROOT_PATH
from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService
from supervisord.control import Failover

MODEL_PATH = "/io/github/vllmctl1/models/qwen3_2d8b"
REPLICA_PATH = "/io/github/vllmctl1/replicas/qwen_2da"


@pytest.fixture
def said() -> Iterator[Callable[[str], asyncio.Event]]:
    """Makes events that are set when the service logs such a line."""
    handlers = []

    class Listener(logging.Handler):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text, self.heard = text, asyncio.Event()

        def emit(self, record: logging.LogRecord) -> None:
            if self.text in record.getMessage():
                self.heard.set()

    def listen(text: str) -> asyncio.Event:
        handlers.append(Listener(text))
        service_module.log.addHandler(handlers[-1])
        return handlers[-1].heard

    yield listen
    for handler in handlers:
        service_module.log.removeHandler(handler)


async def within(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 20.0)


async def test_the_name_is_owned_after_start_and_free_after_stop(
    daemon: Any, connect: Any, control: Any, facts: ManagerFacts, remote_error: Any
) -> None:
    service = BusService(control, lambda: facts, daemon.address)
    await service.start()
    await within(service.wait_owned())
    caller = await connect()
    assert (await caller.owner()).startswith(":")
    await service.stop()
    await within(service.wait_lost())
    with pytest.raises(remote_error, match="NameHasNoOwner"):
        await caller.owner()
    assert control.on_change == []
    assert control.on_failover == []
    await service.stop()


async def test_a_second_daemon_is_told_which_process_is_the_first(
    service: BusService, daemon: Any, control: Any, facts: ManagerFacts, caller: Any
) -> None:
    owner = await caller.owner()
    second = BusService(control, lambda: facts, daemon.address)
    with pytest.raises(NameTaken) as raised:
        await second.start()
    assert str(raised.value) == (
        f"cannot own the bus name {BUS_NAME}: another vllm-supervisord is running (pid {os.getpid()})"
    )
    assert raised.value.pid == os.getpid()
    assert await caller.owner() == owner
    assert len(control.on_change) == 1


async def test_a_start_without_a_bus_says_where_it_looked(control: Any, facts: ManagerFacts, tmp_path: Any) -> None:
    service = BusService(control, lambda: facts, f"unix:path={tmp_path}/none")
    with pytest.raises(BusUnavailable) as raised:
        await service.start()
    assert str(raised.value) == f"cannot connect to the bus at unix:path={tmp_path}/none: No such file or directory"
    assert control.on_change == []


async def test_the_name_is_ours_again_after_the_bus_died(
    service: BusService, daemon: Any, connect: Any, control: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, service_module.__name__):
        for number in range(3):
            await daemon.kill()
            await within(service.wait_lost())
            control.set_replica(in_flight=number)  # the daemon goes on without a bus
            for on_failover in control.on_failover:
                on_failover(Failover("m", "a", "b", "x"))
            await daemon.start()
            await within(service.wait_owned())
            caller = await connect()
            assert await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "InFlight") == number
            await caller.listen()
            control.set_replica(in_flight=100 + number)
            assert (await caller.signal("PropertiesChanged")).body[1]["InFlight"].value == 100 + number
    assert caplog.text.count("is lost (it hung up); going on without it") == 3
    assert caplog.text.count(f"is back, and {BUS_NAME} is ours again") == 3


async def test_work_under_way_when_the_bus_dies_is_finished_and_its_answer_dropped(
    service: BusService, daemon: Any, connect: Any, control: Any
) -> None:
    control.gate.clear()
    caller = await connect()
    call = asyncio.create_task(caller.call(REPLICA_PATH, REPLICA_INTERFACE, "Wake"))
    await within(control.begun.acquire())
    await daemon.kill()
    await within(service.wait_lost())
    control.gate.set()
    await within(control.finished.wait())
    call.cancel()
    await asyncio.wait([call])
    await daemon.start()
    await within(service.wait_owned())


async def test_a_name_that_is_taken_when_the_bus_is_back_is_waited_for(
    service: BusService,
    daemon: Any,
    control: Any,
    facts: ManagerFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Any,
) -> None:
    monkeypatch.setattr(service_module, "RETRY_MAX", 0.01)
    await daemon.kill()
    await within(service.wait_lost())
    # A bus on which somebody else is already, put where the service looks for it.
    (tmp_path / "other").mkdir()
    other = type(daemon)(tmp_path / "other")
    await other.start()
    first = BusService(control, lambda: facts, other.address)
    await first.start()
    refused = said("another vllm-supervisord is running")
    (tmp_path / "other" / "bus").rename(tmp_path / "bus")
    await within(refused.wait())
    await first.stop()
    await within(service.wait_owned())
    await service.stop()
    await other.kill()


async def test_the_end_while_the_bus_is_away(service: BusService, daemon: Any, control: Any) -> None:
    await daemon.kill()
    await within(service.wait_lost())
    await within(service.stop())
    assert control.on_change == []


async def test_pending_calls_are_answered_at_the_end(
    daemon: Any, connect: Any, control: Any, facts: ManagerFacts, remote_error: Any
) -> None:
    service = BusService(control, lambda: facts, daemon.address)
    await service.start()
    control.gate.clear()
    callers = [await connect() for _ in range(5)]
    calls = [asyncio.create_task(caller.call(MODEL_PATH, MODEL_INTERFACE, "Stop")) for caller in callers]
    for _ in calls:
        await within(control.begun.acquire())
    await within(service.stop())
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, remote_error)
        assert outcome.name == "io.github.vllmctl1.Error.ShuttingDown"
        assert outcome.text == "cannot finish Stop: vllm-supervisord is shutting down"


async def test_a_call_that_arrives_while_we_stop_is_answered(
    daemon: Any, connect: Any, control: Any, facts: ManagerFacts, remote_error: Any
) -> None:
    """Calls are sent without pause while the service stops: each gets an answer, ours or the bus daemon's."""
    service = BusService(control, lambda: facts, daemon.address)
    await service.start()
    caller = await connect()
    control.gate.clear()
    calls = [asyncio.create_task(caller.call(MODEL_PATH, MODEL_INTERFACE, "Wake")) for _ in range(100)]
    await within(control.begun.acquire())
    stopping = asyncio.create_task(service.stop())
    for _ in range(100):
        calls.append(asyncio.create_task(caller.call(MODEL_PATH, MODEL_INTERFACE, "Wake")))
        await asyncio.sleep(0)
    await within(stopping)
    outcomes = {str(outcome).split(":")[0] for outcome in await asyncio.gather(*calls, return_exceptions=True)}
    # ServiceUnknown and NoReply are the daemon's words for "nobody has that name" and "its owner left".
    assert "io.github.vllmctl1.Error.ShuttingDown" in outcomes
    assert outcomes <= {
        "io.github.vllmctl1.Error.ShuttingDown",
        "org.freedesktop.DBus.Error.ServiceUnknown",
        "org.freedesktop.DBus.Error.NoReply",
    }


async def test_work_that_was_cancelled_inside_is_answered_too(caller: Any, control: Any, remote_error: Any) -> None:
    control.outcome = asyncio.CancelledError()
    with pytest.raises(remote_error) as raised:
        await caller.call(REPLICA_PATH, REPLICA_INTERFACE, "Wake")
    assert raised.value.name == "io.github.vllmctl1.Error.ShuttingDown"


async def test_a_view_that_fails_is_an_internal_error_and_not_the_end(
    service: BusService, caller: Any, control: Any, remote_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = control.fleet
    control.fleet = None
    with pytest.raises(remote_error, match=r"Error\.Internal: cannot finish ListModels: AttributeError inside"):
        await caller.call(ROOT_PATH, MANAGER_INTERFACE, "ListModels")
    control.fleet = fleet
    assert await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "State") == "ready"
