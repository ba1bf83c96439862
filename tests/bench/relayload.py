"""Clients of the relay bench, as cheap as can be: one request after the other on a connection, and when what came."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from stubengine import PLAIN

#: Events of each stream that are not counted: while others are still being opened.
UNDER_WAY = 5


class Load(asyncio.Protocol):
    """One connection; ``ended`` at the end of each answer, with the time of its first body byte."""

    def __init__(self) -> None:
        self.buffer = b""
        self.delays: list[float] = []
        self.ended: asyncio.Future[float] | None = None
        self.first: asyncio.Future[float] | None = None
        self.under_way: asyncio.Future[float] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        for waiter in (self.ended, self.first, self.under_way):
            if waiter is not None and not waiter.done():
                waiter.set_exception(ConnectionError(f"the peer closed: {exc} {self.buffer[:300]!r}"))

    def ask(self, request: bytes) -> asyncio.Future[float]:
        loop = asyncio.get_running_loop()
        self.ended, self.head, self.buffer = loop.create_future(), None, b""
        self.first, self.under_way = loop.create_future(), loop.create_future()
        for waiter in (self.first, self.under_way):  # whoever asks need not be waiting for it
            waiter.add_done_callback(lambda done: done.exception() if not done.cancelled() else None)
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.buffer += data
        if self.ended is None or self.ended.done():
            return
        if self.head is None:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self.head, self.buffer = self.buffer[:end], self.buffer[end + 4 :]
            if not self.head.startswith(b"HTTP/1.1 200"):
                self.ended.set_exception(RuntimeError(self.head.decode()))
                return
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", self.head)
            self.left = int(length[1]) if length else None
        if self.left is not None:
            if len(self.buffer) >= self.left and not self.ended.done():
                self.ended.set_result(now)
            return
        for sent in re.findall(rb'"t":([0-9.]{20})', self.buffer):
            self.delays.append(now - float(sent))
            if not self.first.done():
                self.first.set_result(now)
            if len(self.delays) >= UNDER_WAY and not self.under_way.done():
                self.under_way.set_result(now)
        if self.buffer.endswith(b"0\r\n\r\n"):
            self.ended.set_result(now)
        self.buffer = self.buffer[-8:] if b'"t":' not in self.buffer[-60:] else self.buffer[-60:]


def request(mode: int = PLAIN, count: int = 0, size: int = 0) -> bytes:
    messages: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    if size:
        messages = [{"role": ("user", "assistant")[n % 2], "content": "word " * (size // 300)} for n in range(60)]
    body: dict[str, object] = {"model": "m", "messages": messages, "max_tokens": 16, "seed": 10 * count + mode}
    if mode:
        body["stream"] = True
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n"
        "Accept-Encoding: gzip, deflate\r\nUser-Agent: OpenAI/Python 2.0\r\nAuthorization: Bearer none\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connected(port: int, count: int) -> list[Load]:
    loop = asyncio.get_running_loop()
    loads = []
    for _ in range(count):
        for _ in range(200):
            try:
                loads.append((await loop.create_connection(Load, "127.0.0.1", port))[1])
                break
            except OSError:
                await asyncio.sleep(0.05)
        else:
            raise ConnectionError("nobody listens")
    return loads
