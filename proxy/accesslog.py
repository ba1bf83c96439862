"""One line per request, the same fields in text and as the log record's ``fields`` (docs/monitoring.md names them)."""

from __future__ import annotations

import logging
import re
import time
from functools import lru_cache
from json.encoder import encode_basestring_ascii

from proxy.exchange import Finished, Outcome

log = logging.getLogger("proxy.access")

#: Characters of a value in the text; what is longer tells no more.
_MOST_SHOWN = 1000
_PLAIN = re.compile(rf"[\x21\x23-\x3c\x3e-\x5b\x5d-\x7e]{{1,{_MOST_SHOWN}}}")
#: What all records of ours have in common.
_ANY_RECORD = vars(logging.LogRecord(log.name, logging.INFO, "", 0, "", (), None))
#: A client that left before it had its answer, in nginx's numbering.
CLIENT_GONE = 499


def log_request(finished: Finished, outcome: Outcome) -> None:
    """Log a finished request."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = _fields(finished, outcome)
    text = _text(fields, finished, outcome)
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
        if outcome.usage.completion is not None:
            fields["completion_tokens"] = outcome.usage.completion
        if outcome.usage.cached is not None:
            fields["cached_tokens"] = outcome.usage.cached
    if outcome.close is not None:
        fields["close"] = outcome.close
    if outcome.status == CLIENT_GONE:
        fields["gone_in"] = str(outcome.stage)
    return fields


def _text(fields: dict[str, object], finished: Finished, outcome: Outcome) -> str:
    """``name=value ...`` of what is said, a value being quoted where it must."""
    others = f"{finished.method}{finished.route}{outcome.model}{outcome.replica}{finished.id}{finished.peer}"
    silent = outcome.key or outcome.code or outcome.details
    given = outcome.model and outcome.replica and outcome.reason and outcome.first_byte is not None
    if given and not silent and _PLAIN.fullmatch(others):
        # An engine's answer, most often: all is said but these three, and only the reason must be quoted.
        said = fields.copy()
        del said["key"], said["code"], said["detail"]
        said["reason"] = _shown(outcome.reason)
    else:
        said = {
            name: _shown(value) if isinstance(value, str) else value
            for name, value in fields.items()
            if value is not None and value != ""
        }
    return _template(tuple(said)) % tuple(said.values())


def _shown(value: str) -> str:
    value = value[:_MOST_SHOWN]
    return value if _PLAIN.fullmatch(value) else encode_basestring_ascii(value)


@lru_cache(256)
def _template(names: tuple[str, ...]) -> str:
    """Requests differ little in what there is to say of them."""
    return " ".join([f"{name}=%s" for name in names])
