"""What changes is heard: real values, from the right paths, few at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest

from supervisord.bus.names import MANAGER_INTERFACE, MODEL_INTERFACE, REPLICA_INTERFACE, ROOT_PATH, replica_path
from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService
from supervisord.control import ControlError, ErrorCode, Failover
from supervisord.core.states import Life

MODEL_PATH = "/io/github/vllmctl1/models/qwen3_2d8b"
REPLICA_PATH = "/io/github/vllmctl1/replicas/qwen_2da"


@pytest.fixture
async def listener(caller: Any) -> Any:
    await caller.listen()
    return caller


def plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: variant.value for name, variant in values.items()}


async def test_a_change_is_told_with_exactly_the_values_that_changed(listener: Any, control: Any) -> None:
    control.set_replica(state=Life.ASLEEP, sleep_level=1, in_flight=0, idle_since=1.5)
    heard = {}
    for _ in range(2):
        signal = await listener.signal("PropertiesChanged")
        interface, changed, invalidated = signal.body
        assert invalidated == []
        heard[signal.path, interface] = plain(changed)
    assert heard == {
        (REPLICA_PATH, REPLICA_INTERFACE): {
            "State": "asleep",
            "SleepLevel": 1,
            "InFlight": 0,
            "IdleSinceUSec": 1_500_000,
        },
        (ROOT_PATH, MANAGER_INTERFACE): {"Status": "0/1 awake, 3 in flight, 2 waiting"},
    }


async def test_a_storm_of_changes_is_few_signals_and_ends_with_the_last_value(listener: Any, control: Any) -> None:
    views = control.views
    for number in range(10_000):
        control.set_replica(in_flight=number)
        if number % 100 == 0:
            await asyncio.sleep(0)
    heard = []
    while not heard or heard[-1] != 9_999:
        signal = await listener.signal("PropertiesChanged")
        if signal.path == REPLICA_PATH:
            heard.append(signal.body[1]["InFlight"].value)
    # One at once, then one in each interval that this took on a slow machine: far from one per change.
    assert len(heard) < 100
    assert control.views - views < 100


async def test_a_change_back_within_one_interval_is_no_change(listener: Any, control: Any) -> None:
    control.set_replica(in_flight=4)
    control.set_replica(in_flight=3)
    control.set_replica(step="reload_weights")
    assert plain((await listener.signal("PropertiesChanged")).body[1]) == {"Step": "reload_weights"}


async def test_the_supervisor_is_not_looked_at_while_nothing_changes(listener: Any, control: Any) -> None:
    control.set_replica(step="x")
    await listener.signal("PropertiesChanged")
    views = control.views
    for _ in range(10):
        await listener.call(REPLICA_PATH, "org.freedesktop.DBus.Peer", "Ping")
    assert control.views == views


@pytest.mark.parametrize("outcome", [None, ControlError(ErrorCode.WAKE_FAILED, "cannot wake")])
async def test_what_a_command_changed_is_heard_before_its_answer(
    listener: Any, control: Any, remote_error: Any, outcome: ControlError | None
) -> None:
    """Also while a publication just went out: a client's cached properties are right when its call returns."""
    control.outcome = outcome
    for number in range(10):
        [replica] = control.fleet.replicas
        replica = dataclasses.replace(replica, in_flight=100 + number)
        control.fleet = dataclasses.replace(control.fleet, replicas=(replica,))
        with nullcontext() if outcome is None else pytest.raises(remote_error, match="WakeFailed"):
            await listener.call(REPLICA_PATH, REPLICA_INTERFACE, "Wake")
        assert listener.signals.get_nowait().body[1]["InFlight"].value == 100 + number


async def test_added_and_removed_objects_are_told_from_the_managers_path(listener: Any, control: Any) -> None:
    [replica], [model] = control.fleet.replicas, control.fleet.models
    second = dataclasses.replace(replica, name="qwen-b", gpus=(1,))
    control.become(
        dataclasses.replace(
            control.fleet,
            replicas=(replica, second),
            models=(dataclasses.replace(model, replicas=("qwen-a", "qwen-b")),),
        )
    )
    added = await listener.signal("InterfacesAdded")
    assert added.path == ROOT_PATH
    path, interfaces = added.body
    assert path == replica_path("qwen-b")
    assert plain(interfaces[REPLICA_INTERFACE])["Gpus"] == [1]
    changed = await listener.signal("PropertiesChanged")
    while changed.path != MODEL_PATH:
        changed = await listener.signal("PropertiesChanged")
    assert plain(changed.body[1]) == {"Replicas": [REPLICA_PATH, replica_path("qwen-b")]}

    control.become(dataclasses.replace(control.fleet, replicas=(), models=()))
    removed = [await listener.signal("InterfacesRemoved") for _ in range(3)]
    assert {signal.path for signal in removed} == {ROOT_PATH}
    assert [signal.body for signal in removed] == [
        [MODEL_PATH, [MODEL_INTERFACE]],
        [REPLICA_PATH, [REPLICA_INTERFACE]],
        [replica_path("qwen-b"), [REPLICA_INTERFACE]],
    ]


async def test_removed_objects_are_unknown_and_added_ones_can_be_called_at_once(
    caller: Any, control: Any, remote_error: Any
) -> None:
    [replica] = control.fleet.replicas
    control.become(dataclasses.replace(control.fleet, replicas=(dataclasses.replace(replica, name="new"),)))
    assert await caller.get(replica_path("new"), REPLICA_INTERFACE, "Name") == "new"
    with pytest.raises(remote_error, match="UnknownObject"):
        await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "Name")


async def test_a_failover_is_told_at_once(listener: Any, control: Any) -> None:
    for target in ("qwen-b", ""):
        for on_failover in control.on_failover:
            on_failover(Failover("qwen3-8b", "qwen-a", target, "connection refused\0"))
        signal = await listener.signal("Failover")
        assert (signal.path, signal.interface) == (ROOT_PATH, MANAGER_INTERFACE)
        assert signal.body == ["qwen3-8b", "qwen-a", target, "connection refused"]


async def test_a_reload_that_only_changed_the_managers_facts_is_told(
    daemon: Any, connect: Any, control: Any, facts: ManagerFacts
) -> None:
    current = facts
    service = BusService(control, lambda: current, daemon.address)
    await service.start()
    listener = await connect()
    await listener.listen()
    current = dataclasses.replace(facts, config_files=("/etc/a.toml", "/etc/b.toml"))
    await listener.call(ROOT_PATH, MANAGER_INTERFACE, "Reload")
    signal = listener.signals.get_nowait()
    assert signal.body == [MANAGER_INTERFACE, signal.body[1], []]
    assert plain(signal.body[1]) == {"ConfigFiles": ["/etc/a.toml", "/etc/b.toml"]}
    await service.stop()
