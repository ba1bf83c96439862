"""How long the prefill policy takes to decide, and what it remembers takes.

    .venv/bin/python tests/bench/bench_routing_decision.py

Three figures: reading and hashing a body of 400 kB, deciding among 8 replicas with 100000 whole requests known (the
requests are those of agents 60 turns into their work, 121 messages each), and memory after a million distinct prefixes.
Times are of the deciding thread's CPU, so that whatever else the machine does is not in them, but for what it leaves of
the processor's caches: decisions before which another process ran are also shown apart, and in the row "8 MB later" so
much other memory is gone through before each. Every request is made right before its decision, as a proxy reads it.
"""

import gc
import itertools
import json
import random
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from proxy.policies.prefill import Prefill
from proxy.reading.facts import Facts, rolling_keys
from proxy.reading.request import read_json
from proxy.routes import Prompt
from supervisord.core.admission import Candidate, Placement

#: Their KV is known, so every request here is of a long conversation that has or wants a seat.
REPLICAS = [Candidate(f"replica-{number}", number % 3, 0, 800_000) for number in range(8)]
TURNS = 60


def conversation(number: int, turns: int) -> Facts:
    texts = ["system", *(f"{number}.{turn}" for turn in range(2 * turns + 1))]
    keys, _ = rolling_keys([], texts)
    return Facts("m", True, keys, 1, tuple(12_000 + 1500 * turn for turn in range(len(texts))))


def timed(samples: list[float], call, *args):
    before = time.thread_time()
    result = call(*args)
    samples.append(1e6 * (time.thread_time() - before))
    return result


def switched() -> int:
    """How often this thread gave its processor to another."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


def all_of(decisions: list[tuple[str, float]], *kinds: str) -> list[float]:
    return [took for kind, took in decisions if not kinds or kind in kinds]


def show(name: str, samples: list[float]) -> None:
    if len(samples) < 2:
        return
    cuts = statistics.quantiles(samples, n=1000, method="inclusive")
    p50, p99, p999 = (cuts[at - 1] for at in (500, 990, 999))
    print(f"{name:52} p50 {p50:8.1f} us   p99 {p99:8.1f} us   p99.9 {p999:8.1f} us   ({len(samples)} samples)")


def hashing() -> None:
    messages = [{"role": "user" if n % 2 else "assistant", "content": "the same old words " * 210} for n in range(100)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    size = sum(len(json.dumps(message)) for message in messages)
    reading: list[float] = []
    hashing: list[float] = []
    for _ in range(200):
        # New ones every time: a text remembers its hash.
        timed(hashing, rolling_keys, [], [json.dumps(message) for message in messages])
        timed(reading, read_json, body, Prompt.CHAT)
    show(f"hashing {size / 1000:.0f} kB of messages", hashing)
    show(f"the whole reading of a body of {len(body) / 1000:.0f} kB", reading)


def deciding() -> None:
    rng = random.Random(1)
    clock = [0.0]
    policy = Prefill(lambda: clock[0])
    while len(policy._owners) < 100_000:
        facts = conversation(rng.randrange(10**9), 1)
        policy.choose(facts, REPLICAS)
        policy.finished(facts, None)
        clock[0] += 1.0
    first_bytes: list[float] = []
    learning: list[float] = []

    def turns(first: int, last: int, before: Callable[[], object] = list) -> list[tuple[str, float]]:
        """What kind of decision it was, and its microseconds."""
        decisions: list[tuple[str, float]] = []
        switches = switched()
        for turn, number in itertools.product(range(first, last), range(50)):
            facts = conversation(-number, turn)
            before()
            time_of: list[float] = []
            choice = timed(time_of, policy.choose, facts, REPLICAS)
            kind = "at home" if choice.placement is Placement.STAYS else "elsewhere"
            now = switched()
            decisions.append((kind if now == switches else "disturbed", time_of[0]))
            switches = now
            clock[0] += 0.5
            timed(first_bytes, policy.first_byte, facts)
            timed(learning, policy.finished, facts, 0.9)
        return decisions

    turns(TURNS, TURNS + 1)
    first_bytes.clear()
    learning.clear()
    decisions = turns(TURNS + 1, TURNS + 40)
    show(f"choosing, {len(policy._owners)} owners, {2 * TURNS + 4} to {2 * TURNS + 80} messages", all_of(decisions))
    show("  after another process had run", all_of(decisions, "disturbed"))
    show("  not so, stays at home", all_of(decisions, "at home"))
    show("  not so, goes elsewhere", all_of(decisions, "elsewhere"))
    show("the first byte", first_bytes)
    show("learning from an answer", learning)
    memory = bytearray(8_000_000)
    show("choosing, 8 MB later", all_of(turns(TURNS + 40, TURNS + 50, lambda: memory.count(1))))
    for turns_before, count in ((TURNS, 1000), (0, 4000)):
        unknown: list[float] = []
        for n in range(count):
            facts = conversation(10**9 * (1 + turns_before) + n, turns_before)
            timed(unknown, policy.choose, facts, REPLICAS)
            clock[0] += 0.5
            policy.finished(facts, None)
        show(f"choosing, one that nobody knows, {2 * turns_before + 2} messages", unknown)


def remembering() -> None:
    rng = random.Random(2)
    clock = [0.0]
    gc.collect()
    tracemalloc.start()
    policy = Prefill(lambda: clock[0])
    seen = most = 0
    before = tracemalloc.get_traced_memory()[0]
    while seen < 1_000_000:
        facts = conversation(rng.randrange(10**9), 2)
        seen += len(facts.keys)
        policy.choose(facts, REPLICAS)
        policy.finished(facts, None)
        clock[0] += 1.0
        if seen % 1000 < 6:
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
    held = sum(len(replica.held) for replica in policy._replicas.values())
    entries = held + len(policy._owners)
    print(
        f"after {seen} distinct prefixes: {held} prefixes and {len(policy._owners)} whole requests remembered, "
        f"at most {most / 1e6:.0f} MB ({most / entries:.0f} bytes each)"
    )


if __name__ == "__main__":
    hashing()
    deciding()
    remembering()
