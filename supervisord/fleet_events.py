"""What the core noted, as journal lines: one for every event. (Failovers are the proxy's own lines.)"""

from __future__ import annotations

import logging

from supervisord.core.actions import Note
from supervisord.sd.journal import FIELDS

log = logging.getLogger("supervisord.fleet")


def journal_note(note: Note) -> None:
    """``journalctl --user VLLMCTL_EVENT=woken VLLMCTL_REPLICA=...`` finds it."""
    level = logging.WARNING if note.warning else logging.INFO
    fields = {"event": str(note.kind), "model": note.model, "replica": note.replica}
    log.log(level, "%s: %s", note.replica, note.message, extra={FIELDS: fields})
