"""One line per request, the same fields in text and as the log record's ``fields`` (docs/monitoring.md names them)."""

from __future__ import annotations

import logging
import re
import time
from json.encoder import encode_basestring_ascii

from proxy.exchange import Finished, Outcome

log = logging.getLogger("proxy.access")

_PLAIN = re.compile(r"[\x21\x23-\x3c\x3e-\x5b\x5d-\x7e]+")
#: Characters of a value in the text; what is longer tells no more.
_MOST_SHOWN = 1000
#: What all records of ours have in common.
_ANY_RECORD = vars(logging.LogRecord(log.name, logging.INFO, "", 0, "", (), None))
#: A client that left before it had its answer, in nginx's numbering.
CLIENT_GONE = 499


def log_request(finished: Finished, outcome: Outcome) -> None:
    """Log a finished request."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = _fields(finished, outcome)
    text = " ".join(
        [
            f"{name}={_shown(value) if isinstance(value, str) else value}"
            for name, value in fields.items()
            if value is not None and value != ""
        ]
    )
    # As log.info does it, without looking for the caller in the stack and taking its path apart: a third of the whole.
    record, now = logging.LogRecord.__new__(logging.LogRecord), time.time()
    # ``told``: the text has all of the fields.
    vars(record).update(_ANY_RECORD, created=now, msecs=now % 1 * 1000, msg=text, fields=fields, told=True)
    log.handle(record)


def _fields(finished: Finished, outcome: Outcome) -> dict[str, object]:
    """What is empty or None is not said; of a request that no replica got, neither is what only a replica's has."""
    started = finished.started
    fields: dict[str, object] = {
        "method": finished.method,
        "route": finished.route,
        "model": outcome.model,
        "replica": outcome.replica,
        "reason": outcome.reason,
        "status": outcome.status,
        "bytes": outcome.bytes_sent,
        "ttfb": None if outcome.first_byte is None else round(outcome.first_byte - started, 6),
        "duration": round(finished.ended - started, 6),
        "request_id": finished.id,
        "client": finished.peer,
        "key": outcome.key,
        "code": outcome.code,
        "detail": "; ".join(outcome.details),
    }
    if outcome.model:
        fields["stream"] = "yes" if outcome.stream else "no"
        fields["bytes_in"] = outcome.bytes_received
    if outcome.queued:
        fields["queued"] = round(outcome.queued, 6)
    if outcome.attempts > 1:
        fields["attempts"] = outcome.attempts
    if outcome.stream and outcome.computed is not None:
        fields["ttft"] = round(outcome.computed - started, 6)
    if outcome.usage is not None:
        fields["prompt_tokens"] = outcome.usage.prompt
        fields["completion_tokens"] = outcome.usage.completion
        fields["cached_tokens"] = outcome.usage.cached
    if outcome.close is not None:
        fields["close"] = outcome.close
    if outcome.status == CLIENT_GONE:
        fields["gone_in"] = str(outcome.stage)
    return fields


def _shown(value: str) -> str:
    value = value[:_MOST_SHOWN]
    return value if _PLAIN.fullmatch(value) else encode_basestring_ascii(value)
