"""What people do to a replica: operators through the supervisor, others past it."""

from world import LADDER, Life, Phase, Record, ShutDown, Verb, World, asleep_world, model, ready_world

from supervisord.core.actions import CommandFailure, RunUnitJob
from supervisord.core.admission import Lease, RefusalCode
from supervisord.core.events import UnitChanged
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
