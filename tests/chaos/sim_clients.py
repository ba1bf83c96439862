"""Clients: the real relay between them and the simulated engines, and what each of them saw in the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sim_loop import Process
from sim_ports import UpstreamPort

from proxy.errors import Dialect, ProxyError
from proxy.exchange import Outcome
from proxy.reading.facts import Facts
from proxy.relay import Relay
from proxy.routing import PolicyBook
from supervisord.control import Failover
from supervisord.core.spec import Config

if TYPE_CHECKING:
    from sim_world import World


class Client:
    """One request, and how long its sender will wait for the end of the answer. Seconds."""

    def __init__(self, model: str, first_after: float, length: float, patience: float, *, stream: bool = False) -> None:
        self.model, self.first_after, self.length, self.patience = model, first_after, length, patience
        self.stream = stream
        #: One for each message of its conversation.
        self.keys: tuple[bytes, ...] = ()
        #: Those messages have 10 000 tokens each, the first one 30 000.
        self.long = False
        self.arrived = 0.0
        self.answers: list[str] = []
        #: From a refusal.
        self.retry_after: float | None = None


class SimExchange:
    """As much of an exchange as the relay looks at."""

    def __init__(self, client: Client) -> None:
        self.client, self.model, self.id = client, client.model, "r"
        first, each = (120_000, 40_000) if client.long else (400, 400)
        sizes = tuple(first + each * n for n in range(len(client.keys)))
        self.facts = Facts(client.model, client.stream, client.keys, sizes=sizes)
        self.outcome = Outcome()
        self.only = self.learn = None
        self.told = False


class SimReply:
    """As much of a reply as the relay uses: what the client was told."""

    dialect = Dialect.OPENAI
    tells_route = True

    def __init__(self) -> None:
        self.started = self.ended = self.broken = False
        #: An engine's answer has begun to reach the client.
        self.headed = False

    def whole(self, head: object, body: bytes, extra: bytes = b"") -> None:
        self.started = self.headed = True
        self._end()

    async def start(self, head: object, extra: bytes = b"", *, at_once: bool = True) -> None:
        self.started = self.headed = True

    async def write(self, data: bytes) -> None:
        self.headed = True

    async def pour(self, answer) -> None:
        self.headed = True
        await answer.pour(None)

    async def comment(self) -> None:
        self.started = True

    async def end(self) -> None:
        self._end()

    @property
    def unfinished(self) -> bool:
        return not self.ended

    async def break_off(self, event: bytes) -> None:
        self.broken = True
        self._end()

    def _end(self) -> None:
        assert not self.ended, "an answer was ended twice"
        self.ended = True


class Clients:
    """Those of one supervisor process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._open: dict[asyncio.Task[None], Client] = {}
        #: Their connections are made, and the process has not seen them yet.
        self._knocking: dict[Client, None] = {}
        self._relay: Relay | None = None
        self._policies: PolicyBook | None = None
        self._empty: asyncio.Event | None = None

    def open(self, dispatcher, config: Config) -> None:
        upstream = UpstreamPort(self._world, self._process, config.proxy.first_byte_timeout)
        self._policies = PolicyBook(config.models, self._process.time)
        self._relay = Relay(dispatcher, upstream, self._failed_over, self._process.time)
        self._empty = asyncio.Event()
        self._empty.set()

    def reconfigure(self, config: Config) -> None:
        if self._policies is not None:
            self._policies.replace(config.models)

    def policy(self, model: str):
        """The policy that new requests for ``model`` get."""
        assert self._policies is not None
        return self._policies.policy(model)

    @property
    def count(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open)

    def knock(self, client: Client) -> None:
        """A connection is made."""
        self._knocking[client] = None

    def arrive(self, client: Client, *, accepted: bool) -> None:
        """The process sees the request of one that knocked; to be called inside the process."""
        del self._knocking[client]
        if not accepted:
            self._world.outcome(client, "nobody listens")
            return
        client.arrived = self._world.now
        assert self._empty is not None
        self._empty.clear()
        task = self._process.create_task(self._serve(client))
        self._open[task] = client
        task.add_done_callback(self._done)
        self._world.later(client.patience, self._leave, task)

    def cut(self) -> None:
        """The process is gone, and every connection with it."""
        for client in (*self._open.values(), *self._knocking):
            if not client.answers:
                self._world.outcome(client, "cut by a kill")
        self._open.clear()
        self._knocking.clear()

    async def drain(self, seconds: float) -> None:
        """Wait for the streams in flight, then end the rest, as the proxy does."""
        assert self._empty is not None
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            for task in list(self._open):
                task.cancel("shutting down")
            await self._empty.wait()

    def _leave(self, task: asyncio.Task[None]) -> None:
        if task in self._open and self._process.alive:
            self._process.call_soon(task.cancel)

    async def _serve(self, client: Client) -> None:
        exchange, reply = SimExchange(client), SimReply()
        assert self._relay is not None
        assert self._policies is not None
        try:
            await self._relay.run(exchange, reply, self._policies.policy(client.model), 15.0)
            answer = "broken" if reply.broken or not reply.ended else "answered"
        except ProxyError as error:
            answer = f"{error.status} {error.code}"
            client.retry_after = error.retry_after
            supervisor = self._world.supervisor
            if supervisor is not None and supervisor.process is self._process:
                supervisor.checks.error_shown(client, answer, str(error), headed=reply.headed)
        except asyncio.CancelledError:
            answer = "left"
        self._world.outcome(client, answer)

    def _done(self, task: asyncio.Task[None]) -> None:
        client = self._open.pop(task, None)
        if not self._open and self._empty is not None:
            self._empty.set()
        if not task.cancelled() and task.exception() is not None:
            self._world._error("a request failed in a way that nobody foresaw", task.exception())
        elif client is not None and not client.answers:
            # Cancelled before its first step ran.
            self._world.outcome(client, "left")

    def _failed_over(self, failover: Failover) -> None:
        self._world.failovers += 1
