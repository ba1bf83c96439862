"""What the core hears. ``op`` numbers tie a result to the action that asked for it; a stale one is ignored."""

from __future__ import annotations

from dataclasses import dataclass

from supervisord.core.canary import Fingerprint
from supervisord.core.readings import Probe, UnitStatus
from supervisord.core.record import Record
from supervisord.core.spec import ModelSpec, ReplicaSpec, SupervisorSpec
from supervisord.core.verbs import Verb


@dataclass(frozen=True, slots=True)
class UnitChanged:
    """systemd's newest reading of a replica's unit."""

    replica: str
    status: UnitStatus


@dataclass(frozen=True, slots=True)
class UnitJobDone:
    """A ``RunUnitJob`` ended. ``result`` is systemd's word, or ``error`` with the text in ``detail``."""

    replica: str
    op: int
    result: str
    #: The unit as it was read after the job; None when it could not be read.
    status: UnitStatus | None = None
    detail: str = ""
    #: The unit's newest log lines, where the job failed.
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """A ``CallEngine`` ended; ``error`` is empty on success."""

    replica: str
    op: int
    error: str = ""
    #: Around a sleep, where it can be measured: bytes of GPU memory before and after.
    memory_before: int | None = None
    memory_after: int | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """A ``ProbeEngine`` ended."""

    replica: str
    op: int
    probe: Probe


@dataclass(frozen=True, slots=True)
class Persisted:
    """A ``Persist`` ended; ``error`` is empty on success."""

    replica: str
    op: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fingerprinted:
    """A ``TakeFingerprint`` ended. No fingerprint and no error: the engine has no route for one."""

    replica: str
    op: int
    fingerprint: Fingerprint | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LastLines:
    """The unit's newest log lines, oldest first."""

    replica: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """An operator wants something of one replica; ends in ``Answer`` with the same ``ticket``."""

    ticket: int
    replica: str
    verb: Verb
    #: For SLEEP: 1 or 2.
    level: int = 0


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration as it is from now on; also the first event of all, with what was found on disk."""

    models: tuple[ModelSpec, ...]
    supervisor: SupervisorSpec
    records: tuple[tuple[str, Record], ...] = ()
    #: What whole engines answered, by replica, with the invocation that it was taken in.
    fingerprints: tuple[tuple[str, str, Fingerprint], ...] = ()
    #: At the start: replicas that run with another command than is configured now ...
    outdated: tuple[str, ...] = ()
    #: ... and those of ours that run and are not configured any more.
    left_over: tuple[ReplicaSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: look at the clocks."""


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Admission closes; nothing new begins."""


Event = (
    UnitChanged
    | UnitJobDone
    | EngineAnswered
    | Probed
    | Persisted
    | Fingerprinted
    | LastLines
    | Command
    | Configured
    | Tick
    | ShutDown
)
