"""Requests that only certain replicas can answer: what an engine keeps in its memory, and adapters."""

import pytest
from world import IdleLadder, Life, RunUnitJob, ShutDown, SupervisorSpec, Verb, World, model

from supervisord.core.admission import Lease, RefusalCode, Refuse
from supervisord.core.spec import ServeSpec
from supervisord.core.view import look, running


def two(awake=("a",), resting="b", level=1, **options):
    """A model with one replica awake and one that rests."""
    world = World(model(replicas=("a", "b"), **options), running=("a", "b"))
    world.run()
    world.command(resting, Verb.SLEEP if level else Verb.STOP, level)
    world.run()
    assert world.life(resting) is (Life.ASLEEP if level else Life.STOPPED)
    assert [name for name in ("a", "b") if world.life(name) is Life.READY] == list(awake)
    return world


def released(world, name):
    """An operator's stop holds; a request may bring it back only afterwards."""
    world.replica(name).hold = world.replica("a").hold
    return world


def test_only_that_replica_gets_it_however_busy():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    assert [world.admit(only=["b"]).replica for _ in range(5)] == ["b"] * 5


@pytest.mark.parametrize("level", [1, 2])
def test_one_that_sleeps_is_woken_once_though_another_is_awake(level):
    world = two(level=level)
    tickets = [world.admit(only=["b"]) for _ in range(3)]
    world.run()
    assert {world.outcomes[ticket].replica for ticket in tickets} == {"b"}
    assert world.engines["b"].calls.count("reload_weights") == (level == 2)
    assert len([call for call in world.engines["b"].calls if call.startswith("wake_up")]) == level


def test_one_that_is_stopped_is_started():
    world = released(two(level=0), "b")
    ticket = world.admit(only=["b"])
    world.run()
    assert world.outcomes[ticket].replica == "b"


def test_who_comes_after_it_and_may_go_elsewhere_does_not_wait_for_it():
    world = two()
    waiting = world.admit(only=["b"])
    assert world.admit().replica == "a"
    assert waiting not in world.outcomes


def test_it_does_not_bring_back_a_replica_that_is_of_no_use_to_it():
    world = World(model(replicas=("a", "b", "c")), running=("a", "b", "c"))
    world.run()
    for name in ("b", "c"):
        world.command(name, Verb.SLEEP, 1)
    world.run()
    world.admit(only=["c"])
    world.run()
    assert (world.life("b"), world.life("c")) == (Life.ASLEEP, Life.READY)


def test_one_that_cannot_be_started_is_refused_in_its_own_words_and_disturbs_nobody():
    world = released(two(level=0), "b")
    world.engines["b"].starts_fail = True
    ticket = world.admit(only=["b"])
    world.run()
    assert world.outcomes[ticket].code is RefusalCode.WAKE_FAILED
    assert world.admit(only=["b"]).code is RefusalCode.WAKE_FAILED
    assert world.life("a") is Life.READY
    assert world.admit().replica == "a"


def test_one_that_is_held_down_is_refused_though_another_is_awake():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    world.command("b", Verb.STOP)
    world.run()
    assert world.admit(only=["b"]).code is RefusalCode.MODEL_HELD
    assert world.admit().replica == "a"


def test_nobody_is_nobody():
    world = World(model(replicas=("a", "b")), running=("a",))
    world.run()
    for only in ([], ["z"]):
        assert world.admit(only=only).code is RefusalCode.NO_LIVE_REPLICA
    assert not world.pending_of(RunUnitJob)


def test_the_last_one_under_suspicion_still_gets_it():
    from supervisord.core.admission import Ending

    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    world.finish(world.admit(only=["b"]), Ending.CONNECT_FAILED, "reset")
    assert world.admit().replica == "a"
    assert world.admit(only=["b"]).replica == "b"


def test_a_sibling_that_holds_its_gpu_makes_room_for_it():
    room = SupervisorSpec(gpu_memory=10, min_residency=5.0, make_room_after=20.0)
    gpus = {"a": (0,), "b": (0,)}
    world = World(model(replicas=("a", "b"), gpus=gpus, memory=8), supervisor=room, running=("a",))
    world.run()
    assert (world.life("a"), world.life("b")) == (Life.READY, Life.STOPPED)
    anybody = world.admit()
    assert anybody.replica == "a"
    world.finish(anybody)
    ticket = world.admit(only=["b"])
    world.later(30)
    world.run()
    assert world.outcomes[ticket].replica == "b"
    assert world.life("a") in (Life.ASLEEP, Life.STOPPED)


def test_shutting_down_wakes_nobody_for_it():
    world = two()
    world.do(ShutDown())
    assert world.admit(only=["b"]).code is RefusalCode.ROUTER_SHUTTING_DOWN
    assert world.life("b") is Life.ASLEEP


# who can be asked without a lease


def test_a_replica_is_running_while_it_has_a_process_and_each_start_is_another_run():
    world = two()
    first = {found.replica: found for found in running(world.fleet)}
    assert first.keys() == {"a", "b"}
    assert (first["b"].model, first["b"].endpoint) == ("chat", "unix:/run/b.sock")
    assert world.life("b") is Life.ASLEEP  # asking is no reason to wake it
    world.admit(only=["b"])
    world.run()
    assert {found.replica: found for found in running(world.fleet)} == first
    world.command("a", Verb.RESTART)
    world.run()
    again = {found.replica: found for found in running(world.fleet)}
    assert again["a"].run != first["a"].run
    world.command("a", Verb.STOP)
    world.run()
    assert [found.replica for found in running(world.fleet)] == ["b"]


# adapters


def serving(world, name, *names):
    world.replica(name).adapters = names
    return world


def test_a_name_that_only_an_engine_knows_reaches_the_replicas_that_have_it():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    serving(world, "b", "sql")
    leases = [world.admit("sql") for _ in range(3)]
    assert {(lease.model, lease.replica) for lease in leases} == {("chat", "b")}
    assert all("sql" in lease.served_names for lease in leases)
    assert look(world.fleet).models[0].adapters == ("sql",)


def test_a_replica_that_had_it_is_woken_for_it():
    world = serving(two(), "b", "sql")
    ticket = world.admit("sql")
    world.run()
    assert world.outcomes[ticket].replica == "b"


def test_a_name_that_two_models_engines_have_means_neither():
    world = World(model("chat", ("a",)), model("embed", ("b",)), running=("a", "b"))
    world.run()
    for name in ("a", "b"):
        serving(world, name, "sql")
    refusal = world.admit("sql")
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.MODEL_NOT_FOUND
    assert [view.adapters for view in look(world.fleet).models] == [(), ()]


def test_a_configured_name_always_means_its_model():
    world = World(model("chat", ("a",)), model("embed", ("b",)), running=("a", "b"))
    world.run()
    serving(world, "a", "embed")
    assert world.admit("embed").replica == "b"
    assert look(world.fleet).models[0].adapters == ()


@pytest.mark.parametrize(
    "value",
    [
        ["sql=/adapters/sql", "math=/adapters/math"],
        "sql=/adapters/sql",
        [{"name": "sql", "path": "/adapters/sql", "base_model_name": "x"}],
        {"name": "sql", "path": "/adapters/sql"},
    ],
)
def test_an_adapter_of_the_command_line_is_known_before_the_engine_ever_ran(value):
    from dataclasses import replace

    spec = replace(model(idle=IdleLadder()), serve=ServeSpec("m", options={"lora-modules": value}))
    world = World(spec)
    assert "sql" in look(world.fleet).models[0].adapters
    ticket = world.admit("sql")
    assert isinstance(ticket, int)
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert world.admit("nobody").code is RefusalCode.MODEL_NOT_FOUND
