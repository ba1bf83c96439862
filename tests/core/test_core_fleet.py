"""Several replicas, models and GPUs."""

from world import Configured, IdleLadder, Life, SupervisorSpec, Verb, World, model

from supervisord.core import step
from supervisord.core.actions import RunUnitJob
from supervisord.core.admission import Lease, RefusalCode


def test_one_request_wakes_one_replica_and_a_burst_wakes_all_each_once():
    world = World(model(replicas=("a", "b")))
    world.admit()
    assert [job.replica for job in world.pending_of(RunUnitJob)] == ["a"]
    for _ in range(20):
        world.admit()
    assert sorted(job.replica for job in world.pending_of(RunUnitJob)) == ["a", "b"]
    world.run()
    assert [world.engines[name].run for name in ("a", "b")] == [1, 1]


def test_the_request_that_woke_one_replica_wakes_no_other_at_the_end():
    world = World(model(replicas=("a", "b")))
    ticket = world.admit()
    world.run()
    world.finish(world.outcomes[ticket])
    world.run()
    assert (world.life("a"), world.life("b")) == (Life.READY, Life.STOPPED)
    assert world.engines["b"].run == 0
    for name in ("a", "b"):
        world.command(name, Verb.START)
    world.run()
    for name in ("a", "b"):
        world.command(name, Verb.SLEEP, 2)
    world.run()
    ticket = world.admit()
    world.run()
    assert world.outcomes[ticket].replica == "a"
    assert (world.life("a"), world.life("b")) == (Life.READY, Life.ASLEEP)


def test_a_crowd_on_the_awake_replica_wakes_its_sleeping_sibling():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    world.command("b", Verb.SLEEP, 1)
    world.run()
    first = [world.admit() for _ in range(1)]
    assert world.life("b") is Life.ASLEEP
    first.append(world.admit())
    assert {lease.replica for lease in first} == {"a"}
    world.run()
    assert world.life("b") is Life.READY


def test_operations_on_one_gpu_exclude_each_other():
    gpus = {"a": (0,), "b": (0,)}
    world = World(model("one", ("a",), gpus), model("two", ("b",), gpus))
    first, second = world.admit("one"), world.admit("two")
    assert [job.replica for job in world.pending_of(RunUnitJob)] == ["a"]
    world.run()
    assert isinstance(world.outcomes[first], Lease)
    assert isinstance(world.outcomes[second], Lease)


def test_operations_on_different_gpus_do_not_wait_for_each_other():
    gpus = {"a": (0,), "b": (1,)}
    world = World(model("one", ("a",), gpus), model("two", ("b",), gpus))
    world.admit("one")
    world.admit("two")
    assert len(world.pending_of(RunUnitJob)) == 2


def test_one_models_failure_never_delays_another():
    world = World(model("bad", ("a",)), model("good", ("b",)))
    world.engines["a"].starts_fail = True
    bad, good = world.admit("bad"), world.admit("good")
    world.run()
    assert world.outcomes[bad].code is RefusalCode.WAKE_FAILED
    assert isinstance(world.outcomes[good], Lease)


def test_a_failed_replica_hands_its_waiters_to_its_sibling():
    world = World(model(replicas=("a", "b")))
    world.engines["a"].starts_fail = True
    ticket = world.admit()
    world.run()
    assert world.outcomes[ticket].replica == "b"


def test_a_reload_that_changes_nothing_touches_nothing():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    for _ in range(3):
        world.do(Configured(world.models, SupervisorSpec()))
    assert world.pending == []
    assert [world.life(name) for name in ("a", "b")] == [Life.READY, Life.READY]


def test_a_removed_replica_finishes_its_requests_and_is_stopped():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    leases = [world.admit(), world.admit()]
    world.do(Configured((model(replicas=("a",)),), SupervisorSpec()))
    world.run()
    assert world.engines["b"].active == "active"
    for lease in leases:
        world.finish(lease)
    world.run()
    assert world.engines["b"].active == "inactive"
    assert "b" not in world.fleet.replicas


def test_requests_waiting_for_a_removed_model_are_told():
    world = World(model("one", ("a",)), model("two", ("b",)))
    ticket = world.admit("one")
    world.do(Configured((world.models[1],), SupervisorSpec()))
    assert world.outcomes[ticket].code is RefusalCode.NO_LIVE_REPLICA
    assert world.admit("one").code is RefusalCode.MODEL_NOT_FOUND


def test_the_idle_ladder_of_a_changed_configuration_holds_at_once():
    world = World(model(), running=("a",))
    world.run()
    world.later(1000)
    assert world.life() is Life.READY
    world.do(Configured((model(idle=IdleLadder(sleep1=500)),), SupervisorSpec()))
    world.run()
    assert world.life() is Life.ASLEEP


def test_replicas_rest_each_by_its_own_clock():
    world = World(model(replicas=("a", "b"), idle=IdleLadder(sleep1=100)), running=("a", "b"))
    world.run()
    lease = world.admit()
    world.later(101)
    world.run()
    assert world.life(lease.replica) is Life.READY
    other = ({"a", "b"} - {lease.replica}).pop()
    assert world.life(other) is Life.ASLEEP


def test_who_joins_a_queue_is_weighed_against_nobody_in_it(monkeypatch):
    settled = []
    really = step.settle
    monkeypatch.setattr(step, "settle", lambda turn: (settled.append(turn.now), really(turn)))
    world = World(model())
    world.admit()
    before = len(settled)
    tickets = [world.admit() for _ in range(1000)]
    assert len(settled) == before
    world.run()
    assert all(isinstance(world.outcomes[ticket], Lease) for ticket in tickets)
