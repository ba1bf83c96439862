"""Requests that their policy holds: they wait beside replicas that could have them, in order, and never for nothing."""

import asyncio

import pytest
from world import IdleLadder, Life, Refuse, ShutDown, SupervisorSpec, Verb, WakeLimits, World, model, spread

from supervisord.core import step as core
from supervisord.core.actions import Persist, ProbeEngine, TakeFingerprint
from supervisord.core.admission import Choice, Ending, Lease, NotYet, RefusalCode
from supervisord.core.events import Configured, Fingerprinted, Persisted, Probed, UnitChanged
from supervisord.core.readings import EngineState, Probe, UnitStatus
from supervisord.core.view import look
from supervisord.loop import Dispatcher


class Seats:
    """A policy with ``free`` seats for long requests; the rest are held, the first of them first."""

    def __init__(self, free=1):
        self.free, self.queue, self.asked, self.heard, self.generations = free, [], 0, [], None

    def long(self):
        """A request that needs a seat."""

        def choose(candidates):
            self.asked += 1
            self.heard = [candidate.kv_tokens for candidate in candidates]
            generations = {candidate.name: candidate.generation for candidate in candidates}
            if self.generations not in (None, generations):
                self.free = 1  # nobody is held for the sake of a cache that is gone
            self.generations = generations
            if choose not in self.queue:
                self.queue.append(choose)
            if any(self.heard) and (self.free <= 0 or self.queue[0] is not choose):
                return NotYet("held for KV: no seat", 40.0)
            self.queue.remove(choose)
            self.free -= 1
            return Choice(candidates[0].name, "seated")

        return choose


def world_of(*names, running=("a",), wake=None, supervisor=None, **options):
    wake = wake or WakeLimits(timeout=120, max_waiting=8)
    world = World(
        model(replicas=names, wake=wake, **options), supervisor=supervisor or SupervisorSpec(), running=running
    )
    for engine in world.engines.values():
        engine.kv_tokens = 600_000
    world.run()
    return world


def full(world, count=2):
    """One long request in flight, and ``count`` that are held."""
    seats = Seats()
    lease = world.admit(choose=seats.long())
    assert isinstance(lease, Lease)
    return seats, lease, [world.admit(choose=seats.long()) for _ in range(count)]


def test_a_policy_hears_what_each_cache_holds():
    world = world_of("a")
    seats, _, tickets = full(world)
    assert seats.heard == [600_000]
    assert all(isinstance(ticket, int) for ticket in tickets)
    assert core.held_for(world.fleet, "chat", tickets[0]) == "held for KV: no seat"
    assert look(world.fleet).models[0].waiting_for_kv == 2


def test_small_requests_pass_those_that_are_held():
    world = world_of("a")
    full(world)
    assert isinstance(world.admit(choose=spread), Lease)


def test_the_end_of_a_request_lets_the_first_one_in_and_no_other():
    world = world_of("a")
    seats, lease, [first, second] = full(world)
    seats.free += 1
    world.finish(lease)
    assert isinstance(world.outcomes[first], Lease)
    assert second not in world.outcomes
    seats.free += 1
    world.finish(world.outcomes[first])
    assert isinstance(world.outcomes[second], Lease)
    assert look(world.fleet).models[0].waiting_for_kv == 0


def test_a_seat_that_time_alone_gives_up_is_seen_within_a_second():
    world = world_of("a")
    seats, _, [first, second] = full(world)
    seats.free += 2
    world.later(1.0)
    assert isinstance(world.outcomes[first], Lease)
    assert isinstance(world.outcomes[second], Lease)


def test_while_nothing_changes_only_the_first_is_asked():
    world = world_of("a", wake=WakeLimits(timeout=120, max_waiting=200))
    seats, _, _ = full(world, 100)
    small = world.admit()
    asked = seats.asked
    world.finish(small)
    assert seats.asked - asked <= 2 * 1  # each round of settling asks once


def test_who_has_waited_for_as_long_as_anybody_may_is_let_in_rather_than_refused():
    world = world_of("a")
    seats, _, [first, second] = full(world)
    world.later(121)
    assert isinstance(world.outcomes[first], Lease)
    assert isinstance(world.outcomes[second], Lease)
    assert seats.heard == [None]


def test_a_full_queue_holds_nobody_any_more():
    world = world_of("a", wake=WakeLimits(timeout=120, max_waiting=2))
    seats, _, _ = full(world)
    assert isinstance(world.admit(choose=seats.long()), Lease)


def test_a_policy_that_holds_whatever_it_is_told_is_bounded_all_the_same():
    world = world_of("a", wake=WakeLimits(timeout=120, max_waiting=1))
    stubborn = lambda candidates: NotYet("no", 40.0)  # noqa: E731
    ticket = world.admit(choose=stubborn)
    refused = world.admit(choose=stubborn)
    assert isinstance(refused, Refuse)
    assert (refused.code, refused.retry_after) == (RefusalCode.QUEUE_FULL, 40.0)
    world.later(121)
    assert world.outcomes[ticket].code is RefusalCode.INSUFFICIENT_MEMORY
    assert world.outcomes[ticket].retry_after == 40.0


def test_a_shutdown_lets_in_who_is_held():
    world = world_of("a")
    _, _, tickets = full(world)
    world.do(ShutDown())
    assert all(isinstance(world.outcomes[ticket], Lease) for ticket in tickets)


def test_a_client_that_leaves_is_held_no_longer():
    world = world_of("a")
    _, _, [first, second] = full(world)
    assert core.abandon(world.fleet, first)
    assert core.abandon(world.fleet, second)
    assert look(world.fleet).models[0].waiting_for_kv == 0


def test_when_the_replica_goes_they_wait_for_it_like_everybody_else():
    world = world_of("a")
    _, lease, [first, second] = full(world)
    world.engines["a"].stop()
    world.drift("a")
    assert look(world.fleet).models[0].waiting_for_kv == 0
    assert core.held_for(world.fleet, "chat", first) == ""
    world.finish(lease)
    world.run()
    assert isinstance(world.outcomes[first], Lease)
    assert second not in world.outcomes
    assert core.held_for(world.fleet, "chat", second) == "held for KV: no seat"


# more KV


def sleeping(world, *names):
    for name in names:
        world.command(name, Verb.SLEEP, 1)
    world.run()


def test_a_sleeping_sibling_is_woken_for_its_kv_and_only_once():
    world = world_of("a", "b", "c", running=("a", "b", "c"), idle=IdleLadder(sleep1=3600))
    sleeping(world, "b", "c")
    full(world, 1)
    assert [world.life(name) for name in "abc"].count(Life.ASLEEP) == 1


def test_a_stopped_sibling_is_started_when_several_are_held():
    world = world_of("a", "b")
    seats, _, _ = full(world, 1)
    world.run()
    assert world.life("b") is Life.STOPPED
    world.admit(choose=seats.long())
    world.run()
    assert world.life("b") is Life.READY


def test_nobody_has_to_rest_so_that_a_held_request_gets_more_kv():
    room = SupervisorSpec(gpu_memory=100, min_residency=0, make_room_after=0)
    other = model("other", ("c",), {"c": (1,)}, memory=80)
    one = model("chat", ("a", "b"), {"a": (0,), "b": (1,)}, memory=80, idle=IdleLadder(sleep1=3600))
    world = World(one, other, supervisor=room, running=("a", "c"))
    for engine in world.engines.values():
        engine.kv_tokens = 600_000
    world.run()
    full(world, 4)
    world.run()
    assert (world.life("b"), world.life("c")) == (Life.STOPPED, Life.READY)


def test_requests_that_are_held_keep_nobody_else_from_the_gpu():
    room = SupervisorSpec(gpu_memory=100, min_residency=0, make_room_after=20)
    one = model("chat", ("a",), {"a": (0,)}, memory=80, wake=WakeLimits(timeout=600))
    other = model("other", ("c",), {"c": (0,)}, memory=80)
    world = World(one, other, supervisor=room, running=("a",))
    world.engines["a"].kv_tokens = 600_000
    world.run()
    _, lease, _ = full(world)
    waiting = world.admit("other")
    world.later(25)
    world.finish(lease)
    for _ in range(200):
        if world.pending:
            world.complete(world.pending[0])
        else:
            world.later(1.0)
        for granted in list(world.open.values()):
            world.finish(granted)
    assert waiting in world.outcomes
    assert isinstance(world.outcomes[waiting], Lease)


@pytest.mark.parametrize("told", [None, 0])
def test_an_engine_that_tells_of_no_kv_is_not_known(told):
    world = World(model(), running=("a",))
    world.engines["a"].kv_tokens = told
    world.run()
    seats = Seats()
    world.admit(choose=seats.long())
    assert seats.heard == [None]


class Broken:
    """A policy that holds its request, and raises when it is asked again."""

    def __init__(self):
        self.asked, self.defect = 0, RuntimeError("a defect")

    def choose(self, candidates):
        self.asked += 1
        if self.asked > 1:
            raise self.defect
        return NotYet("held", 40.0)


def test_a_policy_that_raises_when_it_is_asked_again_costs_its_own_request_alone():
    world = world_of("a")
    broken, seats = Broken(), Seats(free=0)
    first, second = world.admit(choose=broken.choose), world.admit(choose=seats.long())
    seats.free = 1
    world.later(1.0)
    assert world.outcomes[first] is broken.defect
    assert isinstance(world.outcomes[second], Lease)
    assert world.replica().in_flight == 1
    assert not world.fleet.models["chat"].waiting
    assert not world.fleet.models["chat"].held


async def test_the_dispatcher_tells_the_request_whose_policy_raised_and_goes_on():
    def perform(action):
        match action:
            case ProbeEngine(replica, op):
                found = Probe(EngineState.AWAKE, served_names=("chat",), kv_tokens=600_000)
                loop.call_soon(dispatcher.dispatch, Probed(replica, op, found))
            case Persist(replica, op):
                loop.call_soon(dispatcher.dispatch, Persisted(replica, op))
            case TakeFingerprint(replica, op):
                loop.call_soon(dispatcher.dispatch, Fingerprinted(replica, op))

    loop = asyncio.get_running_loop()
    dispatcher = Dispatcher(perform, lambda note: None)
    broken, left = Broken(), Broken()
    try:
        dispatcher.dispatch(Configured((model(),), SupervisorSpec()))
        dispatcher.dispatch(UnitChanged("a", UnitStatus("vllm@a.service", "loaded", "active", "running", "0" * 32)))
        # All three wait for the first look at the engine.
        waits = [dispatcher.admit("chat", choose) for choose in (broken.choose, left.choose, spread)]
        async with asyncio.timeout(10):
            lease = await waits[2].outcome
        dispatcher.finish(lease, Ending.COMPLETED)
        with pytest.raises(RuntimeError, match="a defect"):
            await waits[0].outcome
        dispatcher.abandon(waits[1])  # its client left in this very moment
        assert [replica.in_flight for replica in dispatcher.view().replicas] == [0]
        assert dispatcher.view().models[0].waiting == 0
    finally:
        dispatcher.close()
