"""WebSocket at the byte level for the proxy's tests: frames are made by the ``websockets`` library, not by us."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from dataclasses import dataclass, field

from proxyrig import PATIENCE, Behaviour, Connection, Message, Rig
from websockets.frames import Close, Frame, Opcode, apply_mask

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455 1.3
CREATED = b'{"type":"session.created","id":"sess-engine","created":1796021881}'
UPDATE = b'{"type":"session.update","model":"m"}'
ROUTE = "/v1/realtime"


def handshake(target: str = ROUTE, extra: str = "", **changed: str | None) -> bytes:
    """A client's handshake; ``changed``: fields by their names with ``_``, None to leave one out."""
    fields: dict[str, str | None] = {
        "Host": "proxy.test",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": KEY,
    }
    fields |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value is not None)
    return f"GET {target} HTTP/1.1\r\n{lines}{extra}\r\n".encode("latin-1")


def frame(opcode: Opcode, data: bytes = b"", *, fin: bool = True, mask: bool) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=mask)


def text(data: bytes | dict, *, mask: bool, fin: bool = True) -> bytes:
    return frame(Opcode.TEXT, data if isinstance(data, bytes) else json.dumps(data).encode(), mask=mask, fin=fin)


def closing(code: int, reason: str = "", *, mask: bool) -> bytes:
    return frame(Opcode.CLOSE, Close(code, reason).serialize(), mask=mask)


@dataclass
class Peer:
    """One end of a session. ``masks``: it is the client's end, so what it sends is masked."""

    connection: Connection
    masks: bool
    head: Message
    #: Everything that was read, as it came.
    raw: bytearray = field(default_factory=bytearray)

    async def send(self, data: bytes) -> None:
        await self.connection.send(data)

    async def say(self, event: bytes | dict) -> bytes:
        """One event in one frame; returns its bytes."""
        raw = text(event, mask=self.masks)
        await self.send(raw)
        return raw

    async def read(self) -> Frame:
        """The next frame; raises ``IncompleteReadError`` or ``ConnectionError`` at the end."""
        async with asyncio.timeout(PATIENCE):
            reader = self.connection.reader
            head = await reader.readexactly(2)
            length = head[1] & 0x7F
            if length > 125:
                extended = await reader.readexactly(2 if length == 126 else 8)
                length, head = int.from_bytes(extended, "big"), head + extended
            key = await reader.readexactly(4) if head[1] & 0x80 else b""
            payload = await reader.readexactly(length)
        assert bool(key) is not self.masks, "a client masks, a server does not"
        self.raw += head + key + payload
        if key:
            payload = apply_mask(payload, key)
        return Frame(Opcode(head[0] & 0x0F), payload, bool(head[0] & 0x80))

    async def event(self) -> dict:
        got = await self.read()
        assert got.opcode is Opcode.TEXT, got
        return json.loads(got.data)

    async def close_code(self) -> int:
        """The next frame is a Close."""
        got = await self.read()
        assert got.opcode is Opcode.CLOSE, got
        return int.from_bytes(got.data[:2], "big") if got.data else 1005

    async def gone(self) -> None:
        """Wait for the end of the connection."""
        await self.connection.closed()


class Realtime:
    """What an engine does with a handshake: shakes, greets, and leaves the rest to the test."""

    def __init__(self, greeting: bytes | None = CREATED) -> None:
        self.greeting = greeting
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def __call__(self, request: Message, connection: Connection) -> None:
        await connection.send(accepted(request))
        if self.greeting is not None:
            await connection.send(text(self.greeting, mask=False))
        await self.peers.put(Peer(connection, False, request))
        await asyncio.Event().wait()

    async def peer(self) -> Peer:
        """The engine's end of the next session."""
        async with asyncio.timeout(PATIENCE):
            return await self.peers.get()


def accepted(request: Message, extra: str = "") -> bytes:
    key = request.header("sec-websocket-key")
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode(), usedforsecurity=False).digest()
    accept = base64.b64encode(digest).decode()
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return f"{head}Sec-WebSocket-Accept: {accept}\r\n{extra}\r\n".encode()


async def opened(rig: Rig, target: str = ROUTE, extra: str = "") -> Peer:
    """A client whose handshake was taken."""
    client = await rig.send(handshake(target, extra))
    head = await client.head()
    assert head.status == 101, head
    assert head.header("sec-websocket-accept") == ACCEPT
    return Peer(client, True, head)


async def greeted(rig: Rig, target: str = ROUTE) -> Peer:
    """A client that has heard ``session.created``."""
    client = await opened(rig, target)
    assert (await client.event())["type"] == "session.created"
    return client


async def in_session(rig: Rig, name: str = "a", behaviour: Behaviour | None = None) -> tuple[Peer, Peer]:
    """A client and an engine that talk to each other; the first event has arrived."""
    realtime = behaviour or Realtime()
    assert isinstance(realtime, Realtime)
    await rig.engine(name, realtime)
    client = await greeted(rig)
    raw = await client.say(UPDATE)
    engine = await realtime.peer()
    assert (await engine.read()).data == UPDATE
    assert engine.raw == raw
    return client, engine
