"""Bytes to heads, by llhttp in its strict mode: token and value characters, line ends, folding, lengths.

What llhttp lets pass and a relay must not is refused around it, and what a head means is the matter of
``proxy.http.headers``.

A client's next head, and an engine's, is most often the one before but for its Content-Length: what was read lately is
remembered without that number, which saves nine tenths of the time.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache

import httptools

from proxy.http.headers import Fields, HeadError, RequestHead, ResponseHead, request_head, response_head

#: Longest request line (414), longest field line and whole head, bytes, and most fields (431).
MAX_LINE = 64 * 1024
MAX_HEAD = 128 * 1024
MAX_FIELDS = 128

# RFC 9110 4.2: a userinfo (the @ that the authority's characters lack) is refused, and so is an empty host.
_ABSOLUTE = re.compile(rb"(?i:https?)://([A-Za-z0-9\[][^/?#@]*)([/?].*)?", re.DOTALL)

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")

#: How a client of https:// begins (a handshake's record), which would wait for an answer in TLS for ever.
_TLS = b"\x16\x03"
#: Heads that are remembered, of requests and of responses, and how long one may be for that: bytes.
REMEMBERED = 256
_WORTH_REMEMBERING = 2048
#: How clients and engines nearly always spell it. The number must have a line to itself, as every field has; a second
#: such line is left for the parser to refuse.
_CLIENTS_LENGTH, _ENGINES_LENGTH = b"\r\nContent-Length: ", b"\r\ncontent-length: "
_MOST_DIGITS = 15
#: What stands for the number in a head that is remembered. Not 0, which some answers have whatever they say.
_ANY_LENGTH = 1


class _Collector:
    __slots__ = ("fields", "status", "target")

    def __init__(self) -> None:
        self.fields: Fields = []
        self.target = self.status = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_status(self, status: bytes) -> None:
        self.status += status


def too_long(start: bytes) -> HeadError | None:
    """Why a head of which this is the start is refused already, None if it may still become one."""
    if start.startswith(_TLS):
        return HeadError("this is TLS, and the port speaks plain HTTP: use http://, or give it a certificate")
    line_end = start.find(b"\n")
    if (len(start) if line_end < 0 else line_end) > MAX_LINE:
        return HeadError("the request line is too long", 414)
    if len(start) > MAX_HEAD:
        return HeadError("the head is too long", 431)
    # A line break that no later byte can make right.
    if line_end == 0 or (line_end > 0 and start.count(b"\n") != start.count(b"\r\n")):
        return HeadError("a line ends without CR")
    return None


def parse_request(head: bytes) -> RequestHead:
    """A complete head with its empty line; raises ``HeadError``. The result is the caller's, but for its fields."""
    if len(head) > _WORTH_REMEMBERING:
        return _parse_request(head)
    start, end = _length_in(head)
    if start == end:
        return _remembered_request(head, b"").copy()
    parsed = _remembered_request(head[:start], head[end:]).copy()
    parsed.length = int(head[start:end])
    return parsed


def _length_in(head: bytes) -> tuple[int, int]:
    """Where the number of a Content-Length begins and ends: at the same place where none is seen."""
    start = head.find(_CLIENTS_LENGTH)
    if start < 0:
        start = head.find(_ENGINES_LENGTH)
        if start < 0:
            return 0, 0
    start += len(_CLIENTS_LENGTH)
    end = head.find(b"\r\n", start)
    return (start, end) if end - start <= _MOST_DIGITS and head[start:end].isdigit() else (0, 0)


@lru_cache(REMEMBERED)
def _remembered_request(before: bytes, after: bytes) -> RequestHead:
    """Not to be changed. ``after``: what follows the number; empty where there is none."""
    return _parse_request(b"%b%d%b" % (before, _ANY_LENGTH, after) if after else before)


def _parse_request(head: bytes) -> RequestHead:
    line, _, rest = head.partition(b"\r\n")
    if len(line) > MAX_LINE:
        raise HeadError("the request line is too long", 414)
    http11 = line.endswith(b" HTTP/1.1")
    # One space each, and 1.0 or 1.1; a head of 0.9 has no fields, one of 2.0 is not sent so.
    if line.count(b" ") != 2 or not (http11 or line.endswith(b" HTTP/1.0")):
        raise HeadError("the request line is not of HTTP/1.1")
    if len(rest) > MAX_LINE and max(map(len, rest.split(b"\r\n"))) > MAX_LINE:
        raise HeadError("a field is too long", 431)
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # Upgrade is not followed: the request is what it is without it (RFC 9110 7.8)
    except httptools.HttpParserError as error:
        raise _refusal(head, line.partition(b" ")[0], str(error)) from None
    fields = collector.fields
    if len(fields) > MAX_FIELDS:
        raise HeadError("too many fields", 431)
    method, target = parser.get_method(), collector.target
    if line != b"%b %b HTTP/1.%d" % (method, target, http11):
        raise HeadError("the request line can be read in two ways")
    authority = b""
    if target[:1] != b"/" and (target != b"*" or method != b"OPTIONS"):
        target, authority = _absolute(method, target)
    read = request_head(method.decode(), target.decode("latin-1"), http11, fields, authority)
    read.long = len(head) > _WORTH_REMEMBERING
    return read


def _refusal(head: bytes, method: bytes, reason: str) -> HeadError:
    """Of a head that is not understood: 501 where nothing but its method is unknown (RFC 9110 9.1), else 400."""
    if method != b"GET" and _TOKEN.fullmatch(method):
        with contextlib.suppress(HeadError):
            _parse_request(b"GET" + head[len(method) :])
            return HeadError(f"{method.decode()} is no method that is known here", 501)
    return HeadError(reason)


def _absolute(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Path and authority of a target in absolute form, which every server must accept (RFC 9112 3.2.2)."""
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise HeadError("the request target is not a path")
    authority, path = found[1], found[2] or b""
    if not path and method == b"OPTIONS":
        return b"*", authority  # RFC 9112 3.2.4
    return path if path.startswith(b"/") else b"/" + path, authority


def parse_response(head: bytes, *, upgrades: bool = False) -> ResponseHead:
    """A complete head with its empty line; raises ``HeadError``. The result is the caller's.

    ``upgrades``: it may be a 101.
    """
    if upgrades or len(head) > _WORTH_REMEMBERING:
        return _parse_response(head, upgrades=upgrades)
    start, end = _length_in(head)
    if start == end:
        return _remembered_response(head, b"").copy()
    parsed = _remembered_response(head[:start], head[end:]).copy()
    if parsed.length == _ANY_LENGTH:  # else it has no body, whatever it says
        parsed.length = int(head[start:end])
    return parsed


@lru_cache(REMEMBERED)
def _remembered_response(before: bytes, after: bytes) -> ResponseHead:
    """See ``_remembered_request``."""
    return _parse_response(b"%b%d%b" % (before, _ANY_LENGTH, after) if after else before)


def _parse_response(head: bytes, *, upgrades: bool = False) -> ResponseHead:
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade as error:
        if not upgrades:
            raise HeadError("the engine switches protocols") from error
    except httptools.HttpParserError as error:
        raise HeadError(str(error)) from None
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise HeadError(f"the engine speaks HTTP/{version}")
    return response_head(
        parser.get_status_code(), collector.status.decode("latin-1"), version == "1.1", collector.fields
    )
