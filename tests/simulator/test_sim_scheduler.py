"""Continuous batching without a clock: steps are planned and committed by hand."""

from __future__ import annotations

import pytest

from supervisord.simulator.cache import BlockPool
from supervisord.simulator.scheduler import CostModel, Scheduler, Seq

COSTS = CostModel()
BLOCK = 16


def scheduler(max_seqs: int = 256, budget: int = 2048, kv_tokens: int = 114_688) -> Scheduler:
    return Scheduler(COSTS, max_seqs, budget, BlockPool(kv_tokens // BLOCK, BLOCK))


def conversation(name: str, tokens: int) -> list[int]:
    """Keys of the full blocks of a text; texts that begin alike have equal names."""
    return [hash((name, at)) for at in range(tokens // BLOCK)]


def run(sched: Scheduler) -> tuple[float, dict[Seq, float]]:
    """Step until nothing is left; the time that took, and when each sequence got its first token."""
    clock, first = 0.0, {}
    while step := sched.plan():
        clock += step.seconds
        for seq in sched.commit(step):
            first.setdefault(seq, clock)
    return clock, first


@pytest.mark.parametrize(("concurrency", "total"), [(1, 42.8), (4, 147.6), (8, 230.8)])
def test_throughput_of_two_cards_is_near_the_measured_figures(concurrency: int, total: float) -> None:
    # The shape of the measured load is not known; 512 tokens in and 128 out, evenly over two cards, fits all three.
    per_card = [concurrency // 2 + concurrency % 2, concurrency // 2]
    rate = 0.0
    for requests in filter(None, per_card):
        sched = scheduler()
        for _ in range(requests):
            sched.add(Seq(512, 128))
        seconds, _ = run(sched)
        rate += requests * 128 / seconds
    assert rate == pytest.approx(total, rel=0.07)


@pytest.mark.parametrize(("batch", "tpot"), [(1, 0.0236), (4, 0.0288)])
def test_time_per_output_token_is_the_measured_one(batch: int, tpot: float) -> None:
    assert COSTS.seconds(0, batch) == pytest.approx(tpot, rel=0.01)


def test_prefill_runs_at_the_set_rate_in_chunks_of_the_budget() -> None:
    sched = scheduler()
    sched.add(Seq(32_768, 1))
    steps = 0
    seconds = 0.0
    while step := sched.plan():
        sched.commit(step)
        steps, seconds = steps + 1, seconds + step.seconds
    assert steps == 16
    assert seconds == pytest.approx(32_768 / 2800)


def test_a_long_prompt_does_not_stop_running_answers() -> None:
    sched = scheduler()
    talker = Seq(10, 50)
    sched.add(talker)
    step = sched.plan()
    assert step
    sched.commit(step)
    sched.add(Seq(20_000, 5))
    step = sched.plan()
    assert step
    assert step.decode == (talker,)
    assert sum(chunk for _, chunk in step.prefill) == 2048 - 1
    assert talker in sched.commit(step)


def test_first_come_first_served_up_to_max_num_seqs() -> None:
    sched = scheduler(max_seqs=2)
    seqs = [Seq(10, 3) for _ in range(3)]
    for seq in seqs:
        sched.add(seq)
    sched.plan()
    assert sched.running == seqs[:2]
    assert list(sched.waiting) == seqs[2:]
    _, first = run(sched)
    assert first[seqs[2]] > first[seqs[0]]


def test_what_does_not_fit_the_kv_cache_waits() -> None:
    sched = scheduler(kv_tokens=1600)
    for _ in range(2):
        sched.add(Seq(1280, 2))
    sched.plan()
    assert (len(sched.running), len(sched.waiting)) == (1, 1)
    assert sched.kv_usage == pytest.approx(0.8)
    run(sched)
    assert not sched.waiting
    assert sched.pool.in_use == 0


def test_a_prompt_that_does_not_fit_whole_beside_what_runs_does_not_begin() -> None:
    sched = scheduler(budget=256, kv_tokens=1280)
    first, second = Seq(600, 50), Seq(900, 1)
    sched.add(first)
    while not first.produced:
        step = sched.plan()
        assert step
        sched.commit(step)
    sched.add(second)
    order = []
    while step := sched.plan():
        order += [seq for seq in sched.commit(step) if seq.done]
    assert order == [first, second]
    assert sched.preemptions == 0


def test_what_waits_for_room_does_not_keep_its_prefix_from_making_room() -> None:
    sched = scheduler(budget=256, kv_tokens=1280)
    talk = conversation("talk", 640)
    sched.add(Seq(640, 1, talk))
    run(sched)
    first = Seq(480, 300)  # grows to all that is left, and beyond
    sched.add(first)
    while not first.produced:
        step = sched.plan()
        assert step
        sched.commit(step)
    second = Seq(1100, 1, [*talk, *conversation("more", 460)])
    sched.add(second)
    run(sched)
    assert 0 < second.cached < 640


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    sched = scheduler(kv_tokens=1600)
    seqs = [Seq(480, 200, conversation(f"{n}", 480)) for n in range(3)]
    for seq in seqs:
        sched.add(seq)
    run(sched)
    assert sched.preemptions > 0
    assert [seq.preempted for seq in seqs] == [False, False, True]
    assert [seq.cached for seq in seqs] == [0, 0, 0]


def test_cached_tokens_are_not_computed_but_the_last_one_always_is() -> None:
    sched = scheduler()
    keys = conversation("x", 1600)
    sched.add(Seq(1600, 1, keys))
    run(sched)
    hits = []
    sched.add(Seq(1600, 1, keys, lambda seq, hit: hits.append(hit.tokens)))
    step = sched.plan()
    assert step
    assert [chunk for _, chunk in step.prefill] == [BLOCK]  # the block with the last token
    assert hits == [1584]


def test_followers_of_a_shared_prefix_wait_for_its_blocks_and_not_for_its_first_answer() -> None:
    sched = scheduler()
    keys = conversation("shared", 8000)
    seqs = [Seq(8192, 400, [*keys, *conversation(f"own {n}", 192)]) for n in range(4)]
    for seq in seqs:
        sched.add(seq)
    clock, first = 0.0, {}
    while len(first) < 4:
        step = sched.plan()
        assert step
        clock += step.seconds
        for seq in sched.commit(step):
            first.setdefault(seq, clock)
    assert [seq.cached for seq in seqs] == [0, 8000, 8000, 8000]
    assert clock < 1.3 * (8192 + 3 * 192) / COSTS.prefill_rate


def test_the_answer_is_found_by_the_next_turn_where_it_is_known() -> None:
    sched = scheduler()
    sched.add(Seq(1600, 161, conversation("x", 1760)))
    run(sched)
    hits = []
    sched.add(Seq(2000, 1, conversation("x", 2000), lambda seq, hit: hits.append(hit.tokens)))
    sched.plan()
    assert hits == [1760]


def test_when_kv_is_short_the_last_one_gives_way_and_all_get_all_their_tokens() -> None:
    sched = scheduler(kv_tokens=1600)
    seqs = [Seq(480, 200, conversation(f"{n}", 480)) for n in range(3)]
    for seq in seqs:
        sched.add(seq)
    order = []
    while step := sched.plan():
        assert sched.pool.in_use <= sched.pool.capacity
        order += [seq for seq in sched.commit(step) if seq.done]
    assert sched.preemptions > 0
    assert order[0] is seqs[0]
    assert [seq.produced for seq in seqs] == [200] * 3
    assert sched.pool.in_use == 0


def test_a_long_context_is_slower_where_attention_has_a_price() -> None:
    sched = Scheduler(CostModel(per_pair=1e-8), 8, 2048, BlockPool(10_000, BLOCK))
    sched.add(Seq(32_768, 1))
    seconds, _ = run(sched)
    assert seconds == pytest.approx(32_768 / 2800 + 1e-8 * 32_768**2 / 2)


def test_nothing_is_admitted_while_new_ones_are_paused() -> None:
    sched = scheduler()
    sched.add(Seq(10, 1))
    assert sched.plan(admit=False) is None
    assert len(sched.waiting) == 1


def test_a_sequence_removed_during_its_step_gets_no_token() -> None:
    sched = scheduler()
    seq = Seq(10, 5)
    sched.add(seq)
    step = sched.plan()
    assert step
    assert sched.remove(seq)
    assert sched.commit(step) == []
    assert not sched.remove(seq)


def test_preempted_sequences_wait_in_front_in_order_and_finish_with_all_their_tokens() -> None:
    sched = scheduler()
    seqs = [Seq(100, 4), Seq(100, 4)]
    for seq in seqs:
        sched.add(seq)
    for _ in range(2):
        step = sched.plan()
        assert step
        sched.commit(step)
    late = Seq(10, 1)
    sched.add(late)
    sched.preempt_all()
    assert list(sched.waiting) == [*seqs, late]
    run(sched)
    assert [seq.produced for seq in seqs] == [4, 4]


def test_pooling_is_done_when_the_prompt_is_computed() -> None:
    sched = scheduler()
    seq = Seq(10, 0)
    sched.add(seq)
    step = sched.plan()
    assert step
    assert sched.commit(step) == [seq]
    assert seq.produced == 0
    assert not sched.running
