"""What could be read in two ways is refused and the connection closed, and the request behind it is never seen."""

import re
from pathlib import Path

import pytest
from proxyrig import chunk, request_bytes

CORPUS = Path(__file__).parent / "corpus" / "requests.txt"
BODY = b'{"model":"m","prompt":"xx"}'
VICTIM = request_bytes({"model": "m", "prompt": "smuggled"}, "/v1/completions")
assert len(BODY) == 27


def unescaped(text: str) -> bytes:
    plain = {"r": b"\r", "n": b"\n", "t": b"\t", "0": b"\0", "\\": b"\\"}
    parts = re.split(r"\\(x[0-9a-f]{2}|.)", text)
    found = b""
    for at, part in enumerate(parts):
        if at % 2 == 0:
            found += part.encode()
        else:
            found += bytes([int(part[1:], 16)]) if part[0] == "x" else plain[part]
    return found.replace(b"BODY", BODY).replace(b"VICTIM", VICTIM)


def cases():
    _, *entries = re.split(r"^== ", CORPUS.read_text(), flags=re.MULTILINE)
    for entry in entries:
        head, *lines = entry.splitlines()
        name, _, statuses = head.partition(" ")
        yield pytest.param(unescaped("".join(lines)), set(statuses.split(", ")), id=name)


@pytest.mark.parametrize("pieces", ["at once", "byte by byte"])
@pytest.mark.parametrize(("raw", "statuses"), list(cases()))
async def test_a_request_of_the_corpus_is_refused_and_ends_the_connection(rig, raw, statuses, pieces):
    engine = await rig.engine()
    client = await rig.connect()
    if pieces == "at once":
        await client.send(raw)
    else:
        for at in range(len(raw)):
            client.writer.write(raw[at : at + 1])
            if at % 16 == 0:
                await client.writer.drain()
    answer = await client.closed()
    if answer:
        assert answer.count(b"HTTP/1.1 ") == 1, answer
        assert answer[9:12].decode() in statuses, answer
        assert b"\r\nConnection: close\r\n" in answer
    else:
        assert "closed" in statuses
    assert engine.requests == []
    assert rig.admission.admitted == []


@pytest.mark.parametrize(
    "raw",
    [
        b"1b\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"1B\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"00000001b\r\n" + BODY + b"\r\n000\r\n\r\n",
        b"1b;name=value;x=\"y z\"\r\n" + BODY + b"\r\n0;last\r\n\r\n",
        b"1b\r\n" + BODY + b"\r\n0\r\nTrailer: dropped\r\nContent-Length: 1\r\n\r\n",
        b"".join(chunk(BODY[at : at + 1]) for at in range(27)) + b"0\r\n\r\n",
    ],
)  # fmt: skip
async def test_what_the_rfc_allows_in_chunks_is_understood_and_the_next_request_is_the_next(rig, raw):
    engine = await rig.engine()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n"
    client = await rig.send(head + raw + VICTIM)
    assert [(await client.response()).status for _ in range(2)] == [200, 200]
    assert [request.body for request in engine.requests] == [BODY, VICTIM.partition(b"\r\n\r\n")[2]]
    assert all(name.lower() != "dropped" for request in engine.requests for name, _ in request.headers)


@pytest.mark.parametrize(
    "raw",
    [b"1b;" + b"x" * 300 + b"\r\n" + BODY, b"".join(b"1;" + b"x" * 200 + b"\r\n \r\n" for _ in range(100))],
    ids=["one", "many"],
)
async def test_oversized_extensions_are_refused(rig, raw):
    engine = await rig.engine()
    client = await rig.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)
    assert (await client.response()).status == 400
    await client.closed()
    assert engine.requests == []


async def test_the_body_of_a_request_that_has_none_by_its_route_is_not_the_next_request(rig):
    engine = await rig.engine()
    inner = VICTIM
    head = f"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
    client = await rig.send(head + inner + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.response()).status == 200
    assert (await client.response()).json()["object"] == "list"
    assert engine.requests == []


async def test_a_body_that_nobody_waited_for_ends_the_connection(rig):
    engine = await rig.engine()
    client = await rig.send(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\n\r\n")
    assert (await client.response()).status == 200
    await client.send(VICTIM)
    assert await client.closed() == b""
    assert engine.requests == []


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"Transfer-Encoding: gzip\r\n\r\nhello",
        b"X-A: b\n\r\n\r\nhello",
        b"X-A: b\r\n c\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
async def test_an_answer_that_could_be_read_in_two_ways_is_502(rig, head):
    async def answer(request, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + head)

    await rig.engine("a", answer)
    assert (await rig.post()).status == 502


async def test_an_engine_that_says_more_than_it_was_asked_is_not_asked_again_there(rig):
    async def twice(request, connection):
        await connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
        )

    engine = await rig.engine("a", twice)
    assert [(await rig.post()).body for _ in range(2)] == [b"{}", b"{}"]
    assert len(engine.connections) == 2
