"""One line per request, the same fields in text and as the log record's ``fields``."""

from __future__ import annotations

import json
import logging
import re

from proxy.exchange import Outcome

log = logging.getLogger("proxy.access")

_PLAIN = re.compile(r"[\x21\x23-\x3c\x3e-\x5b\x5d-\x7e]+")


def log_request(method: str, route: str, request_id: str, outcome: Outcome, started: float, ended: float) -> None:
    """Log a finished request. ``route`` is the row of the allow-list, never the client's own text; times in seconds."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "method": method,
        "route": route,
        "model": outcome.model,
        "replica": outcome.replica,
        "reason": outcome.reason,
        "status": outcome.status,
        "bytes": outcome.bytes_sent,
        "ttfb": None if outcome.first_byte is None else round(outcome.first_byte - started, 6),
        "duration": round(ended - started, 6),
        "request_id": request_id,
        "code": outcome.code,
        "detail": "; ".join(outcome.details),
    }
    text = " ".join([f"{name}={_shown(value)}" for name, value in fields.items() if value is not None and value != ""])
    # As log.info does it, without looking for the caller in the stack, which would be a fifth of the whole.
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None, extra={"fields": fields}))


def _shown(value: object) -> str:
    if not isinstance(value, str):
        return str(value)
    text = value
    return text if _PLAIN.fullmatch(text) else json.dumps(text[:1000])
