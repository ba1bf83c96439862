"""What a daemon finds running that its configuration does not have like that: as if it had been reloaded now."""

from world import Configured, FakeEngine, Life, World, model, ready_world

from supervisord.core import step as core
from supervisord.core.actions import RunUnitJob, UnitVerb
from supervisord.core.spec import ReplicaSpec

LEFT = ReplicaSpec("gone", "before", "vllm@gone.service", "unix:/run/gone.sock", bundled=True, gpus=(0,))


def test_an_engine_that_was_started_with_another_command_is_restarted_when_nothing_is_in_flight():
    world = ready_world()
    lease = world.admit()
    world.do(Configured(world.models, world.supervisor, outdated=("a",)))
    assert world.pending_of(RunUnitJob) == []
    world.finish(lease)
    world.run()
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)
    # Once: whatever the new run was started with, it is not held against it.
    world.later(60)
    assert world.engines["a"].run == 2


def test_an_engine_that_is_not_configured_any_more_is_stopped_and_forgotten():
    world = ready_world()
    world.engines["gone"] = FakeEngine(LEFT.unit)
    world.engines["gone"].start()
    world.do(Configured(world.models, world.supervisor, left_over=(LEFT,)))
    (job,) = world.pending_of(RunUnitJob)
    assert (job.unit, job.verb) == (LEFT.unit, UnitVerb.STOP)
    assert core.adopted(world.fleet)  # nobody waits for that
    world.run()
    assert set(world.fleet.replicas) == {"a"}
    assert world.engines["gone"].active == "inactive"


def test_nothing_is_started_on_a_gpu_that_a_left_over_engine_still_holds():
    world = World(model(gpus={"a": (0,)}))
    world.engines["gone"] = FakeEngine(LEFT.unit)
    world.do(Configured(world.models, world.supervisor, left_over=(LEFT,)))
    world.admit()
    (stop,) = world.pending_of(RunUnitJob)
    assert stop.unit == LEFT.unit
    world.complete(stop)
    assert [job.verb for job in world.pending_of(RunUnitJob)] == [UnitVerb.START]
