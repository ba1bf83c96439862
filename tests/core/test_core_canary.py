"""The canary: no byte of an engine that is not itself, though it says 200, healthy and awake."""

import pytest
from world import CallEngine, Life, Phase, Record, Verb, WakeLimits, World, model

from supervisord.core.actions import NoteKind, RunUnitJob, TakeFingerprint, UnitVerb
from supervisord.core.admission import Lease
from supervisord.core.canary import Fingerprint, FingerprintError, difference
from supervisord.core.states import Hold

CANARY = WakeLimits(canary=True)
WHOLE = Fingerprint(("yes",), (-0.1,))


def ready_world(**options):
    world = World(model(wake=CANARY), running=("a",), **options)
    world.run()
    return world


def test_the_first_readiness_takes_a_fingerprint_and_keeps_it():
    world = ready_world()
    assert world.life() is Life.READY
    assert world.fingerprints["a"] == (f"{1:032x}", WHOLE)


def test_garbage_is_found_at_adoption_though_the_journal_of_intents_was_lost():
    kept = {"a": (f"{1:032x}", WHOLE)}
    world = World(model(wake=CANARY), running=("a",), fingerprints=kept)
    world.engines["a"].whole = False
    ticket = world.admit()
    world.run()
    assert world.noted(NoteKind.CANARY_FAILED) == 1
    assert "reload_weights" in world.engines["a"].calls
    assert world.engines["a"].whole
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_wake_is_let_through_only_after_the_comparison():
    world = ready_world()
    world.command("a", Verb.SLEEP, 1)
    world.run()
    ticket = world.admit()
    while not world.pending_of(TakeFingerprint):
        world.complete(world.pending[0])
    assert ticket not in world.outcomes
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_level_1_wake_that_comes_back_with_garbage_has_its_weights_loaded_again():
    world = ready_world()
    world.command("a", Verb.SLEEP, 1)
    world.run()
    world.engines["a"].whole = False
    ticket = world.admit()
    world.run()
    assert world.engines["a"].calls[1:] == [
        "wake_up",
        "wake_up weights",
        "reload_weights",
        "wake_up kv_cache",
        "reset_prefix_cache",
    ]
    assert isinstance(world.outcomes[ticket], Lease)


def test_garbage_after_a_reload_restarts_the_unit_and_a_new_run_has_a_new_fingerprint():
    world = ready_world()
    world.command("a", Verb.SLEEP, 2)
    world.run()
    ticket = world.admit()
    for _ in range(20):
        if world.pending_of(TakeFingerprint):
            break
        world.complete(world.pending[0])
    world.engines["a"].whole = False  # the reload did not load what it should have
    world.complete(world.pending_of(TakeFingerprint)[0])
    assert world.pending_of(RunUnitJob)[0].verb is UnitVerb.RESTART
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert world.fingerprints["a"][0] == f"{2:032x}"


def test_an_engine_that_cannot_answer_the_canary_is_restarted():
    world = World(model(wake=CANARY), running=("a",))
    world.later(0.1)
    world.complete(world.pending_of(TakeFingerprint)[0], error="500: EngineDeadError")
    assert world.pending_of(RunUnitJob)[0].verb is UnitVerb.RESTART
    world.run()
    assert world.life() is Life.READY


def test_an_engine_without_a_route_for_it_is_let_through():
    world = World(model(wake=CANARY), running=("a",))
    world.engines["a"].no_route = True
    world.run()
    assert world.life() is Life.READY


def test_the_next_run_of_an_engine_without_a_route_is_asked_again():
    world = World(model())
    world.engines["a"].no_route = True
    world.command("a", Verb.START)
    world.run()
    assert (world.life(), world.fingerprints) == (Life.READY, {})
    world.engines["a"].no_route = False  # it refused a key that its configuration had no more
    world.command("a", Verb.RESTART)
    world.run()
    assert world.life() is Life.READY
    assert set(world.fingerprints) == {"a"}


def test_an_unfinished_wake_is_finished_before_the_fingerprint_is_taken():
    record = Record(2, Phase.WAKING, f"{1:032x}", Hold.NONE, 0.0)
    world = World(model(wake=CANARY), running=("a",), records={"a": record})
    world.engines["a"].whole = False
    world.run()
    assert world.fingerprints["a"][1] == WHOLE
    assert not world.pending_of(CallEngine)


@pytest.mark.parametrize(
    ("seen", "same"),
    [
        (Fingerprint(("a", "b"), (-0.1, -0.2)), True),
        (Fingerprint(("a", "b"), (-0.15, -0.3)), True),
        (Fingerprint(("a", "b"), (-0.1, -3.0)), False),
        (Fingerprint(("a", "c"), (-0.1, -0.2)), False),
        (Fingerprint(("a",), (-0.1,)), False),
    ],
)
def test_small_noise_is_no_difference_and_other_weights_are(seen, same):
    assert (difference(Fingerprint(("a", "b"), (-0.1, -0.2)), seen) == "") is same


def test_a_tie_ends_the_comparison():
    known = Fingerprint(("a", "b", "c"), (-0.1, -0.7, -0.1))
    assert difference(known, Fingerprint(("a", "x", "y"), (-0.1, -0.71, -5.0))) == ""


def test_vectors_are_compared_by_direction():
    known = Fingerprint((), (1.0, 0.0, 1.0))
    assert difference(known, Fingerprint((), (2.0, 0.0, 2.01))) == ""
    assert difference(known, Fingerprint((), (0.0, 1.0, 0.0)))


@pytest.mark.parametrize("value", [None, [], {}, {"tokens": [1], "values": []}, {"tokens": [], "values": ["x"]}])
def test_a_stored_fingerprint_is_read_strictly(value):
    with pytest.raises(FingerprintError):
        Fingerprint.from_json(value)
    assert Fingerprint.from_json(WHOLE.to_json()) == WHOLE
