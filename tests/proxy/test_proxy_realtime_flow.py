"""Who does not read stops who sends, in both directions and at every stage, and little is held meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from proxyrig import PATIENCE, Behaviour, Connection, Engine, Message, Rig
from websockets.frames import Opcode
from wsrig import CREATED, UPDATE, Peer, Realtime, accepted, frame, greeted, handshake, in_session, opened, text

from supervisord.core.admission import Ending

PIECE = text(b'"' + b"x" * 65_000 + b'"', mask=True)
PIECE_BACK = text(b'"' + b"x" * 65_000 + b'"', mask=False)
#: What the kernel's buffers of the proxy's two sockets take up at most (tcp_rmem and tcp_wmem: 36 MB here), and some.
BOUND = 60_000_000


@pytest.fixture
def narrow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends have small buffers of their own."""

    async def connect() -> Connection:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", rig.port))
        client = Connection(*await asyncio.open_connection(sock=sock))
        rig.clients.append(client)
        return client

    made = rig.engine

    async def engine(name: str, behaviour: Behaviour) -> Engine:
        engine = await made(name, behaviour)
        assert engine._server is not None
        engine._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # its connections inherit it
        return engine

    monkeypatch.setattr(rig, "connect", connect)
    monkeypatch.setattr(rig, "engine", engine)


async def flood(peer: Peer, piece: bytes) -> int:
    """Send pieces until nobody takes one for half a second; returns how many, of which the last may be on its way."""
    transport = peer.connection.writer.transport
    transport.set_write_buffer_limits(0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    for count in range(1, BOUND // len(piece)):
        peer.connection.writer.write(piece)
        try:
            await asyncio.wait_for(peer.connection.writer.drain(), 0.5)
        except TimeoutError:
            return count
    raise AssertionError("nobody was held")


@pytest.mark.parametrize("side", ["client", "engine"])
async def test_an_end_that_does_not_read_stops_the_other(rig: Rig, narrow: None, side: str):
    client, engine = await in_session(rig)
    sender, reader = (engine, client) if side == "client" else (client, engine)
    for _ in range(await flood(sender, text(b'"' + b"x" * 65_000 + b'"', mask=sender.masks))):
        assert len((await reader.read()).data) == 65_002
    await sender.say(b"{}")
    assert (await reader.read()).data == b"{}"


async def test_a_client_that_says_much_before_an_engine_is_there_is_held_and_loses_nothing(rig: Rig, narrow: None):
    rig.admission.asleep = {"a"}
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    await client.say(UPDATE)
    await rig.until(lambda: bool(rig.admission.waiting))
    count = await flood(client, PIECE)
    rig.admission.wake("a")
    engine = await realtime.peer()
    assert (await engine.read()).data == UPDATE
    engine.raw.clear()
    for _ in range(count):
        await engine.read()
    assert engine.raw == PIECE * count


async def test_a_client_that_pings_and_does_not_read_the_answers_is_held(rig: Rig, narrow: None):
    rig.admission.asleep = {"a"}
    await rig.engine("a", Realtime())
    client = await opened(rig, "/v1/realtime?model=m")
    await rig.until(lambda: bool(rig.admission.waiting))
    count = await flood(client, frame(Opcode.PING, b"p" * 125, mask=True) * 500)
    pongs = frame(Opcode.PONG, b"p" * 125, mask=False) * 500
    for _ in range(count):
        assert await asyncio.wait_for(client.connection.reader.readexactly(len(pongs)), PATIENCE) == pongs


async def test_a_client_that_has_not_read_its_pongs_when_its_engine_comes_stops_the_engine(rig: Rig, narrow: None):
    rig.admission.asleep = {"a"}
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await opened(rig, "/v1/realtime?model=m")
    await rig.until(lambda: bool(rig.admission.waiting))
    await flood(client, frame(Opcode.PING, b"p" * 125, mask=True) * 500)
    rig.admission.wake("a")
    engine = await realtime.peer()
    sent = await flood(engine, PIECE_BACK)
    received = 0
    while received < sent:
        received += (await client.read()).opcode is Opcode.TEXT
    client.connection.reset()


async def test_an_engine_that_ends_its_side_and_reads_no_more_is_not_waited_for(rig: Rig, narrow: None):
    client, engine = await in_session(rig)
    engine.connection.writer.transport.pause_reading()
    await flood(client, PIECE)
    engine.connection.writer.write_eof()
    try:
        assert (await client.event())["code"] == "upstream_failed"
        assert await client.close_code() == 1011
    finally:
        engine.connection.reset()
        client.connection.reset()


async def test_two_hundred_sessions_that_do_not_read_are_bounded_memory(rig: Rig):
    piece = text(b"x" * 16_000, mask=False)

    async def floods(request: Message, connection: Connection) -> None:
        await connection.send(accepted(request) + text(CREATED, mask=False))
        while True:
            await connection.send(piece)

    await rig.engine("a", floods)
    loop = asyncio.get_running_loop()
    before, slow = resident(), []
    for _ in range(200):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", rig.port))
        await loop.sock_sendall(sock, handshake("/v1/realtime?model=m"))
        slow.append(sock)
    await rig.until(lambda: len(rig.admission.open) == 200)
    connections = rig.proxy._server.connections
    async with asyncio.timeout(3 * PATIENCE):
        while not all(connection.write_paused for connection in connections):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # a full buffer is told to nobody here
    held = sum(connection.transport.get_write_buffer_size() for connection in connections)
    print(f"held for 200 sessions: {held / 1e6:.1f} MB; resident: +{(resident() - before) / 1e6:.1f} MB")
    assert held < 200 * (64 * 1024 + 300_000)  # the limit, and one read above it
    for sock in slow:
        sock.close()
    await rig.until(lambda: not rig.admission.open)
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)] * 200


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
