"""Sleep and wake as vLLM does them, quirks included, as one pure value: every operation returns the next state.

The rules are those of vLLM 0.32/0.33 seen on the running engine and in its source; each method names its quirk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

#: What ``/wake_up?tags=`` can name; any other tag is accepted and does nothing.
MEMORY_TAGS = ("weights", "kv_cache")
SCHEDULING_TAG = "scheduling"


class Pause(StrEnum):
    """Which requests the scheduler leaves alone."""

    NONE = "none"
    NEW = "new"  # running requests go on, none is admitted
    ALL = "all"


class Weights(StrEnum):
    """Where the weights are."""

    GPU = "gpu"
    HOST = "host"  # level 1: copied to host RAM
    DROPPED = "dropped"  # level 2: nowhere


class IllegalAccess(Exception):
    """The operation touched memory that is not mapped: on a GPU the engine core dies of this."""


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes. ``other``: the CUDA context and the like, kept while asleep."""

    total: int
    weights: int
    kv_cache: int
    other: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Simulated seconds of each operation (defaults of the options reproduce 2.5-4 s and about 23 s per wake)."""

    sleep: float
    wake1: float
    wake2: float

    def wake(self, state: SleepState, tags: frozenset[str]) -> float:
        """How long waking ``tags`` takes: copying back dominates at level 1; at level 2 it is nearly all the reload."""
        seconds = 0.0
        from_host = state.weights is Weights.HOST
        if "weights" in tags & state.asleep:
            seconds += 0.9 * self.wake1 if from_host else 0.1 * self.wake2
        if "kv_cache" in tags & state.asleep:
            seconds += 0.1 * self.wake1 if state.level == 1 else 0.05 * self.wake2
        return seconds

    @property
    def reload(self) -> float:
        return 0.85 * self.wake2


@dataclass(frozen=True, slots=True)
class SleepState:
    """One engine's sleep. ``frees``: started with --enable-sleep-mode; else (as on a CPU) memory and weights stay."""

    frees: bool
    #: The level of the sleep under way; 0 when awake.
    level: int = 0
    #: Memory that is released now.
    asleep: frozenset[str] = frozenset()
    weights: Weights = Weights.GPU
    #: False between a level-2 wake and ``reload_weights``: answers are garbage, with HTTP 200.
    whole: bool = True
    pause: Pause = Pause.NONE

    @property
    def is_sleeping(self) -> bool:
        """What ``/is_sleeping`` says: also true while the scheduler is merely paused."""
        return bool(self.asleep) or self.pause is not Pause.NONE

    @property
    def runnable(self) -> bool:
        """Can a request be computed? A partial wake with scheduling forced on is not: illegal memory access."""
        return not (self.frees and self.asleep)

    def paused(self, pause: Pause) -> SleepState:
        return replace(self, pause=pause)

    def sleep(self, level: int) -> SleepState:
        """Level 0 only pauses. Asleep already: nothing happens, whatever the level (1 -> 2 is a silent no-op)."""
        if level == 0 or self.asleep:
            return replace(self, pause=Pause.ALL)
        weights, whole = self.weights, self.whole
        if self.frees:
            weights = Weights.HOST if level == 1 else Weights.DROPPED
            whole = whole and level == 1
        return replace(self, level=level, asleep=frozenset(MEMORY_TAGS), weights=weights, whole=whole, pause=Pause.ALL)

    def wake(self, tags: Iterable[str] | None) -> SleepState:
        """``None``: everything. Scheduling resumes when all memory is back, or when named (however little is back)."""
        named = frozenset(tags) if tags is not None else frozenset((*MEMORY_TAGS, SCHEDULING_TAG))
        asleep = self.asleep - named
        resumes = SCHEDULING_TAG in named or (bool(self.asleep) and not asleep)
        return replace(
            self,
            level=self.level if asleep else 0,
            asleep=asleep,
            weights=self.weights if "weights" in asleep else Weights.GPU,
            pause=Pause.NONE if resumes else self.pause,
        )

    def reload(self) -> SleepState:
        """``reload_weights``: makes the weights whole; raises ``IllegalAccess`` while they are not on the GPU."""
        if self.frees and "weights" in self.asleep:
            raise IllegalAccess("CUDA error: an illegal memory access was encountered")
        return replace(self, whole=True)

    def gpu_bytes(self, sizes: MemorySizes) -> dict[str, int]:
        """GPU memory held, by purpose."""
        weights = 0 if self.frees and "weights" in self.asleep else sizes.weights
        kv_cache = 0 if self.frees and "kv_cache" in self.asleep else sizes.kv_cache
        used = weights + kv_cache + sizes.other
        return {"total": sizes.total, "weights": weights, "kv_cache": kv_cache, "other": sizes.other, "used": used}

    def host_bytes(self, sizes: MemorySizes) -> int:
        """Host RAM held by a napping engine's weights."""
        return sizes.weights if self.weights is Weights.HOST else 0
