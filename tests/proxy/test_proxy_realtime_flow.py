"""Who does not read stops who sends, in both directions and at every stage, and little is held meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from proxyrig import PATIENCE, Connection, Message, Rig
from websockets.frames import Opcode
from wsrig import CREATED, UPDATE, Peer, Realtime, accepted, frame, greeted, handshake, in_session, opened, text

from supervisord.core.admission import Ending

PIECE = text(b'"' + b"x" * 65_000 + b'"', mask=True)
#: What two sockets' buffers and ours take up at most.
BOUND = 8_000_000


def small_buffers(connection: Connection) -> None:
    """What is sent beyond what the other end reads shows soon."""
    connection.writer.transport.set_write_buffer_limits(0)
    connection.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)


async def flood(peer: Peer, piece: bytes, stalled: asyncio.Event, total: int) -> int:
    """Send ``total`` pieces, and say when nobody takes them; returns how many bytes."""
    small_buffers(peer.connection)
    sent = 0
    for _ in range(total):
        peer.connection.writer.write(piece)
        try:
            await asyncio.wait_for(peer.connection.writer.drain(), 0.5)
        except TimeoutError:
            stalled.set()
            await peer.connection.writer.drain()
        sent += len(piece)
        if not stalled.is_set():
            assert sent < BOUND, "nobody was held"
    return sent


@pytest.mark.parametrize("side", ["client", "engine"])
async def test_an_end_that_does_not_read_stops_the_other(rig: Rig, side: str):
    client, engine = await in_session(rig)
    sender, reader = (engine, client) if side == "client" else (client, engine)
    piece = text(b'"' + b"x" * 65_000 + b'"', mask=sender.masks)
    stalled = asyncio.Event()
    flooding = asyncio.create_task(flood(sender, piece, stalled, 300))  # 19 MB
    await asyncio.wait_for(stalled.wait(), PATIENCE)
    for _ in range(300):
        assert len((await reader.read()).data) == 65_002
    assert await asyncio.wait_for(flooding, PATIENCE) == 300 * len(piece)


async def test_a_client_that_says_much_before_an_engine_is_there_is_held_and_loses_nothing(rig: Rig):
    rig.admission.asleep = {"a"}
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    await client.say(UPDATE)
    await rig.until(lambda: bool(rig.admission.waiting))
    stalled = asyncio.Event()
    flooding = asyncio.create_task(flood(client, PIECE, stalled, 200))
    await asyncio.wait_for(stalled.wait(), PATIENCE)
    rig.admission.wake("a")
    engine = await realtime.peer()
    assert (await engine.read()).data == UPDATE
    engine.raw.clear()
    for _ in range(200):
        await engine.read()
    assert engine.raw == PIECE * 200
    await asyncio.wait_for(flooding, PATIENCE)


async def test_a_client_that_pings_and_does_not_read_the_answers_is_held(rig: Rig):
    rig.admission.asleep = {"a"}
    await rig.engine("a", Realtime())
    client = await opened(rig, "/v1/realtime?model=m")
    await rig.until(lambda: bool(rig.admission.waiting))
    stalled = asyncio.Event()
    pings = frame(Opcode.PING, b"p" * 125, mask=True) * 500
    flooding = asyncio.create_task(flood(client, pings, stalled, 150))  # 10 MB
    await asyncio.wait_for(stalled.wait(), PATIENCE)
    for _ in range(150 * 500):
        assert (await client.read()).data == b"p" * 125
    await asyncio.wait_for(flooding, PATIENCE)


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
