"""What a sleep and a wake consist of, step by step: vLLM's own order, with the intent on disk before the first call.

Level 1 keeps the weights in host RAM: one ``wake_up`` brings them back. Level 2 drops them: they must be loaded
again between the two halves of the wake, or the engine answers 200 and garbage. A level that is not known (somebody
slept the engine by hand) is woken as level 2, which is right for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from supervisord.core.actions import Call
from supervisord.core.readings import EngineState
from supervisord.core.record import Phase
from supervisord.core.recovery import UNKNOWN_LEVEL


@dataclass(frozen=True, slots=True)
class PersistStep:
    """Write down where the sequence stands, and go on only when it is on disk."""

    phase: Phase
    level: int

    @property
    def words(self) -> str:
        return f"record {self.phase}"


@dataclass(frozen=True, slots=True)
class CallStep:
    """One control call."""

    call: Call
    level: int = 0
    tags: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.call} {','.join(self.tags)}".rstrip() if self.call is not Call.SLEEP else f"sleep {self.level}"


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Ask the engine itself: a tier counts as reached only when it says so."""

    expected: EngineState

    @property
    def words(self) -> str:
        return f"verify {self.expected}"


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """Compare a short greedy answer with what a whole engine gave before; the first one is what is kept."""

    @property
    def words(self) -> str:
        return "canary"


Step = PersistStep | CallStep | VerifyStep | CanaryStep


def sleep_steps(level: int) -> tuple[Step, ...]:
    """From a drained, awake engine to ``level``."""
    return (
        PersistStep(Phase.FALLING_ASLEEP, level),
        CallStep(Call.SLEEP, level=level),
        VerifyStep(EngineState.ASLEEP),
        PersistStep(Phase.SETTLED, level),
    )


def wake_steps(level: int, *, canary: bool = False) -> tuple[Step, ...]:
    """From ``level`` to whole weights and an awake engine. Every step may be repeated: vLLM answers 200 again."""
    if level == 1:
        calls: tuple[Step, ...] = (CallStep(Call.WAKE_UP),)
    else:
        calls = (
            CallStep(Call.WAKE_UP, tags=("weights",)),
            CallStep(Call.RELOAD_WEIGHTS),
            CallStep(Call.WAKE_UP, tags=("kv_cache",)),
            CallStep(Call.RESET_PREFIX_CACHE),
        )
    last: tuple[Step, ...] = (CanaryStep(),) if canary else ()
    return (PersistStep(Phase.WAKING, level), *calls, VerifyStep(EngineState.AWAKE), *last)


def resume_steps(*, canary: bool = False) -> tuple[Step, ...]:
    """For an engine that still says it sleeps after ``wake_steps``: it was paused besides, or slept again meanwhile.

    Then its weights may be gone, whatever level it was woken from: everything, once more, and the pause ended.
    """
    steps = wake_steps(UNKNOWN_LEVEL, canary=canary)
    verify = steps.index(VerifyStep(EngineState.AWAKE))
    return (*steps[:verify], CallStep(Call.WAKE_UP), *steps[verify:])


#: For an engine that has just become ready for the first time.
FIRST_LOOK_STEPS: tuple[Step, ...] = (CanaryStep(),)
