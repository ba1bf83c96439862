"""The supervisor killed before and after every step of everything that it does to a replica, and of a reload.

    TESTS=tests/systemd/test_product_every_crash_point.py make test-systemd

The daemon is the real one, on real systemd; it is made to stand still at a step (stopping_points.py) and killed there.
Several replicas are struck by one kill, each at its own point. How many points were tried, and how many answers were
garbage, is printed at the end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import get_args

import pytest
from crashpoints import RELOAD, STEPS, Point, Stops, points
from product import LIMIT, SERVICE, Answer, Clients, Fleet, Product, codes, model, show, systemctl, until
from stopping_points import DAEMON

from supervisord.bus.address import session_bus_address
from supervisord.bus.client import Client, DaemonAbsent
from supervisord.bus.names import replica_path
from supervisord.control import Verb
from supervisord.core.actions import Call, Effect, UnitVerb

#: So many replicas are struck by one kill.
AT_ONCE = 8
NAMES = [f"c{number}" for number in range(AT_ONCE)]


def configured(points: dict[str, Point] | None = None) -> str:
    """All replicas; those of a reload changed or gone."""
    changed = {name: point.operation for name, point in (points or {}).items()}
    return "".join(
        model(name, sim_load_time=0.05, max_model_len=8192 if "command changed" in changed.get(name, "") else 4096)
        for name in NAMES
        if "gone" not in changed.get(name, "")
    )


CONFIG = configured()
RELOADED = [name for name in STEPS if name.startswith("reload")]


def rounds(points: list[Point]) -> list[dict[str, Point]]:
    """So many points at a time, one for each replica."""
    return [dict(zip(NAMES, points[first : first + AT_ONCE], strict=False)) for first in range(0, len(points), AT_ONCE)]


ROUNDS = [*rounds(points(*(name for name in STEPS if name not in RELOADED))), *rounds(points(*RELOADED))]


@pytest.fixture(scope="module")
def stops(product: Product):
    """A daemon that can be made to stand still, for all tests of the module."""
    stops = Stops(product)
    file = product.write_unit(f"{SERVICE}.d/zz-points.conf", stops.drop_in)
    systemctl("daemon-reload")
    systemctl("restart", SERVICE)
    yield stops
    file.unlink()
    systemctl("daemon-reload")


@pytest.fixture
async def operator(stops: Stops) -> AsyncIterator[Client]:
    """The way of commands to the daemon."""
    systemctl("reset-failed", SERVICE, check=False)
    async with Client.connect(session_bus_address(os.environ)) as client:
        yield client
    stops.let_go()


async def command(operator: Client, name: str, verb: Verb, level: int = 0) -> bool:
    """A command to a replica; False: the supervisor was gone before it answered."""
    try:
        async with asyncio.timeout(LIMIT):  # also where the daemon's loop has dropped it
            await operator.command(replica_path(name), verb, level)
    except DaemonAbsent:
        return False
    return True


async def prepare(operation: str, product: Product, operator: Client, name: str) -> None:
    """The replica is in the state that ``operation`` begins in."""
    await command(operator, name, Verb.START)
    if operation == "start":
        await asyncio.to_thread(systemctl, "stop", f"vllm@{name}.service")
    elif operation.startswith("wake"):
        await command(operator, name, Verb.SLEEP, int(operation[-1]))


async def perform(operation: str, operator: Client, clients: Clients, name: str) -> Answer | bool:
    """Have it done; returns what whoever asked for it got."""
    if operation == "start" or operation.startswith("wake"):
        return await clients.ask(name, "Early")
    verb, level = {
        "sleep 1": (Verb.SLEEP, 1),
        "sleep 2": (Verb.SLEEP, 2),
        "stop": (Verb.STOP, 0),
        "restart": (Verb.RESTART, 0),
    }[operation]
    return await command(operator, name, verb, level)


async def perform_all(plan: dict[str, Point], product, operator, clients) -> list[Answer | bool]:
    if any(point.operation in RELOADED for point in plan.values()):
        product.configure(configured(plan))
        try:
            return [bool(await operator.reload())]
        except DaemonAbsent:
            return [False]
    return await asyncio.gather(*(perform(point.operation, operator, clients, name) for name, point in plan.items()))


def starts(product: Product, name: str) -> int:
    """How often the engine's process began."""
    return product.log(name).count("Starting vLLM API server")


def started_anew(point: Point) -> int:
    """How many starts of the engine belong to the operation: none is ever added to them."""
    if point.operation == "start" or point.operation in RELOADED[:1]:
        return 1
    return int(point.operation == "restart" and point.reached("restart the unit"))


async def nobody_is_worse_off(product: Product, clients: Clients, fleet: Fleet, name: str, point: Point) -> int:
    """The next daemon has brought the replica to where it belongs; returns the garbage that its engine answered."""
    if "gone" in point.operation:
        await fleet.until(lambda: name not in {r.name for r in fleet.now().replicas}, f"{name} is gone")
        await until(lambda: show(f"vllm@{name}.service", "ActiveState")["ActiveState"] == "inactive", f"{name} is down")
        assert (await clients.ask(name)).status == 404
        return 0
    if point.operation == "stop" and point.reached("record settled 0, held down"):
        await fleet.becomes(name, "stopped")
        assert fleet[name].hold == "down"
        assert (await clients.ask(name)).code == "model_held"
        return 0
    if "command changed" in point.operation:
        await fleet.until(lambda: fleet[name].max_model_len == 8192, f"{name} has the new command")
    await fleet.becomes(name, "ready")
    async with product.engine(name) as engine:
        state = await engine.state()
    assert (state["weights_whole"], state["is_sleeping"]) == (True, False)
    return int(state["garbage_answers"])


@pytest.mark.parametrize("plan", ROUNDS, ids=[f"round{number}" for number in range(1, len(ROUNDS) + 1)])
async def test_a_supervisor_killed_at_any_step_is_followed_by_one_that_sets_everything_right(
    product, clients, fleet, stops, operator, crash_points, plan
):
    await asyncio.gather(*(prepare(point.operation, product, operator, name) for name, point in plan.items()))
    before = {name: starts(product, name) for name in plan}
    stops.lay(plan)
    early = asyncio.create_task(perform_all(plan, product, operator, clients))
    await stops.strike(plan)
    # Whoever comes now waits in the socket's queue for the next daemon.
    served = [name for name, point in plan.items() if point.operation != "stop" and "gone" not in point.operation]
    late = await asyncio.gather(*(clients.ask(name, f"Late {number}") for name in served for number in range(3)))
    assert codes(late) == {"whole": len(late)}
    for told in await early:
        # Answered, or cut with the connection that the killed process had accepted; nothing in between.
        assert told in (True, False) if isinstance(told, bool) else told.whole or (told.status == 0 and not told.body)
    await fleet.returns()
    garbage = await asyncio.gather(*(nobody_is_worse_off(product, clients, fleet, *each) for each in plan.items()))
    crash_points.tried(map(str, plan.values()), sum(garbage))
    assert sum(garbage) == 0
    anew = {name: starts(product, name) - before[name] for name in plan}
    assert anew == {name: started_anew(point) for name, point in plan.items()}
    if any(point.operation in RELOADED for point in plan.values()):
        product.configure(CONFIG)
        await operator.reload()


@pytest.mark.parametrize("point", [*points("reload")[::2], points("reload")[-1]], ids=str)
async def test_a_supervisor_killed_within_a_reload_is_followed_by_one_that_has_the_new_configuration(
    product, clients, fleet, stops, operator, crash_points, point
):
    """The steps follow one another without anything in between, so that after one of them is before the next."""
    changed, gone, kept = NAMES[:3]
    await asyncio.gather(*(command(operator, name, Verb.START) for name in (changed, gone, kept)))
    reload_of = {changed: Point(RELOADED[0], "", ""), gone: Point(RELOADED[1], "", "")}
    async with product.engine(kept) as engine:
        run = engine.run()
        stops.lay({DAEMON: point})
        early = asyncio.create_task(perform_all(reload_of, product, operator, clients))
        await stops.strike({DAEMON: point})
        late = await asyncio.gather(*(clients.ask(name) for name in (changed, kept) for _ in range(3)))
        assert codes(late) == {"whole": len(late)}
        assert await early in ([True], [False])
        await fleet.returns()
        garbage = [await nobody_is_worse_off(product, clients, fleet, *each) for each in reload_of.items()]
        garbage.append((await engine.state())["garbage_answers"])
        assert engine.run() == run
    crash_points.tried([str(point)], sum(garbage))
    assert sum(garbage) == 0
    product.configure(CONFIG)
    await operator.reload()


async def test_an_undisturbed_operation_has_no_step_but_the_listed(product, clients, fleet, stops, operator):
    """So that a new step cannot come without its crash points."""
    name = NAMES[0]

    async def settled(operation: str) -> None:
        """The whole operation is over, whatever it consists of."""
        wanted = {"sleep": "asleep", "stop": "stopped"}.get(operation.split()[0], "ready")
        replicas = {} if "gone" in operation else {name: wanted}
        await fleet.until(
            lambda: {r.name: r.state for r in fleet.now().replicas if r.name == name} == replicas, operation
        )

    for operation, steps in STEPS.items():
        await prepare(operation, product, operator, name)
        stops.clear()
        await perform_all({name: Point(operation, "", "")}, product, operator, clients)
        await until(lambda steps=steps: len(stops.done(name)) >= len(steps), f"the steps of {operation}")
        await settled(operation)
        assert (operation, stops.done(name)) == (operation, steps)
        if operation in RELOADED:
            assert stops.done(DAEMON) == RELOAD
            product.configure(CONFIG)
            await operator.reload()


def test_everything_that_the_supervisor_can_do_is_a_step_of_some_operation():
    listed = {step for steps in STEPS.values() for step in steps}
    for verb in UnitVerb:
        assert f"{verb} the unit" in listed
    for call in Call:
        assert any(step.startswith(call) for step in listed), call
    # A look changes nothing, and the last lines of a failed unit are only read.
    assert {effect.__name__ for effect in get_args(Effect)} == {
        *("RunUnitJob", "CallEngine", "Persist", "TakeFingerprint", "SaveFingerprint"),
        *("ProbeEngine", "ReadLastLines"),
    }
