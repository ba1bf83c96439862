"""What people do to a replica: operators through the supervisor, others past it."""

import pytest
from world import (
    LADDER,
    CallEngine,
    IdleLadder,
    Life,
    Phase,
    Record,
    ShutDown,
    Verb,
    WakeLimits,
    World,
    asleep_world,
    model,
    ready_world,
)

from supervisord.core.actions import CommandFailure, Persist, RunUnitJob, TakeFingerprint, UnitVerb
from supervisord.core.admission import Lease, RefusalCode
from supervisord.core.events import EngineAnswered, UnitChanged, UnitJobDone
from supervisord.core.states import Hold


def test_down_holds_until_up():
    world = ready_world()
    down = world.command("a", Verb.STOP)
    world.run()
    assert world.answers[down].failure is None
    refusal = world.admit()
    assert refusal.code is RefusalCode.MODEL_HELD
    assert world.disk["a"].hold is Hold.DOWN
    up = world.command("a", Verb.START)
    world.run()
    assert world.answers[up].failure is None
    assert isinstance(world.admit(), Lease)
    assert world.disk == {}


def test_a_hold_outlives_the_daemon():
    record = Record(0, Phase.SETTLED, "", Hold.DOWN, 0.0)
    world = World(model(), records={"a": record})
    assert world.admit().code is RefusalCode.MODEL_HELD


def test_a_stop_that_the_daemon_did_not_come_to_is_finished_by_the_next_one():
    before = ready_world()
    before.admit()  # in flight, so the stop waits
    before.command("a", Verb.STOP)
    before.run()
    assert before.life() is Life.DRAINING
    after = World(model(), records=before.disk, running=("a",))
    after.run()
    assert (after.life(), after.replica().hold) == (Life.STOPPED, Hold.DOWN)
    assert after.disk["a"].invocation == ""


def test_a_run_that_somebody_started_in_spite_of_the_hold_is_left_to_them():
    record = Record(0, Phase.SETTLED, "", Hold.DOWN, 0.0)
    world = World(model(), records={"a": record}, running=("a",))
    world.run()
    assert world.life() is Life.READY
    assert world.admit().code is RefusalCode.MODEL_HELD
    # And the daemon after this one leaves it, too.
    assert World(model(), records=world.disk, running=("a",)).pending_of(RunUnitJob) == []


def test_drain_keeps_the_engine_running_without_requests():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    lease = world.admit()
    ticket = world.command(lease.replica, Verb.DRAIN)
    assert ticket not in world.answers
    world.finish(lease)
    assert world.answers[ticket].failure is None
    assert all(world.admit().replica != lease.replica for _ in range(3))


def test_shutting_down_refuses_who_waits_and_who_comes():
    world = asleep_world()
    ticket = world.admit()
    world.do(ShutDown())
    assert world.outcomes[ticket].code is RefusalCode.ROUTER_SHUTTING_DOWN
    assert world.admit().code is RefusalCode.ROUTER_SHUTTING_DOWN


def test_nothing_is_started_during_shutdown():
    world = World(model())
    world.do(ShutDown())
    world.command("a", Verb.START)
    world.later(100)
    assert not world.pending_of(RunUnitJob)


def test_a_unit_stopped_by_somebody_is_left_stopped_until_a_request():
    world = ready_world()
    world.engines["a"].stop()
    world.drift("a")
    assert world.life() is Life.STOPPED
    world.later(60)
    assert world.engines["a"].run == 1
    ticket = world.admit()
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_late_reading_of_the_run_that_we_stopped_is_no_news():
    world = ready_world()
    late = world.engines["a"].status()
    world.command("a", Verb.STOP)
    world.run()
    world.do(UnitChanged("a", late))
    assert world.life() is Life.STOPPED


def test_an_engine_without_dev_mode_is_only_stopped():
    world = World(model(idle=LADDER), running=("a",))
    world.engines["a"].can_sleep = False
    world.run()
    ticket = world.command("a", Verb.SLEEP, 1)
    assert world.answers[ticket].failure is CommandFailure.SLEEP_UNSUPPORTED
    world.later(3700)
    world.run()
    assert world.life() is Life.READY
    world.later(28800 - 3700 + 1)
    world.run()
    assert world.life() is Life.STOPPED


@pytest.mark.parametrize("result", ["done", "canceled"])
def test_a_unit_that_somebody_starts_while_we_stop_it_is_followed(result):
    world = ready_world()
    ticket = world.command("a", Verb.STOP)
    (job,) = world.pending_of(RunUnitJob)
    world.pending.remove(job)
    world.engines["a"].start()
    world.drift("a")  # before the end of our job is told, and told once
    world.do(UnitJobDone("a", job.op, result, world.engines["a"].status()))
    assert world.answers[ticket].failure is None
    world.run()
    assert (world.life(), world.replica().hold) == (Life.READY, Hold.DOWN)
    assert world.engines["a"].run == 2


def test_a_stop_that_was_cancelled_and_stopped_nothing_has_failed():
    world = ready_world()
    ticket = world.command("a", Verb.STOP)
    (job,) = world.pending_of(RunUnitJob)
    world.pending.remove(job)
    world.do(UnitJobDone("a", job.op, "canceled", world.engines["a"].status()))
    assert world.answers[ticket].failure is CommandFailure.STOP_FAILED


def test_a_stop_that_was_never_begun_has_failed_though_the_unit_was_restarted_before():
    world = ready_world()
    world.engines["a"].start()  # and nobody has told of it yet
    ticket = world.command("a", Verb.STOP)
    world.complete(world.pending_of(RunUnitJob)[0], error="the service manager cannot be reached", result="error")
    assert world.answers[ticket].failure is CommandFailure.STOP_FAILED
    world.later(3)
    world.run()
    assert (world.life(), world.engines["a"].active) == (Life.STOPPED, "inactive")


def test_a_hold_that_is_set_while_a_sleep_is_being_written_down_outlives_the_daemon():
    world = ready_world()
    world.command("a", Verb.SLEEP, 1)
    while [write.record.phase for write in world.pending_of(Persist)] != [Phase.SETTLED]:
        world.complete(world.pending[0])
    world.command("a", Verb.DRAIN)
    world.run()
    assert world.life() is Life.ASLEEP
    assert (world.disk["a"].level, world.disk["a"].hold) == (1, Hold.DRAINED)


def test_a_hold_that_is_set_during_a_wake_that_fails_outlives_the_daemon():
    world = asleep_world(2)
    world.admit()
    world.complete(world.pending[0])
    world.command("a", Verb.DRAIN)
    world.complete(world.pending_of(CallEngine)[0], error="out of memory")
    (job,) = world.pending_of(RunUnitJob)
    world.complete(job, error="no reply")
    assert world.life() is Life.FAILED
    world.run()
    assert world.disk["a"].hold is Hold.DRAINED
    # And what the weights of the run are worth, which is not over for all that is known, is still there.
    assert (world.disk["a"].level, world.disk["a"].phase) == (2, Phase.WAKING)
    ticket = world.command("a", Verb.STOP)
    world.run()
    assert world.answers[ticket].failure is None
    assert world.disk["a"].hold is Hold.DOWN


def test_a_restart_that_waits_for_its_requests_is_not_done_by_waking_an_engine_that_somebody_slept():
    world = ready_world()
    ticket = world.command("a", Verb.RESTART)
    world.complete(world.pending_of(RunUnitJob)[0])
    world.run()
    assert (world.answers[ticket].failure, world.engines["a"].run) == (None, 2)
    lease = world.admit()
    ticket = world.command("a", Verb.RESTART)
    world.engines["a"].level = 1  # POST /sleep, by somebody
    world.later(6)
    world.run()
    world.finish(lease)
    world.run()
    assert world.answers[ticket].failure is CommandFailure.SUPERSEDED
    assert world.engines["a"].run == 2


@pytest.mark.parametrize("during", ["a wake", "a sleep that fails"])
def test_a_restart_that_is_asked_for_during_an_operation_is_done_after_it(during):
    world = asleep_world(2) if during == "a wake" else ready_world()
    if during == "a wake":
        world.admit()
    else:
        world.engines["a"].sleep_lies = True
        world.command("a", Verb.SLEEP, 1)
    ticket = world.command("a", Verb.RESTART)
    world.run()
    for lease in list(world.open.values()):
        world.finish(lease)
    world.run()
    assert world.answers[ticket].failure is None
    assert (world.life(), world.engines["a"].run) == (Life.READY, 2)


def test_a_hold_that_could_not_be_written_is_written_when_the_disk_has_room_again():
    world = ready_world()
    world.command("a", Verb.DRAIN)
    for _ in range(3):
        (write,) = world.pending_of(Persist)
        world.complete(write, error="no space left on device")
        assert not world.pending
        world.later(31)
    world.run()
    assert world.disk["a"].hold is Hold.DRAINED
    world.later(600)
    assert not world.pending_of(Persist)


def test_a_hold_whose_end_could_not_be_written_is_not_found_by_the_next_daemon():
    world = World(model(wake=WakeLimits(canary=True)))
    world.command("a", Verb.STOP)
    world.run()
    world.command("a", Verb.START)
    (write,) = world.pending_of(Persist)
    world.complete(write, error="no space left on device")
    world.complete(world.pending_of(RunUnitJob)[0])
    world.later(1)
    (canary,) = world.pending_of(TakeFingerprint)
    world.later(35)  # the first look writes nothing
    world.complete(canary)
    world.run()
    assert (world.life(), world.disk["a"].hold) == (Life.READY, Hold.DOWN)
    world.later(35)
    world.run()
    assert world.disk == {}


def test_two_operators_who_restart_an_engine_are_both_told_when_it_is_ready():
    world = ready_world()
    tickets = [world.command("a", Verb.RESTART) for _ in range(2)]
    world.run()
    assert [world.answers[ticket].failure for ticket in tickets] == [None, None]
    assert world.engines["a"].run == 2


def test_a_failed_replica_whose_unit_is_still_up_is_restarted_and_not_only_found_again():
    world = ready_world(idle=IdleLadder(stop=60))
    world.later(60)
    (job,) = world.pending_of(RunUnitJob)
    world.complete(job, error="no reply")
    assert (world.life(), world.engines["a"].active) == (Life.FAILED, "active")
    ticket = world.command("a", Verb.RESTART)
    assert world.pending_of(RunUnitJob)[0].verb is UnitVerb.RESTART
    world.run()
    assert world.answers[ticket].failure is None
    assert (world.life(), world.engines["a"].run) == (Life.READY, 2)


@pytest.mark.parametrize(
    ("verb", "life"), [(Verb.RESTART, Life.READY), (Verb.STOP, Life.STOPPED), (Verb.DRAIN, Life.STOPPED)]
)
def test_what_is_asked_for_during_a_sleep_that_keeps_its_memory_is_done(verb, life):
    world = ready_world()
    asleep = world.command("a", Verb.SLEEP, 1)
    while not world.pending_of(CallEngine):
        world.complete(world.pending[0])
    ticket = world.command("a", verb)
    (call,) = world.pending_of(CallEngine)
    world.pending.remove(call)
    world.engines["a"].call(call)
    world.do(EngineAnswered("a", call.op, "", 30_000, 30_000))
    world.run()
    assert world.answers[asleep].failure is CommandFailure.SUPERSEDED
    assert (world.answers[ticket].failure, world.life()) == (None, life)
