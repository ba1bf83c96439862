"""What is fuzzed: each target takes any bytes and raises AssertionError where what became of them is wrong.

The oracles are other parsers: h11 for heads and chunks, the standard library's json, and python-multipart, by which the
engine's own server reads forms. What ours accepts must mean the same to them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import h11
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from proxy.errors import ProxyError
from proxy.http.body import Body
from proxy.http.chunks import ChunkError, Chunks
from proxy.http.headers import HeadError
from proxy.http.heads import parse_request, parse_response
from proxy.reading.multipart import Form, read_form
from proxy.reading.request import read_json
from proxy.routes import Prompt

BOUNDARY = "b"
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every byte that it refuses


def request_head(data: bytes) -> None:
    """A head that is accepted means the same to h11, and so does the one that the engine gets."""
    raw = _one_head(data)
    try:
        mine = parse_request(raw)
    except HeadError:
        return
    other = _h11(raw)
    assert other is not None, "accepted, and refused by h11"
    if "://" not in other.target.decode("latin-1"):
        assert (other.method.decode(), other.target.decode("latin-1")) == (mine.method, mine.target)
    assert _framing(other) == mine.length
    passed = _h11(mine.for_engine("id", mine.length or 0, decoded=False))
    assert passed is not None, "what the engine would get is no head"
    assert (passed.method.decode(), passed.target.decode("latin-1")) == (mine.method, mine.target)
    assert _framing(passed) == (mine.length or 0)


def response_head(data: bytes) -> None:
    """Any bytes are a head or a ``HeadError``; what is passed on holds no line break of its own."""
    try:
        head = parse_response(_one_head(data))
    except HeadError:
        return
    lines = head.lines.split(b"\r\n")
    assert lines.pop() == b""
    assert all(line and b"\n" not in line and b"\r" not in line for line in lines)


def chunks(data: bytes) -> None:
    """However the bytes are cut, the same comes of them; and what is passed on, taken apart, is the body."""
    pieces = list(_cut(data))
    whole, whole_error = _taken([b"".join(pieces)])
    cut, cut_error = _taken(pieces)
    assert whole_error == cut_error
    if whole_error:
        assert whole.startswith(cut) or cut.startswith(whole)
        return
    assert whole == cut
    passed, reader = b"", Chunks()
    for piece in pieces:
        passed += reader.pass_on(piece)
    assert reader.size == len(whole)
    if reader.done:
        again, error = _taken([passed + b"0\r\n\r\n"])
        assert not error
        assert again == whole


def form(data: bytes) -> None:
    """The model of a form is where the engine's server finds it."""
    body = Body(1 << 20, None)
    body.append(data)
    try:
        mine = read_form(f"multipart/form-data; boundary={BOUNDARY}", body)
    except ProxyError:
        return
    finally:
        body.close()
    theirs = _form(data)
    if theirs is not None:
        assert (mine.model, mine.stream) == (theirs.model, theirs.stream)
    if mine.model is not None:
        assert data[mine.start : mine.end].decode("utf-8", "replace") == mine.model


def json_body(data: bytes) -> None:
    """What is accepted, and what it means, is exactly ``json.loads``; a spliced name changes nothing else."""
    try:
        mine = read_json(data, Prompt.CHAT)
    except ProxyError:
        mine = None
    try:
        theirs = json.loads(data)
    except (ValueError, RecursionError):
        theirs = None
    model = theirs.get("model") if isinstance(theirs, dict) else None
    right = isinstance(theirs, dict) and (model is None or isinstance(model, str))
    assert (mine is not None) == right
    if mine is None or not isinstance(theirs, dict):
        return
    assert (mine.facts.model, mine.facts.stream) == (model or None, theirs.get("stream") is True)
    if mine.model_name is not None:
        splice = mine.model_name.replaced_by("another")
        spliced = data[: splice.start] + splice.replacement + data[splice.end :]
        assert json.loads(spliced) == {**theirs, "model": "another"}


TARGETS: dict[str, Callable[[bytes], None]] = {
    "request-head": request_head,
    "response-head": response_head,
    "chunks": chunks,
    "form": form,
    "json": json_body,
}


def _one_head(data: bytes) -> bytes:
    end = data.find(b"\r\n\r\n")
    return data + b"\r\n\r\n" if end < 0 else data[: end + 4]


def _h11(raw: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=200_000)
    try:
        connection.receive_data(raw)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


def _framing(request: h11.Request) -> int | None:
    fields = dict(request.headers)
    return None if b"transfer-encoding" in fields else int(fields.get(b"content-length", b"0"))


def _cut(data: bytes) -> Iterator[bytes]:
    """The first byte says how the rest is cut."""
    if not data:
        return
    size, at = data[0] % 16 + 1, 1
    while at < len(data):
        yield data[at : at + size]
        at += size


def _taken(pieces: list[bytes]) -> tuple[bytes, bool]:
    reader, found = Chunks(), b""
    try:
        for piece in pieces:
            found += b"".join(reader.take_out(piece))
    except ChunkError:
        return found, True
    return found, False


class _Part:
    def __init__(self) -> None:
        self.field = self.value = b""
        self.headers: dict[bytes, bytes] = {}
        self.data = b""


def _form(data: bytes) -> Form | None:
    """As a server on python-multipart reads it: of equal fields the last; None where it refuses."""
    parts: list[_Part] = []

    def header_end() -> None:
        part = parts[-1]
        part.headers[part.field.lower()] = part.value
        part.field = part.value = b""

    def header_field(data: bytes, start: int, end: int) -> None:
        parts[-1].field += data[start:end]

    def header_value(data: bytes, start: int, end: int) -> None:
        parts[-1].value += data[start:end]

    def part_data(data: bytes, start: int, end: int) -> None:
        parts[-1].data += data[start:end]

    callbacks = {
        "on_part_begin": lambda: parts.append(_Part()),
        "on_part_data": part_data,
        "on_header_field": header_field,
        "on_header_value": header_value,
        "on_header_end": header_end,
    }
    parser = MultipartParser(BOUNDARY.encode(), callbacks)
    try:
        parser.write(data)
        parser.finalize()
    except FormParserError:
        return None
    model, stream = None, False
    for part in parts:
        _, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        if b"filename" in options:
            continue
        text = part.data.decode("utf-8", "replace")
        if options.get(b"name") == b"model":
            model = text
        elif options.get(b"name") == b"stream":
            stream = text.strip().lower() in ("true", "1")
    return Form(model, 0, 0, stream)
