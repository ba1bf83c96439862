"""Cache, tokens, answers, faults, metrics: the small pure parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.simulator import tokens
from supervisord.simulator.cache import BlockPool, Hit
from supervisord.simulator.faults import Faults, UnknownFault, parse
from supervisord.simulator.metrics import Histogram
from supervisord.simulator.tokens import count

TEXT = bytes(range(64)) * 10  # ten blocks of sixteen four-byte tokens


def test_a_stored_prompt_is_a_hit_for_everything_that_starts_with_it() -> None:
    cache = BlockPool(100, 16)
    cache.store(cache.keys(TEXT), tainted=False)
    longer = TEXT + b"and more of it"
    assert cache.match(cache.keys(longer), count(longer)) == Hit(160, False)
    other = b"x" + TEXT
    assert cache.match(cache.keys(other), count(other)) == Hit(0, False)


def test_a_whole_prompt_is_never_a_hit() -> None:
    cache = BlockPool(100, 16)
    cache.store(cache.keys(TEXT), tainted=False)
    assert cache.match(cache.keys(TEXT), count(TEXT)).tokens == 144


def test_a_cache_salt_separates_equal_prompts() -> None:
    cache = BlockPool(100, 16)
    cache.store(cache.keys(TEXT, "mine"), tainted=False)
    assert cache.match(cache.keys(TEXT, "yours"), count(TEXT)).tokens == 0


def test_keys_can_be_extended_instead_of_computed_again() -> None:
    cache = BlockPool(100, 16)
    known = cache.keys(TEXT, "salt")
    longer = TEXT + TEXT
    assert cache.keys(longer, "salt", known) == cache.keys(longer, "salt")


def test_the_least_recently_used_prompt_goes_first_and_its_tail_before_its_head() -> None:
    cache = BlockPool(15, 16)
    old, new = TEXT, b"new " + TEXT
    cache.store(cache.keys(old), tainted=False)
    cache.store(cache.keys(new), tainted=False)
    assert len(cache) == 15
    assert cache.match(cache.keys(new), count(new)).tokens == 160
    assert cache.match(cache.keys(old), count(old + b"!")).tokens == 80


def test_blocks_made_by_broken_weights_taint_what_builds_on_them() -> None:
    cache = BlockPool(100, 16)
    cache.store(cache.keys(TEXT), tainted=True)
    assert cache.match(cache.keys(TEXT), count(TEXT)).tainted
    cache.clear()
    assert cache.match(cache.keys(TEXT), count(TEXT)) == Hit(0, False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans()), max_size=60))
def test_blocks_are_never_lost_and_what_is_held_is_never_given_away(steps) -> None:
    pool, held = BlockPool(20, 16), {}
    for name, blocks, lets_go in steps:
        if lets_go and held:
            pool.free(held.pop(next(iter(held))))
        elif name not in held:
            keys = [hash((name % 2, at)) for at in range(blocks)]
            mine, _ = pool.take(keys, blocks * 16 + 1)
            if pool.grow(mine, blocks * 16 + 1):
                pool.fill(mine, keys, blocks * 16, tainted=False)
                held[name] = mine
                assert pool.match(keys, blocks * 16 + 1).tokens == blocks * 16
            else:
                assert pool.capacity - pool.in_use < blocks + 1
                pool.free(mine)
        assert (
            len({key for mine in held.values() for key in mine.shared}) + sum(m.own for m in held.values())
            == pool.in_use
        )
        assert pool.in_use <= pool.capacity
    for mine in held.values():
        pool.free(mine)
    assert pool.in_use == 0
    assert len(pool) <= pool.capacity


@pytest.mark.parametrize("text", ["", "a", "abcd", "grüße, 世界", "x" * 1001])
def test_detokenize_undoes_tokenize(text: str) -> None:
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert len(ids) == tokens.count(text.encode())


def test_a_conversation_starts_with_its_earlier_turn_and_its_answer() -> None:
    turn = [{"role": "user", "content": "hello"}]
    later = [
        *turn,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    assert tokens.render_chat(later).startswith(tokens.render_chat(turn) + b"hi")


def test_answers_differ_by_prompt_and_are_the_same_every_time() -> None:
    one, again, other = (tokens.Answer(p, "last words") for p in (b"prompt 1", b"prompt 1", b"prompt 2"))
    texts = ["".join(answer.token(i, False) for i in range(answer.length)) for answer in (one, again, other)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert "last words" in texts[0]
    assert tokens.Answer.GARBAGE not in texts[0]
    assert tokens.Answer.GARBAGE in one.token(0, True)


def test_a_counted_fault_strikes_that_often_and_a_count_of_zero_disarms() -> None:
    faults = Faults()
    faults.arm("wake-fails", count=2)
    assert [bool(faults.take("wake-fails")) for _ in range(3)] == [True, True, False]
    faults.arm("503")
    assert faults.take("503")
    assert faults.take("503")
    faults.arm("503", count=0)
    assert not faults.take("503")


def test_a_fault_of_a_moment_strikes_at_that_moment_only() -> None:
    faults = Faults()
    faults.arm("die", "wake_up", 1)
    assert faults.take_at("sleep") is None
    fault = faults.take_at("wake_up")
    assert fault
    assert fault.name == "die"
    assert faults.take_at("wake_up") is None


def test_an_unknown_fault_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownFault, match=r"cannot arm fault 'explode'.*reset-mid-stream"):
        Faults().arm("explode")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("die", ("die", "", None)),
        ("die=chunk:3", ("die", "chunk:3", None)),
        ("reset-mid-stream=2*5", ("reset-mid-stream", "2", 5)),
        ("503*1", ("503", "", 1)),
    ],
)
def test_faults_of_the_command_line(text: str, expected: tuple[str, str, int | None]) -> None:
    assert parse(text) == expected


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    lines = list(histogram.lines("m", 'a="b"'))
    assert lines[:4] == [
        'm_bucket{a="b",le="0.1"} 2.0',
        'm_bucket{a="b",le="1.0"} 3.0',
        'm_bucket{a="b",le="+Inf"} 4.0',
        'm_count{a="b"} 4.0',
    ]
