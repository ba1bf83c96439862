"""Which web pages may use the port from a browser (the Fetch standard's CORS protocol). Pure.

An engine's own answers to that question are dropped: it is asked by whoever reaches the port, and the port decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from proxy.http.headers import Headers, RequestHead

#: Fields of an answer that a page may read, besides the few that it always may.
EXPOSED = "x-request-id, x-vllmctl-replica, x-vllmctl-route, retry-after"
#: Seconds that a browser may remember the answer to a preflight: a change of the configuration counts after so long.
MAX_AGE = 600

_FIELD_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,4096}")


class Cors:
    """The answers for a list of ``origins``, or for every origin where that is ``*``."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._anybody = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines(self, head: RequestHead) -> bytes:
        """Lines for the head of any answer to this request, errors included."""
        if self._anybody:
            # Without credentials, which no page of an unknown origin may have used.
            return b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: %b\r\n" % EXPOSED.encode()
        origin = head.field(b"origin")
        if origin not in self._origins:
            return b"Vary: Origin\r\n"
        return (
            b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Allow-Credentials: true\r\n"
            b"Access-Control-Expose-Headers: %b\r\nVary: Origin\r\n" % (origin, EXPOSED.encode())
        )

    def preflight(self, head: RequestHead, methods: str) -> Headers:
        """What an answer to OPTIONS says besides, where it is a browser's preflight of an origin that may."""
        origin = head.field(b"origin")
        if not head.field(b"access-control-request-method") or not (self._anybody or origin in self._origins):
            return []
        headers = [("Access-Control-Allow-Methods", methods), ("Access-Control-Max-Age", str(MAX_AGE))]
        wanted = head.field(b"access-control-request-headers")
        if _FIELD_NAMES.fullmatch(wanted):
            # By name, for "*" does not mean Authorization. What the field says is for the engine to judge.
            headers.append(("Access-Control-Allow-Headers", wanted.decode("ascii")))
        return headers
