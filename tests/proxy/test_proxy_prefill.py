"""``prefill``: where the first token is predicted soonest, at home unless that costs too much, and nothing leaks."""

import gc
import json
from collections import Counter as Tally

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.held import Halves, Held
from proxy.policies.prefill import Prefill
from proxy.reading.facts import Facts
from proxy.reading.request import read_json
from proxy.reading.usage import usage_of
from proxy.routes import Prompt
from supervisord.core.admission import Candidate, Placement

TOKENS = 4  # bytes per token


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def prompt(*messages: tuple[str, int], instructions: int = 0, stream: bool = True) -> Facts:
    """A request of messages, each a text that stands for it and its tokens. Every call makes a request of its own."""
    keys, sizes, text, size = [], [], "", 0
    for name, tokens in messages:
        text, size = f"{text}/{name}", size + tokens * TOKENS
        keys.append(text.encode())
        sizes.append(size)
    return Facts("m", stream, tuple(keys), instructions, tuple(sizes))


def replicas(names: str = "ab", in_flight: int = 0, **generations: int) -> list[Candidate]:
    return [Candidate(name, in_flight, generations.get(name, 0)) for name in names]


def serve(policy: Prefill, time: Time, facts: Facts, candidates: list[Candidate]) -> str:
    """Choose, and answer at once in the time that the policy itself predicts."""
    name = policy.choose(facts, candidates).replica
    time.now += policy.pending_seconds(name)
    policy.first_byte(facts)
    policy.finished(facts, None)
    return name


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.mark.parametrize("asked", ["", [], None, 0, {}, "x", [[]]])
@pytest.mark.parametrize("route", list(Prompt))
def test_a_prompt_of_next_to_nothing_may_come_again_and_leaves_nothing(time, route, asked):
    policy = Prefill(time)
    body = {"stream": True, "prompt": asked, "messages": asked, "input": asked, "instructions": asked, "system": asked}
    for _ in range(3):
        facts = read_json(json.dumps(body).encode(), route).facts
        policy.explain(facts, replicas())
        policy.choose(facts, replicas("a"))
        policy.finished(facts, None)
    assert policy.under_way == 0
    assert policy.pending_seconds("a") == 0.0


@pytest.fixture
def policy(time: Time) -> Prefill:
    return Prefill(time)


def agent(number: int, turn: int, each: int = 2000) -> Facts:
    """The ``turn``-th request of a conversation behind a system prompt that all share."""
    tail = [(f"{kind}{number}.{at}", each) for at in range(turn) for kind in ("reply", "next")]
    return prompt(("system", 8000), (f"task{number}", 4000), *tail, instructions=1)


# where things go


def test_a_cold_burst_of_one_prefix_is_spread_over_idle_replicas(policy):
    burst = [prompt(("the same", 90_000), (f"q{n}", 500)) for n in range(16)]
    assert Tally(policy.choose(facts, replicas("abcd")).replica for facts in burst) == dict.fromkeys("abcd", 4)


def test_a_burst_gathers_where_its_prefix_is_when_the_others_are_busy(policy):
    prefix = ("the same", 20_000)
    first = prompt(prefix, ("q", 100))
    assert policy.choose(first, replicas("a")).replica == "a"
    policy.choose(prompt(("another", 90_000)), replicas("b"))
    burst = [prompt(prefix, (f"q{n}", 100)) for n in range(8)]
    assert {policy.choose(facts, replicas()).replica for facts in burst} == {"a"}


def test_conversations_behind_one_system_prompt_spread_and_then_stay(policy, time):
    first_turns = [agent(n, 0) for n in range(6)]
    homes = {n: policy.choose(facts, replicas()).replica for n, facts in enumerate(first_turns)}
    time.now += 60
    for facts in first_turns:
        policy.first_byte(facts)
        policy.finished(facts, None)
    assert Tally(homes.values()) == {"a": 3, "b": 3}
    for turn in range(1, 6):
        for n in reversed(range(6)):
            assert serve(policy, time, agent(n, turn), replicas()) == homes[n]


def raw(text: str) -> Facts:
    """A request of ``/v1/completions``."""
    return read_json(json.dumps({"model": "m", "prompt": text, "stream": True}).encode(), Prompt.COMPLETION).facts


def test_raw_prompts_that_grow_stay_where_they_are(policy, time):
    texts = {n: f"You are an agent.\nTask {n}: " + f"{n} words and more words. " * 4000 for n in range(4)}
    homes = {n: policy.choose(raw(text), replicas()).replica for n, text in texts.items()}
    assert Tally(homes.values()) == {"a": 2, "b": 2}
    time.now += 100
    for turn in range(4):
        for n in reversed(range(4)):
            texts[n] += f"\nTool {turn}: " + "a result " * 300
            facts = raw(texts[n])
            choice = policy.choose(facts, replicas())
            assert choice.reason.startswith(f"continuation of {homes[n]}, stays")
            time.now += 1
            policy.finished(facts, None)


@pytest.mark.parametrize("added", [1, 2, 40])
@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("instructions", [0, 1])
def test_a_turn_may_add_any_number_of_messages(policy, time, added, length, instructions):
    begun = [("system", 100), ("begun", 20_000), ("then", 100)][:length]
    home = serve(policy, time, prompt(*begun, instructions=instructions), replicas())
    longer = prompt(*begun, *((f"tool {n}", 20) for n in range(added)), instructions=instructions)
    assert policy.choose(longer, replicas()).reason.startswith(f"continuation of {home}, stays")
    other = prompt(("system", 100), *((f"tool {n}", 20) for n in range(added + 1)), instructions=instructions)
    assert policy.choose(other, replicas()).placement is Placement.COLD


def test_requests_that_are_remembered_are_nothing_to_the_collector_of_garbage(policy, time):
    def tracked(first: int) -> int:
        for number in range(first, first + 300):
            serve(policy, time, prompt(("system", 100), (f"question {number}", 100)), replicas())
        gc.collect()
        return len(gc.get_objects())

    few = tracked(0)
    assert tracked(300) - few < 100


def test_a_small_chat_does_not_queue_behind_a_long_prefill(policy):
    long = policy.choose(prompt(("long", 90_000)), replicas()).replica
    for n in range(5):
        assert policy.choose(prompt((f"hello{n}", 50)), replicas()).replica != long


def test_a_conversation_that_leaves_a_queue_is_told_to_move(policy, time):
    home = serve(policy, time, prompt(("hello", 100)), replicas())
    policy.choose(prompt(("another", 90_000)), replicas(home))
    choice = policy.choose(prompt(("hello", 100), ("reply", 20), ("next", 20)), replicas())
    assert choice.replica != home
    assert choice.placement is Placement.MOVES


def test_one_long_prompt_sent_again_goes_where_it_is_cached(policy, time):
    first = serve(policy, time, prompt(("long", 50_000)), replicas("abc"))
    for _ in range(3):
        assert serve(policy, time, prompt(("long", 50_000)), replicas("abc")) == first


def test_a_home_that_is_a_little_busy_is_kept_and_a_very_busy_one_is_left_for_good(policy, time):
    home = serve(policy, time, agent(1, 0), replicas())
    other = "b" if home == "a" else "a"
    policy.choose(prompt(("small", 1000)), replicas(home))
    choice = policy.choose(agent(1, 1), replicas())
    assert (choice.replica, choice.reason.split(":")[0]) == (home, f"continuation of {home}, stays")
    policy.choose(prompt(("huge", 200_000)), replicas(home))
    choice = policy.choose(agent(1, 2), replicas())
    assert (choice.replica, choice.reason.split(":")[0]) == (other, f"continuation of {home}, moves")
    time.now += 1000
    choice = policy.choose(agent(1, 3), replicas())
    assert choice.reason.startswith(f"continuation of {other}, stays")


def test_the_reason_tells_the_predicted_seconds_of_every_replica_the_cheapest_first(policy):
    policy.choose(prompt(("long", 40_000)), replicas("b"))
    assert policy.choose(prompt(("x", 4000)), replicas("ba")).reason == "cold: a 1.05s, b 11.10s"


def test_a_replica_that_lost_its_cache_owns_nothing(policy, time):
    home = serve(policy, time, agent(1, 0), replicas())
    restarted = replicas("ab", **{home: 1})
    assert policy.choose(agent(1, 1), restarted).reason.startswith("cold")


def test_a_replica_that_restarted_is_the_home_of_what_it_serves_then(policy, time):
    serve(policy, time, agent(1, 0), replicas("a"))
    serve(policy, time, agent(1, 1), replicas("a", a=1))
    assert policy.choose(agent(1, 2), replicas("a", a=1)).reason.startswith("continuation of a, stays")


def test_requests_in_flight_count_when_nothing_else_does(policy):
    busy = [Candidate("a", 9, 0), Candidate("b", 2, 0), Candidate("c", 5, 0)]
    assert policy.choose(Facts("m"), busy).replica == "b"


def test_a_replica_that_failed_the_request_is_no_home(policy, time):
    facts = agent(1, 0)
    failed = policy.choose(facts, replicas()).replica
    policy.forget(facts, failed)
    assert policy.pending_seconds(failed) == 0.0
    other = policy.choose(facts, [c for c in replicas() if c.name != failed]).replica
    time.now += 60
    assert policy.choose(agent(1, 1), replicas()).reason.startswith(f"continuation of {other}, stays")


def test_a_slow_replica_is_found_out_and_gets_less(policy, time):
    served: Tally = Tally()
    for n in range(200):
        facts = prompt((f"x{n}", 8000))
        name = policy.choose(facts, replicas()).replica
        time.now += 2.0 * (4 if name == "a" else 1)
        policy.first_byte(facts)
        policy.finished(facts, None)
        served[name] += n >= 100
    assert served["a"] < served["b"] / 4


@pytest.mark.parametrize("last", [15, 7, 0])
def test_a_burst_that_is_computed_in_one_step_tells_of_no_other_speed(policy, time, last):
    """2000 tokens a second, learned; then 16 questions about one text, whose first bytes come at once in any order."""
    for n in range(16):
        facts = prompt((f"x{n}", 8000))
        policy.choose(facts, replicas("ab"[n % 2]))
        time.now += 4
        policy.first_byte(facts)
        policy.finished(facts, None)
    for text in range(3):
        burst = [prompt((f"text {text}", 20_000), (f"q{n}", 500)) for n in range(16)]
        for facts in burst:
            policy.choose(facts, replicas("a"))
        time.now += (20_000 + 16 * 500) / 2000
        for facts in burst[last:] + burst[:last]:
            policy.first_byte(facts)
            time.now += 1e-4
        for facts in burst:
            policy.finished(facts, None)
    bids = policy.explain(prompt(("x", 8000)), replicas()).bids
    assert {bid.replica: bid.seconds for bid in bids} == {name: pytest.approx(4.0, rel=0.25) for name in "ab"}
    # Nor were the texts found gone for the time that all of their questions took.
    assert policy.explain(prompt(("text 0", 20_000), ("q", 500)), replicas("a")).bids[0].cached_tokens == 20_000


def test_what_made_room_in_a_cache_counts_as_cold_after_a_miss(policy, time):
    """Ten prompts of 20000 tokens, over and over, in a cache that holds fewer: the answers tell."""
    for _ in range(3):
        for n in range(10):
            facts = prompt((f"doc{n}", 20_000), ("q", 10))
            policy.choose(facts, replicas("a"))
            time.now += 6
            policy.first_byte(facts)
            policy.finished(facts, 0.0)
    assert policy.choose(prompt(("doc0", 20_000), ("q", 10)), replicas("a")).reason == "cold: a 6.00s"


def test_what_made_room_is_found_out_by_the_time_where_answers_do_not_tell(policy, time):
    def ask(n: int) -> str:
        facts = prompt((f"doc{n}", 20_000), ("q", 10))
        reason = policy.choose(facts, replicas("a")).reason
        time.now += 6
        policy.first_byte(facts)
        policy.finished(facts, None)
        return reason

    for round_ in range(3):
        for n in range(10):
            reason = ask(n)
            assert reason == "cold: a 6.00s" or round_ < 2


# what holds whatever happens


def test_pending_work_shrinks_while_time_passes_and_not_below_nothing(policy, time):
    policy.choose(prompt(("x", 40_000)), replicas("a"))
    before = policy.pending_seconds("a")
    time.now += 4
    assert policy.pending_seconds("a") == pytest.approx(before - 4)
    time.now += 400
    assert policy.pending_seconds("a") == 0.0


MESSAGES = st.lists(st.sampled_from([("s", 3000), ("x", 10), ("y", 9000), ("z", 400)]), max_size=5)
STEP = st.tuples(
    MESSAGES,
    st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1),
    st.sampled_from(["hold", "answer", "fail", "leave"]),
    st.booleans(),
    st.floats(0, 20),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)


def play(steps, order):
    """Run ``steps`` with the candidates in the order that ``order`` puts them; what was chosen, and the policy."""
    time = Time()
    policy, open_requests, chosen = Prefill(time, capacity=64, wholes=32), [], []
    for messages, candidates, ending, stream, wait, cached in steps:
        facts = prompt(*messages, stream=stream)
        choice = policy.choose(facts, order([Candidate(name, *rest) for name, rest in candidates.items()]))
        assert choice.replica in candidates
        chosen.append(choice)
        time.now += wait
        if ending == "fail":
            policy.forget(facts, choice.replica)
            open_requests.append((facts, cached))
        elif ending == "leave":
            policy.finished(facts, None)
        else:
            open_requests.append((facts, cached))
            if ending == "answer":
                policy.first_byte(facts)
        if len(open_requests) > 3:
            policy.finished(*open_requests.pop(0))
    for facts, cached in open_requests:
        policy.finished(facts, cached)
    return chosen, policy


@given(st.lists(STEP, max_size=40), st.randoms())
def test_the_order_of_candidates_does_not_matter_and_the_same_calls_give_the_same_choices(steps, random):
    def shuffled(candidates):
        random.shuffle(candidates)
        return candidates

    assert play(steps, shuffled)[0] == play(steps, list)[0]


@given(st.lists(STEP, max_size=40))
def test_every_charge_is_given_back(steps):
    _, policy = play(steps, list)
    assert policy.under_way == 0
    assert all(policy.pending_seconds(name) == 0.0 for name in "abcde")


@given(st.integers(2, 6), st.integers(0, 1000))
def test_no_idle_replica_starves(count, seed):
    time = Time()
    policy = Prefill(time)
    names = "abcdef"[:count]
    served = Tally(
        serve(policy, time, prompt((f"{seed}.{n}", 100 + (seed * n) % 5000)), replicas(names)) for n in range(60)
    )
    assert set(served) == set(names)
    assert max(served.values()) - min(served.values()) <= 30


# the parts


def test_halves_are_bounded_and_keep_what_was_used_lately():
    halves: Halves[int] = Halves(100)
    for n in range(10_000):
        halves.put(b"often", 1)
        halves.put(n.to_bytes(4, "big"), n)
        assert len(halves) <= 100
    assert halves.get(b"often") == 1
    assert halves.get((9_999).to_bytes(4, "big")) == 9_999
    assert halves.get((1).to_bytes(4, "big")) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_longest_prefix_held_is_the_longest_common_one(stored, asked):
    held = Held(0)
    held.add(prompt(*((str(n), 10) for n in stored)), 10.0)
    common = next(
        (i for i, (x, y) in enumerate(zip(stored, asked, strict=False)) if x != y), min(len(stored), len(asked))
    )
    assert held.longest(prompt(*((str(n), 10) for n in asked)))[0] == common * 10 * TOKENS


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.floats(0, 5000)), min_size=1, max_size=20
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(-1, 11),
)
def test_a_hint_changes_where_is_looked_first_and_not_what_is_found(stored, asked, hint):
    held = Held(0)
    for messages, new in stored:
        held.add(prompt(*((str(n), 10) for n in messages)), new)
    facts = prompt(*((str(n), 10) for n in asked))
    assert held.longest(facts, min(hint, len(asked) - 1)) == held.longest(facts)


def test_the_beginning_of_a_conversation_does_not_age_while_it_goes_on():
    """Another that branches off from it late finds it, although its first messages were put long ago."""
    held = Held(0, holds=10_000.0)
    messages = [("start", 100)]
    for n in range(60):
        messages = [*messages, (f"m{n}", 100)]
        held.add(prompt(*messages), 400.0)
    branch = prompt(*messages[:30], ("other", 100))
    assert held.longest(branch)[0] == 30 * 100 * TOKENS


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (b'{"usage":{"prompt_tokens":200,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":150}}}', 0.75),
        (b'{"usage": {"input_tokens": 200, "output_tokens": 5, "cache_read_input_tokens": 50}}', 0.25),
        (b'{"usage":{"input_tokens":80,"input_tokens_details":{"cached_tokens":80},"output_tokens":1}}', 1.0),
        (b'{"usage":{"prompt_tokens":200,"prompt_tokens_details":null}}', None),
        (b'{"usage":{"prompt_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}}', None),
        (b"", None),
        (b'"prompt_tokens": 9, "cached_tokens": 9' + b"x" * 4000, None),
    ],
)
def test_the_share_of_cached_tokens_is_read_from_the_end_of_an_answer(answer, share):
    usage = usage_of(answer)
    assert (usage and usage.cached_share) == share
