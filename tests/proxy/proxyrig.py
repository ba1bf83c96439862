"""What the proxy's tests stand on: an honest admission, engines and clients at the byte level, a running proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from proxy.server import PublicProxy
from supervisord.control import Failover
from supervisord.core.admission import (
    Candidate,
    Chooser,
    Ending,
    Lease,
    ListedModel,
    NotYet,
    RefusalCode,
    Refuse,
    Running,
    Wait,
)
from supervisord.core.spec import ModelSpec, ProxySpec, ReplicaSpec

PATIENCE = 10.0


class FakeAdmission:
    """One model, ``m`` (alias ``alias``); keeps the books, and fails loudly when a lease comes back twice."""

    def __init__(self) -> None:
        self.endpoints: dict[str, str] = {}
        self.asleep: set[str] = set()
        #: Replicas that start anew after every failure: those who failed there may have them again.
        self.restarts: set[str] = set()
        self.served_names: tuple[str, ...] = ("m", "alias")
        self.models: tuple[ListedModel, ...] = (listed("m", ("alias",)),)
        self.refusal: Refuse | None = None
        self.open: dict[int, Lease] = {}
        self.finished: list[tuple[str, Ending, str]] = []
        self.waiting: dict[int, tuple[Wait, Chooser, frozenset[str]]] = {}
        self.abandoned = 0
        self.admitted: list[str] = []
        #: Of every request: the replicas that alone may have it.
        self.only: list[frozenset[str] | None] = []
        #: Adapters, and the replicas that serve them.
        self.adapters: dict[str, frozenset[str]] = {}
        #: Replicas without a process, and how often the others were started anew.
        self.stopped: set[str] = set()
        self.runs: Counter[str] = Counter()
        self.changed = asyncio.Event()
        self._ids = iter(range(1, 1_000_000))

    def admit(
        self,
        model: str,
        choose: Chooser,
        *,
        exclude: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
    ) -> Lease | Wait | Refuse:
        self.changed.set()
        self.admitted.append(model)
        only = self.adapters.get(model, only)
        self.only.append(only)
        if only is not None:
            exclude |= self.endpoints.keys() - only
        if self.refusal is not None:
            return self.refusal
        if model not in ("m", "alias", *self.adapters):
            return Refuse(RefusalCode.MODEL_NOT_FOUND, f"The model `{model}` does not exist.")
        lease = self._grant(choose, exclude)
        if isinstance(lease, Lease):
            return lease
        if lease is None and not self.asleep - exclude:
            return Refuse(RefusalCode.NO_LIVE_REPLICA, "no replica of m answers", 7.2)
        reason = lease.reason if lease is not None else ""
        wait = Wait(next(self._ids), asyncio.get_running_loop().create_future(), reason)
        self.waiting[wait.ticket] = (wait, choose, exclude)
        return wait

    def candidates(self, model: str) -> list[Candidate]:
        names = [name for name in self.endpoints if name not in self.asleep]
        return [Candidate(name, 0, 0) for name in names] if model in ("m", "alias") else []

    def finish(self, lease: Lease, ending: Ending, detail: str = "") -> None:
        assert self.open.pop(lease.id, None) is lease, f"lease {lease.id} returned twice"
        self.finished.append((lease.replica, ending, detail))
        self.changed.set()
        self._ask_again()

    def abandon(self, wait: Wait) -> None:
        self.abandoned += 1
        self.waiting.pop(wait.ticket, None)
        if wait.outcome.done() and wait.outcome.exception() is None:
            granted = wait.outcome.result()
            if isinstance(granted, Lease):
                self.finish(granted, Ending.CLIENT_GONE)
        self.changed.set()

    def running(self) -> list[Running]:
        names = [name for name in self.endpoints if name not in self.stopped]
        return [Running("m", name, self.endpoints[name], f"run {self.runs[name]}") for name in names]

    def listing(self) -> tuple[ListedModel, ...]:
        return self.models

    def wake(self, name: str) -> None:
        """The replica is ready: everybody who waits gets a lease."""
        self.asleep.discard(name)
        self._ask_again()

    def _ask_again(self) -> None:
        for ticket, (wait, choose, exclude) in list(self.waiting.items()):
            try:
                lease = self._grant(choose, exclude)
            except Exception as error:  # noqa: BLE001 - as the supervisor does: it is that request's alone
                del self.waiting[ticket]
                wait.outcome.set_exception(error)
                continue
            if isinstance(lease, Lease):
                del self.waiting[ticket]
                wait.outcome.set_result(lease)

    def refuse_waiting(self, refusal: Refuse) -> None:
        """The wake failed, or took too long."""
        for wait, _, _ in self.waiting.values():
            wait.outcome.set_result(refusal)
        self.waiting.clear()

    @property
    def endings(self) -> list[tuple[str, Ending]]:
        return [(replica, ending) for replica, ending, _ in self.finished]

    def _grant(self, choose: Chooser, exclude: frozenset[str]) -> Lease | NotYet | None:
        in_flight = [lease.replica for lease in self.open.values()]
        gone = self.asleep | (exclude - self.restarts)
        names = [name for name in self.endpoints if name not in gone]
        names.sort(key=lambda name: name in exclude)
        if names and names[0] not in exclude:
            names = [name for name in names if name not in exclude]
        if not names:
            return None
        choice = choose([Candidate(name, in_flight.count(name), 0) for name in names])
        if isinstance(choice, NotYet):
            return choice
        lease = Lease(
            next(self._ids), "m", choice.replica, self.endpoints[choice.replica], self.served_names, choice.reason
        )
        self.open[lease.id] = lease
        return lease


def listed(name: str, aliases: tuple[str, ...] = ()) -> ListedModel:
    return ListedModel(name, aliases, "asleep", 114688, 1_700_000_000, True, "adaptive", 2.5)


@dataclass
class Message:
    """A request or a response at the byte level."""

    first_line: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def status(self) -> int:
        return int(self.first_line.split()[1])

    def json(self) -> dict:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> Message:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    return Message(first, [(n, v.strip()) for n, v in (line.split(":", 1) for line in lines)])


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n"))[:-2], 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]


async def read_body(reader: asyncio.StreamReader, message: Message) -> bytes:
    if message.header("transfer-encoding") == "chunked":
        body = b""
        while data := await read_chunk(reader):
            body += data
        return body
    if (length := message.header("content-length")) is not None:
        return await reader.readexactly(int(length))
    return await reader.read() if message.first_line.startswith("HTTP/") else b""


class Connection:
    """A client or engine connection, closed by the fixture that made it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Message:
        async with asyncio.timeout(PATIENCE):
            return await read_head(self.reader)

    async def response(self, *, method: str = "POST") -> Message:
        """The next response, complete; raises ``IncompleteReadError`` or ``ConnectionError`` where it is cut."""
        async with asyncio.timeout(PATIENCE):
            message = await read_head(self.reader)
            if method != "HEAD" and message.status not in (204, 304):
                message.body = await read_body(self.reader, message)
            return message

    async def chunk(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await read_chunk(self.reader)

    async def closed(self) -> bytes:
        """Wait for the other side's end; returns what came before it."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def reset(self) -> None:
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


Behaviour = Callable[[Message, Connection], Awaitable[None]]


def reply_bytes(body: bytes, status: str = "200 OK", headers: str = "Content-Type: application/json\r\n") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def event_stream_head(extra: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{extra}transfer-encoding: chunked"
    return head.encode() + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answer_ok(request: Message, connection: Connection) -> None:
    await connection.send(reply_bytes(b'{"ok":true}'))


def streaming(gate: asyncio.Event) -> Behaviour:
    """One event of a stream at once, its end when ``gate`` opens."""

    async def stream(request: Message, connection: Connection) -> None:
        await connection.send(event_stream_head() + chunk(b"data: 1\n\n"))
        await gate.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return stream


class Engine:
    """An engine at the byte level: reads whole requests, then does what ``behaviour`` says."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = answer_ok
        self.requests: list[Message] = []
        self.connections: list[Connection] = []
        #: Set when a client connection of the engine (the proxy's) has ended.
        self.lost = asyncio.Event()
        self.arrived = asyncio.Event()
        self.reads_bodies = True
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def start(self, path: str | None = None, port: int = 0) -> None:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._serve, path, backlog=4096)
            self.endpoint = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096)
            self.endpoint = f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self.connections:
            connection.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = Connection(reader, writer)
        self.connections.append(connection)
        try:
            while True:
                request = await read_head(reader)
                if self.reads_bodies:
                    request.body = await read_body(reader, request)
                self.requests.append(request)
                self.arrived.set()
                await self.behaviour(request, connection)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.lost.set()
            connection.reset()
            self._tasks.discard(task)


@dataclass
class Rig:
    """A running proxy with its admission; ``connect`` opens client connections that are closed at the end."""

    admission: FakeAdmission
    proxy: PublicProxy
    port: int
    spec: ProxySpec
    failovers: list[Failover]
    engines: dict[str, Engine] = field(default_factory=dict)
    clients: list[Connection] = field(default_factory=list)

    async def engine(self, name: str = "a", behaviour: Behaviour = answer_ok, path: str | None = None) -> Engine:
        engine = Engine()
        await engine.start(path)
        engine.behaviour = behaviour
        self.engines[name] = engine
        self.admission.endpoints[name] = engine.endpoint
        return engine

    async def connect(self, **options: int) -> Connection:
        client = Connection(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self.clients.append(client)
        return client

    async def send(self, raw: bytes) -> Connection:
        client = await self.connect()
        await client.send(raw)
        return client

    async def post(self, body: object = None, path: str = "/v1/chat/completions", headers: str = "") -> Message:
        """One whole request and its whole answer, on a connection of its own."""
        client = await self.send(request_bytes(body, path, headers))
        return await client.response()

    async def get(self, path: str, method: str = "GET") -> Message:
        client = await self.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return await client.response(method=method)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the admission's books say so."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.admission.changed.clear()
                if not condition():
                    await self.admission.changed.wait()

    def reconfigure(self, **changes: object) -> None:
        self.spec = replace(self.spec, **changes)
        self.proxy.reconfigure(self.spec, [MODEL])


MODEL = ModelSpec("m", (ReplicaSpec("a", "m", "a.service", "http://127.0.0.1:1"),), ("alias",), "adaptive")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


def request_bytes(body: object = None, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(CHAT if body is None else body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: proxy.test\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode("latin-1") + data


def open_files() -> Counter[str]:
    """What this process has open (temporary files, sockets by kind), by where /proc says it leads."""
    names: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names[os.readlink(entry.path).partition("[")[0]] += 1  # noqa: PTH115
    return names
