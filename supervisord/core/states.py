"""A replica's life as one table. The code advances by it, the docs are drawn from it, a test holds them together.

Health and hold are separate from the life state: a ready replica may be suspect, a stopped one may be held.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Life(StrEnum):
    """Where a replica is in its life; this is the word that a person sees."""

    STOPPED = "stopped"
    STARTING = "starting"  # the unit is starting, or it runs and the engine is still loading
    READY = "ready"
    DRAINING = "draining"  # the gate is closed, requests in flight finish
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    STOPPING = "stopping"
    FAILED = "failed"


class Health(StrEnum):
    """What we believe of a replica that should answer."""

    OK = "ok"
    TRIAL = "trial"  # a request failed there, looks are well again: gets one request at a time until one succeeds
    SUSPECT = "suspect"  # a connection failed or a probe did; gets requests only when nobody else is left
    DEAD = "dead"  # confirmed; its unit is being restarted


class Hold(StrEnum):
    """What an operator said; stays until the operator takes it back."""

    NONE = "none"
    DRAINED = "drained"  # runs, but gets no requests
    DOWN = "down"  # stopped, and no request starts it


class Cause(StrEnum):
    """Why a replica's life advances."""

    START = "start wanted"
    ENGINE_AWAKE = "engine awake, weights whole"
    ENGINE_ASLEEP = "engine found asleep"
    WEIGHTS_UNKNOWN = "engine awake, weights not known to be whole"
    GATE_CLOSED = "rest or stop wanted"
    GATE_REOPENED = "wanted again before the rest began"
    DRAINED_TO_SLEEP = "in flight 0, sleep"
    DRAINED_TO_STOP = "in flight 0, stop"
    SLEEP_VERIFIED = "sleep verified"
    SLEEP_REFUSED = "still awake after sleep"
    WAKE = "wake wanted"
    STOP = "stop wanted"
    UNIT_DOWN = "unit inactive"
    UNIT_UP = "unit started by somebody"
    UNIT_FAILED = "unit failed"
    UNIT_RESTARTED = "unit restarts"
    ESCALATE = "broken, unit is restarted"
    RESTART = "restart wanted"
    GIVE_UP = "attempts used up, back-off"


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: in ``source``, ``cause`` leads to ``target``."""

    source: Life
    cause: Cause
    target: Life


class IllegalTransition(Exception):
    """The code tried to advance a replica along a row that the table does not have: a defect of ours."""

    def __init__(self, replica: str, life: Life, cause: Cause) -> None:
        super().__init__(f"replica {replica}: no transition from {life} for '{cause}'")
        self.replica, self.life, self.cause = replica, life, cause


def _rows(source: Life, *rows: tuple[Cause, Life]) -> tuple[Transition, ...]:
    return tuple(Transition(source, cause, target) for cause, target in rows)


# The unit can change under any state, by systemd or by a person; these rows hold wherever a unit can be up.
_UNIT_ROWS = (
    (Cause.UNIT_DOWN, Life.STOPPED),
    (Cause.UNIT_FAILED, Life.FAILED),
    (Cause.UNIT_RESTARTED, Life.STARTING),
)

TRANSITIONS: tuple[Transition, ...] = (
    *_rows(
        Life.STOPPED,
        (Cause.START, Life.STARTING),
        (Cause.UNIT_UP, Life.STARTING),
        (Cause.UNIT_FAILED, Life.FAILED),
        (Cause.GIVE_UP, Life.FAILED),
    ),
    *_rows(
        Life.STARTING,
        (Cause.ENGINE_AWAKE, Life.READY),
        (Cause.ENGINE_ASLEEP, Life.ASLEEP),
        (Cause.WEIGHTS_UNKNOWN, Life.WAKING),
        (Cause.STOP, Life.STOPPING),
        (Cause.ESCALATE, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
        *_UNIT_ROWS,
    ),
    *_rows(
        Life.READY,
        (Cause.GATE_CLOSED, Life.DRAINING),
        (Cause.ENGINE_ASLEEP, Life.ASLEEP),
        (Cause.WEIGHTS_UNKNOWN, Life.WAKING),
        (Cause.ESCALATE, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
        *_UNIT_ROWS,
    ),
    *_rows(
        Life.DRAINING,
        (Cause.GATE_REOPENED, Life.READY),
        (Cause.DRAINED_TO_SLEEP, Life.FALLING_ASLEEP),
        (Cause.DRAINED_TO_STOP, Life.STOPPING),
        (Cause.RESTART, Life.STARTING),
        (Cause.ENGINE_ASLEEP, Life.ASLEEP),
        (Cause.WEIGHTS_UNKNOWN, Life.WAKING),
        (Cause.ESCALATE, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
        *_UNIT_ROWS,
    ),
    *_rows(
        Life.FALLING_ASLEEP,
        (Cause.SLEEP_VERIFIED, Life.ASLEEP),
        (Cause.SLEEP_REFUSED, Life.READY),
        (Cause.WEIGHTS_UNKNOWN, Life.WAKING),
        (Cause.ESCALATE, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
        *_UNIT_ROWS,
    ),
    *_rows(
        Life.ASLEEP,
        (Cause.WAKE, Life.WAKING),
        (Cause.STOP, Life.STOPPING),
        (Cause.RESTART, Life.STARTING),
        (Cause.ENGINE_AWAKE, Life.READY),
        (Cause.WEIGHTS_UNKNOWN, Life.WAKING),
        (Cause.ESCALATE, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
        *_UNIT_ROWS,
    ),
    *_rows(
        Life.WAKING,
        (Cause.ENGINE_AWAKE, Life.READY),
        (Cause.ESCALATE, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
        *_UNIT_ROWS,
    ),
    *_rows(
        Life.STOPPING,
        (Cause.UNIT_DOWN, Life.STOPPED),
        (Cause.UNIT_FAILED, Life.STOPPED),
        (Cause.UNIT_RESTARTED, Life.STARTING),
        (Cause.GIVE_UP, Life.FAILED),
    ),
    *_rows(
        Life.FAILED,
        (Cause.START, Life.STARTING),
        (Cause.STOP, Life.STOPPING),
        (Cause.UNIT_UP, Life.STARTING),
        (Cause.UNIT_DOWN, Life.STOPPED),
    ),
)

_TABLE = {(row.source, row.cause): row.target for row in TRANSITIONS}
assert len(_TABLE) == len(TRANSITIONS), "two rows for one state and cause"


def advance(replica: str, life: Life, cause: Cause) -> Life:
    """The state after ``cause``; raises ``IllegalTransition`` where the table has no such row."""
    try:
        return _TABLE[life, cause]
    except KeyError:
        raise IllegalTransition(replica, life, cause) from None
