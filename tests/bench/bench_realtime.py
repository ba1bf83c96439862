"""What /v1/realtime costs, beside a direct connection and nginx as a WebSocket proxy, in one run and taking turns.

    .venv/bin/python tests/bench/bench_realtime.py [--rounds 4] [--seconds 3] [--sessions 64] [--cache DIR]

A session sends an event with 0.1 s of speech (PCM, 16 kHz, in base64: 4.3 kB); a stub of an engine answers with a
short one, and then comes the next, without a pause. The peer has one core, the engine and the load share another. CPU
is what the kernel counted for the peer's threads, so it does not depend on what else the machine does; latencies do.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_relay
from bench_relay import REPOSITORY, Peer, free_port, ready, report, running
from stubengine import Engine

SCRIPT = str(Path(__file__).resolve())
NGINX_UPGRADES = bench_relay.NGINX.replace(
    'proxy_set_header Connection "";', 'proxy_set_header Connection "upgrade"; proxy_set_header Upgrade $http_upgrade;'
)
_ACCEPTED_WITH = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_HANDSHAKE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

_SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
)


def _frame(text: bytes, mask: bytes = b"") -> bytes:
    """A text frame of less than 64 KiB."""
    size, bit = len(text), 0x80 if mask else 0
    length = bytes([bit | size]) if size < 126 else bytes([bit | 126]) + size.to_bytes(2, "big")
    if mask:
        text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(text))
    return b"\x81" + length + mask + text


GREETING = _frame(b'{"type":"session.created","id":"sess-1","created":1796021881}')
DELTA = _frame(b'{"type":"transcription.delta","delta":" and so on, a few words of text"}')
_SPEECH = base64.b64encode(bytes(range(256)) * 12 + bytes(128)).decode()
APPEND = _frame(json.dumps({"type": "input_audio_buffer.append", "audio": _SPEECH}).encode(), b"\x11\x22\x33\x44")


class Speaker(Engine):
    """The stub of an engine, which answers each ``APPEND`` with a ``DELTA`` once it is asked for a WebSocket."""

    talking = False
    left = 0

    def data_received(self, data: bytes) -> None:
        if self.talking:
            self.left += len(data)
            count, self.left = divmod(self.left, len(APPEND))
            if count:
                self.transport.write(DELTA * count)
            return
        key = re.search(rb"(?i)\nsec-websocket-key: *([^\r]+)", data)
        if key is None:
            super().data_received(data)
            return
        self.talking = True
        accept = base64.b64encode(hashlib.sha1(key[1] + _ACCEPTED_WITH).digest())
        head = (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b"
        )
        self.transport.write(head % accept + b"\r\n\r\n" + GREETING)


async def engine(ports: str) -> None:
    loop = asyncio.get_running_loop()
    for port in ports.split(","):
        await loop.create_server(Speaker, "127.0.0.1", int(port), backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


class Session(asyncio.Protocol):
    """A client: ``greeted``, then one exchange after another."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.buffer = b""
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.times: list[float] = []
        self.until = 0.0
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(_HANDSHAKE)

    def connection_lost(self, exc: Exception | None) -> None:
        for waiter in (self.greeted, self.ended):
            if not waiter.done():
                waiter.set_exception(ConnectionError(f"the peer closed: {exc} {self.buffer[:300]!r}"))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.greeted.done():
            end = self.buffer.find(b"\r\n\r\n")
            if end >= 0 and self.buffer[end + 4 :] == GREETING:
                self.buffer = b""
                self.greeted.set_result(None)
            return
        if len(self.buffer) < len(DELTA):
            return
        assert self.buffer == DELTA
        self.buffer, now = b"", time.monotonic()
        self.times.append(now - self.asked)
        if now < self.until:
            self.ask()
        else:
            self.ended.set_result(None)

    def ask(self) -> None:
        self.asked = time.monotonic()
        self.transport.write(APPEND)


async def talk(peer: Peer, sessions: int, seconds: float) -> tuple[list[float], float]:
    """The times of all exchanges, in order of size, and the peer's CPU seconds for each."""
    loop = asyncio.get_running_loop()
    open_ones = [(await loop.create_connection(Session, "127.0.0.1", peer.port))[1] for _ in range(sessions)]
    await asyncio.gather(*(session.greeted for session in open_ones))
    cpu, until = peer.cpu(), time.monotonic() + seconds
    for session in open_ones:
        session.until = until
        session.ask()
    await asyncio.gather(*(session.ended for session in open_ones))
    used = peer.cpu() - cpu
    for session in open_ones:
        session.transport.abort()
    times = sorted(took for session in open_ones for took in session.times)
    return times, used / len(times)


async def measure(peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    alone, _ = await talk(peer, 1, options.seconds)
    times, used = await talk(peer, options.sessions, options.seconds)
    return {
        "alone p50 us": 1e6 * statistics.median(alone),
        "alone p99 us": 1e6 * alone[int(len(alone) * 0.99)],
        "CPU us/frame": 1e6 * used / 2,
        f"frames/s of {options.sessions}": 2 * len(times) / options.seconds,
    }


async def bench(options: argparse.Namespace) -> None:
    engines = [free_port(), free_port()]
    cpus = sorted(os.sched_getaffinity(0))
    mine, theirs = (cpus[1], cpus[0]) if len(cpus) > 1 else (None, None)
    if mine is not None:
        os.sched_setaffinity(0, {mine})
    script = [sys.executable, SCRIPT, "engine", ",".join(map(str, engines))]
    process = subprocess.Popen(script, stdout=subprocess.PIPE)  # noqa: ASYNC220 - nothing else runs yet
    assert process.stdout is not None
    process.stdout.readline()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in options.peers}
    try:
        for number in range(options.rounds):
            for name in options.peers:
                with running(Peer(name, options, engines, theirs)) as peer:
                    await ready(peer)
                    found = await measure(peer, options)
                results[name].append(found)
                print(f"round {number} {name:8} {'  '.join(f'{k} {v:.4g}' for k, v in found.items())}", flush=True)
    finally:
        process.kill()
        process.wait()
    report(results)


def main() -> None:
    import uvloop

    if sys.argv[1:2] == ["engine"]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(engine(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of talk, twice per round and peer")
    parser.add_argument("--sessions", type=int, default=64, help="at a time")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/vllm-supervisord-bench")
    options = parser.parse_args()
    options.checkouts, options.peers = {"ours": REPOSITORY}, ["direct", "ours", "nginx"]
    if not (options.cache / "nginx/usr/sbin/nginx").exists():
        print(f"skipped: nginx is not installed in {options.cache}")
        options.peers.remove("nginx")
    bench_relay.NGINX = NGINX_UPGRADES
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bench(options))


if __name__ == "__main__":
    main()
