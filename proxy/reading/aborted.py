"""How vLLM ends a request that it gave up by itself: with a 200 and a whole body, as if that were an answer.

It does so to everything in flight when it is told to end, or to sleep in its default mode. The client is still there
(an engine whose client left is not listened to any more), so nobody asked for that.
"""

from __future__ import annotations

import json
import re

_FINISH = re.compile(rb'"finish_reason": ?"abort"')
# Anthropic's dialect has no word for it: the end of a message that says no reason. In its beginning none is usual.
_DELTA = re.compile(rb'"type": ?"message_delta"[^\n]*"stop_reason": ?null')
_MESSAGE = re.compile(rb'"type": ?"message"[,}]')
_NO_REASON = re.compile(rb'"stop_reason": ?null')


def event_aborted(data: bytes) -> bool:
    """Whether one of the events in ``data`` is such an end. (Within a JSON text quotes are escaped: no text can be.)"""
    return (b'"abort"' in data and _FINISH.search(data) is not None) or (
        b"message_delta" in data and _DELTA.search(data) is not None
    )


def answer_aborted(body: bytes) -> bool:
    """Whether a plain answer is such an end."""
    suspicious = (b'"abort"' in body and _FINISH.search(body) is not None) or (
        b'"stop_reason"' in body and _MESSAGE.search(body) is not None and _NO_REASON.search(body) is not None
    )
    return suspicious and _is_abort(body)


def _is_abort(body: bytes) -> bool:
    # The words may also be what a tool is called with, which stands in a message as JSON.
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict):
        return False
    if answer.get("type") == "message":
        return answer.get("stop_reason", "") is None
    choices = answer.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )
