"""What random histories (tests/chaos) found, each in its shortest form."""

from world import IdleLadder, Life, Phase, ShutDown, Verb, World, model

from supervisord.core.actions import Call, CallEngine, Persist, ProbeEngine, RunUnitJob
from supervisord.core.admission import Ending, Lease
from supervisord.core.events import UnitChanged
from supervisord.core.step import next_due


def asleep_world(level=1, **options) -> World:
    world = World(model(**options), running=("a",))
    world.run()
    world.command("a", Verb.SLEEP, level)
    world.run()
    assert world.life() is Life.ASLEEP
    return world


def test_an_engine_slept_by_hand_during_our_wake_is_woken_with_its_weights_loaded_again():
    world = asleep_world(level=1)
    engine = world.engines["a"]
    world.admit()
    world.complete(world.pending[0])  # the intent
    (wake,) = world.pending_of(CallEngine)
    world.complete(wake)
    engine.level, engine.whole = 2, False  # POST /sleep?level=2, by somebody
    (look,) = world.pending_of(ProbeEngine)
    world.complete(look)
    world.run()
    assert world.life() is Life.READY
    assert engine.whole
    assert f"{Call.RELOAD_WEIGHTS}" in engine.calls


def test_a_late_reading_of_the_run_before_does_not_end_a_start():
    world = World(model())
    world.engines["a"].start()
    world.engines["a"].stop("failed")
    world.drift("a")
    world.engines["a"].active = "inactive"  # reset before the start; read then, told later
    late = world.engines["a"].status()
    world.command("a", Verb.START)
    while world.pending_of(RunUnitJob):
        world.complete(world.pending[0])
    world.do(UnitChanged("a", late))
    assert world.life() is Life.STARTING
    world.run()
    assert world.life() is Life.READY


def test_a_full_disk_does_not_make_the_idle_ladder_run_in_circles():
    world = World(model(idle=IdleLadder(sleep1=60)), running=("a",))
    world.run()
    world.later(60)
    tries = 0
    while world.pending_of(Persist):
        tries += 1
        assert tries < 3
        for write in world.pending_of(Persist):
            world.complete(write, error="no space left on device")
    assert world.life() is Life.READY
    world.later(29)
    assert not world.pending
    world.later(2)
    world.run()
    assert world.life() is Life.ASLEEP


def test_the_clock_of_an_idle_rung_stands_still_while_shutting_down():
    world = World(model(idle=IdleLadder(sleep1=1)), running=("a",))
    world.run()
    world.do(ShutDown())
    world.later(1)
    assert next_due(world.fleet) > world.now  # it would be due for ever, and never taken


def test_who_waits_for_another_start_is_let_in_when_a_replica_on_trial_answers_again():
    world = World(model(replicas=("a", "b")), running=("a",))
    world.run()
    long, failed = world.admit(), world.admit()
    world.finish(failed, Ending.CONNECT_FAILED, "reset")
    world.later(0.1)  # a look, and the replica is on trial
    trial = world.admit()
    assert isinstance(trial, Lease)
    world.command("b", Verb.START)
    ticket = world.admit()
    assert isinstance(ticket, int)
    world.finish(trial)
    assert world.outcomes[ticket].replica == "a"
    assert long.id in world.open


def test_a_wake_that_fails_during_the_shutdown_starts_nothing():
    world = asleep_world(level=2)
    world.admit()
    world.complete(world.pending[0])
    world.do(ShutDown())
    world.complete(world.pending_of(CallEngine)[0], error="out of memory")
    assert not world.pending_of(RunUnitJob)
    assert world.disk["a"].phase is Phase.WAKING  # the next supervisor finishes it
