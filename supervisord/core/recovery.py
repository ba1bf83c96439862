"""What an engine found running is worth: may a byte of it reach a client?

Asked when a replica is adopted at start-up, when its unit came up, and whenever a routine look finds it awake or
asleep against expectation. The record on disk says what we (or our predecessor) were about to do with the weights.
"""

from __future__ import annotations

from enum import StrEnum

from supervisord.core.readings import EngineState
from supervisord.core.record import Phase, Record

#: The level assumed where nobody knows it: waking as from level 2 is right from every level.
UNKNOWN_LEVEL = 2


class Verdict(StrEnum):
    """What to do with an engine that answers."""

    READY = "ready"  # awake and whole
    ASLEEP = "asleep"  # leave it
    FINISH_WAKE = "finish wake"  # a wake was begun, or the weights may be gone: go through the wake sequence


def judge(record: Record | None, invocation: str, state: EngineState) -> tuple[Verdict, int]:
    """The verdict and the sleep level it is about (0 with READY).

    ``record``: what is on disk; void when it is about another ``invocation`` of the unit, since a process that
    started later loaded its weights afresh. ``state`` is AWAKE or ASLEEP.
    """
    if record is not None and record.invocation != invocation:
        record = None
    if record is None or record.level == 0:
        return (Verdict.READY, 0) if state is EngineState.AWAKE else (Verdict.ASLEEP, UNKNOWN_LEVEL)
    if state is EngineState.ASLEEP:
        return (Verdict.FINISH_WAKE if record.phase is Phase.WAKING else Verdict.ASLEEP), record.level
    if record.level == 1:
        return Verdict.READY, 0
    return Verdict.FINISH_WAKE, record.level
