"""Engines and clients without manners, all at once, from a seed: every request ends, and no kept connection is unread.

``MANNERS=1-100 .venv/bin/python -m pytest tests/proxy/test_proxy_manners.py`` looks longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Callable

import pytest
from proxyrig import PATIENCE, Connection, Message, Rig, chunk, event_stream_head, request_bytes

FIRST, _, LAST = os.environ.get("MANNERS", "1-2").partition("-")
CLIENTS, REQUESTS, REQUESTS_PER_KILL = 12, 40, 30
DONE = b"data: [DONE]\n\n"
#: Sizes and their weights: in one packet, as much as is read at a time, more than is held until it is whole.
ANSWERS = (0, 10, 900, 20_000, 70_000, 300_000, 1_200_000), (1, 8, 8, 4, 3, 2, 1)
QUESTIONS = (0, 500, 30_000, 200_000, 3_000_000), (10, 5, 3, 2, 1)
#: Bytes of the kernel's buffers at an end that has small ones. (Less than a few of loopback's segments is filled
#: by timers.)
SMALL_IN, SMALL_OUT = 150_000, 20_000


async def turns(chance: random.Random, most: int) -> None:
    """Let the others go first, for some turns of the loop."""
    for _ in range(chance.randrange(most)):
        await asyncio.sleep(0)


def event_of(number: int, at: int, size: int = 0) -> bytes:
    return b'data: {"n":%d,"at":%d,"x":"%b"}\n\n' % (number, at, b"z" * size)


class RudeEngine(asyncio.Protocol):
    """One connection of an engine: what it does is drawn anew for every request."""

    def __init__(self, connections: set[RudeEngine], chance: random.Random) -> None:
        self.connections, self.chance = connections, chance
        self.came = bytearray()
        self.more, self.writable = asyncio.Event(), asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        for option, size in ((socket.SO_RCVBUF, SMALL_IN), (socket.SO_SNDBUF, SMALL_OUT)):
            if self.chance.random() < 0.2:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, size)
        self.connections.add(self)
        self.task = asyncio.get_running_loop().create_task(self.serve())

    def data_received(self, data: bytes) -> None:
        self.came += data
        self.more.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.connections.discard(self)
        self.task.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.more.clear()
            await self.more.wait()

    async def serve(self) -> None:
        chance, ends = self.chance, False
        while not ends:
            await self.until(lambda: b"\r\n\r\n" in self.came)
            head, _, self.came = self.came.partition(b"\r\n\r\n")
            length = int(re.search(rb"(?i)\ncontent-length: (\d+)", head)[1])
            number = int(re.search(rb"(?i)\nx-number: (\d+)", head)[1])
            if chance.random() < 0.2:
                self.transport.pause_reading()
                await turns(chance, 100)
                self.transport.resume_reading()
            if chance.random() < 0.9:  # else it answers what it has not read
                await self.until(lambda length=length: len(self.came) >= length)
            ends = await self.answer(number)
            if not ends:
                await self.until(lambda length=length: len(self.came) >= length)
                del self.came[:length]
        await turns(chance, 20)
        self.transport.abort() if chance.random() < 0.2 else self.transport.close()

    async def answer(self, number: int) -> bool:
        """Returns whether it is the last one on this connection, which may or may not have been said."""
        chance = self.chance
        fault = chance.choice(["none"] * 30 + ["silence", "half", "half", "more"])
        ends = fault != "none" or chance.random() < 0.2
        said = "Connection: close\r\n" if ends and chance.random() < 0.5 else ""
        kind = chance.choice(("stream", "stream", "stream", "length", "length", "length", "chunks", "end"))
        start = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{said}".encode()
        if chance.random() < 0.05:
            start = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + start
        body = b'{"n":%d,"x":"%b"}' % (number, b"z" * chance.choices(*ANSWERS)[0])
        match kind:
            case "stream":
                count, size = chance.choice((1, 2, 10, 60)), chance.choice((0, 100, 100, 3000, 30_000))
                events = [event_of(number, at, size) for at in range(count)]
                pieces = [event_stream_head(said), *map(chunk, [*events, DONE]), b"0\r\n\r\n"]
            case "length":
                pieces = [start + b"Content-Length: %d\r\n\r\n" % len(body), body]
            case "chunks":
                cut = chance.randrange(1, len(body))
                pieces = [start + b"Transfer-Encoding: chunked\r\n\r\n", chunk(body[:cut]), chunk(body[cut:])]
                pieces += [chance.choice((b"0\r\n\r\n", b"0\r\nX-Trailer: 1\r\n\r\n"))]
            case "end":
                pieces, ends = [start + b"\r\n", body], True
        data = b"".join(pieces)
        match fault:
            case "silence":
                return True
            case "half":
                pieces = [data[: chance.randrange(len(data))]]
            case "more":
                pieces = [data + b"and more"]  # no answer: nobody could tell it from that to the next request
        await self.write(pieces)
        return ends

    async def write(self, pieces: list[bytes]) -> None:
        chance = self.chance
        match chance.choice(("at once", "at once", "by pieces", "in bits")):
            case "at once":
                pieces = [b"".join(pieces)]
            case "in bits":
                data, pieces = b"".join(pieces), []
                while data:
                    size = chance.choice((1, 3, 40, 700) if len(pieces) < 30 else (5000, 60_000, 250_000))
                    pieces.append(data[:size])
                    data = data[size:]
        for piece in pieces:
            self.transport.write(piece)
            await self.writable.wait()
            await turns(chance, 5)


class Replica:
    """Is killed again and again, and comes back."""

    def __init__(self, seed: str) -> None:
        self._seed, self._made = seed, 0
        self._connections: set[RudeEngine] = set()
        self._dead = False
        self._server: asyncio.Server

    async def start(self, path: str | None) -> str:
        """Returns the endpoint."""
        loop = asyncio.get_running_loop()
        if path is not None:
            self._server = await loop.create_unix_server(self._make, path)
            return f"unix:{path}"
        self._server = await loop.create_server(self._make, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _make(self) -> asyncio.Protocol:
        self._made += 1
        return Nobody() if self._dead else RudeEngine(self._connections, random.Random(f"{self._seed} {self._made}"))

    async def kill(self, chance: random.Random) -> None:
        self._dead = True
        for connection in list(self._connections):
            connection.transport.abort()
        await turns(chance, 30)
        self._dead = False

    async def stop(self) -> None:
        self._server.close()
        while connections := list(self._connections):
            for connection in connections:
                connection.transport.abort()
            await asyncio.gather(*(connection.task for connection in connections), return_exceptions=True)


class Nobody(asyncio.Protocol):
    """What a connection to a replica that is dead comes to."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.abort()


async def killing(rig: Rig, replicas: list[Replica], chance: random.Random) -> None:
    """One or another dies after every so many requests."""
    finished = rig.admission.finished
    while True:
        due = len(finished) + REQUESTS_PER_KILL
        while len(finished) < due:
            rig.admission.changed.clear()
            await rig.admission.changed.wait()
        await chance.choice(replicas).kill(chance)


class RudeClient:
    """Asks one thing after the other, on one connection for as long as that lasts; says how each ended."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self._rig, self._chance = rig, chance
        self._connection: Connection | None = None

    async def ask(self, number: int) -> str:
        chance = self._chance
        if self._connection is None:
            self._connection = await self._rig.connect(limit=chance.choice((4096, 1 << 20)))
            if chance.random() < 0.2:
                sock = self._connection.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_IN)
        old = chance.random() < 0.08
        question = {"model": "m", "stream": True, "messages": [], "x": "y" * chance.choices(*QUESTIONS)[0]}
        raw = request_bytes(question, headers=f"X-Number: {number}\r\n")
        try:
            answer = await self._talk(raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1) if old else raw)
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # the last: what uvloop says then
            await self.leave()
            return "cut"
        if answer is None:
            await self.leave()
            return "left"
        if old or answer.header("connection") == "close":
            await self.leave()
        return _whole(number, answer)

    async def _talk(self, raw: bytes) -> Message | None:
        chance, connection = self._chance, self._connection
        assert connection is not None
        manners = chance.choice(
            ["waits"] * 8 + ["does not read"] * 3 + ["leaves in body", "leaves", "leaves in answer"]
        )
        if manners == "leaves in body":
            raw = raw[: len(raw) // 2]
        step = chance.choice((len(raw), len(raw), len(raw), 1 + len(raw) // 7))
        for at in range(0, len(raw), step):
            connection.writer.write(raw[at : at + step])
            await turns(chance, 5)
        if manners == "does not read":
            connection.writer.transport.pause_reading()
            await turns(chance, 200)
            connection.writer.transport.resume_reading()
        elif manners == "leaves in answer":
            async with asyncio.timeout(PATIENCE):
                await connection.reader.readuntil(b"\n")
        return None if manners.startswith("leaves") else await connection.response()

    async def leave(self) -> None:
        if self._connection is not None:
            self._rig.clients.remove(self._connection)
            self._connection.reset() if self._chance.random() < 0.5 else await self._connection.close()
            self._connection = None


def _whole(number: int, answer: Message) -> str:
    """That it answers this question, as far as it goes."""
    if answer.status != 200:
        assert answer.status == 502, answer  # both replicas failed it; a stuck one would be a 504
        return "refused"
    if "event-stream" not in answer.header("content-type"):
        whole = answer.body.endswith(b'"}')  # else its end was that of a connection that broke
        assert not whole or json.loads(answer.body)["n"] == number
        return "whole" if whole else "cut"
    events = answer.body.split(b"\n\n")
    for at, event in enumerate(event for event in events if b'"at"' in event):
        assert event_of(number, at)[:-4].startswith(event[: len(event_of(number, at)) - 4])
    return "whole" if answer.body.endswith(DONE) else "told"


@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
async def test_whatever_engines_and_clients_do_every_request_ends(rig, tmp_path, seed):
    print(f"seed {seed}")
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    rig.admission.restarts = {"a", "b"}  # one that was killed is back soon
    listener = rig.proxy._listeners[0].sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_OUT)  # its connections inherit it
    replicas = []
    for name, path in (("a", str(tmp_path / "a")), ("b", None)):
        replicas.append(Replica(f"{seed} {name}"))
        rig.admission.endpoints[name] = await replicas[-1].start(path)
    ends: Counter[str] = Counter()

    async def client(of: int) -> None:
        asks = RudeClient(rig, random.Random(f"{seed} client {of}"))
        for at in range(REQUESTS):
            ends[await asks.ask(of * REQUESTS + at)] += 1
        await asks.leave()

    kills = asyncio.create_task(killing(rig, replicas, random.Random(f"{seed} kills")))
    clients = [asyncio.create_task(client(of)) for of in range(CLIENTS)]
    try:
        await asyncio.gather(*clients)
        await rig.until(lambda: not rig.admission.open and not rig.admission.waiting)
        for pool in rig.proxy._upstreams._pools.values():
            assert all(kept.closed or kept.transport.is_reading() for _, kept in pool._idle)
    finally:
        print(dict(ends))
        for task in (kills, *clients):
            task.cancel()
        await asyncio.gather(kills, *clients, return_exceptions=True)
        for replica in replicas:
            await replica.stop()
    assert not failures
    assert ends["whole"] > CLIENTS * REQUESTS / 2
