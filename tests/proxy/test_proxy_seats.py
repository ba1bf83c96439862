"""Seats for long conversations: who is held, for whose sake, for how long, and that nobody is held for nothing."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.policies.pauses import FEWEST, LONGEST, MARGIN, PAUSES, Pauses
from proxy.policies.prefill import Prefill
from proxy.policies.seats import FORGOTTEN, LONGEST_HOLD, SWEEP, SWEPT
from proxy.policies.tokens import TokenSize
from proxy.reading.facts import Facts
from proxy.routing import PolicyBook
from supervisord.core.admission import Candidate, Choice, NotYet
from supervisord.core.spec import ModelSpec, ReplicaSpec, WakeLimits

KV = 600_000


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def turn(number: int, at: int, tokens: int = 100_000, each: int = 200) -> Facts:
    """The ``at``-th request of a conversation of so many tokens at first."""
    keys = tuple(f"{number}/{message}".encode() for message in range(2 * at + 1))
    return Facts("m", True, keys, 0, tuple(4 * (tokens + each * n) for n in range(len(keys))))


def replicas(names: str = "a", kv: int | None = KV, **generations: int) -> list[Candidate]:
    return [Candidate(name, 0, generations.get(name, 0), kv) for name in names]


class Agents:
    """Conversations that are driven by hand, on one policy."""

    def __init__(self, names: str = "a", **options: float) -> None:
        self.time = Time()
        self.policy = Prefill(self.time, **options)
        self.candidates = replicas(names)
        self.turns: dict[int, int] = {}

    def ask(self, number: int, **options: int) -> tuple[Facts, Choice | NotYet]:
        facts = turn(number, self.turns.get(number, 0), **options)
        return facts, self.policy.choose(facts, self.candidates)

    def again(self, facts: Facts) -> Choice | NotYet:
        return self.policy.choose(facts, self.candidates)

    def answer(self, number: int, facts: Facts, seconds: float = 6.0) -> None:
        self.time.now += seconds
        self.policy.first_byte(facts)
        self.policy.finished(facts, None)
        self.turns[number] = self.turns.get(number, 0) + 1

    def turn(self, number: int, seconds: float = 6.0, **options: int) -> str:
        facts, choice = self.ask(number, **options)
        assert isinstance(choice, Choice), choice
        self.answer(number, facts, seconds)
        return choice.replica

    def teach(self, pause: float = 2.0, turns: int = 3, number: int = 5) -> None:
        """``number`` conversations that come back after ``pause`` seconds, over and over."""
        for _ in range(turns):
            for one in range(number):
                self.turn(one, seconds=pause / number)


@pytest.fixture
def agents() -> Agents:
    agents = Agents()
    agents.teach(turns=4)
    return agents


# who is held


def test_nobody_is_held_before_it_is_known_that_conversations_come_back():
    agents = Agents()
    for number in range(20):
        _, choice = agents.ask(number)
        assert isinstance(choice, Choice)


def test_those_that_came_back_after_their_first_turn_are_taken_to_come_back_again():
    agents = Agents()
    for _ in range(2):
        asked = [agents.ask(number, tokens=60_000) for number in range(8)]
        for number, (facts, choice) in enumerate(asked):
            assert isinstance(choice, Choice)
            agents.answer(number, facts, 0.2)
    assert isinstance(agents.ask(9)[1], NotYet)


def test_one_that_has_no_seat_waits_for_those_that_come_back_soon(agents):
    _, held = agents.ask(9)
    assert isinstance(held, NotYet)
    assert held.reason == "held for KV: 5 long conversations have their seats, this is number 1 of those who wait"
    assert held.likely_in > 0
    assert agents.turn(3) == "a"  # who sits goes on


def test_short_requests_pass(agents):
    agents.ask(9)
    _, choice = agents.ask(10, tokens=500)
    assert isinstance(choice, Choice)


def test_where_the_kv_is_not_known_nobody_is_held(agents):
    agents.candidates = replicas(kv=None)
    assert isinstance(agents.ask(9)[1], Choice)


def test_admission_of_all_holds_nobody():
    agents = Agents(longest_hold=0)
    agents.teach(turns=6)
    assert isinstance(agents.ask(9)[1], Choice)


def test_documents_that_nobody_asks_about_again_are_never_held():
    agents = Agents()
    for number in range(60):
        agents.turn(number)
        agents.time.now += 1.0
    asked = [agents.ask(number)[1] for number in range(100, 120)]
    assert all(isinstance(choice, Choice) for choice in asked)


def test_people_who_think_for_a_minute_hold_nobody_up():
    agents = Agents()
    for _ in range(6):
        for number in range(10):
            agents.turn(number)
        agents.time.now += 60.0
    asked = [agents.ask(number)[1] for number in range(100, 110)]
    assert all(isinstance(choice, Choice) for choice in asked)


# how it ends


def test_the_first_in_the_queue_gets_the_seat_of_one_that_stays_away(agents):
    first, second = agents.ask(9)[0], agents.ask(10)[0]
    agents.time.now += 2.0
    for number in (0, 1, 2, 3):
        agents.turn(number, seconds=0.1)
    agents.time.now += 2.0  # the fifth has been away for longer than the others ever were
    assert isinstance(agents.again(second), NotYet)
    choice = agents.again(first)
    assert isinstance(choice, Choice)
    assert choice.reason.startswith("held 4.4s for KV, cold: a ")
    assert isinstance(agents.again(second), NotYet)


def test_one_that_comes_back_late_and_finds_its_seat_taken_waits_like_the_others(agents):
    waiting = agents.ask(9)[0]
    agents.time.now += 2.0
    for number in (1, 2, 3, 4):
        agents.turn(number, seconds=0.1)
    agents.time.now += 2.0
    assert isinstance(agents.again(waiting), Choice)
    late = [agents.ask(number)[1] for number in range(5)]
    assert [isinstance(choice, NotYet) for choice in late] == [True, False, False, False, False]


def test_one_that_leaves_the_queue_is_not_waited_for(agents):
    first, second = agents.ask(9)[0], agents.ask(10)[0]
    agents.policy.finished(first, None)
    agents.time.now += 10.0
    assert isinstance(agents.again(second), Choice)
    assert agents.policy.held == 0


def test_nobody_is_held_for_longer_than_the_bound():
    agents = Agents(longest_hold=20.0)
    agents.teach(turns=4)
    waiting = [agents.ask(number)[0] for number in range(9, 14)]
    for _ in range(4):
        agents.teach(turns=1, pause=5.0)
    assert all(isinstance(agents.again(facts), Choice) for facts in waiting)


def test_who_is_silent_for_minutes_is_forgotten_and_so_is_a_prompt_of_instructions_alone():
    """Many at once, which are not all looked at in one decision; the same instructions again are no conversation."""
    agents = Agents()
    agents.candidates = replicas(kv=100 * KV)
    for number in range(80):
        agents.turn(number, seconds=0.0)
    only_instructions = turn(99, 0)._replace(instructions=1)
    for facts in (only_instructions, only_instructions._replace()):
        assert isinstance(agents.again(facts), Choice)
        agents.policy.finished(facts, None)
    assert agents.policy.seats == 82
    agents.time.now += FORGOTTEN + 1.0
    decisions = 82 // SWEPT + 1
    for number in range(100, 100 + decisions):
        before = agents.policy.seats
        agents.turn(number, seconds=0.0)
        assert before - SWEPT <= agents.policy.seats - 1 <= before
        agents.time.now += SWEEP
    assert agents.policy.seats == decisions


def test_a_restart_gives_every_seat_up(agents):
    waiting = agents.ask(9)[0]
    agents.candidates = replicas(a=1)
    assert isinstance(agents.again(waiting), Choice)


def test_an_empty_replica_takes_a_conversation_that_is_larger_than_its_cache(agents):
    agents.candidates = replicas(a=1)
    assert isinstance(agents.ask(9, tokens=2 * KV)[1], Choice)


def test_another_replica_with_room_is_as_good(agents):
    agents.candidates = replicas("ab")
    choice = agents.ask(9)[1]
    assert isinstance(choice, Choice)
    assert choice.replica == "b"


def test_when_those_that_sit_outgrow_the_cache_the_last_one_to_come_gives_its_seat_up():
    agents = Agents()
    agents.teach(turns=4)
    for number in range(5):
        facts = turn(number, agents.turns[number], each=8_000)  # as if they had read much
        assert isinstance(agents.policy.choose(facts, agents.candidates), Choice) is (number < 4)
        agents.answer(number, facts, 0.1)


def test_what_a_conversation_takes_is_corrected_by_what_its_answers_tell(agents):
    """Pictures: many bytes and few tokens."""
    agents.candidates = replicas(a=1)
    for number in range(20, 40):
        facts, choice = agents.ask(number, tokens=250_000)
        assert isinstance(choice, Choice)
        agents.policy.finished(facts, None, 2_000)


def test_the_tokens_that_answers_tell_of_are_those_of_the_conversation_however_many_turns_it_has():
    """One whose text has more tokens a byte than the others', which is not learned of all."""
    agents = Agents()
    for _ in range(10):
        for number in range(5):
            facts, choice = agents.ask(number)
            assert isinstance(choice, Choice), "one outgrew the cache"
            agents.time.now += 0.4
            agents.policy.finished(facts, None, 160_000 if number == 0 else 85_000)
            agents.turns[number] = agents.turns.get(number, 0) + 1
    held = agents.ask(9, tokens=KV // 10)[1]
    assert isinstance(held, NotYet), "they have 500 000 of 600 000, of which 510 000 are for seats"
    assert isinstance(agents.again(turn(0, agents.turns[0])), Choice)


def test_long_is_what_is_much_of_the_cache():
    agents = Agents()
    agents.candidates = replicas(kv=60_000)
    for _ in range(4):
        for number in range(5):
            facts, choice = agents.ask(number, tokens=10_000, each=10)
            assert isinstance(choice, Choice)
            agents.answer(number, facts, 0.4)
    assert isinstance(agents.ask(9, tokens=10_000)[1], NotYet)
    assert isinstance(agents.ask(10, tokens=1_000)[1], Choice)


# what is learned


def test_the_patience_is_the_time_that_pays_best():
    pauses = Pauses()
    for _ in range(20):
        pauses.add(2.0)
    for _ in range(2):
        pauses.add(25.0)
    assert pauses.patience(1.0) == 2.0 * MARGIN  # to wait for the last two would cost more than they are worth
    assert pauses.patience(60.0) == 25.0 * MARGIN  # unless they are very large
    assert pauses.patience(0.2) == 0.0  # and for what is computed at once nobody waits


@given(st.lists(st.one_of(st.floats(0, 200), st.just(math.inf)), max_size=80), st.floats(0.01, 100))
def test_a_patience_is_a_pause_that_was_seen_lately_or_none(seen, prefill):
    pauses = Pauses()
    for seconds in seen:
        pauses.add(seconds)
    patience = pauses.patience(prefill)
    assert patience in (0.0, *(MARGIN * seconds for seconds in seen[-PAUSES:] if seconds <= LONGEST))
    assert len(seen) >= FEWEST or patience == 0.0


@given(st.lists(st.floats(LONGEST + 0.1, 1000), min_size=FEWEST, max_size=50))
def test_nobody_waits_for_those_that_come_back_late(seen):
    pauses = Pauses()
    for seconds in seen:
        pauses.add(seconds)
    assert pauses.patience(30.0) == 0.0


def test_the_size_of_a_token_is_learned():
    size = TokenSize()
    assert size.size == 4.0
    for _ in range(50):
        size.add(300_000, 100_000)
    assert size.size == pytest.approx(3.0, rel=0.01)
    for _ in range(500):
        size.add(500_000, 100_000)
    assert size.size == pytest.approx(5.0, rel=0.02)


# whatever happens

STEP = st.tuples(
    st.integers(0, 7),
    st.sampled_from(["ask", "answer", "answer", "leave", "fail", "restart"]),
    st.sampled_from([0.0, 0.5, 3.0, 40.0, 400.0]),
    st.sampled_from(["a", "ab", "b"]),
)


@settings(deadline=None)
@given(st.lists(STEP, max_size=80), st.randoms())
def test_nobody_is_held_but_for_the_sake_of_one_that_sits_and_all_counters_return_to_zero(steps, random):
    agents = Agents("ab")
    agents.teach(turns=4)
    generations = {"a": 0, "b": 0}
    under_way: dict[int, Facts] = {}
    waiting: dict[int, Facts] = {}
    for number, action, seconds, names in steps:
        agents.time.now += seconds
        agents.candidates = replicas(names, **generations)
        random.shuffle(agents.candidates)
        if action == "restart":
            generations[names[0]] += 1
        elif number in waiting:
            if action == "leave":
                agents.policy.finished(waiting.pop(number), None)
        elif number in under_way:
            facts = under_way.pop(number)
            if action == "fail":
                agents.policy.forget(facts, "a")
                agents.policy.finished(facts, None)
            else:
                agents.answer(number, facts, 0.0)
        else:
            waiting[number] = turn(number, agents.turns.get(number, 0))
        for one, facts in list(waiting.items()):
            choice = agents.again(facts)
            if isinstance(choice, Choice):
                assert choice.replica in names
                under_way[one] = waiting.pop(one)
        if waiting:
            assert agents.policy.seats > 0
        assert agents.policy.held == len(waiting)
    agents.time.now += LONGEST_HOLD
    for facts in waiting.values():
        assert isinstance(agents.again(facts), Choice), "held for ever"
    for facts in (*waiting.values(), *under_way.values()):
        agents.policy.finished(facts, None)
    assert (agents.policy.held, agents.policy.under_way) == (0, 0)


# the configuration


def spec(**options: object) -> ModelSpec:
    return ModelSpec("m", (ReplicaSpec("a", "m", "a.service", "http://127.0.0.1:1"),), **options)


def test_the_admission_of_a_model_is_its_configuration_s():
    time = Time()
    for admission, holds in (("kv", True), ("all", False)):
        agents = Agents()
        agents.time = time
        agents.policy = PolicyBook([spec(admission=admission)], time).policy("m")
        agents.teach(turns=4)
        assert isinstance(agents.ask(9)[1], NotYet) is holds


def test_a_new_configuration_changes_who_is_held_and_forgets_nothing():
    agents = Agents()
    book = PolicyBook([spec()], agents.time)
    agents.policy = book.policy("m")
    agents.teach(turns=4)
    held = agents.ask(9)[0]
    assert isinstance(agents.again(held), NotYet)
    book.replace([spec(admission="all", wake=WakeLimits(timeout=9.0))])
    assert book.policy("m") is agents.policy
    assert isinstance(agents.again(held), Choice)
    agents.policy.finished(held, None)
    assert agents.turn(3) == "a"
    assert agents.policy.held == 0


def test_a_policy_that_a_request_asks_for_holds_as_its_model_says():
    agents = Agents()
    book = PolicyBook([spec(routing="adaptive", admission="all")], agents.time)
    agents.policy = book.policy("m", "prefill")
    agents.teach(turns=4)
    assert isinstance(agents.ask(9)[1], Choice)


def test_a_hold_ends_well_before_the_patience_of_the_queue_does():
    agents = Agents()
    agents.policy = PolicyBook([spec(wake=WakeLimits(timeout=8.0))], agents.time).policy("m")
    agents.teach(turns=4)
    facts = agents.ask(9)[0]
    agents.teach(turns=2, pause=2.5)
    assert isinstance(agents.again(facts), Choice)


def test_an_explanation_says_who_would_be_held_and_holds_nobody(agents):
    newcomer = turn(99, 0)
    told = agents.policy.explain(newcomer, agents.candidates)
    assert told.replica == ""
    assert [bid.replica for bid in told.bids] == ["a"]
    assert agents.policy.held == 0
    answer = agents.policy.choose(newcomer, agents.candidates)
    assert isinstance(answer, NotYet)
    assert told.reason == answer.reason
    agents.policy.finished(newcomer, None)


def test_an_explanation_lets_one_that_sits_go_home(agents):
    facts = turn(0, agents.turns[0])
    told = agents.policy.explain(facts, agents.candidates)
    choice = agents.policy.choose(facts, agents.candidates)
    assert (told.replica, told.reason) == (choice.replica, choice.reason)
