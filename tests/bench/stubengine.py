"""A stub of an engine, as cheap as can be: the seed of a request says what it answers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, ClassVar

# What the engine shall do is in the request's seed: 10 * N + one of these.
PLAIN = 0  # a whole answer
TICKS = 1  # N events, one each TICK
TOGETHER = 2  # N requests are answered at the same moment
SILENT = 3  # one event, then nothing
TICK = 0.02
ANSWER = json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [{"text": "x" * 300}]}).encode()
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","t":%020.9f,"choices":[{"delta":{"content":"abc"}}]}'
)


class Engine(asyncio.Protocol):
    streams: ClassVar[dict[Engine, int]] = {}
    gathered: ClassVar[list[Engine]] = []

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def connection_lost(self, exc: Exception | None) -> None:
        Engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", self.buffer[:end])
            if length is None and re.search(rb"(?i)\ntransfer-encoding: *chunked", self.buffer[:end]):
                stop = self.buffer.find(b"\r\n0\r\n\r\n", end)
                if stop < 0:
                    return
                size = stop + 7 - end - 4
            else:
                size = int(length[1]) if length else 0
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            self.answer(body)

    def answer(self, body: bytes) -> None:
        seed = re.search(rb'"seed": ?(\d+)', body)  # routers write bodies anew, but leave this one as it is
        count, mode = divmod(int(seed[1]) if seed else PLAIN, 10)
        if mode == PLAIN:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            self.transport.write(head % len(ANSWER) + ANSWER)
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        if mode == TICKS:
            self.transport.write(head)
            Engine.streams[self] = count
        elif mode == SILENT:
            self.transport.write(head + chunk())
        else:
            Engine.gathered.append(self)
            if len(Engine.gathered) == count:
                for one in Engine.gathered:
                    one.transport.write(head + chunk() + b"0\r\n\r\n")
                Engine.gathered.clear()


def chunk() -> bytes:
    event = EVENT % time.monotonic() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


async def engine(path: str) -> None:
    loop = asyncio.get_running_loop()
    for one in path.split(","):
        await loop.create_server(Engine, "127.0.0.1", int(one), backlog=4096)
    print("ready", flush=True)
    while True:
        await asyncio.sleep(TICK)
        for stream, left in list(Engine.streams.items()):
            stream.transport.write(chunk() if left > 1 else chunk() + b"0\r\n\r\n")
            Engine.streams[stream] = left - 1
            if left <= 1:
                del Engine.streams[stream]
