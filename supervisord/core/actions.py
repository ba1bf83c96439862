"""What the core wants done. Effects do it and send the result back as an event (events.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from supervisord.core.admission import Lease, Refuse
from supervisord.core.canary import Fingerprint
from supervisord.core.record import Record


class UnitVerb(StrEnum):
    """A job for systemd."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class RunUnitJob:
    """Run one systemd job; ends in ``UnitJobDone`` with the same ``op``."""

    replica: str
    op: int
    unit: str
    verb: UnitVerb
    #: Seconds.
    timeout: float
    #: The unit's start limit counts it: an engine that breaks again and again is left alone in the end.
    counted: bool = False


class Call(StrEnum):
    """A call of the engine's control face."""

    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    RELOAD_WEIGHTS = "reload_weights"
    RESET_PREFIX_CACHE = "reset_prefix_cache"


@dataclass(frozen=True, slots=True)
class CallEngine:
    """One control call; ends in ``EngineAnswered`` with the same ``op``."""

    replica: str
    op: int
    call: Call
    timeout: float
    #: For SLEEP.
    level: int = 0
    #: For WAKE_UP; empty: everything.
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeEngine:
    """One look at the engine; ends in ``Probed`` with the same ``op``."""

    replica: str
    op: int
    timeout: float
    #: Only whether it sleeps: the end of a sequence, where every millisecond is a waiting client's.
    verify: bool = False


@dataclass(frozen=True, slots=True)
class Persist:
    """Bring this record (None: no record) to disk; ends in ``Persisted`` with the same ``op`` (0: nobody waits)."""

    replica: str
    op: int
    record: Record | None


@dataclass(frozen=True, slots=True)
class TakeFingerprint:
    """Ask the engine for a short greedy answer; ends in ``Fingerprinted`` with the same ``op``."""

    replica: str
    op: int
    timeout: float


@dataclass(frozen=True, slots=True)
class SaveFingerprint:
    """Keep what a whole engine answers, for the daemon after us; nobody waits for it."""

    replica: str
    invocation: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class ReadLastLines:
    """Read the unit's newest log lines; ends in ``LastLines``."""

    replica: str
    unit: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A waiting request got its lease."""

    ticket: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Deny:
    """A waiting request is refused."""

    ticket: int
    refusal: Refuse


@dataclass(frozen=True, slots=True)
class Fault:
    """A waiting request's policy raised when it was asked again: a defect, and that request's alone."""

    ticket: int
    error: Exception


class CommandFailure(StrEnum):
    """Why a command was not carried out; the control face turns it into its own errors."""

    SUPERSEDED = "superseded"
    HELD = "held"
    SLEEP_UNSUPPORTED = "sleep unsupported"
    SLEEP_FAILED = "sleep failed"
    WAKE_FAILED = "wake failed"
    START_FAILED = "start failed"
    STOP_FAILED = "stop failed"
    UNIT_MISSING = "unit missing"
    SHUTTING_DOWN = "shutting down"
    INSUFFICIENT_MEMORY = "insufficient memory"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Answer:
    """An operator's command ended; ``failure`` is None when it was done."""

    ticket: int
    failure: CommandFailure | None = None
    message: str = ""


class NoteKind(StrEnum):
    """What happened, for the journal and the counters. One line and one count each."""

    DEMOTED = "demoted"
    REVIVED = "revived"
    WAKE_STARTED = "wake_started"
    WOKEN = "woken"
    SLEEP_STARTED = "sleep_started"
    SLEPT = "slept"
    SLEEP_FAILED = "sleep_failed"
    STARTED = "started"
    READY = "ready"
    STOPPED = "stopped"
    ESCALATED = "escalated"
    FAILED = "failed"
    EXPLAINED = "explained"
    DRIFT = "drift"
    ADOPTED = "adopted"
    HELD = "held"
    RELEASED = "released"
    RECONFIGURED = "reconfigured"
    RECORD_FAILED = "record_failed"
    CANARY_PASSED = "canary_passed"
    CANARY_FAILED = "canary_failed"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class Note:
    """One structured journal line, and one count."""

    kind: NoteKind
    model: str
    replica: str
    message: str
    #: True for what a person should look at.
    warning: bool = False
    #: The sleep level that it is about; 0: about none.
    level: int = 0
    #: How long the wake or start took that it ends; None: it ends none.
    seconds: float | None = None


Effect = RunUnitJob | CallEngine | ProbeEngine | Persist | TakeFingerprint | SaveFingerprint | ReadLastLines
Action = Effect | Grant | Deny | Fault | Answer | Note
