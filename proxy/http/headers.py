"""Heads of messages once they are parsed: what the proxy must know of them, and which of their lines cross it.

Everything that is not hop-by-hop passes as it came, byte by byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

#: Fields of a message of our own making.
Headers = list[tuple[str, str]]
#: Fields as they were received, in order.
Field = tuple[bytes, bytes]
Fields = list[Field]

#: RFC 9110 7.6.1: they belong to one connection. Proxy-Authenticate and Proxy-Authorization speak to us.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: What a client says of those before it: nobody can check it, so it does not pass. See ``proxy.clients.forwarded``.
_HEARSAY = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-proto",
        b"x-real-ip",
    }
)
#: An engine's opinion on who may use it from a browser. See ``proxy.clients.cors``.
_CORS = frozenset(
    {
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"access-control-max-age",
    }
)
#: What only this port says. An engine may be another port like this one.
_OURS = frozenset({b"x-vllmctl-replica", b"x-vllmctl-route"})
#: Of a request: known to us, and dropped or written anew.
_OF_REQUEST = (
    _HOP_BY_HOP
    | _HEARSAY
    | {
        b"host",
        b"expect",
        b"content-length",
        b"content-encoding",
        b"content-type",
        b"x-request-id",
        b"x-vllmctl-routing",
    }
)
_OF_RESPONSE = (
    _HOP_BY_HOP | _CORS | _OURS | {b"content-length", b"content-type", b"content-encoding", b"x-request-id", b"date"}
)

_LENGTH = re.compile(rb"[0-9]{1,15}")
# RFC 9110 4.2.1 by way of RFC 3986's reg-name, IP-literal and port; a userinfo is an attack.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_CONNECTION_OPTIONS = {b"close", b"keep-alive", b""}


class HeadError(Exception):
    """A head that is refused. ``status``: what a client is answered."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class RequestHead:
    """A request's head, and the framing of its body."""

    method: str
    #: Path and query as they came.
    target: str
    #: Whether the client speaks HTTP/1.1; else 1.0.
    http11: bool
    #: Whether the client wants to keep the connection.
    keep_alive: bool = True
    #: Bytes of the body; None where it is chunked.
    length: int | None = 0
    expect: str = ""
    content_type: str = ""
    content_encoding: str = ""
    #: The client's X-Request-Id.
    request_id: str = ""
    #: X-Vllmctl-Routing: the policy that the client asks for, for this request alone.
    routing: str = ""
    #: The protocols that the client would change to; empty where its Connection does not name Upgrade.
    upgrade: str = ""
    #: Fields for the engine, without those that are written anew.
    passing: tuple[Field, ...] = ()
    #: What it says of those before it, names in lower case. See ``proxy.clients.trusted``.
    hearsay: tuple[Field, ...] = ()
    #: Whether it is too long to be remembered, and so is what is made of it.
    long: bool = False

    def copy(self) -> RequestHead:
        """One of one's own."""
        return RequestHead(
            self.method,
            self.target,
            self.http11,
            self.keep_alive,
            self.length,
            self.expect,
            self.content_type,
            self.content_encoding,
            self.request_id,
            self.routing,
            self.upgrade,
            self.passing,
            self.hearsay,
            self.long,
        )

    def field(self, name: bytes) -> bytes:
        """The value of the first field called ``name`` (lower case) of those that pass; empty where there is none."""
        return next((value.strip(b" \t") for key, value in self.passing if key.lower() == name), b"")

    def for_engine(self, request_id: str, length: int, *, decoded: bool, key: str = "") -> bytes:
        """The head that the engine gets.

        ``decoded``: the body no longer has its Content-Encoding. ``key``: what the engine asks for, unless the client
        has credentials of its own.
        """
        first_lines = _first_lines if self.long else _remembered_lines
        lines = first_lines(self.method, self.target, self.passing)
        if key and not any(name.lower() == b"authorization" for name, _ in self.passing):
            lines += b"Authorization: Bearer %b\r\n" % key.encode("latin-1", "replace")
        if self.content_encoding and not decoded:
            lines += b"Content-Encoding: %b\r\n" % self.content_encoding.encode("latin-1")
        return b"%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n" % (lines, request_id.encode(), length)


@dataclass(slots=True)
class ResponseHead:
    """A response's head, and the framing of its body."""

    status: int
    reason: str
    #: The lines for the client, without a length or coding of the transfer, each with its line break.
    lines: bytes
    #: Bytes of the body; None where it is chunked, or ends with the connection.
    length: int | None = None
    chunked: bool = False
    #: Whether the connection can carry another request.
    keep_alive: bool = True
    content_type: str = ""
    #: Whether the body is server-sent events.
    is_event_stream: bool = False
    encoded: bool = False
    has_request_id: bool = False
    has_date: bool = False

    def copy(self) -> ResponseHead:
        """One of one's own."""
        return ResponseHead(
            self.status,
            self.reason,
            self.lines,
            self.length,
            self.chunked,
            self.keep_alive,
            self.content_type,
            self.is_event_stream,
            self.encoded,
            self.has_request_id,
            self.has_date,
        )


def request_head(method: str, target: str, http11: bool, fields: Fields, authority: bytes = b"") -> RequestHead:
    """Read a request's fields as RFC 9112 wants; raises ``HeadError`` for what could be read in two ways.

    ``authority``: the host that the request target named, which counts instead of the Host field's.
    """
    if authority and not _HOST.fullmatch(authority):
        raise HeadError("the request target names no host")
    head = RequestHead(method, target, http11, keep_alive=http11)
    passing: Fields = []
    host, length, coding, options, upgrade = None, None, None, b"", b""
    for pair in fields:
        name = pair[0].lower()
        if name not in _OF_REQUEST:
            passing.append(pair)
            continue
        value = pair[1].strip(b" \t")
        match name:
            case b"host":
                if host is not None:
                    raise HeadError("more than one Host")
                host = value
                passing.append((pair[0], authority) if authority else pair)
            case b"content-length":
                length = _length(length, value)
            case b"transfer-encoding":
                coding = value.lower() if coding is None else b"several"
            case b"connection":
                options += b"," + value
            case b"content-type":
                head.content_type = value.decode("latin-1")
                passing.append(pair)
            case b"content-encoding":
                head.content_encoding += ("," if head.content_encoding else "") + value.decode("latin-1")
            case b"upgrade":
                upgrade += (b"," if upgrade else b"") + value
            case b"expect":
                head.expect = value.decode("latin-1").lower()
            case b"x-request-id":
                head.request_id = value.decode("latin-1")
            case b"x-vllmctl-routing":
                head.routing = value.decode("latin-1")
            case _ if name in _HEARSAY:
                head.hearsay += ((name, value),)
    if host is None:
        if http11:
            raise HeadError("no Host")
        passing.append((b"Host", authority or b"localhost"))  # a 1.0 client need not send one, a 1.1 engine wants one
    elif not _HOST.fullmatch(host):
        raise HeadError("Host is not a host")
    if coding is not None:
        if length is not None or not http11 or coding != b"chunked":
            raise HeadError("cannot tell where the body ends: Transfer-Encoding may only be chunked, and alone")
        head.length = None
    else:
        head.length = length or 0
    if upgrade and b"upgrade" in _named(options):
        head.upgrade = upgrade.decode("latin-1")
    head.passing = tuple(_connection(head, options, passing) if options else passing)
    return head


def _first_lines(method: str, target: str, fields: tuple[Field, ...]) -> bytes:
    return b"".join([f"{method} {target} HTTP/1.1\r\n".encode(), *[b"%b: %b\r\n" % pair for pair in fields]])


#: They are the same for most requests of a client, as its head is.
_remembered_lines = lru_cache(256)(_first_lines)


def response_head(status: int, reason: str, http11: bool, fields: Fields) -> ResponseHead:
    """Read an engine's response; raises ``HeadError`` where its framing makes no sense."""
    head = ResponseHead(status, reason, b"", keep_alive=http11)
    passing: Fields = []
    length, coding, options = None, None, b""
    for pair in fields:
        name = pair[0].lower()
        if name not in _OF_RESPONSE:
            passing.append(pair)
            continue
        value = pair[1].strip(b" \t")
        match name:
            case b"content-length":
                length = _length(length, value)
            case b"transfer-encoding":
                coding = value.lower() if coding is None else b"several"
            case b"connection":
                options += b"," + value
            case b"content-type":
                head.content_type = value.decode("latin-1")
                head.is_event_stream = _is_event_stream(head.content_type)
                passing.append(pair)
            case b"content-encoding":
                head.encoded = bool(value)
                passing.append(pair)
            case b"x-request-id":
                head.has_request_id = True
                passing.append(pair)
            case b"date":
                head.has_date = True
                passing.append(pair)
    if status in (204, 304):
        length, coding = 0, None
    if coding is not None:
        if length is not None or coding != b"chunked" or not http11:
            raise HeadError("cannot tell where the answer ends: Transfer-Encoding may only be chunked, and alone")
        head.chunked = True
    elif length is None:
        head.keep_alive = False
    head.length = length
    if options:
        passing = _connection(head, options, passing)
    head.lines = b"".join([b"%b: %b\r\n" % pair for pair in passing])
    return head


def own_head(status: int, reason: str, headers: Iterable[tuple[str, str]], length: int | None = None) -> ResponseHead:
    """The head of an answer of ours; without ``length`` the body is chunked."""
    lines, content_type = [], ""
    for name, value in headers:
        lines.append(f"{name}: {value}\r\n")
        if name.lower() == "content-type":
            content_type = value
    head = ResponseHead(status, reason, "".join(lines).encode("latin-1", "replace"), length, content_type=content_type)
    head.is_event_stream = _is_event_stream(content_type)
    return head


def is_host(value: bytes) -> bool:
    """Whether this can be the value of a Host field, and is not empty."""
    return value != b"" and _HOST.fullmatch(value) is not None


def is_request_id(value: str) -> bool:
    """Whether a client's X-Request-Id can be used as it is: it goes into logs and headers."""
    return _REQUEST_ID.fullmatch(value) is not None


def _is_event_stream(content_type: str) -> bool:
    return content_type.startswith("text/event-stream")


def _length(before: int | None, value: bytes) -> int:
    if before is not None or not _LENGTH.fullmatch(value):
        raise HeadError("Content-Length is not one number")
    return int(value)


def _named(options: bytes) -> set[bytes]:
    return {option.strip(b" \t").lower() for option in options.split(b",")}


def _connection(head: RequestHead | ResponseHead, options: bytes, passing: Fields) -> Fields:
    """Obey the Connection field: returns the fields that it does not name."""
    named = _named(options)
    if b"close" in named:
        head.keep_alive = False
    elif b"keep-alive" in named and (not isinstance(head, ResponseHead) or head.chunked or head.length is not None):
        head.keep_alive = True
    if named <= _CONNECTION_OPTIONS:
        return passing
    named -= {b"host"}  # nobody may take from a request what it must have
    return [pair for pair in passing if pair[0].lower() not in named]
