"""What an engine is told of the client that it does not see: ``[proxy] forwarded``. Pure.

What a client says of itself in these fields never passes: vLLM's server believes them when they come over loopback.
"""

from __future__ import annotations

import re
from enum import StrEnum

from proxy.http.headers import Fields

_QUOTED = re.compile(rb'["\\]')


class Forwarded(StrEnum):
    """Values of ``[proxy] forwarded``."""

    OFF = "off"
    X_FORWARDED = "x-forwarded"
    FORWARDED = "forwarded"
    BOTH = "both"


def forwarded_fields(mode: str, peer: str, host: bytes, *, secure: bool) -> Fields:
    """Fields for the engine. ``peer``: the client's address, or ``unix``, ``unknown``; ``secure``: it came by TLS."""
    protocol = b"https" if secure else b"http"
    address = b"" if peer in ("unix", "unknown") else peer.partition("%")[0].encode()
    fields: Fields = []
    if mode in (Forwarded.X_FORWARDED, Forwarded.BOTH):
        if address:
            fields.append((b"X-Forwarded-For", address))
        fields += [(b"X-Forwarded-Proto", protocol), (b"X-Forwarded-Host", host)]
    if mode in (Forwarded.FORWARDED, Forwarded.BOTH):
        node = b'"[%b]"' % address if b":" in address else address or b"unknown"
        name = _QUOTED.sub(rb"", host)
        fields.append((b"Forwarded", b'for=%b;proto=%b;host="%b"' % (node, protocol, name)))
    return fields
