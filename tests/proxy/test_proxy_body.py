"""Bodies: caps, forms, files."""

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxyrig import CHAT, chunk, open_files, reply_bytes

from proxy.http.body import PIECE, Body, Splice

TEXT = json.dumps({**CHAT, "padding": "x" * 50_000}).encode()


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(rig):
    rig.reconfigure(max_body=1000)
    client = await rig.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
    answer = await client.response()
    assert answer.status == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert answer.header("connection") == "close"


async def test_a_chunked_body_without_a_length_is_413_once_it_is_too_large(rig):
    rig.reconfigure(max_body=1000)
    client = await rig.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    await client.send(chunk(b"x" * 600))
    await client.send(chunk(b"x" * 600))
    assert (await client.response()).status == 413


async def test_a_body_of_exactly_the_limit_passes(rig):
    await rig.engine()
    body = json.dumps(CHAT).encode()
    rig.reconfigure(max_body=len(body))
    assert (await rig.post(body)).status == 200


async def test_a_chunked_body_reaches_the_engine_whole(rig):
    engine = await rig.engine()
    client = await rig.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for at in range(0, len(TEXT), 7000):
        await client.send(chunk(TEXT[at : at + 7000]))
    await client.send(b"0\r\nX-Trailer: dropped\r\n\r\n")
    assert (await client.response()).status == 200
    assert engine.requests[0].body == TEXT
    assert engine.requests[0].header("content-length") == str(len(TEXT))
    assert engine.requests[0].header("transfer-encoding") is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b"\xff\xff"])
async def test_a_body_that_is_no_json_object_is_400_in_the_shape_of_vllm(rig, body):
    answer = await rig.post(body)
    assert answer.status == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert answer.json()["error"]["code"] == 400
    assert rig.admission.admitted == []


async def test_a_broken_chunk_is_400_and_reaches_nobody(rig):
    engine = await rig.engine()
    client = await rig.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nbad\r\n"
    )
    assert (await client.response()).status == 400
    assert engine.requests == []


# forms


def form(*parts: tuple[str, bytes], boundary: str = "b0und") -> bytes:
    body = b""
    for disposition, value in parts:
        body += f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + value + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


FORM = "Content-Type: multipart/form-data; boundary=b0und\r\n"
AUDIO = ('name="file"; filename="a.wav"', b"RIFF\r\n--b0un\r\n\r\n\x00--")
PATH = "/v1/audio/transcriptions"


@pytest.mark.parametrize("size", [10, 3_000_000])
@pytest.mark.parametrize("order", [1, -1])
async def test_the_model_of_a_form_is_found_wherever_it_stands(rig, order, size):
    engine = await rig.engine()
    audio = ('name="file"; filename="a.wav"', os.urandom(size).replace(b"--b0und", b"--other"))
    body = form(*[audio, ('name="language"', b"en"), ('name="model"', b"alias")][::order])
    answer = await rig.post(body, PATH, FORM)
    assert answer.status == 200
    assert rig.admission.admitted == ["alias"]
    assert engine.requests[0].body == body


@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_the_model_of_a_form_is_spliced_where_the_engine_has_another_name(rig, size):
    engine = await rig.engine()
    rig.admission.served_names = ("whisper-large",)
    audio = ('name="file"; filename="a.wav"', b"\x01" * size)
    assert (await rig.post(form(audio, ("name=model", b"m"), AUDIO), PATH, FORM)).status == 200
    assert engine.requests[0].body == form(audio, ("name=model", b"whisper-large"), AUDIO)
    assert engine.requests[0].header("content-length") == str(len(engine.requests[0].body))


@pytest.mark.parametrize(
    ("parts", "model"),
    [
        ([AUDIO], None),
        ([('name="model"', b"")], None),
        ([('name="model"; filename="m"', b"n"), ('name="model"', b"m")], "m"),
        ([('name="model"', b"n"), ('name="model"', b"m")], "m"),
        ([('name="amodel"', b"n"), ('name="model"', b"m")], "m"),
        ([('name="model"', b"m"), ('name="prompt"', b"name=model")], "m"),
    ],
)
async def test_only_the_last_field_called_model_counts(rig, parts, model):
    await rig.engine()
    await rig.post(form(*parts), PATH, FORM)
    assert rig.admission.admitted == [model or "m"]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", FORM),
        (b"nonsense", FORM),
        (form(AUDIO)[:-5], FORM),
        (b"--b0und\r\nno end of headers", FORM),
        (b"--b0und\r\n" + b"X: y\r\n" * 10_000 + b"\r\n--b0und--", FORM),
        (form(*[AUDIO] * 1500), FORM),
        (form(AUDIO), "Content-Type: multipart/form-data\r\n"),
        (form(AUDIO), "Content-Type: application/json\r\n"),
        (form(AUDIO), ""),
    ],
)
async def test_what_is_no_form_is_400(rig, body, headers):
    assert (await rig.post(body, PATH, headers)).status == 400
    assert rig.admission.admitted == []


async def test_an_upload_too_large_for_us_is_413_and_its_file_is_gone(rig):
    rig.reconfigure(max_body=2_000_000)
    before = open_files()
    client = await rig.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{FORM}Transfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(3):
        await client.send(chunk(b"x" * 900_000))
    assert (await client.response()).status == 413
    assert _on_disk(open_files()) == _on_disk(before)


def _on_disk(files: Counter) -> Counter:
    return Counter({name: count for name, count in files.items() if name.startswith("/")})


# the container


@given(
    st.binary(max_size=300),
    st.integers(0, 300),
    st.integers(0, 300),
    st.binary(max_size=20),
    st.none() | st.integers(0, 300),
)
def test_pieces_are_the_body_with_its_splice_in_memory_and_in_a_file(data, start, end, replacement, spool_after):
    start, end = sorted((min(start, len(data)), min(end, len(data))))
    body = Body(limit=300, spool_after=spool_after)
    for at in range(0, len(data), 70):
        body.append(data[at : at + 70])
    splice = Splice(start, end, replacement)
    assert b"".join(bytes(piece) for piece in body.pieces()) == data == bytes(body.text_bytes())
    assert b"".join(bytes(piece) for piece in body.pieces(splice)) == data[:start] + replacement + data[end:]
    assert body.spliced_size(splice) == len(data) - (end - start) + len(replacement)
    needle = data[start:end][:9]
    assert body.find(needle, 0) == data.find(needle)
    body.close()
    assert body.size == 0


def test_a_needle_across_two_pieces_of_a_file_is_found():
    body = Body(limit=3 * PIECE, spool_after=0)
    body.append(b"x" * (PIECE - 3) + b"needle" + b"x" * PIECE)
    assert body.find(b"needle", 0) == PIECE - 3
    assert body.find(b"needle", PIECE - 2) == -1
    body.close()


@pytest.mark.parametrize("buffered", [8192, 4_000_000])  # it shows within the upload, or when that is looked through
async def test_an_upload_for_which_the_disk_has_no_room_is_503_and_reaches_nobody(rig, monkeypatch, buffered):
    full = partial(Path("/dev/full").open, "w+b", buffering=buffered)
    monkeypatch.setattr("proxy.http.body.tempfile.TemporaryFile", full)
    await rig.engine()
    body = form(("name=model", b"m"), ('name="file"; filename="a"', b"a" * 2_000_000))
    client = await rig.send(
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{FORM}Content-Length: {len(body)}\r\n\r\n".encode() + body[:100]
    )
    await client.send(body[100:])
    answer = await client.response()
    assert (answer.status, answer.json()["error"]["code"]) == (503, "out_of_resources")
    assert "No space left on device" in answer.json()["error"]["message"]
    assert answer.header("retry-after") == "1"
    assert rig.admission.admitted == []


async def test_an_engine_that_answers_before_it_has_the_whole_body_is_heard(rig):
    async def early(request, connection):
        await connection.send(reply_bytes(b'{"early":true}', "413 Content Too Large", "Connection: close\r\n"))
        await connection.closed()

    engine = await rig.engine("a", early)
    engine.reads_bodies = False
    answer = await rig.post({**CHAT, "padding": "x" * 8_000_000})
    assert answer.status == 413
    assert answer.json() == {"early": True}
