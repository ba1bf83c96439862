"""What we say in a realtime session ourselves, in vLLM's words, and what we look for in what others say."""

from __future__ import annotations

import json
import math
import time
from os import urandom
from urllib.parse import quote, unquote_plus

from proxy.errors import ProxyError, bad_request
from proxy.realtime import websocket

#: Our codes whose close code does not follow from their status.
_CLOSE_CODES = {
    "router_shutting_down": websocket.SERVICE_RESTART,
    "realtime_idle": websocket.GOING_AWAY,
}


def session_created() -> dict[str, object]:
    """The greeting that clients wait for before they name a model."""
    return {"type": "session.created", "id": f"sess-{urandom(8).hex()}", "created": int(time.time())}


def is_session_created(event: bytes) -> bool:
    """Whether an engine's event is that greeting."""
    try:
        said = json.loads(event)
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("type") == "session.created"


def error_event(error: ProxyError) -> dict[str, object]:
    """vLLM's error event; ``retry_after`` is ours, seconds."""
    event: dict[str, object] = {"type": "error", "error": error.message, "code": str(error.code)}
    if error.retry_after is not None:
        event["retry_after"] = max(1, math.ceil(error.retry_after))
    return event


def close_code_of(error: ProxyError) -> int:
    """What a session that ends with this error is closed with."""
    if (code := _CLOSE_CODES.get(str(error.code))) is not None:
        return code
    if error.status == 503:
        return websocket.TRY_AGAIN_LATER
    return websocket.POLICY_VIOLATION if error.status < 500 else websocket.INTERNAL_ERROR


def model_in_query(target: str) -> str | None:
    """The ``model`` of a request target, as OpenAI's clients name it; raises ``ProxyError`` for more than one."""
    found = [unquote_plus(value) for name, value in _parameters(target) if name == "model"]
    if len(found) > 1:
        raise bad_request("the query names a model more than once", param="model")
    return found[0] if found and found[0] else None


def respelled(target: str, name: str) -> str:
    """The target with another ``model``; all else stays as it came."""
    path, _, query = target.partition("?")
    parts = [
        f"model={quote(name, safe='')}" if part.partition("=")[0] == "model" else part for part in query.split("&")
    ]
    return f"{path}?{'&'.join(parts)}"


def _parameters(target: str) -> list[tuple[str, str]]:
    query = target.partition("?")[2]
    return [(name, value) for name, _, value in (part.partition("=") for part in query.split("&"))]
