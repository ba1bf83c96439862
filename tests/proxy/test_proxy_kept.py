"""Connections to engines: kept ones are fit for whoever has them next, and one that has ended is not waited for."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
from proxyrig import CHAT, PATIENCE, STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from supervisord.core.admission import Ending


@contextlib.asynccontextmanager
async def stalling(rig, request: bytes) -> AsyncIterator[socket.socket]:
    """A client that has sent ``request`` and takes a few thousand bytes of its answer at a time, when it is read."""
    rig.proxy._listeners[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # inherited
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", rig.port))
        await loop.sock_sendall(client, request)
        yield client


@pytest.mark.parametrize("kind", ["whole", "in chunks"])
async def test_the_last_bytes_of_an_answer_leave_a_kept_connection_that_is_read(rig, tmp_path, gate, kind):
    # More than is held until it is whole; or chunks, for a client that knows none: they are not passed on as they are.
    size, version = (2_000_000, b"HTTP/1.1") if kind == "whole" else (10, b"HTTP/1.0")
    last = b"y" * 120_000  # more than the client takes at once, so that these bytes hold the connection

    async def answer(request, connection):
        if len(engine.requests) > 1:
            await connection.send(reply_bytes(b"{}"))
        elif kind == "whole":
            await connection.send(reply_bytes(b"x" * size + last)[: -len(last)])
            await gate.wait()
            await connection.send(last)
        else:
            await connection.send(event_stream_head() + chunk(b"x" * size))
            await gate.wait()
            await connection.send(chunk(last) + b"0\r\n\r\n")

    engine = await rig.engine("a", answer, path=str(tmp_path / "e"))
    async with stalling(rig, request_bytes(STREAM).replace(b"HTTP/1.1", version)) as client:
        came = 0
        while came < size:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 20), PATIENCE)
            came += data.count(b"x")
        gate.set()
        await rig.until(lambda: rig.admission.finished)
        assert rig.proxy.in_flight == 1  # until it is read
        assert (await rig.post()).body == b"{}"
    assert len(engine.connections) == 1


@pytest.mark.parametrize("said", ["nothing", "a half", "events"])
async def test_an_engine_that_ends_its_side_and_reads_no_more_is_not_waited_for(rig, tmp_path, said):
    saying = {
        "nothing": b"",
        "a half": reply_bytes(b"half of it")[:-4],
        "events": event_stream_head() + chunk(b"data: 1\n\n"),
    }
    over = asyncio.Event()

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # megabytes of the request are still to come
        writer.write(saying[said])
        writer.write_eof()
        await over.wait()
        writer.transport.abort()

    async with await asyncio.start_unix_server(end, tmp_path / "e"):
        rig.admission.endpoints["a"] = f"unix:{tmp_path}/e"
        try:
            answer = await rig.post({**CHAT, "x": "y" * 10_000_000})
        finally:
            over.set()
    if said == "events":
        assert answer.status == 200
        assert json.loads(answer.body.rstrip().rpartition(b"data: ")[2])["error"]["code"] == "upstream_failed"
    else:
        assert answer.status == 502


async def test_what_an_engine_sends_while_its_client_leaves_is_written_to_nobody(rig, tmp_path):
    async def answer(request, connection):
        await connection.send(event_stream_head())
        while True:
            await connection.send(chunk(b"data: 1\n\n"))
            await asyncio.sleep(0)

    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    await rig.engine("a", answer, path=str(tmp_path / "e"))
    for number in range(30):
        client = await rig.send(request_bytes(STREAM))
        await client.head()
        client.reset()
        await rig.until(lambda number=number: len(rig.admission.finished) > number)
    assert {ending for _, ending in rig.admission.endings} == {Ending.CLIENT_GONE}
    assert not failures
