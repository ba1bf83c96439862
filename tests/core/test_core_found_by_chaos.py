"""What random histories (tests/chaos) found, each in its shortest form."""

from world import Life, Verb, World, model

from supervisord.core.actions import Call, CallEngine, ProbeEngine, RunUnitJob
from supervisord.core.events import UnitChanged


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
