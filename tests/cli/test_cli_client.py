"""The client by itself: what it believes, what it raises, and what it leaves behind."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from supervisord.bus import names
from supervisord.bus.client import Client, StillWorking
from supervisord.bus.errors import BusUnavailable, CallFailed
from supervisord.bus.snapshot import ReplicaChange
from supervisord.control import ControlError, ErrorCode, Verb
from supervisord.core.states import Life

#: Seconds for what takes milliseconds.
PATIENCE = 20.0


async def test_a_snapshot_is_typed_and_in_seconds(supervisor, bus):
    async with Client.connect(bus.address) as client:
        fleet = await client.fleet()
    assert fleet.manager.listen == ("127.0.0.1:8000",)
    assert [model.name for model in fleet.models] == ["chat", "embed", "ocr"]
    [chat_a, chat_b] = fleet.replicas_of("chat")
    assert (chat_a.in_flight, chat_b.sleep_level, chat_b.wake_seconds) == (3, 1, 3.1)
    assert fleet.models[0].replicas == ("chat-a", "chat-b")


async def test_signals_of_others_are_not_believed(supervisor, control, bus):
    async with Client.connect(bus.address) as client, client.watch() as watch:
        send = ["dbus-send", f"--bus={bus.address}", "--type=signal", f"--dest={client._link.unique_name}"]
        path = names.replica_path("chat-a")
        await asyncio.to_thread(
            subprocess.run,
            [*send, path, "org.freedesktop.DBus.NameOwnerChanged", "string:x", "string:y", "string:"],
            check=True,
        )
        await asyncio.to_thread(
            subprocess.run,
            [*send, names.ROOT_PATH, f"{names.MANAGER_INTERFACE}.Failover", *["string:x"] * 4],
            check=True,
        )
        await asyncio.to_thread(supervisor.do, lambda: control.set_replica("chat-a", state=Life.DRAINING))
        [change] = await asyncio.wait_for(watch.next(), PATIENCE)
    assert isinstance(change, ReplicaChange)
    assert change.after.state == "draining"


async def test_what_was_signalled_before_the_snapshot_is_not_told_again(supervisor, control, bus):
    async with Client.connect(bus.address) as client, client.watch() as first:
        await asyncio.to_thread(supervisor.do, lambda: control.set_replica("chat-a", in_flight=4))
        await asyncio.wait_for(first.next(), PATIENCE)
        async with client.watch() as second:
            assert second.fleet.replicas[0].in_flight == 4
            await asyncio.to_thread(supervisor.do, lambda: control.set_replica("chat-a", in_flight=5))
            [change] = await asyncio.wait_for(second.next(), PATIENCE)
    assert (change.before.in_flight, change.after.in_flight) == (4, 5)


async def test_errors_are_the_supervisors_own_or_the_buses(supervisor, control, bus):
    control.scripts["chat"] = ControlError(ErrorCode.HELD, "chat is held.")
    async with Client.connect(bus.address) as client:
        with pytest.raises(ControlError, match="chat is held") as failed:
            await client.command(names.model_path("chat"), Verb.WAKE)
        assert failed.value.code is ErrorCode.HELD
        with pytest.raises(CallFailed, match="no object"):
            await client.command(names.model_path("nix"), Verb.WAKE)


async def test_a_call_that_is_given_up_leaves_the_connection_usable(supervisor, control, bus):
    control.scripts["chat"] = control.wait_for_release
    async with Client.connect(bus.address) as client:
        with pytest.raises(StillWorking):
            await client.command(names.model_path("chat"), Verb.WAKE, timeout=0.05)
        await asyncio.to_thread(supervisor.do, control.release.set)
        assert (await client.fleet()).models[0].name == "chat"


async def test_after_the_bus_is_gone_every_call_fails_at_once(supervisor, bus):
    async with Client.connect(bus.address) as client, client.watch() as watch:
        await asyncio.to_thread(bus.kill)
        with pytest.raises(BusUnavailable, match="went away"):
            await asyncio.wait_for(watch.next(), PATIENCE)
        with pytest.raises(BusUnavailable, match="went away"):
            await client.fleet()


async def test_a_cancelled_call_leaves_nothing_behind(supervisor, control, bus):
    control.scripts["chat"] = control.wait_for_release
    async with Client.connect(bus.address) as client:
        call = asyncio.create_task(client.command(names.model_path("chat"), Verb.WAKE))
        assert await asyncio.to_thread(control.begun.acquire, timeout=PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client._replies == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}
