"""What happens to replicas: one journal line and one count for every event, from one table.

The core's notes are journalled and counted here. A failover's line is the proxy's, which knows the request; it is
counted here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from supervisord.control import Failover
from supervisord.core.actions import Note, NoteKind
from supervisord.core.histogram import Histogram
from supervisord.sd.journal import FIELDS

log = logging.getLogger("supervisord.fleet")

#: ``VLLMCTL_EVENT=`` of a request that left a replica for another.
FAILOVER = "failover"

#: Seconds: a nap's end takes a few, a deep sleep's half a minute, a start minutes.
WAKE_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0)
START_BOUNDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 900.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Counted:
    """The counter of one event."""

    #: Of ``vllm_supervisord_NAME_total``.
    name: str
    help: str
    #: Whether the counter has the sleep level as a label.
    by_level: bool = False


#: ``VLLMCTL_EVENT=`` of the journal line, and the counter that counts those lines.
EVENTS: Mapping[str, Counted] = MappingProxyType(
    {
        FAILOVER: Counted("failovers", "Requests that left this replica, before their first byte, because it failed."),
        NoteKind.DEMOTED: Counted("demotions", "Times that the replica fell under suspicion: requests go elsewhere."),
        NoteKind.REVIVED: Counted("revivals", "Times that a suspicion ended well."),
        NoteKind.WAKE_STARTED: Counted("wakes_begun", "Wakes begun, by the level slept at.", by_level=True),
        NoteKind.WOKEN: Counted(
            "wakes", "Wakes that ended with a ready replica, by the level slept at.", by_level=True
        ),
        NoteKind.SLEEP_STARTED: Counted("sleeps_begun", "Sleeps begun, by level.", by_level=True),
        NoteKind.SLEPT: Counted("sleeps", "Sleeps that were verified, by level.", by_level=True),
        NoteKind.SLEEP_FAILED: Counted(
            "sleep_failures", "Sleeps that did not happen or gave no memory back, by level.", by_level=True
        ),
        NoteKind.STARTED: Counted("starts_begun", "Starts of the unit by the supervisor."),
        NoteKind.READY: Counted("starts", "Times that a started or adopted replica became ready."),
        NoteKind.STOPPED: Counted("stops", "Times that the unit went down in order, whoever stopped it."),
        NoteKind.ESCALATED: Counted("escalations", "Restarts and stops of the unit because the engine was broken."),
        NoteKind.FAILED: Counted("failures", "Times that the replica was given up, until its back-off is over."),
        NoteKind.EXPLAINED: Counted("failures_explained", "Failures whose unit's last lines were found."),
        NoteKind.DRIFT: Counted("drifts", "Changes made by somebody else that were seen and followed."),
        NoteKind.ADOPTED: Counted("adoptions", "Replicas found running when the supervisor started."),
        NoteKind.HELD: Counted("holds", "Holds set by an operator (down, drain)."),
        NoteKind.RELEASED: Counted("releases", "Holds ended by an operator."),
        NoteKind.RECONFIGURED: Counted("reconfigurations", "Changes of the configuration that touch the replica."),
        NoteKind.RECORD_FAILED: Counted("record_failures", "States that could not be written to disk."),
        NoteKind.CANARY_PASSED: Counted("canary_passes", "Canaries that answered as before."),
        NoteKind.CANARY_FAILED: Counted("canary_failures", "Canaries that did not: the weights are loaded again."),
        NoteKind.EVICTED: Counted("evictions", "Times that the replica was asked to rest for another on its GPU."),
    }
)


class Happening(NamedTuple):
    """What is counted apart. ``level`` is 0 where the counter has none."""

    event: str
    model: str
    replica: str
    level: int


class FleetEvents:
    """Writes and counts. Read at any time; the counts begin at the daemon's start."""

    def __init__(self) -> None:
        self.counts: Counter[Happening] = Counter()
        #: Seconds that wakes took, by model and level, and starts, by model.
        self.wakes: dict[tuple[str, int], Histogram] = {}
        self.starts: dict[str, Histogram] = {}

    def note(self, note: Note) -> None:
        """``journalctl --user VLLMCTL_EVENT=woken VLLMCTL_REPLICA=...`` finds it."""
        level = logging.WARNING if note.warning else logging.INFO
        fields: dict[str, object] = {"event": str(note.kind), "model": note.model, "replica": note.replica}
        if note.level:
            fields["level"] = note.level
        if note.seconds is not None:
            fields["seconds"] = round(note.seconds, 3)
        log.log(level, "%s: %s", note.replica, note.message, extra={FIELDS: fields})
        self._count(str(note.kind), note.model, note.replica, note.level)
        if note.seconds is None:
            return
        if note.kind is NoteKind.WOKEN:
            self.wakes.setdefault((note.model, note.level), Histogram(WAKE_BOUNDS)).observe(note.seconds)
        else:
            self.starts.setdefault(note.model, Histogram(START_BOUNDS)).observe(note.seconds)

    def failed_over(self, failover: Failover) -> None:
        """A request left ``failover.source``; its line is written."""
        self._count(FAILOVER, failover.model, failover.source)

    def _count(self, event: str, model: str, replica: str, level: int = 0) -> None:
        self.counts[Happening(event, model, replica, level if EVENTS[event].by_level else 0)] += 1
