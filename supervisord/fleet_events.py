"""What the core noted and the proxy did, as journal lines and counters: one of each for every event."""

from __future__ import annotations

import logging

from supervisord.control import Failover
from supervisord.core.actions import Note
from supervisord.sd.journal import FIELDS

log = logging.getLogger("supervisord.fleet")


def journal_note(note: Note) -> None:
    """``journalctl --user VLLMCTL_EVENT=woken VLLMCTL_REPLICA=...`` finds it."""
    level = logging.WARNING if note.warning else logging.INFO
    fields = {"event": str(note.kind), "model": note.model, "replica": note.replica}
    log.log(level, "%s: %s", note.replica, note.message, extra={FIELDS: fields})


def journal_failover(failover: Failover) -> None:
    """A silent failover hides a dead card."""
    fields = {"event": "failover", "model": failover.model, "replica": failover.source, "target": failover.target}
    target = failover.target or "nobody"
    message = "%s: a request moved to %s before its first byte: %s"
    log.warning(message, failover.source, target, failover.reason, extra={FIELDS: fields})
