"""Which headers cross the proxy, in either direction. Everything that is not hop-by-hop passes as it came."""

from __future__ import annotations

import re
from collections.abc import Iterable

Headers = list[tuple[str, str]]

# RFC 9110 7.6.1: they belong to one connection. Proxy-Authenticate and Proxy-Authorization speak to us.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Answered by us (Expect), or written anew from the body that is really sent.
_REWRITTEN = frozenset({"expect", "content-length", "x-request-id"})

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


def end_to_end(headers: Iterable[tuple[str, str]]) -> Headers:
    """Without the hop-by-hop ones, those that ``Connection`` names included."""
    items = list(headers)
    dropped = set(_HOP_BY_HOP)
    for name, value in items:
        if name.lower() == "connection":
            dropped.update(token.strip().lower() for token in value.split(","))
    return [(name, value) for name, value in items if name.lower() not in dropped]


def to_engine(headers: Iterable[tuple[str, str]], request_id: str, *, decoded: bool) -> Headers:
    """A client's headers for the engine, without a length. ``decoded``: the body no longer has its Content-Encoding."""
    rewritten = _REWRITTEN | {"content-encoding"} if decoded else _REWRITTEN
    kept = [(name, value) for name, value in end_to_end(headers) if name.lower() not in rewritten]
    return [*kept, ("X-Request-Id", request_id)]


def first(headers: Iterable[tuple[str, str]], name: str) -> str:
    """The first value of a header (``name`` in lower case), empty if absent."""
    return next((value for key, value in headers if key.lower() == name), "")


def is_request_id(value: str) -> bool:
    """Whether a client's X-Request-Id can be used as it is: it goes into logs and headers."""
    return _REQUEST_ID.fullmatch(value) is not None
