"""Frames without any network: read, followed and made as the ``websockets`` library does it, however they are cut."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ProtocolError
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from proxy.realtime import websocket
from proxy.realtime.websocket import (
    Frames,
    MessageReader,
    WebSocketError,
    close_code,
    close_frame,
    frame,
    masked,
    read_head,
)

CONTROL = st.tuples(st.sampled_from([Opcode.PING, Opcode.PONG]), st.binary(max_size=125))
PAYLOAD = st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(lambda size: b"x" * size))
MESSAGE = st.tuples(st.sampled_from([Opcode.TEXT, Opcode.BINARY]), st.lists(PAYLOAD, min_size=1, max_size=3))


@st.composite
def conversations(draw: st.DrawFn) -> list[Frame]:
    """Frames as one side may send them: messages in fragments, with control frames anywhere, and perhaps a Close."""
    frames: list[Frame] = []
    for opcode, pieces in draw(st.lists(MESSAGE, max_size=4)):
        for at, piece in enumerate(pieces):
            frames += [Frame(*control) for control in draw(st.lists(CONTROL, max_size=1))]
            frames.append(Frame(opcode if at == 0 else Opcode.CONT, piece, at == len(pieces) - 1))
    if draw(st.booleans()):
        frames.append(Frame(Opcode.CLOSE, draw(st.sampled_from([b"", b"\x03\xe8", b"\x03\xf3bye"]))))
    return frames


def cut(draw: st.DataObject, raw: bytes) -> list[bytes]:
    at = sorted(draw.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    return [raw[start:end] for start, end in zip([0, *at], [*at, len(raw)], strict=True)]


@given(conversations(), st.booleans(), st.data())
def test_frames_are_followed_wherever_they_are_cut(frames: list[Frame], mask: bool, draw: st.DataObject):
    raw = b"".join(f.serialize(mask=mask) for f in frames)
    follower = Frames()
    for piece in cut(draw, raw):
        follower.feed(piece)
    assert follower.messages == sum(f.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) for f in frames)
    closes = [close_code(f.data) for f in frames if f.opcode is Opcode.CLOSE]
    assert follower.close == (closes[0] if closes else None)
    assert follower.between_messages is not bool(closes)


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.TEXT, Opcode.CONT])
def test_short_frames_that_are_there_as_a_whole_cost_no_call_each(opcode: Opcode):
    """A client may send nothing else, and forty thousand of them are one read of the socket."""
    raw = Frame(opcode, b"").serialize(mask=True) * 1000 + Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True)
    follower, calls = Frames(), []
    sys.setprofile(lambda frame, event, what: calls.append(event))
    try:
        follower.feed(raw)
    finally:
        sys.setprofile(None)
    assert len(calls) < 50
    assert (follower.messages, follower.close) == (0 if opcode is Opcode.PING else 1000, 1000)


@given(conversations(), st.booleans(), st.data())
def test_the_gaps_between_frames_and_messages_are_known(frames: list[Frame], mask: bool, draw: st.DataObject):
    raws = [f.serialize(mask=mask) for f in frames if f.opcode is not Opcode.CLOSE]
    end = draw.draw(st.integers(0, len(b"".join(raws))))
    follower = Frames()
    follower.feed(b"".join(raws)[:end])
    ends = [sum(map(len, raws[: n + 1])) for n in range(len(raws))]
    assert follower.between_frames is (end == 0 or end in ends)
    if follower.between_frames:
        data = [f for f, at in zip(frames, ends, strict=False) if at <= end and f.opcode < 8]
        assert follower.between_messages is (not data or data[-1].fin)


@given(conversations(), st.booleans(), st.data())
def test_messages_are_read_wherever_they_are_cut(frames: list[Frame], mask: bool, draw: st.DataObject):
    raw = b"".join(f.serialize(mask=mask) for f in frames)
    reader = MessageReader(1 << 20, masks=mask)
    read = []
    for piece in cut(draw, raw):
        reader.feed(piece)
        while (message := reader.next()) is not None:
            read.append(message)
    expected, opcode, payload = [], None, b""
    for f in frames:
        if f.opcode >= 8:
            expected.append((f.opcode, f.data))
            continue
        opcode, payload = (f.opcode if opcode is None else opcode), payload + f.data
        if f.fin:
            expected.append((opcode, payload))
            opcode, payload = None, b""
    assert [(m.opcode, m.payload) for m in read] == expected
    assert sorted(b"".join(m.raw for m in read)) == sorted(raw)
    assert not reader.held


@given(st.integers(0, 255), st.booleans(), st.booleans(), st.integers(0, 130))
def test_a_frame_that_the_library_refuses_is_refused(first: int, masks: bool, mask: bool, length: int):
    raw = bytes((first, (126 if length > 125 else length) | mask << 7))
    raw += (length.to_bytes(2, "big") if length > 125 else b"") + (b"abcd" if mask else b"") + b"x" * length
    reader = MessageReader(1 << 20, masks=masks)
    reader.feed(raw)
    try:
        reader.next()
    except WebSocketError as error:
        refused = error.code == websocket.PROTOCOL_ERROR
    else:
        refused = False
    begins_within = first & 0x0F == Opcode.CONT
    half_a_code = first & 0x0F == Opcode.CLOSE and length == 1
    assert refused is (_library_refuses(raw, masks) or begins_within or half_a_code)


def _library_refuses(raw: bytes, masks: bool) -> bool:
    stream = StreamReader()
    stream.feed_data(raw)
    try:
        next(Frame.parse(stream.read_exact, mask=masks))
    except StopIteration:
        return False
    except ProtocolError:
        return True
    raise AssertionError("the frame is whole")


@given(st.integers(0, 70_000), st.booleans(), st.sampled_from([websocket.TEXT, websocket.BINARY]))
def test_our_frames_are_read_by_the_library(size: int, mask: bool, opcode: int):
    payload = b"\x00\xff" * (size // 2) + b"z" * (size % 2)
    stream = StreamReader()
    stream.feed_data(frame(opcode, payload, mask=mask))
    parser = Frame.parse(stream.read_exact, mask=mask)
    with pytest.raises(StopIteration) as end:
        next(parser)
    assert (end.value.value.opcode, end.value.value.data, end.value.value.fin) == (opcode, payload, True)


@given(st.text(max_size=200))
def test_a_reason_is_cut_to_what_a_close_can_hold(reason: str):
    raw = close_frame(1013, reason)
    head = read_head(raw, 0)
    assert head is not None
    assert head.length <= 125
    payload = raw[head.size :]
    assert close_code(payload) == 1013
    assert reason.startswith(payload[2:].decode())


@given(st.binary(max_size=1000), st.binary(min_size=4, max_size=4))
def test_masking_twice_is_nothing(payload: bytes, key: bytes):
    assert masked(payload, key) == bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    assert masked(masked(payload, key), key) == payload


def test_what_was_not_read_can_be_passed_on_as_it_came():
    whole = Frame(Opcode.TEXT, b"one").serialize(mask=True)
    begun = Frame(Opcode.TEXT, b"two", fin=False).serialize(mask=True) + b"\x80\xfe"
    reader = MessageReader(100, masks=True)
    reader.feed(whole + begun)
    first = reader.next()
    assert first is not None
    assert first.raw == whole
    assert reader.next() is None
    assert reader.held == len(begun)
    assert reader.rest() == begun
    assert reader.held == 0


def test_a_message_is_refused_as_soon_as_it_says_how_long_it_is():
    reader = MessageReader(100, masks=True)
    reader.feed(Frame(Opcode.TEXT, b"x" * 60, fin=False).serialize(mask=True))
    assert reader.next() is None
    reader.feed(Frame(Opcode.CONT, b"x" * 60).serialize(mask=True)[:6])
    with pytest.raises(WebSocketError) as error:
        reader.next()
    assert error.value.code == websocket.TOO_BIG


@given(st.lists(st.binary(max_size=40), max_size=12), st.booleans())
def test_any_bytes_are_read_or_refused_and_followed_without_a_fall(pieces: list[bytes], masks: bool):
    reader, follower = MessageReader(1000, masks=masks), Frames()
    taken = b""
    for piece in pieces:
        follower.feed(piece)
        reader.feed(piece)
        try:
            while (message := reader.next()) is not None:
                taken += message.raw
        except WebSocketError:
            break
    assert len(taken) + reader.held <= sum(map(len, pieces))


def test_a_message_in_endless_empty_frames_is_refused_before_it_fills_the_memory():
    reader = MessageReader(1000, masks=True)
    reader.feed(b"\x01\x80abcd" + b"\x00\x80abcd" * 1000)
    with pytest.raises(WebSocketError, match="too many frames") as error:
        reader.next()
    assert error.value.code == websocket.TOO_BIG
