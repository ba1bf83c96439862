"""Health that means something: who is demoted, confirmed, restarted, tried again; and who is not."""

import pytest
from world import Life, Verb, World, model

from supervisord.core.actions import NoteKind, ProbeEngine, RunUnitJob, UnitVerb
from supervisord.core.admission import Ending, Lease, RefusalCode
from supervisord.core.states import Health


def pair():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    return world


def look(world):
    world.later(0.0)
    for action in world.pending_of(ProbeEngine):
        world.complete(action)


def test_a_hung_core_is_demoted_confirmed_and_restarted_though_its_health_route_answers():
    world = pair()
    world.engines["a"].hangs = True
    world.later(6)
    assert world.replica("a").health is Health.SUSPECT
    assert all(world.admit().replica == "b" for _ in range(4))
    world.later(20)
    assert [job.replica for job in world.pending_of(RunUnitJob)] == ["a"]
    world.engines["a"].hangs = False
    world.run()
    assert world.life("a") is Life.READY


def test_a_busy_engine_that_only_misses_looks_is_not_restarted():
    world = pair()
    lease = world.admit()
    engine = world.engines[lease.replica]
    engine.hangs = True
    for _ in range(400):
        engine.tokens += 100
        world.later(1)
    assert not world.pending_of(RunUnitJob)
    engine.hangs = False
    world.later(6)
    assert world.replica(lease.replica).health is Health.OK


def test_a_busy_engine_without_progress_is_restarted_after_a_minute():
    world = pair()
    lease = world.admit()
    world.engines[lease.replica].hangs = True
    world.later(50)
    assert not world.pending_of(RunUnitJob)
    world.later(30)
    assert [job.replica for job in world.pending_of(RunUnitJob)] == [lease.replica]


def test_a_replica_whose_request_failed_is_tried_with_one_request_at_a_time():
    world = pair()
    first = world.admit()
    world.finish(first, Ending.CONNECT_FAILED, "reset")
    look(world)
    assert world.replica(first.replica).health is Health.TRIAL
    leases = [world.admit() for _ in range(6)]
    assert sum(lease.replica == first.replica for lease in leases) == 1
    trial = next(lease for lease in leases if lease.replica == first.replica)
    world.finish(trial)
    assert world.replica(first.replica).health is Health.OK
    assert world.noted(NoteKind.REVIVED) == 1


def test_a_demotion_is_one_line_however_many_requests_it_cost():
    world = pair()
    leases = [world.admit() for _ in range(8)]
    for lease in leases:
        if lease.replica == "a":
            world.finish(lease, Ending.CONNECT_FAILED, "refused")
    assert world.noted(NoteKind.DEMOTED) == 1


def test_requests_that_fail_together_are_one_failure():
    world = pair()
    for lease in [world.admit() for _ in range(8)]:
        if lease.replica == "a":
            world.finish(lease, Ending.CONNECT_FAILED, "reset")
    look(world)
    replica = world.replica("a")
    assert replica.health is Health.TRIAL
    assert replica.trial_at == world.now  # and not half a minute later, as after many trials


def test_each_failed_trial_waits_twice_as_long():
    world = pair()
    for strikes in range(1, 5):
        lease = next(x for x in iter(world.admit, None) if x.replica == "a")
        world.finish(lease, Ending.CONNECT_FAILED, "reset")
        look(world)
        replica = world.replica("a")
        assert replica.health is Health.TRIAL
        assert replica.trial_at - world.now == 2 ** (strikes - 1) - 1
        world.later(replica.trial_at - world.now)


def test_a_trial_whose_client_left_decides_nothing_and_blocks_nothing():
    world = pair()
    lease = world.admit()
    world.finish(lease, Ending.CONNECT_FAILED, "reset")
    look(world)
    trial = next(x for x in iter(world.admit, None) if x.replica == lease.replica)
    world.finish(trial, Ending.CLIENT_GONE)
    assert world.replica(lease.replica).health is Health.TRIAL
    assert next(x for x in iter(world.admit, None) if x.replica == lease.replica)


def test_a_poison_request_that_fails_everywhere_blacks_out_nobody():
    world = pair()
    for _ in range(5):
        first = world.admit()
        world.finish(first, Ending.CONNECT_FAILED, "reset")
        second = world.admit(exclude={first.replica})
        if isinstance(second, Lease):
            world.finish(second, Ending.CONNECT_FAILED, "reset")
        healthy = world.admit()
        assert isinstance(healthy, Lease)
        world.finish(healthy)
        look(world)
    assert not world.pending_of(RunUnitJob)


def test_a_request_that_failed_everywhere_is_told_so_as_soon_as_the_engines_are_found_well():
    world = pair()
    failed = set()
    for _ in range(2):
        lease = world.admit(exclude=failed)
        world.finish(lease, Ending.CONNECT_FAILED, "reset")
        failed.add(lease.replica)
    ticket = world.admit(exclude=failed)
    assert ticket not in world.outcomes  # perhaps one of them is restarted
    for _ in failed:
        look(world)
    assert world.outcomes[ticket].code is RefusalCode.NO_LIVE_REPLICA
    assert isinstance(world.admit(), Lease)


def test_an_engine_that_answers_5xx_to_its_health_route_is_restarted():
    world = pair()
    world.engines["a"].answering = False
    world.later(12)
    assert [job.replica for job in world.pending_of(RunUnitJob)] == ["a"]


def test_a_dead_sleeper_that_waits_for_its_turn_on_the_gpu_is_told_of_once():
    world = World(model(replicas=("a", "b"), gpus={"a": (0,), "b": (0,)}), running=("a",))
    world.run()
    world.command("a", Verb.SLEEP, 1)
    world.run()
    world.command("b", Verb.START)
    world.engines["a"].answering = False
    world.later(60)
    assert world.life("b") is Life.STARTING
    assert world.noted(NoteKind.ESCALATED) == 1
    world.run()
    assert world.life("a") is Life.STOPPED


@pytest.mark.parametrize(("why", "counted"), [("the engine broke", True), ("an operator wants it", False)])
def test_only_restarts_of_an_engine_that_broke_come_to_an_end_at_the_start_limit(why, counted):
    world = pair()
    if counted:
        world.engines["a"].answering = False
        world.later(12)
    else:
        world.command("a", Verb.RESTART)
    (job,) = world.pending_of(RunUnitJob)
    assert (job.verb, job.counted) == (UnitVerb.RESTART, counted)
