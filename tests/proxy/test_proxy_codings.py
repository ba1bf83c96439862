"""Compressed request bodies: decoded under the cap, whatever they are cut into, and refused when they lie."""

import asyncio
import gzip
import json
import threading
import zlib

import brotli
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from proxyrig import CHAT, PATIENCE, chunk, request_bytes

from proxy.errors import ProxyError
from proxy.http.body import PIECE
from proxy.http.codings import ACCEPTED, ZSTD_WINDOW, decoder_for

TEXT = json.dumps({**CHAT, "padding": "x" * 50_000}).encode()
LIMIT = 1 << 30


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


CODINGS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstd.compress,
    "br": brotli.compress,
    "gzip, zstd": lambda data: zstd.compress(gzip.compress(data)),
    "br,identity,  deflate": lambda data: zlib.compress(brotli.compress(data)),
}
#: Those of which several may follow each other.
REPEATABLE = ("gzip", "zstd")
SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18\x04\0\0\0skip"


@given(
    st.binary(max_size=2000), st.sampled_from(list(CODINGS)), st.lists(st.integers(1, 200), max_size=10), st.booleans()
)
def test_a_compressed_body_is_decoded_whatever_its_pieces(data, coding, cuts, twice):
    packed = CODINGS[coding](data)
    if twice and coding in REPEATABLE:
        packed, data = packed * 2, data * 2
    decoder, out = decoder_for(coding, LIMIT), b""
    for cut in [*cuts, len(packed)]:
        out += b"".join(decoder.feed(packed[:cut]))
        packed = packed[cut:]
    decoder.finish()
    assert out == data


@pytest.mark.parametrize("coding", REPEATABLE)
@pytest.mark.parametrize("size", [PIECE - 1, PIECE, 2 * PIECE, 2 * PIECE + 1])
def test_what_follows_whole_pieces_is_decoded_once(coding, size):
    first, second = bytes(size), b"what follows"
    decoder = decoder_for(coding, LIMIT)
    out = b"".join(decoder.feed(CODINGS[coding](first) + CODINGS[coding](second)))
    decoder.finish()
    assert out == first + second


@given(st.binary(max_size=300), st.sampled_from(list(CODINGS)), st.lists(st.integers(1, 50), max_size=5))
def test_any_bytes_are_decoded_or_refused(data, coding, cuts):
    decoder = decoder_for(coding, LIMIT)
    try:
        for cut in [*cuts, len(data)]:
            list(decoder.feed(data[:cut]))
            data = data[cut:]
        decoder.finish()
    except ProxyError as error:
        assert error.status == 400  # noqa: PT017


@pytest.mark.parametrize("coding", ["", "identity", "Identity, identity"])
def test_what_is_not_coded_needs_no_decoder(coding):
    assert decoder_for(coding, LIMIT) is None


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br", "zstd, gzip"])
def test_a_bomb_is_decoded_in_small_pieces(coding):
    packed = bytes(32 * PIECE)
    for one in coding.split(", "):
        packed = CODINGS[one](packed)
    pieces = list(map(len, decoder_for(coding, LIMIT).feed(packed)))
    assert sum(pieces) == 32 * PIECE
    assert max(pieces) <= 2 * PIECE


def test_a_bomb_between_two_codings_is_413_though_nothing_comes_out():
    empty_frames = SKIPPABLE_FRAME * 200_000
    decoder = decoder_for("zstd, gzip", 1_000_000)
    with pytest.raises(ProxyError) as refused:
        list(decoder.feed(gzip.compress(empty_frames)))
    assert refused.value.status == 413


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3],
        lambda data: b"x" * 40,
        lambda data: data + b"junk" * 9,
        lambda data: data + b"\0",
        lambda data: data + b"{",
    ],
    ids=["cut short", "another format", "junk after it", "a NUL after it", "a byte after it"],
)
@pytest.mark.parametrize("pieces", [1, 7, 10_000])
def test_a_damaged_coding_is_400(coding, damage, pieces):
    decoder = decoder_for(coding, LIMIT)
    packed = damage(CODINGS[coding](b"hello" * 100))
    with pytest.raises(ProxyError) as refused:  # noqa: PT012
        for at in range(0, len(packed), pieces):
            list(decoder.feed(packed[at : at + pieces]))
        decoder.finish()
    assert refused.value.status == 400
    assert str(refused.value).startswith("cannot decode the ")


def test_a_zstd_frame_that_wants_more_memory_than_http_allows_is_400():
    for window in (ZSTD_WINDOW, ZSTD_WINDOW + 1):
        packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window})
        packed = packer.compress(b"x" * 1000) + packer.compress(b"y" * 1000) + packer.flush()
        decoder = decoder_for("zstd", LIMIT)
        if window == ZSTD_WINDOW:
            assert sum(map(len, decoder.feed(packed))) == 2000
        else:
            with pytest.raises(ProxyError, match="memory"):
                list(decoder.feed(packed))


def test_zstd_s_skippable_frames_are_skipped():
    decoder = decoder_for("zstd", LIMIT)
    packed = SKIPPABLE_FRAME + zstd.compress(b"a") + SKIPPABLE_FRAME + zstd.compress(b"b")
    assert b"".join(decoder.feed(packed)) == b"ab"
    decoder.finish()


@pytest.mark.parametrize("coding", list(CODINGS))
async def test_a_compressed_request_reaches_the_engine_decoded_with_true_headers(rig, coding):
    engine = await rig.engine()
    answer = await rig.post(CODINGS[coding](TEXT), headers=f"Content-Encoding: {coding}\r\n")
    assert answer.status == 200
    assert engine.requests[0].body == TEXT
    assert engine.requests[0].header("content-encoding") is None
    assert engine.requests[0].header("content-length") == str(len(TEXT))


async def test_codings_in_several_fields_are_one_list(rig):
    engine = await rig.engine()
    packed = zstd.compress(gzip.compress(TEXT))
    assert (await rig.post(packed, headers="Content-Encoding: gzip\r\nContent-Encoding: zstd\r\n")).status == 200
    assert engine.requests[0].body == TEXT


async def test_a_compressed_chunked_body_with_trailers_is_decoded(rig):
    engine = await rig.engine()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: zstd\r\nTransfer-Encoding: chunked"
    packed = zstd.compress(TEXT)
    client = await rig.send(
        head + b"\r\n\r\n" + b"".join(chunk(packed[at : at + 9]) for at in range(0, len(packed), 9))
    )
    await client.send(b"0\r\nContent-Encoding: gzip\r\n\r\n" + request_bytes())
    assert [(await client.response()).status for _ in range(2)] == [200, 200]
    assert engine.requests[0].body == TEXT
    assert engine.requests[0].header("transfer-encoding") is None


@pytest.mark.parametrize("coding", ["compress", "nonsense", "gzip, compress", "compress, gzip", "gzip, gzip, gzip"])
async def test_another_coding_is_415_and_says_which_would_do(rig, coding):
    answer = await rig.post(b"xxxx", headers=f"Content-Encoding: {coding}\r\n")
    assert answer.status == 415
    assert answer.header("accept-encoding") == ACCEPTED == "zstd, br, gzip, deflate"
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br", "gzip, zstd"])
async def test_a_bomb_is_413(rig, coding):
    rig.reconfigure(max_body=100_000)
    answer = await rig.post(CODINGS[coding](bytes(50_000_000)), headers=f"Content-Encoding: {coding}\r\n")
    assert answer.status == 413
    assert rig.admission.admitted == []


async def test_a_damaged_body_is_400_and_reaches_nobody(rig):
    engine = await rig.engine()
    for coding in ("gzip", "deflate", "zstd", "br"):
        answer = await rig.post(CODINGS[coding](TEXT)[:-2], headers=f"Content-Encoding: {coding}\r\n")
        assert answer.status == 400
        assert answer.json()["error"]["message"] == f"cannot decode the {coding} request body: it is cut short"
    assert engine.requests == []


# what takes long


class Gate:
    """Stands before the last piece of a coding, as a very large body does: until the test lets it go on."""

    def __init__(self, monkeypatch):
        self.reached, self.open = threading.Event(), threading.Event()
        self.left = 0
        monkeypatch.setattr("proxy.clients.intake.AT_ONCE", 1000)
        monkeypatch.setattr("proxy.clients.intake.decoder_for", lambda *args: Slow(decoder_for(*args), self))

    async def wait(self):
        await asyncio.to_thread(self.reached.wait, PATIENCE)


class Slow:
    def __init__(self, decoder, gate):
        self._decoder, self._gate = decoder, gate

    def feed(self, data):
        pieces = list(self._decoder.feed(data))
        yield from pieces
        self._gate.reached.set()
        assert self._gate.open.wait(PATIENCE)
        self._gate.left += 1

    def finish(self):
        self._decoder.finish()


async def test_a_large_compressed_body_stops_nobody_else_while_it_is_unpacked(rig, monkeypatch):
    engine = await rig.engine()
    gate = Gate(monkeypatch)
    client = await rig.send(request_bytes(zstd.compress(TEXT), headers="Content-Encoding: zstd\r\n"))
    await gate.wait()
    assert (await rig.get("/health")).status == 200
    assert engine.requests == []
    gate.open.set()
    assert (await client.response()).status == 200
    assert engine.requests[0].body == TEXT


async def test_a_client_that_leaves_while_its_body_is_unpacked_leaves_nothing_behind(rig, monkeypatch):
    engine = await rig.engine()
    gate = Gate(monkeypatch)
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: "
    packed = gzip.compress(bytes(3_000_000))
    client = await rig.send(f"{head}{len(packed)}\r\n\r\n".encode() + packed)
    await gate.wait()
    client.reset()
    gate.open.set()
    async with asyncio.timeout(PATIENCE):
        while rig.proxy.in_flight:  # noqa: ASYNC110 - nothing tells of a request that never got a lease
            await asyncio.sleep(0)
    assert gate.left == 1
    assert engine.requests == []  # and the rig finds no file of it


@pytest.mark.parametrize("size", [2 * PIECE, 40 * PIECE])
@pytest.mark.parametrize("coding", ["gzip", "zstd", "br"])
async def test_what_is_unpacked_in_a_thread_is_the_same_and_as_limited(rig, coding, size):
    engine = await rig.engine()
    text = json.dumps({**CHAT, "padding": "xy" * size}).encode()
    packed = CODINGS[coding](text)
    assert (await rig.post(packed, headers=f"Content-Encoding: {coding}\r\n")).status == 200
    assert engine.requests[0].body == text
    answer = await rig.post(packed[:-3], headers=f"Content-Encoding: {coding}\r\n")
    assert (answer.status, "cut short" in answer.json()["error"]["message"]) == (400, True)
    rig.reconfigure(max_body=len(text) - 1)
    assert (await rig.post(packed, headers=f"Content-Encoding: {coding}\r\n")).status == 413


async def test_more_compressed_bytes_than_a_body_may_have_are_413_whatever_they_hold(rig):
    rig.reconfigure(max_body=10_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: zstd\r\nTransfer-Encoding: chunked\r\n\r\n"
    client = await rig.send(head + chunk(SKIPPABLE_FRAME * 1000))
    assert (await client.response()).status == 413
