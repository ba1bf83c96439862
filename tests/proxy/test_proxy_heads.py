"""The parsers beside h11: what ours accepts means the same to it; and any bytes at all, in any pieces."""

import contextlib
import dataclasses
import tracemalloc

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http.chunks import ChunkError, Chunks
from proxy.http.headers import HeadError, RequestHead, ResponseHead
from proxy.http.heads import _parse_request, parse_request, parse_response

TOKEN = st.text("abcXYZ019-_.!#$%&'*+^`|~", min_size=1, max_size=12)
VALUE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=20)
KNOWN = ["Content-Length", "Transfer-Encoding", "Host", "Connection", "Expect", "Content-Encoding", "TE", "X-A"]
NAME = TOKEN | st.sampled_from(KNOWN) | st.sampled_from(KNOWN).map(str.lower)
FRAMING = st.sampled_from(
    ["0", "5", "05", "5, 5", "+5", " 5 ", "chunked", "Chunked", "gzip, chunked", "close", "x", ""]
)
FIELDS = st.lists(st.tuples(NAME, VALUE | FRAMING), max_size=6)
#: What turns a good head into a doubtful one.
DAMAGE = [b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n ", b"\x0b", b"\x7f", b"\x80", b"\r\n\r\n", b",", b"HTTP/1.1"]


def head_of(fields, line="POST /v1/completions HTTP/1.1", host=True) -> bytes:
    lines = [line, *(["Host: x"] if host else []), *(f"{name}: {value}" for name, value in fields)]
    return "".join(f"{text}\r\n" for text in lines).encode("latin-1") + b"\r\n"


@st.composite
def heads(draw) -> bytes:
    head = bytearray(head_of(draw(FIELDS), host=draw(st.booleans())))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(head) - 4))
        head[at : at + draw(st.integers(0, 2))] = draw(st.sampled_from(DAMAGE))
    return bytes(head)


def ours(raw: bytes) -> RequestHead | None:
    try:
        return parse_request(raw)
    except HeadError:
        return None


def theirs(raw: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=200_000)
    try:
        connection.receive_data(raw)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


def framing(request: h11.Request) -> int | None:
    """As h11 frames the body: its length, None for chunked."""
    fields = dict(request.headers)
    return None if b"transfer-encoding" in fields else int(fields.get(b"content-length", b"0"))


@settings(max_examples=400, deadline=None)
@given(heads())
def test_what_we_accept_h11_accepts_with_the_same_meaning(raw):
    end = raw.find(b"\r\n\r\n") + 4
    mine = ours(raw[:end])
    if mine is None:
        return
    other = theirs(raw[:end])
    assert other is not None, raw
    assert (other.method.decode(), other.target.decode("latin-1")) == (mine.method, mine.target)
    assert framing(other) == mine.length
    # What goes on to the engine is what h11 saw, in its order.
    seen = [(name, value) for name, value in other.headers]
    passed = [(name.lower(), value.strip(b" \t")) for name, value in mine.passing]
    assert [pair for pair in seen if pair in passed] == passed


@pytest.mark.parametrize("spelling", [b"%x", b"%X", b"0%x"])
def test_whole_chunks_pass_as_they_came_whatever_their_length(spelling):
    chunks, passed = Chunks(), 0
    for size in (*range(1, 40), *range(250, 270), 4095, 4096, 65535, 65536, 1 << 20):
        body = bytes(n & 255 for n in range(size))
        raw = (spelling % size) + b"\r\n" + body + b"\r\n"
        assert chunks.pass_on(raw) == raw
        passed += size
        assert chunks.size == passed
        assert chunks.tail.endswith(body[-4:])
        assert chunks.open_bytes is None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TOKEN.map("x-{}".format), VALUE), max_size=6), st.integers(0, 10**9) | st.none())
def test_what_is_plainly_right_is_accepted(fields, length):
    framed = [("Transfer-Encoding", "chunked")] if length is None else [("Content-Length", str(length))]
    mine = parse_request(head_of([*fields, *framed]))
    assert mine.length == length
    kept = [(n.encode(), v.strip(" \t").encode("latin-1")) for n, v in fields]
    assert [(name, value.strip(b" \t")) for name, value in mine.passing] == [(b"Host", b"x"), *kept]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | heads())
def test_any_bytes_are_a_head_or_a_head_error(raw):
    for parse in (parse_request, parse_response):
        with contextlib.suppress(HeadError):
            parse(raw + b"\r\n\r\n")


PIECES = st.lists(st.integers(0, 40), max_size=30)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [piece for piece in [*pieces, data[at:]] if piece]


def encoded(bodies: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(body), extension, body) for body in bodies if body)
    return chunks + b"0\r\n" + trailer + b"\r\n"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.binary(max_size=50), max_size=8),
    PIECES,
    st.sampled_from([b"", b";a=b", b' ; q="x;y"']),
    st.sampled_from([b"", b"A: b\r\n"]),
    st.binary(max_size=5),
)
def test_chunks_in_any_pieces_are_the_same_bytes(bodies, sizes, extension, trailer, excess):
    raw, plain = encoded(bodies, extension, trailer), b"".join(bodies)
    out, through = Chunks(), Chunks()
    taken, passed = [], []
    for piece in cut(raw + excess, sizes):
        taken += out.take_out(piece)
        passed.append(through.pass_on(piece))
    assert (out.done, out.excess, out.size, out.tail) == (True, excess, len(plain), plain[-4:])
    assert b"".join(taken) == plain
    assert (through.done, through.excess, through.size, through.tail) == (True, excess, len(plain), plain[-4:])
    # Passed on: the same chunks, without extensions, the last chunk and trailers.
    assert b"".join(passed) == encoded(bodies)[: -len(b"0\r\n\r\n")]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.integers(0, 300), PIECES)
def test_what_was_passed_on_of_broken_chunks_can_be_completed(bodies, stop, sizes):
    raw = encoded(bodies)[:-5]
    chunks = Chunks()
    sent = b"".join(chunks.pass_on(piece) for piece in cut(raw[:stop], sizes))
    assert raw.startswith(sent)
    missing = chunks.open_bytes
    completed = sent if missing is None else sent + b"\n" * missing + b"\r\n"
    again = Chunks()
    again.take_out(completed + b"0\r\n\r\n")
    assert again.done


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100) | st.text("0123456789abcdefABCDEF;\r\n \t:x", max_size=60).map(str.encode), PIECES)
def test_any_bytes_are_chunks_or_a_chunk_error_whatever_their_pieces(raw, sizes):
    def outcome(pieces):
        chunks = Chunks()
        try:
            return b"".join(b"".join(chunks.take_out(piece)) for piece in pieces), chunks.done, chunks.excess
        except ChunkError:
            return "error"

    whole = outcome([raw] if raw else [])
    assert outcome(cut(raw, sizes)) == whole


@pytest.mark.parametrize("count", [128, 129])
def test_the_number_of_fields_is_limited(count):
    raw = head_of([(f"x-{number}", "y") for number in range(count - 1)])
    if count == 128:
        assert len(parse_request(raw).passing) == 128
    else:
        with pytest.raises(HeadError) as refused:
            parse_request(raw)
        assert refused.value.status == 431


def test_a_head_that_differs_only_in_its_length_has_its_own_length():
    """What was read is remembered without the number, and nobody's change is seen by the next."""
    for length in (0, 1, 7, 7, 123456):
        head = parse_request(head_of([("Content-Length", length), ("A", "1")]))
        assert (head.length, head.passing) == (length, ((b"Host", b"x"), (b"A", b"1")))
        head.passing, head.length = (), 99
        answer = parse_response(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nA: 1\r\n\r\n" % length)
        assert (answer.length, answer.lines) == (length, b"A: 1\r\n")
        answer.lines += b"B: 2\r\n"


def test_nothing_is_remembered_of_long_heads():
    tracemalloc.start()
    try:
        for number in range(300):
            raw = head_of([("A", f"{number:060000}")])
            assert b"A: %060000d\r\n" % number in parse_request(raw).for_engine("id", 0, decoded=False)
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=300)
@given(heads())
def test_what_was_remembered_is_what_would_have_been_read(raw):
    """Twice: the first may be remembered from another head that was like it, the second is from this one."""
    for _ in range(2):
        results: list[RequestHead | str] = []
        for parse in (parse_request, _parse_request):
            try:
                results.append(parse(raw))
            except HeadError as error:
                results.append(str(error))
        assert results[0] == results[1]


@pytest.mark.parametrize("length", [b"0", b"1", b"5"])
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_an_answer_without_a_body_has_none_whatever_its_length_says(status, length):
    assert parse_response(b"HTTP/1.1 %b\r\nContent-Length: %b\r\n\r\n" % (status, length)).length == 0


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5\r\n 5\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length: 1234567890123456\r\n",
    ],
)
def test_a_length_that_is_not_one_number_is_refused_also_after_a_head_like_it(framing):
    parse_request(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
    for _ in range(2):
        with pytest.raises(HeadError):
            parse_request(b"POST / HTTP/1.1\r\nHost: x\r\n%b\r\n" % framing)


@pytest.mark.parametrize("kind", [RequestHead, ResponseHead])
def test_a_copy_of_a_head_lacks_no_field(kind):
    head = kind(*(object() for _ in dataclasses.fields(kind)))
    copy = head.copy()
    assert copy is not head
    assert [getattr(copy, field.name) for field in dataclasses.fields(kind)] == [
        getattr(head, field.name) for field in dataclasses.fields(kind)
    ]
