"""A configuration that changes under a running fleet: what is in flight goes on, nothing is forgotten or done twice."""

from dataclasses import replace

import pytest
from world import Configured, EngineState, FakeEngine, Life, Probe, Verb, WakeLimits, World, model, ready_world

from supervisord.core.actions import CallEngine, CommandFailure, RunUnitJob, UnitVerb
from supervisord.core.admission import Lease
from supervisord.core.events import UnitJobDone
from supervisord.core.fleet import Fleet
from supervisord.core.spec import ReplicaSpec, ServeSpec
from supervisord.core.states import Hold

ELSEWHERE = model("other", ("z",))


def own(spec=None, **changes):
    """The model with its one replica in a unit of the person's own."""
    spec = spec or model()
    return replace(spec, replicas=(replace(spec.replicas[0], unit="own.service", bundled=False, **changes),))


def reload(world: World, *models) -> None:
    for spec in models:
        for each in spec.replicas:
            world.engines.setdefault(each.name, FakeEngine(each.unit))
    world.do(Configured(models, world.supervisor))


def other_command(world: World):
    return replace(world.models[0], serve=ServeSpec("another"))


# --- another command ---


def test_a_command_that_changes_while_its_engine_loads_is_followed():
    world = World(model())
    world.command("a", Verb.START)
    assert world.pending_of(RunUnitJob)
    reload(world, other_command(world))
    world.run()
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)
    world.later(60)
    assert world.engines["a"].run == 2


def test_a_command_that_changes_before_its_unit_was_read_is_followed():
    world = World(model(), running=("a",))
    world.fleet, world.pending = Fleet(), []
    world.do(Configured(world.models, world.supervisor))
    reload(world, other_command(world))
    world.drift("a")
    world.run()
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)


@pytest.mark.parametrize("how", ["by somebody", "after a failure"])
def test_an_engine_that_came_up_again_since_its_command_changed_is_not_restarted_for_it(how):
    world = ready_world()
    lease = world.admit()
    reload(world, other_command(world))
    if how == "after a failure":
        world.engines["a"].stop("failed")
        world.drift("a")
    world.engines["a"].start()
    world.drift("a")
    world.finish(lease)
    world.run()
    world.later(60)
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)


@pytest.mark.parametrize("state", [EngineState.WRONG_MODEL, EngineState.UNREACHABLE])
def test_a_model_with_another_name_or_place_does_not_cut_what_is_in_flight(state):
    world = ready_world()
    lease = world.admit()
    before = world.models[0]
    reload(world, replace(before, name="assistant", replicas=(replace(before.replicas[0], model="assistant"),)))
    world.engines["a"].probe = lambda: Probe(state)  # what is asked for by the new name, or looked for at the new place
    world.later(60)
    assert not world.pending_of(RunUnitJob)
    del world.engines["a"].probe
    world.finish(lease)
    assert [job.verb for job in world.pending_of(RunUnitJob)] == [UnitVerb.RESTART]


@pytest.mark.parametrize("state", [EngineState.WRONG_MODEL, EngineState.UNREACHABLE])
def test_no_request_goes_to_an_engine_that_has_another_name_or_place_while_its_sibling_is_restarted(state):
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    lease = world.admit(only=("b",))
    before = world.models[0]
    for engine in world.engines.values():
        engine.probe = lambda: Probe(state)
    reload(world, replace(before, name="assistant", replicas=[replace(r, model="assistant") for r in before.replicas]))
    world.later(0)
    ticket = world.admit("assistant")
    assert (world.life("a"), world.life("b")) == (Life.STARTING, Life.DRAINING)
    world.finish(lease)
    for engine in world.engines.values():
        del engine.probe
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert [engine.run for engine in world.engines.values()] == [2, 2]


def test_a_model_that_comes_back_with_another_command_is_started_with_that():
    world = ready_world()
    lease = world.admit()
    reload(world, ELSEWHERE)
    reload(world, other_command(world))
    world.finish(lease)
    world.run()
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)


def test_one_that_is_taken_away_and_comes_back_while_it_drains_is_ready_again():
    world = ready_world()
    lease = world.admit()
    reload(world, ELSEWHERE)
    assert world.life() is Life.DRAINING
    reload(world, *world.models)
    world.finish(lease)
    world.run()
    assert (world.engines["a"].run, world.life()) == (1, Life.READY)


def test_a_change_that_is_taken_back_before_it_was_followed_restarts_nothing():
    world = ready_world()
    lease = world.admit()
    reload(world, other_command(world))
    assert world.life() is Life.DRAINING
    reload(world, *world.models)
    assert world.life() is Life.READY
    world.finish(lease)
    world.run()
    world.later(60)
    assert world.engines["a"].run == 1
    reload(world, other_command(world))
    world.run()
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)


def test_an_engine_that_was_found_with_another_command_is_restarted_whatever_is_reloaded():
    world = ready_world()
    lease = world.admit()
    world.do(Configured(world.models, world.supervisor, outdated=("a",)))
    reload(world, other_command(world))
    reload(world, *world.models)
    world.finish(lease)
    world.run()
    assert (world.engines["a"].run, world.life()) == (2, Life.READY)


# --- taken away ---


@pytest.mark.parametrize("bundled", [True, False])
def test_one_that_is_taken_away_in_its_wake_is_not_restarted(bundled):
    world = World(model() if bundled else own(), running=("a",))
    world.run()
    world.command("a", Verb.SLEEP, 2)
    world.run()
    world.admit()
    world.complete(world.pending[0])  # the intent
    (call,) = world.pending_of(CallEngine)
    reload(world, ELSEWHERE)
    world.complete(call, error="the replica is no longer configured")
    world.later(world.supervisor.backoff_min)
    jobs = [job.verb for job in world.pending_of(RunUnitJob)]
    assert jobs == ([UnitVerb.STOP] if bundled else [])
    world.run()
    assert "a" not in world.fleet.replicas
    assert "a" not in world.disk


def test_a_start_of_a_unit_that_is_taken_away_is_not_undone_when_it_does_not_end():
    world = World(own())
    world.command("a", Verb.START)
    (job,) = world.pending_of(RunUnitJob)
    reload(world, ELSEWHERE)
    world.engines["a"].start()
    world.pending.remove(job)
    world.do(UnitJobDone("a", job.op, "timeout", world.engines["a"].status()))
    assert not world.pending_of(RunUnitJob)
    assert "a" not in world.fleet.replicas


def test_one_that_is_taken_away_and_cannot_be_stopped_is_tried_again_after_its_back_off():
    world = ready_world()
    reload(world, ELSEWHERE)
    world.complete(world.pending_of(RunUnitJob)[0], error="no reply")
    assert not world.pending_of(RunUnitJob)
    world.later(world.supervisor.backoff_min)
    world.run()
    assert "a" not in world.fleet.replicas
    assert world.engines["a"].active == "inactive"


def test_nothing_is_started_beside_a_bundled_engine_that_has_another_name_now():
    world = World(model(gpus={"a": (0,)}), running=("a",))
    world.run()
    lease = world.admit()
    reload(world, model(replicas=("b",), gpus={"b": (0,)}))
    world.admit()
    world.later(10)
    assert not world.pending_of(RunUnitJob)
    world.finish(lease)
    (stop,) = world.pending_of(RunUnitJob)
    assert (stop.replica, stop.verb) == ("a", UnitVerb.STOP)
    world.complete(stop)
    world.later(1)
    assert [(job.replica, job.verb) for job in world.pending_of(RunUnitJob)] == [("b", UnitVerb.START)]


def test_an_engine_that_shares_the_gpu_of_one_that_is_taken_away_does_not_wait_for_it():
    gpus = {"a": (0,), "z": (0,)}
    other = model("other", ("z",), gpus)
    world = World(model(gpus=gpus), other, running=("a", "z"))
    world.run()
    world.command("z", Verb.SLEEP, 1)
    world.run()
    world.admit()
    reload(world, other)
    ticket = world.admit("other")
    world.run()
    assert (world.life("a"), world.life("z")) == (Life.DRAINING, Life.READY)
    assert ticket in world.outcomes


# --- another name for a unit, another unit for a name ---


def test_requests_in_flight_are_counted_under_the_new_name_of_their_unit():
    world = World(own(), running=("a",))
    world.run()
    lease = world.admit()
    world.engines["b"] = world.engines["a"]
    reload(world, own(name="b"))
    assert set(world.fleet.replicas) == {"b"}
    world.drift("b")
    world.run()
    assert (world.life("b"), world.replica("b").in_flight) == (Life.READY, 1)
    world.command("b", Verb.SLEEP, 1)
    world.run()
    assert "sleep 1" not in world.engines["b"].calls
    world.finish(lease)
    world.run()
    assert world.life("b") is Life.ASLEEP


def test_a_unit_that_is_renamed_in_its_wake_has_its_wake_finished():
    world = World(own(), running=("a",))
    world.run()
    world.command("a", Verb.SLEEP, 2)
    world.run()
    world.admit()
    world.complete(world.pending[0])
    engine = world.engines["b"] = world.engines["a"]
    engine.level = 0  # woken, and its weights not loaded again
    reload(world, own(name="b"))
    for call in world.pending_of(CallEngine):
        world.pending.remove(call)  # its connection is closed
    world.drift("b")
    world.run()
    assert world.life("b") is Life.READY
    assert engine.whole
    assert world.disk == {}


def test_the_fingerprint_of_a_unit_is_kept_under_its_new_name_and_on_disk():
    world = World(own(), running=("a",))
    world.run()
    world.engines["b"] = world.engines["a"]
    reload(world, own(name="b"))
    world.drift("b")
    world.run()
    assert world.fingerprints["b"] == world.fingerprints["a"]


def test_a_hold_is_kept_under_the_new_name_of_a_unit_and_on_disk():
    world = World(own(), running=("a",))
    world.run()
    world.command("a", Verb.STOP)
    world.run()
    reload(world, own(name="b"))
    world.run()
    assert world.replica("b").hold is Hold.DOWN
    assert {name: record.hold for name, record in world.disk.items()} == {"b": Hold.DOWN}


def test_a_hold_is_kept_when_the_unit_is_another_one():
    world = ready_world()
    world.command("a", Verb.STOP)
    world.run()
    reload(world, own(world.models[0]))
    world.run()
    assert world.replica().hold is Hold.DOWN
    world.command("a", Verb.START)
    world.run()
    assert world.disk == {}


def test_a_bundled_engine_goes_down_when_its_replica_has_a_unit_of_its_own():
    world = ready_world()
    lease = world.admit()
    old = world.engines["a"]
    reload(world, own(world.models[0]))
    world.engines |= {"a": FakeEngine("own.service"), old.unit: old}
    world.drift("a")
    assert not world.pending_of(RunUnitJob)
    world.finish(lease)
    assert [(job.unit, job.verb) for job in world.pending_of(RunUnitJob)] == [(old.unit, UnitVerb.STOP)]
    world.run()
    assert old.active == "inactive"
    assert set(world.fleet.replicas) == {"a"}


def test_two_units_that_change_places_keep_their_requests():
    specs = [replace(spec, unit=f"{spec.name}.service", bundled=False) for spec in model(replicas=("a", "b")).replicas]
    chat = replace(model(), replicas=tuple(specs))
    world = World(chat, running=("a", "b"))
    world.run()
    lease = world.admit(only=("a",))
    swapped = (replace(specs[0], unit="b.service"), replace(specs[1], unit="a.service"))
    reload(world, replace(chat, replicas=swapped))
    assert (world.replica("a").in_flight, world.replica("b").in_flight) == (0, 1)
    world.finish(lease)
    assert world.replica("b").in_flight == 0


def test_what_the_weights_are_worth_is_known_when_two_units_change_places():
    specs = [replace(spec, unit=f"{spec.name}.service", bundled=False) for spec in model(replicas=("a", "b")).replicas]
    chat = replace(model(wake=WakeLimits(canary=False)), replicas=tuple(specs))
    world = World(chat, running=("a",))
    engine = world.engines["b"]
    engine.run = 6
    engine.start()
    world.drift("b")
    world.run()
    world.command("b", Verb.SLEEP, 2)
    world.run()
    reload(world, replace(chat, replicas=(replace(specs[0], unit="b.service"), replace(specs[1], unit="a.service"))))
    world.engines |= {"a": engine, "b": world.engines["a"]}
    engine.level = 0  # POST /wake_up, by somebody: it answers, and what it answers is garbage
    world.drift("a")
    world.drift("b")
    world.run()
    assert world.life("a") is Life.READY
    assert engine.whole
    assert world.disk == {}


def test_a_bundled_engine_that_is_configured_again_with_another_command_is_restarted():
    world = ready_world()
    lease = world.admit()
    engine = world.engines["a"]
    reload(world, own(world.models[0]))
    world.engines |= {"a": FakeEngine("own.service"), engine.unit: engine}
    world.drift("a")
    reload(world, other_command(world))
    world.engines["a"] = engine
    world.drift("a")
    world.run()
    world.finish(lease)
    world.run()
    assert (world.life(), engine.run) == (Life.READY, 2)


def test_a_left_over_engine_does_not_take_the_place_of_the_replica_that_has_its_name():
    spec = own()
    world = World(spec, running=("a",))
    left = ReplicaSpec("a", "chat", "vllm@a.service", "unix:/run/gone.sock", bundled=True)
    world.engines[left.unit] = FakeEngine(left.unit)
    world.do(Configured((spec,), world.supervisor, left_over=(left,)))
    (job,) = world.pending_of(RunUnitJob)
    assert (job.unit, job.verb) == (left.unit, UnitVerb.STOP)
    world.run()
    assert set(world.fleet.replicas) == {"a"}
    assert world.life() is Life.READY


def test_a_command_to_a_replica_whose_unit_changes_is_answered():
    world = ready_world()
    world.admit()
    ticket = world.command("a", Verb.RESTART)
    reload(world, own(world.models[0]))
    assert world.answers[ticket].failure is CommandFailure.GONE
