"""The sleep machine: vLLM's rules, quirk by quirk."""

from __future__ import annotations

import pytest

from supervisord.simulator.options import DEFAULT_MEMORY, DEFAULT_TIMES
from supervisord.simulator.sleep import IllegalAccess, Pause, SleepState, Weights

AWAKE = SleepState(frees=True)


def test_level_1_keeps_the_weights_in_host_memory_and_a_plain_wake_brings_them_back_whole() -> None:
    asleep = AWAKE.sleep(1)
    assert (asleep.is_sleeping, asleep.weights, asleep.level) == (True, Weights.HOST, 1)
    assert asleep.host_bytes(DEFAULT_MEMORY) == DEFAULT_MEMORY.weights
    assert asleep.wake(None) == AWAKE


def test_gpu_memory_falls_to_the_context_on_sleep_and_returns_by_tags() -> None:
    asleep = AWAKE.sleep(2)
    assert AWAKE.gpu_bytes(DEFAULT_MEMORY)["used"] == 29 * 1024**3
    assert asleep.gpu_bytes(DEFAULT_MEMORY)["used"] == DEFAULT_MEMORY.other
    partly = asleep.wake(["weights"])
    assert partly.gpu_bytes(DEFAULT_MEMORY)["used"] == DEFAULT_MEMORY.other + DEFAULT_MEMORY.weights
    assert asleep.host_bytes(DEFAULT_MEMORY) == 0


def test_level_1_to_2_is_a_no_op() -> None:
    asleep = AWAKE.sleep(1)
    assert asleep.sleep(2) == asleep
    assert asleep.sleep(2).wake(None).whole


def test_a_plain_wake_after_level_2_leaves_the_weights_not_whole_and_looks_awake() -> None:
    woken = AWAKE.sleep(2).wake(None)
    assert not woken.whole
    assert not woken.is_sleeping
    assert woken.pause is Pause.NONE


def test_weights_that_were_not_whole_stay_so_through_a_level_1_nap() -> None:
    assert not AWAKE.sleep(2).wake(None).sleep(1).wake(None).whole


def test_the_proper_level_2_wake_is_whole_and_scheduling_resumes_with_the_last_tag_only() -> None:
    weights = AWAKE.sleep(2).wake(["weights"])
    assert weights.is_sleeping
    assert weights.pause is Pause.ALL
    assert weights.reload().wake(["kv_cache"]) == AWAKE


def test_reload_before_the_weights_are_mapped_is_an_illegal_access() -> None:
    with pytest.raises(IllegalAccess):
        AWAKE.sleep(2).reload()


def test_an_unknown_tag_changes_nothing() -> None:
    asleep = AWAKE.sleep(1)
    assert asleep.wake(["wheights"]) == asleep
    assert AWAKE.wake(["wheights"]) == AWAKE


def test_level_0_only_pauses() -> None:
    paused = AWAKE.sleep(0)
    assert paused.is_sleeping
    assert paused.gpu_bytes(DEFAULT_MEMORY) == AWAKE.gpu_bytes(DEFAULT_MEMORY)
    assert paused.wake(None) == AWAKE


def test_forced_scheduling_on_a_partial_wake_is_not_runnable() -> None:
    forced = AWAKE.sleep(1).wake(["weights", "scheduling"])
    assert forced.pause is Pause.NONE
    assert not forced.runnable


def test_without_sleep_mode_nothing_is_freed_and_level_2_does_no_harm() -> None:
    state = SleepState(frees=False)
    asleep = state.sleep(2)
    assert asleep.is_sleeping
    assert asleep.gpu_bytes(DEFAULT_MEMORY) == state.gpu_bytes(DEFAULT_MEMORY)
    assert asleep.wake(None).whole


def test_wake_times_add_up_to_the_measured_ones() -> None:
    nap = AWAKE.sleep(1)
    assert DEFAULT_TIMES.wake(nap, nap.asleep) == pytest.approx(3.0)
    deep = AWAKE.sleep(2)
    weights = DEFAULT_TIMES.wake(deep, frozenset({"weights"}))
    kv_cache = DEFAULT_TIMES.wake(deep.wake(["weights"]).reload(), frozenset({"kv_cache"}))
    assert weights + DEFAULT_TIMES.reload + kv_cache == pytest.approx(23.0)
