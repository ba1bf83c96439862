"""How soon the engine, or the queue, hears that a client has left; and what clients that read nothing cost.

    .venv/bin/python tests/bench/bench_disconnect.py

Client, port and engine share one event loop (uvloop), the admission is the tests' own. A client closes its connection,
resets it, or only its half of it, at each stage of a request; the time runs from there to the moment when the engine
sees its connection end, or the queue has the place back. "direct" is the same without a proxy in between: two sockets
and this loop. Then 200 clients ask for a stream, read nothing, and the engine sends as fast as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from proxyrig import MODEL, STREAM, Connection, FakeAdmission, Message, Rig, chunk, event_stream_head, request_bytes

from proxy.server import PublicProxy
from supervisord.core.spec import ProxySpec

#: Seconds for what takes milliseconds.
PATIENCE = 10.0
FLOOD = chunk(b"data: " + b"x" * 16_000 + b"\n\n")


def close(client: Connection) -> None:
    client.writer.close()


def reset(client: Connection) -> None:
    sock = client.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


def half_close(client: Connection) -> None:
    client.writer.write_eof()


LEAVINGS: dict[str, Callable[[Connection], None]] = {"closes": close, "resets": reset, "half-closes": half_close}


async def silent(request: Message, connection: Connection) -> None:
    """An engine in a long prefill: nothing."""
    await connection.reader.read()


async def silent_stream(request: Message, connection: Connection) -> None:
    """One event, and then a long think."""
    await connection.send(event_stream_head() + chunk(b"data: {}\n\n"))
    await connection.reader.read()


async def flood(request: Message, connection: Connection) -> None:
    """Everything at once, as long as it is taken."""
    await connection.send(event_stream_head())
    while True:
        connection.writer.write(FLOOD)
        await connection.writer.drain()


async def until(condition: Callable[[], bool], changed: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            changed.clear()
            await changed.wait()


async def left_in_queue(rig: Rig, leave: Callable[[Connection], None]) -> float:
    """The place in the queue of a sleeping model."""
    admission = rig.admission
    client = await rig.send(request_bytes(STREAM))
    await until(lambda: bool(admission.waiting), admission.changed)
    began = time.perf_counter()
    leave(client)
    await until(lambda: not admission.waiting, admission.changed)
    took = time.perf_counter() - began
    await client.close()
    return took


async def left_in_engine(rig: Rig, leave: Callable[[Connection], None], *, streaming: bool, port: int) -> float:
    """A request that the engine has; ``streaming``: of which an event has come."""
    engine = rig.engines["a"]
    engine.lost.clear()
    engine.arrived.clear()
    client = Connection(*await asyncio.open_connection("127.0.0.1", port))
    await client.send(request_bytes(STREAM))
    async with asyncio.timeout(PATIENCE):
        if streaming:
            await client.reader.readuntil(b"data: {}\n\n")
        else:
            await engine.arrived.wait()
        began = time.perf_counter()
        leave(client)
        await engine.lost.wait()
    took = time.perf_counter() - began
    await client.close()
    return took


async def stalled(rig: Rig, count: int, seconds: float) -> tuple[float, float]:
    """Kilobytes per client that reads nothing: unsent in the port at the most, and of this whole process."""
    rig.engines["a"].behaviour = flood
    before = memory()
    clients = []
    for _ in range(count):
        reader = asyncio.StreamReader(limit=1024)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", rig.port))
        transport, _ = await loop.create_connection(lambda protocol=protocol: protocol, sock=sock)
        transport.pause_reading()
        transport.write(request_bytes(STREAM))
        clients.append(transport)
    await asyncio.sleep(seconds)
    grown = memory() - before
    unsent = max(connection.transport.get_write_buffer_size() for connection in rig.proxy._server.connections)
    for transport in clients:
        transport.abort()
    return unsent / 1024, grown / count


def memory() -> float:
    """Resident kilobytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1])
    raise RuntimeError("no VmRSS")


async def bench(times: int, readers: int, seconds: float) -> None:
    admission = FakeAdmission()
    proxy = PublicProxy(admission, ProxySpec(), [MODEL], lambda failover: None)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    rig = Rig(admission, proxy, listener.getsockname()[1], ProxySpec(), [])
    await proxy.start([listener])
    engine = await rig.engine("a", silent)
    print(f"{times} times each, milliseconds\n")
    print("| stage | client | p50 | p99 | most |\n|---|---|---|---|---|")

    async def row(stage: str, measure: Callable[[Callable[[Connection], None]], Awaitable[float]]) -> None:
        for name, leave in LEAVINGS.items():
            took = sorted([await measure(leave) for _ in range(times)])
            p99 = took[min(times - 1, round(times * 0.99))]
            median = statistics.median(took)
            print(f"| {stage} | {name} | {median * 1e3:.2f} | {p99 * 1e3:.2f} | {took[-1] * 1e3:.2f} |", flush=True)

    await row("direct, prefill", lambda leave: left_in_engine(rig, leave, streaming=False, port=engine.port))
    await row("prefill", lambda leave: left_in_engine(rig, leave, streaming=False, port=rig.port))
    engine.behaviour = silent_stream
    await row("stream that is silent", lambda leave: left_in_engine(rig, leave, streaming=True, port=rig.port))
    del admission.endpoints["a"]
    admission.asleep.add("a")
    await row("queue, wake", lambda leave: left_in_queue(rig, leave))
    admission.asleep.clear()
    admission.endpoints["a"] = engine.endpoint
    unsent, grown = await stalled(rig, readers, seconds)
    print(f"\n{readers} clients that read nothing, an engine that floods them, {seconds:g} s:")
    print(f"at most {unsent:.0f} kB unsent in the port for each; {grown:.0f} kB each of this whole process, in which")
    print("the engine and the clients are as well")
    await proxy.drain(0)
    await proxy.stop()
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bench(options.times, options.readers, options.seconds))


if __name__ == "__main__":
    main()
