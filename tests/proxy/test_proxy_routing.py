"""The policies, without HTTP: MISSION's shapes, the two old bugs, and replicas that come and go."""

import json
from collections import Counter as Tally

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.classic import Adaptive, Affinity, Owners, RoundRobin
from proxy.policies.prefill import Prefill
from proxy.reading.facts import Facts, rolling_keys
from proxy.routing import POLICIES, PolicyBook
from supervisord.core.admission import Candidate, Choice, Placement, RefusalCode
from supervisord.core.spec import ModelSpec, ReplicaSpec


def replicas(*names: str, generation: int = 0, in_flight: int = 0) -> list[Candidate]:
    return [Candidate(name, in_flight, generation) for name in names]


def chat(*messages: str, instructions: int = 0) -> Facts:
    keys, sizes = rolling_keys([], messages)
    return Facts("m", True, keys, instructions, sizes)


def no_clock() -> float:
    return 0.0


def spread(policy, facts, candidates, count) -> Tally:
    return Tally(policy.choose(facts, candidates).replica for _ in range(count))


AB = replicas("a", "b")


# The two bugs of MISSION.md F4


def test_a_fresh_burst_of_one_prefix_is_spread_over_every_replica():
    # Hashing the fresh prefix to pick a card sent all sixteen to one: 29.8 s instead of 18.6.
    assert spread(Adaptive(), chat("the same 90k tokens"), AB, 16) == {"a": 8, "b": 8}
    assert spread(Adaptive(), chat("system", "the same 90k tokens", instructions=1), AB, 16) == {"a": 8, "b": 8}


def test_a_burst_behind_one_shared_system_prompt_is_spread():
    policy = Adaptive()
    assert spread(policy, chat("system", instructions=1), AB, 2) == {"a": 1, "b": 1}  # a warm-up of the prompt alone
    chosen = Tally(policy.choose(chat("system", f"question {n}", instructions=1), AB).replica for n in range(16))
    assert chosen == {"a": 8, "b": 8}


CANDIDATES = st.lists(
    st.builds(Candidate, st.sampled_from("abcde"), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=5,
    unique_by=lambda candidate: candidate.name,
)
STEPS = st.tuples(CANDIDATES, st.text("xyz", max_size=4), st.integers(0, 5), st.sampled_from([None, *"abcdef"]))


@pytest.mark.parametrize("name", list(POLICIES))
@given(steps=st.lists(STEPS, min_size=1, max_size=25))
def test_replicas_that_come_and_go_never_raise_and_never_get_a_wrong_name_chosen(name, steps):
    # A stale index in the pin path answered 500 on every continuation.
    policy = POLICIES[name](no_clock)
    for candidates, messages, instructions, failed in steps:
        facts = chat(*messages, instructions=instructions)
        choice = policy.choose(facts, candidates)
        assert choice.replica in {candidate.name for candidate in candidates}
        assert choice.reason
        if failed is not None:
            policy.forget(facts, failed)


LENGTHS = st.sampled_from([100, 4_000, 120_000, 400_000])
CALLS = st.tuples(
    CANDIDATES,
    st.lists(st.sampled_from("xyz"), max_size=4),
    LENGTHS,
    st.sampled_from(["answer", "fail", "leave", "go on"]),
    st.sampled_from([0.0, 0.3, 5.0, 200.0]),
)


def play(name, calls, order):
    """Everything that can be done to a policy, with candidates in the order that ``order`` gives them."""
    now = [0.0]
    policy = POLICIES[name](lambda: now[0])
    said, under_way = [], []
    for candidates, messages, length, ending, seconds in calls:
        now[0] += seconds
        keys, sizes = rolling_keys([], messages)
        facts = Facts("m", True, keys, 0, tuple(length * n for n in range(1, len(sizes) + 1)))
        told = order([candidate._replace(kv_tokens=250_000) for candidate in candidates])
        answer = policy.choose(facts, told)
        said.append(answer)
        under_way.append(facts)
        if ending == "go on":
            continue
        if ending == "fail" and isinstance(answer, Choice):
            policy.forget(facts, answer.replica)
        if ending == "answer" and isinstance(answer, Choice):
            policy.first_byte(facts)
        policy.finished(under_way.pop(), 0.5 if ending == "answer" else None, 1000)
    for facts in under_way:
        policy.finished(facts, None)
    return said, policy


@pytest.mark.parametrize("name", list(POLICIES))
@given(calls=st.lists(CALLS, max_size=40), random=st.randoms())
def test_the_same_calls_give_the_same_answers_in_whatever_order_replicas_are_named(name, calls, random):
    def shuffled(candidates):
        random.shuffle(candidates)
        return candidates

    said, policy = play(name, calls, list)
    assert said == play(name, calls, list)[0] == play(name, calls, shuffled)[0]
    if isinstance(policy, Prefill):
        assert (policy.held, policy.under_way) == (0, 0)
        assert {policy.pending_seconds(replica) for replica in "abcde"} == {0.0}


@pytest.mark.parametrize("name", ["prefill", "adaptive", "roundrobin"])
@given(order=st.lists(st.permutations("abc"), min_size=1, max_size=3), length=LENGTHS)
def test_no_replica_starves_of_new_conversations_while_all_are_alike(name, order, length):
    now = [0.0]
    policy, served = POLICIES[name](lambda: now[0]), Tally()
    for number in range(30):
        facts = Facts("m", True, (f"{number}".encode(),), 0, (length,))
        choice = policy.choose(facts, replicas(*order[number % len(order)]))
        served[choice.replica] += 1
        now[0] += 60.0
        policy.first_byte(facts)
        policy.finished(facts, None)
    assert set(served) == set("abc")
    assert max(served.values()) - min(served.values()) <= 10


@pytest.mark.parametrize("name", list(POLICIES))
@given(steps=st.lists(STEPS, min_size=1, max_size=25))
def test_an_explanation_is_the_next_choice_and_changes_none(name, steps):
    asked, other = POLICIES[name](no_clock), POLICIES[name](no_clock)
    for candidates, messages, instructions, failed in steps:
        facts, same = chat(*messages, instructions=instructions), chat(*messages, instructions=instructions)
        told = [asked.explain(facts, candidates) for _ in range(2)]
        choice = asked.choose(facts, candidates)
        assert told[0] == told[1]
        assert (told[0].replica, told[0].reason) == (choice.replica, choice.reason)
        assert choice == other.choose(same, candidates)
        if failed is not None:
            asked.forget(facts, failed)
            other.forget(same, failed)


# adaptive


def test_a_continuation_goes_to_the_replica_that_served_its_prefix():
    policy = Adaptive()
    homes = {n: policy.choose(chat("system", f"task {n}", instructions=1), AB).replica for n in range(6)}
    assert set(homes.values()) == {"a", "b"}
    for turn in range(1, 5):
        for n in reversed(range(6)):
            dialogue = [m for t in range(turn) for m in (f"reply {n}.{t}", f"next {n}.{t}")]
            choice = policy.choose(chat("system", f"task {n}", *dialogue, instructions=1), AB)
            assert (choice.replica, choice.reason) == (homes[n], "continuation")


def test_continuations_do_not_use_up_turns_of_the_counter():
    policy = Adaptive()
    home = policy.choose(chat("q"), AB).replica
    for _ in range(3):
        assert policy.choose(chat("q", "a", "q2"), AB).replica == home
    assert policy.choose(chat("other"), AB).replica != home


def test_a_first_turn_of_several_messages_is_no_continuation():
    choice = Adaptive().choose(chat("system", "few", "shot", "question"), AB)
    assert choice.reason == "spread"


def test_the_longest_known_prefix_decides():
    policy = Adaptive()
    first = policy.choose(chat("q"), AB).replica
    moved = next(c for c in AB if c.name != first)
    policy.choose(chat("q", "a", "q2"), [moved])  # the first replica was away for one turn
    assert policy.choose(chat("q", "a", "q2", "a2", "q3"), AB).replica == moved.name


def test_a_replica_that_lost_its_cache_owns_nothing_any_more():
    policy = Adaptive()
    home = policy.choose(chat("q"), AB).replica
    restarted = [Candidate(c.name, 0, 1 if c.name == home else 0) for c in AB]
    choice = policy.choose(chat("q", "a", "q2"), restarted)
    assert choice.reason == "spread"
    choice = policy.choose(chat("q", "a", "q2", "a2", "q3"), restarted)
    assert choice.reason == "continuation"


def test_equal_requests_that_went_to_several_replicas_are_continued_on_the_least_busy():
    policy = Adaptive()
    assert spread(policy, chat("q"), AB, 2) == {"a": 1, "b": 1}
    busy = [Candidate("a", 3, 0), Candidate("b", 1, 0)]
    assert policy.choose(chat("q", "x", "q2"), busy).replica == "b"
    assert policy.choose(chat("q", "y", "q2"), list(reversed(busy))).replica == "b"


def test_a_replica_that_failed_the_request_does_not_own_it():
    policy = Adaptive()
    failed = policy.choose(chat("q"), AB).replica
    policy.forget(chat("q"), failed)
    other = policy.choose(chat("q"), [c for c in AB if c.name != failed]).replica
    for _ in range(2):
        assert policy.choose(chat("q", "a", "q2"), AB).replica == other


def test_a_burst_of_raw_prompts_with_one_long_beginning_is_spread():
    def prompt(length: int) -> Facts:  # a key for every block
        keys, sizes = rolling_keys([], ["x"] * length)
        return Facts("m", True, keys, 0, sizes, messages=False)

    policy = Adaptive()
    assert Tally(policy.choose(prompt(50 + n % 3), AB).replica for n in range(16)) == {"a": 8, "b": 8}


def test_an_owner_that_may_not_be_chosen_is_passed_over():
    policy = Adaptive()
    home = policy.choose(chat("q"), AB).replica
    choice = policy.choose(chat("q", "a", "q2"), [c for c in AB if c.name != home])
    assert choice.replica != home
    assert choice.reason == "spread"


# affinity


def test_affinity_pins_a_conversation_and_takes_turns_between_them():
    policy = Affinity()
    homes = {n: policy.choose(chat("s", f"{n}", instructions=1), AB).replica for n in range(8)}
    assert Tally(homes.values()) == {"a": 4, "b": 4}
    for n in range(8):
        choice = policy.choose(chat("s", f"{n}", "reply", "more", instructions=1), AB)
        assert (choice.replica, choice.reason) == (homes[n], "pinned")


def test_affinity_places_anew_when_the_pin_is_gone_cold_or_failed():
    policy = Affinity()
    home = policy.choose(chat("q"), AB).replica
    others = [c for c in AB if c.name != home]
    assert policy.choose(chat("q"), others).replica == others[0].name
    assert policy.choose(chat("q"), AB).replica == others[0].name  # it stays where it is warm now
    assert policy.choose(chat("q"), replicas("a", "b", generation=1)).reason == "spread"
    policy.forget(chat("q"), policy.choose(chat("q"), replicas("a", "b", generation=1)).replica)
    assert policy.choose(chat("q"), replicas("a", "b", generation=1)).reason == "spread"


# turns


@pytest.mark.parametrize("name", list(POLICIES))
def test_requests_without_messages_take_turns(name):
    assert spread(POLICIES[name](no_clock), Facts("m"), replicas("a", "b", "c"), 9) == {"a": 3, "b": 3, "c": 3}


@given(st.lists(st.permutations(["a", "b", "c", "d"]), min_size=4, max_size=12))
def test_the_order_of_the_candidates_does_not_matter(orders):
    policies = [policy() for policy in (RoundRobin, Adaptive, Affinity) for _ in range(2)]
    for turn, order in enumerate(orders):
        facts = chat(*"pqrs"[: turn % 4 + 1])
        for shuffled, fixed in zip(policies[::2], policies[1::2], strict=True):
            assert shuffled.choose(facts, replicas(*order)) == fixed.choose(facts, replicas(*"abcd"))


@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=30))
def test_round_robin_passes_nobody_over_twice(rounds):
    policy, passed_over = RoundRobin(), Tally()
    for names in rounds:
        chosen = policy.choose(Facts(), replicas(*names)).replica
        passed_over[chosen] = 0
        for name in names - {chosen}:
            passed_over[name] += 1
            assert passed_over[name] <= 3  # every other one went first, once each


def test_a_replica_that_comes_back_gets_one_turn_and_no_flood():
    policy = RoundRobin()
    assert spread(policy, Facts(), replicas("a"), 10) == {"a": 10}
    assert spread(policy, Facts(), AB, 10) == {"a": 5, "b": 5}


# what is remembered


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), max_size=200))
def test_owners_are_bounded_and_the_oldest_is_forgotten_first(steps):
    owners, order = Owners(capacity=8), []
    for number, name in steps:
        key = bytes([number])
        owners.add(key, Candidate(name, 0, 0))
        order = [k for k in order if k != key] + [key]
        assert len(owners) <= 8
    for key in order[-8:]:
        assert owners.of(key, replicas("a", "b", "c"))
    for key in order[:-8]:
        assert owners.of(key, replicas("a", "b", "c")) == []


def model(name, routing="adaptive", aliases=()):
    return ModelSpec(name, (ReplicaSpec("a", name, "a.service", "http://127.0.0.1:1"),), aliases, routing)


def test_each_model_has_its_own_policy_which_its_aliases_share():
    book = PolicyBook([model("m", aliases=("x", "y")), model("n", "roundrobin")], no_clock)
    assert book.policy("m") is book.policy("x") is book.policy("y")
    assert isinstance(book.policy("n"), RoundRobin)
    assert book.policy("nobody").choose(Facts(), AB).replica == "a"


def test_a_new_configuration_keeps_what_is_remembered_unless_the_routing_changed():
    book = PolicyBook([model("m"), model("n")], no_clock)
    m, n = book.policy("m"), book.policy("n")
    book.replace([model("m", aliases=("z",)), model("n", "affinity")])
    assert book.policy("m") is m is book.policy("z")
    assert isinstance(book.policy("n"), Affinity)
    assert book.policy("n") is not n


def test_every_refusal_code_has_an_answer():
    from proxy.errors import refused
    from supervisord.core.admission import Refuse

    for code in RefusalCode:
        error = refused(Refuse(code, "why", 3.2))
        assert error.status == (404 if code is RefusalCode.MODEL_NOT_FOUND else 503)
        assert error.code == code.value


# what a choice knew, for the counters


@pytest.mark.parametrize(
    ("name", "first", "again"),
    [
        ("prefill", Placement.COLD, Placement.STAYS),
        ("adaptive", Placement.COLD, Placement.STAYS),
        ("affinity", Placement.COLD, Placement.STAYS),
        ("roundrobin", Placement.BLIND, Placement.BLIND),
    ],
)
def test_a_choice_tells_whether_the_prefix_was_known_somewhere(name, first, again):
    policy = POLICIES[name](no_clock)
    opening, continuation = chat("hello"), chat("hello", "reply", "next")
    assert policy.choose(opening, AB).placement is first
    policy.first_byte(opening)
    policy.finished(opening, None)
    assert policy.choose(continuation, AB).placement is again


# a policy for one request (x-vllmctl-routing)


async def test_a_request_may_ask_for_another_policy_and_the_engine_does_not_hear_of_it(rig):
    engine = await rig.engine("a")
    usual, asked = await rig.post(), await rig.post(headers="x-vllmctl-routing: roundrobin\r\n")
    assert (usual.header("x-vllmctl-route"), asked.header("x-vllmctl-route")) == ("spread", "roundrobin")
    assert [request.header("x-vllmctl-routing") for request in engine.requests] == [None, None]


async def test_a_policy_that_is_none_is_refused_with_the_names_of_those_there_are(rig):
    engine = await rig.engine("a")
    answer = await rig.post(headers="x-vllmctl-routing: best\r\n")
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert error["param"] == "x-vllmctl-routing"
    assert all(name in error["message"] for name in POLICIES)
    assert engine.requests == []


def test_what_one_request_asks_for_remembers_apart_from_the_models_own():
    book = PolicyBook([ModelSpec("m", (), ("alias",), "adaptive")], no_clock)
    own, other = book.policy("m"), book.policy("m", "prefill")
    assert other is not own
    assert book.policy("alias", "prefill") is other
    assert book.policy("m", "adaptive") is own
    book.replace([ModelSpec("m", (), (), "adaptive")])
    assert book.policy("m", "prefill") is other
