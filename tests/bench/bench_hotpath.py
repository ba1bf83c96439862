"""The CPU of our own code per request, without the kernel: both connections are the real ones, on transports of memory.

    .venv/bin/python tests/bench/bench_hotpath.py [--rounds 100] [--profile] [--checkout DIR]

Every figure is the least of many short rounds: what the code takes when nothing else disturbs it. It is given in
microseconds and in *calls*: how often an empty Python function could have been called meanwhile, which says more on a
machine whose speed comes and goes. ``whole request`` goes from the bytes that a client sends to the bytes that it gets,
through the real supervisor's admission, the default routing, the access log (to /dev/null) and the metrics, on uvloop.
The stages are parts of it, each alone. ``--checkout`` measures another checkout instead, ``--profile`` prints where the
time of whole requests goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import logging
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REQUESTS = 50


class Transport:
    """Memory in place of a socket: ``on_write`` gets what is written."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        self.write = on_write

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def kept_engine(answers: Callable[[], list[bytes]]) -> Any:
    """A connection to an engine that answers every request whose last byte is ``}``."""
    from proxy.engines.engine import EngineConnection

    loop = asyncio.get_running_loop()
    connection = EngineConnection()

    def on_write(data: bytes) -> None:
        if data[-1] == 0x7D:
            for answer in answers():
                loop.call_soon(connection.data_received, answer)

    connection.connection_made(Transport(on_write))  # type: ignore[arg-type]
    return connection


class Client:
    """A client's connection, and its next answer."""

    def __init__(self, server: Any, ends: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ends, self._size = ends, 0
        self.connection = server()
        self.connection.connection_made(Transport(self._on_write))

    def _on_write(self, data: bytes) -> None:
        if data.endswith(self._ends):
            self._ended.set_result(None)

    async def ask(self, request: list[bytes]) -> None:
        self._ended = self._loop.create_future()
        for piece in request:
            self.connection.data_received(piece)
        await self._ended
        await asyncio.sleep(0)


class Pouring:
    """A client that takes chunks, into which a conversation with an engine is poured; see ``proxy.exchange.Client``."""

    chunked = True

    def send_framed(self, data: bytes) -> None:
        pass

    def connect(self, source: object) -> None:
        pass

    def left_open(self, size: int) -> None:
        pass


async def stream_under_way(head: bytes) -> tuple[Any, asyncio.Task[None]]:
    """A connection to an engine whose answer has begun, and is being poured until the task is cancelled."""
    connection = kept_engine(list)
    talk = connection.send(b"request", iter(()), 1e6)
    connection.data_received(head)
    pouring = asyncio.get_running_loop().create_task(talk.pour(Pouring()))
    await asyncio.sleep(0)
    return connection, pouring


class Meter:
    """Work measured in rounds: the least microseconds of one piece, and the same in calls of an empty function."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._call = 1e9

    async def run(self, number: int, work: Callable[[], object]) -> tuple[float, float]:
        """``number`` pieces a round; a piece that is awaitable is awaited."""
        least = 1e9
        for _ in range(self._rounds):
            self._call = min(self._call, _call())
            began = time.process_time_ns()
            for _ in range(number):
                awaitable = work()
                if awaitable is not None and hasattr(awaitable, "__await__"):
                    await awaitable
            least = min(least, (time.process_time_ns() - began) / number / 1000)
        return least, least / self._call


def _empty() -> None:
    pass


def _call() -> float:
    """Microseconds of a call of an empty function, now."""
    began = time.process_time_ns()
    for _ in range(2000):
        _empty()
    return (time.process_time_ns() - began) / 2000 / 1000


async def measure(options: argparse.Namespace) -> None:
    from awake import awake
    from relayload import request
    from stubengine import ANSWER, TICKS, chunk

    from proxy.http.heads import parse_request, parse_response
    from proxy.reading.facts import Facts
    from proxy.reading.request import read_json
    from proxy.routes import Prompt
    from proxy.routing import PolicyBook
    from proxy.server import PublicProxy
    from proxy.tally import RequestTally
    from supervisord.core.admission import Ending, Lease
    from supervisord.core.spec import ModelSpec, ProxySpec, ReplicaSpec

    replicas = tuple(ReplicaSpec(f"r{n}", "m", f"u{n}.service", f"unix:/r{n}") for n in range(2))
    models = [ModelSpec("m", replicas)]
    dispatcher = await awake(models)
    proxy = PublicProxy(dispatcher, ProxySpec(keepalive=1e6), models, lambda failover: None)
    proxy.observer = tally = RequestTally()
    await proxy.start([])

    answer = b"HTTP/1.1 200 OK\r\ndate: Mon, 06 Jul 2026 07:00:00 GMT\r\nserver: uvicorn\r\n"
    plain = answer + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
    stream = answer + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    events = 1000

    meter, profiler = Meter(options.rounds), cProfile.Profile()

    def report(name: str, us: float, calls: float) -> None:
        print(f"{name:46} {us:9.2f} us {calls:9.0f} calls", flush=True)

    def engines(answers: Callable[[], list[bytes]]) -> None:
        upstreams = proxy._upstreams
        upstreams._pools.clear()
        pool_of = sys.modules[type(upstreams).__module__]._Pool  # wherever the measured checkout has it
        for replica in replicas:
            pool = upstreams._pools[replica.endpoint] = pool_of(replica.endpoint)
            for _ in range(4):
                pool.put(kept_engine(answers))

    Answers = Callable[[], list[bytes]]

    async def whole(name: str, asked: list[bytes], answers: Answers, number: int, per: int = 1) -> None:
        engines(answers)
        client = Client(proxy._server, answers()[-1][-8:])
        for _ in range(max(2, number)):
            await client.ask(asked)
        if options.profile:
            profiler.enable()
        us, calls = await meter.run(number, lambda: client.ask(asked))
        profiler.disable()
        report(name, us / per, calls / per)

    small, large = request(), request(size=400_000)
    cut = large.index(b"\r\n\r\n") + 4
    pieces = [large[:cut], *(large[at : at + 65536] for at in range(cut, len(large), 65536))]
    await whole("whole request", [small], lambda: [plain + ANSWER], REQUESTS)
    apart = [small[: small.index(b"{")], small[small.index(b"{") :]]
    await whole("whole request, body apart, head and body apart", apart, lambda: [plain, ANSWER], REQUESTS)
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(60)
        return
    await whole("whole request of 400 kB", pieces, lambda: [plain + ANSWER], 5)
    await whole("one of 1000 events", [request(TICKS, events)],
                lambda: [stream, *[chunk()] * events, b"0\r\n\r\n"], 1, events)  # fmt: skip

    async def stage(name: str, work: Callable[[], object], number: int = REQUESTS) -> None:
        report("  " + name, *await meter.run(number, work))

    head, body = small[: small.index(b"{")], small[small.index(b"{") :]
    await stage("request head", lambda: parse_request(head))
    await stage("answer's head", lambda: parse_response(plain))
    await stage("body to facts", lambda: read_json(body, Prompt.CHAT))
    await stage("body to facts, 400 kB", lambda: read_json(large[cut:], Prompt.CHAT), 5)
    event = chunk()
    under_way, pouring = await stream_under_way(stream)
    await stage("event, engine's connection to client's", lambda: under_way.data_received(event), 1000)
    pouring.cancel()
    policy = PolicyBook(models, time.monotonic).policy("m")

    def admission() -> None:
        facts = Facts("m", keys=(b"0" * 16,), sizes=(10,))
        lease = dispatcher.admit("m", lambda candidates: policy.choose(facts, candidates))
        assert isinstance(lease, Lease)
        policy.first_byte(facts)
        policy.finished(facts, None)
        dispatcher.finish(lease, Ending.COMPLETED)

    await stage("admission with the default routing", admission)

    from supervisord.core.admission import Candidate

    candidates = [Candidate("r0", 0, 0), Candidate("r1", 0, 0)]

    def routing() -> None:
        facts = Facts("m", keys=(b"0" * 16,), sizes=(10,))
        policy.choose(facts, candidates)
        policy.first_byte(facts)
        policy.finished(facts, None)

    await stage("the default routing alone", routing)

    from proxy.accesslog import log_request
    from proxy.exchange import Finished, Outcome

    finished = Finished("POST", "/v1/chat/completions", "0" * 32, "127.0.0.1", 1.0, 1.1)
    outcome = Outcome(status=200, model="m", replica="r0", reason="soonest: r0 0.05s, r1 0.05s", bytes_sent=400,
                      first_byte=1.002)  # fmt: skip
    await stage("access log line", lambda: log_request(finished, outcome))
    await stage("metrics", lambda: tally(finished, outcome))
    dispatcher.close()
    os._exit(0)  # nothing here has an end of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--checkout", type=Path, default=HERE.parents[1])
    options = parser.parse_args()
    sys.path[:0] = [str(options.checkout.resolve()), str(HERE)]
    import uvloop
    from bench_relay import set_up_heap

    from supervisord.sd.journal import set_up_logging

    log_to = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process
    set_up_logging(logging.INFO, {})
    logging.getLogger().handlers[0].setStream(log_to)  # type: ignore[attr-defined]
    set_up_heap()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(options))


if __name__ == "__main__":
    main()
