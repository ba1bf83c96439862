"""The opening handshake of a WebSocket (RFC 6455 4): a client's request judged, our answer, our own to an engine."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection

from proxy.errors import ProxyError, bad_request
from proxy.http import origins as pages
from proxy.http.headers import HeadError, RequestHead, ResponseHead
from proxy.realtime.websocket import accept_of

VERSION = "13"
#: The subprotocol that OpenAI's clients in a browser offer, which give up if none of theirs is taken. vLLM takes none;
#: so the choice is ours, and the engine is offered nothing (beside this one such a client offers its API key).
SUBPROTOCOL = "realtime"
#: Fields that belong to one connection's handshake.
_HANDSHAKE = b"sec-websocket-"
#: What a 426 must tell (RFC 9110 15.5.22).
_UPGRADE = (("Upgrade", "websocket"), ("Connection", "Upgrade"))


def check_handshake(head: RequestHead, origins: Collection[str]) -> None:
    """Raise ``ProxyError`` unless this asks for a WebSocket, and may. ``origins``: web pages that may besides our own.

    A page of any site may open a WebSocket to any address that its reader's browser can reach, and the browser sends
    no preflight: only the server can refuse (RFC 6455 10.2). Programs that are no browsers send no Origin.
    """
    if not head.http11 or head.method != "GET" or "websocket" not in _tokens(head.upgrade):
        message = "this is a WebSocket, and wants to be opened as one"
        raise ProxyError(426, "upgrade_required", message, headers=_UPGRADE)
    if head.length != 0:
        raise bad_request("a WebSocket is opened by a request without a body")
    if values(head, b"sec-websocket-version") != [VERSION]:
        message = f"only version {VERSION} of WebSocket is spoken"
        raise ProxyError(426, "upgrade_required", message, headers=(*_UPGRADE, ("Sec-WebSocket-Version", VERSION)))
    keys = values(head, b"sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise bad_request("Sec-WebSocket-Key is not one key of 16 bytes")
    for origin in values(head, b"origin"):
        if not pages.may(origin, values(head, b"host"), origins):
            message = f"pages of {origin[:200]!r} may not open a WebSocket here"
            raise ProxyError(403, "origin_not_allowed", message)


def answer_lines(head: RequestHead) -> bytes:
    """The lines of our 101 that belong to the handshake. No extension is taken: frames cross the proxy as they are."""
    lines = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept_of(_key(head))}\r\n"
    offered = _tokens(", ".join(values(head, b"sec-websocket-protocol")))
    if SUBPROTOCOL in offered:
        lines += f"Sec-WebSocket-Protocol: {SUBPROTOCOL}\r\n"
    return lines.encode("latin-1")


def engine_request(head: RequestHead, target: str, request_id: str, challenge: str, *, key: str = "") -> bytes:
    """The handshake that the engine gets: the client's request, with what belongs to one connection made anew.

    ``challenge``: our Sec-WebSocket-Key. ``key``: as for ``RequestHead.for_engine``.
    """
    lines = [b"GET %b HTTP/1.1" % target.encode("latin-1")]
    lines += [b"%b: %b" % pair for pair in head.passing if not pair[0].lower().startswith(_HANDSHAKE)]
    if key and not head.field(b"authorization"):
        lines.append(b"Authorization: Bearer %b" % key.encode("latin-1", "replace"))
    lines.append(
        b"X-Request-Id: %b\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n" % (request_id.encode(), challenge.encode())
    )
    return b"\r\n".join(lines)


def check_answer(head: ResponseHead, key: str) -> None:
    """Raise ``HeadError`` unless an engine's 101 answers our key, and takes nothing that was not offered."""
    fields = dict(line.split(b": ", 1) for line in head.lines.split(b"\r\n") if line)
    known = {name.lower(): value for name, value in fields.items()}
    if known.get(b"sec-websocket-accept", b"").strip() != accept_of(key).encode():
        raise HeadError("its Sec-WebSocket-Accept is wrong")
    if b"sec-websocket-extensions" in known or b"sec-websocket-protocol" in known:
        raise HeadError("it takes an extension or a subprotocol that was not offered")


def values(head: RequestHead, name: bytes) -> list[str]:
    """The values of a field, in order; ``name`` in lower case."""
    return [value.strip(b" \t").decode("latin-1") for field, value in head.passing if field.lower() == name]


def _key(head: RequestHead) -> str:
    return values(head, b"sec-websocket-key")[0]


def _tokens(value: str) -> set[str]:
    return {token.strip(" \t").lower() for token in value.split(",")}


def _is_key(value: str) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False
