"""Models that do not fit onto a GPU together: whoever is wanted gets room, nobody is cut, nobody starves."""

from world import IdleLadder, Life, SupervisorSpec, Verb, WakeLimits, World, model

from supervisord.core.actions import NoteKind, RunUnitJob
from supervisord.core.admission import Lease, RefusalCode

GPU = {"a": (0,), "b": (0,)}
BOUNDED = SupervisorSpec(gpu_memory=100, nap_memory=100, min_residency=60, make_room_after=30)


def two(*, memory=60, nap=None, supervisor=BOUNDED, running=("a",), wake=WakeLimits()):  # noqa: B008
    world = World(
        model("one", ("a",), GPU, memory=memory, nap=nap, wake=wake),
        model("two", ("b",), GPU, memory=memory, nap=nap, wake=wake),
        supervisor=supervisor,
        running=running,
    )
    world.run()
    return world


def test_an_idle_model_rests_when_another_is_wanted_that_does_not_fit_beside_it():
    world = two()
    world.later(61)
    ticket = world.admit("two")
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert (world.life("a"), world.replica("a").level) == (Life.ASLEEP, 1)
    assert world.noted(NoteKind.EVICTED) == 1


def test_models_that_fit_together_leave_each_other_alone():
    world = two(memory=50)
    ticket = world.admit("two")
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert world.life("a") is Life.READY


def test_without_a_declaration_everything_is_taken_to_fit():
    world = two(supervisor=SupervisorSpec())
    world.admit("two")
    world.run()
    assert world.life("a") is Life.READY


def test_a_busy_model_is_not_asked_at_once_and_its_requests_are_never_cut():
    world = two()
    lease = world.admit("one")
    world.later(61)
    ticket = world.admit("two")
    world.run()
    assert world.life("a") is Life.READY
    world.later(31)
    assert world.life("a") is Life.DRAINING
    assert ticket not in world.outcomes
    world.finish(lease)
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert world.life("a") is Life.ASLEEP


def test_who_has_just_become_ready_stays_for_the_minimum_residency():
    world = two(running=())
    first = world.admit("one")
    world.run()
    world.finish(world.outcomes[first])
    ticket = world.admit("two")
    world.later(50)
    world.run()
    assert world.life("a") is Life.READY
    world.later(15)
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_model_that_is_loaded_for_a_waiter_is_not_evicted_before_its_request_is_forwarded():
    world = two(running=("b",), supervisor=SupervisorSpec(gpu_memory=100, min_residency=0, make_room_after=1000))
    world.run()
    ticket = world.admit("one")
    other = world.admit("two")
    assert isinstance(other, int), "b makes room for the one who came first"
    world.run()
    lease = world.outcomes[ticket]
    assert isinstance(lease, Lease)
    assert world.life("a") is Life.READY, "its lease counts from the moment it is ready"
    world.finish(lease)
    world.later(2)
    world.run()
    assert isinstance(world.outcomes[other], Lease)


def test_two_busy_models_take_turns_and_neither_starves():
    world = two(wake=WakeLimits(timeout=10_000))
    served = {"one": 0, "two": 0}
    waiting = {}
    for _ in range(600):
        for name in served:
            if name not in waiting:
                waiting[name] = world.admit(name)
            answer = waiting[name]
            lease = world.outcomes.get(answer) if isinstance(answer, int) else answer
            if isinstance(lease, Lease):
                world.later(0.5)
                world.finish(lease)
                served[name] += 1
                del waiting[name]
        world.later(1)
        world.run()
    assert min(served.values()) > 100
    evictions = world.noted(NoteKind.EVICTED)
    assert 2 <= evictions <= world.now / 60, "residency bounds the number of turns"


def test_starting_and_waking_replicas_are_no_victims():
    world = two(running=())
    world.admit("one")
    assert world.life("a") is Life.STARTING
    world.admit("two")
    world.later(100)
    assert world.life("a") is Life.STARTING
    assert [job.replica for job in world.pending_of(RunUnitJob)] == ["a"]


def test_who_waited_too_long_is_told_that_memory_is_what_is_missing():
    world = two(wake=WakeLimits(timeout=20))
    world.admit("one")
    ticket = world.admit("two")
    world.later(21)
    assert world.outcomes[ticket].code is RefusalCode.INSUFFICIENT_MEMORY


def test_a_model_that_could_never_fit_is_refused_at_once_and_evicts_nobody():
    world = World(
        model("one", ("a",), GPU, memory=60),
        model("huge", ("b",), GPU, memory=101),
        supervisor=BOUNDED,
        running=("a",),
    )
    world.run()
    world.later(61)
    ticket = world.admit("huge")
    refusal = world.outcomes[ticket] if isinstance(ticket, int) else ticket
    assert refusal.code is RefusalCode.INSUFFICIENT_MEMORY
    assert world.life("a") is Life.READY


def test_host_memory_is_a_budget_too():
    world = World(
        model("one", ("a",), GPU, IdleLadder(sleep1=100, sleep2=1000), memory=40, nap=60),
        model("two", ("b",), GPU, IdleLadder(sleep1=101, sleep2=1000), memory=40, nap=60),
        supervisor=BOUNDED,
        running=("a", "b"),
    )
    world.run()
    for _ in range(16):
        world.later(10)
        world.run()
    assert sorted(world.replica(name).level for name in ("a", "b")) == [1, 2]


def test_an_engine_that_has_no_second_level_is_stopped_where_host_memory_is_used_up():
    world = World(
        model("one", ("a",), GPU, IdleLadder(sleep1=100), memory=40, nap=60),
        model("two", ("b",), GPU, IdleLadder(sleep1=101), memory=40, nap=60),
        supervisor=BOUNDED,
        running=("a", "b"),
    )
    world.run()
    world.later(102)
    world.run()
    assert (world.life("a"), world.replica("a").level) == (Life.ASLEEP, 1)
    assert world.life("b") is Life.STOPPED


def test_one_that_still_finishes_its_requests_before_a_nap_has_its_room_in_host_memory():
    world = World(
        model("one", ("a",), GPU, memory=40, nap=60),
        model("two", ("b",), GPU, IdleLadder(sleep1=100, sleep2=1000), memory=40, nap=60),
        supervisor=BOUNDED,
        running=("a", "b"),
    )
    world.run()
    lease = world.admit("one")
    world.command("a", Verb.SLEEP, 1)
    world.later(101)
    world.run()
    assert (world.life("b"), world.replica("b").level) == (Life.ASLEEP, 2)
    world.finish(lease)
    world.run()
    assert (world.life("a"), world.replica("a").level) == (Life.ASLEEP, 1)


def test_nobody_is_woken_from_a_nap_only_to_sleep_deeper_where_there_is_no_room():
    world = two()
    world.later(61)
    world.admit("two")
    world.run()
    assert world.life("a") is Life.ASLEEP
    ticket = world.command("a", Verb.SLEEP, 2)
    world.run()
    assert world.life("a") is Life.STOPPED
    assert world.answers[ticket].failure is None


def test_an_operators_wake_overrules_making_room():
    world = two()
    lease = world.admit("one")
    world.later(61)
    world.admit("two")
    world.later(31)
    assert world.life("a") is Life.DRAINING
    world.command("a", Verb.WAKE)
    assert world.life("a") is Life.READY
    world.finish(lease)
