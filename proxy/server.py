"""The public port: its life from accept to drain, and each request from its head to its log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from random import getrandbits

from proxy import routes
from proxy.accesslog import log_request
from proxy.clients.connected import ClientServer
from proxy.clients.incoming import HttpRequest
from proxy.clients.keys import authenticate
from proxy.clients.response import HttpClient
from proxy.credentials import Credentials
from proxy.engines.keys import EngineKeys
from proxy.engines.upstream import Upstreams
from proxy.errors import ProxyError
from proxy.exchange import ClientGone, Finished, Observer, Outcome, Stage
from proxy.explain import explain_route
from proxy.http.headers import is_request_id
from proxy.realtime.endpoint import Realtime
from proxy.relay import Relay
from proxy.reply import Reply
from proxy.routes import Handler
from proxy.routing import PolicyBook
from proxy.service import Service
from proxy.stored import StoredResponses
from supervisord.control import Failover
from supervisord.core.admission import Admission, Explanation
from supervisord.core.spec import ModelSpec, ProxySpec

log = logging.getLogger("proxy.server")

#: Accepts that the kernel queues for us; above it a connecting client stalls for a second.
BACKLOG = 4096
#: Seconds that a client whose connection was accepted has to ask its first question, when the drain begins.
FIRST_QUESTION = 0.5
#: The status of a WebSocket.
_SWITCHED = 101
#: Seconds that a request has to tell its client, when it is ended by a shutdown.
_CUT_GRACE = 1.0


class PublicProxy:
    """Serves clients on sockets that are already bound. ``clock`` is monotonic, seconds."""

    def __init__(
        self,
        admission: Admission,
        spec: ProxySpec,
        models: Sequence[ModelSpec],
        on_failover: Callable[[Failover], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission = admission
        self._spec = spec
        self._clock = clock
        self._policies = PolicyBook(models, clock)
        self._credentials = Credentials()
        self._engine_keys = EngineKeys(admission.running)
        self._upstreams = Upstreams(spec, self._engine_keys)
        relay = Relay(admission, self._upstreams, on_failover, clock)
        realtime = Realtime(admission, relay.attempts, self._upstreams, clock)
        self._stored = StoredResponses(admission, self._upstreams, clock)
        self._service = Service(admission, spec, self._policies, relay, realtime, self._stored)
        self._server: ClientServer | None = None
        self._listeners: list[asyncio.Server] = []
        self._live: set[_Live] = set()
        self._all_ended = asyncio.Event()
        self._draining = False
        self._loop: asyncio.AbstractEventLoop
        self._untold: list[tuple[Finished, Outcome]] = []
        #: Told of every request when it is over; None: nobody counts.
        self.observer: Observer | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on ``sockets``, which are bound (and, from systemd, listening); they are closed with the proxy."""
        self._server = server = ClientServer(self._handle, self._refused, self._spec)
        server.tls = self._credentials.tls
        self._loop = loop = asyncio.get_running_loop()
        for listener in sockets:
            listener.setblocking(False)
            create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            self._listeners.append(await create(server, sock=listener, backlog=BACKLOG))

    def explain(self, model: str, route: str, body: bytes) -> Explanation:
        """See ``proxy.explain``."""
        return explain_route(self._admission, self._policies, model, route, body)

    def reconfigure(self, spec: ProxySpec, models: Sequence[ModelSpec]) -> None:
        """Take a new configuration; requests in flight are not touched, and ``spec.listen`` is the caller's matter."""
        self._spec = spec
        self._service.configure(spec)
        self._policies.replace(models)
        self._upstreams.configure(spec)
        if self._server is not None:
            self._server.configure(spec)

    def guard(self, credentials: Credentials) -> None:
        """Take other credentials; requests in flight are not touched."""
        self._credentials = credentials
        self._engine_keys.replace(credentials.engine_keys)
        if self._server is not None:
            self._server.tls = credentials.tls

    @property
    def in_flight(self) -> int:
        """Requests that are being answered, local ones included."""
        return len(self._live)

    @property
    def connected(self) -> int:
        """Clients that are connected."""
        return len(self._server.connections) if self._server is not None else 0

    async def stop_accepting(self) -> None:
        """Close the listening sockets; a socket that systemd holds too queues connections for the next process."""
        while self._listeners:
            self._listeners.pop().close()

    async def drain(self, timeout: float) -> None:
        """Wait until the requests in flight have ended, at most ``timeout`` seconds, then end the rest.

        A client that was let in just before, and has asked nothing yet, gets a moment to do so: it would see its
        connection reset. Meanwhile kept connections are closed with the answer to their next request. A stream that is
        ended gets an SSE error event, a WebSocket a Close, and anything else that has begun is cut. A session of which
        nobody knows yet what it wants is not waited for: it would be refused when it says so.
        """
        self._draining = True
        for live in list(self._live):
            if live.only_greeted:
                live.end()
        if self._server is not None and timeout > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.everybody_heard(), min(timeout, FIRST_QUESTION))
        if not await self._ended_within(timeout):
            for live in list(self._live):
                live.end()
            if not await self._ended_within(_CUT_GRACE):
                for live in list(self._live):
                    live.client.cut()
                await self._ended_within(_CUT_GRACE)

    async def stop(self) -> None:
        """Close everything; what is still in flight is ended as ``drain`` ends it."""
        await self.stop_accepting()
        await self.drain(0)
        if self._server is not None:
            await self._server.close(_CUT_GRACE)
            self._server = None
        await self._stored.close()
        await self._upstreams.close()
        self._tell_all()

    async def _ended_within(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while self._live:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        except TimeoutError:
            return False
        return True

    async def _handle(self, request: HttpRequest, client: HttpClient) -> None:
        """One request from its head to its log line."""
        head = request.head
        started, route = self._clock(), "-"
        request_id = head.request_id
        if not request_id or not is_request_id(request_id):
            request_id = f"{getrandbits(128):032x}"
        outcome = Outcome()
        live = _Live(client, request.task, outcome)
        reply = Reply(client, outcome, request_id)
        self._live.add(live)
        try:
            try:
                if self._draining:
                    client.close_after()
                self._service.prepare(request, reply)
                match = routes.match(head.method, head.target)
                route, reply.dialect = match.route.path, match.route.dialect
                # A browser asks what it may before it has a key to show; what a route allows is no secret.
                keys = self._credentials.keys
                if keys is not None and not match.options and match.route.handler is not Handler.HEALTH:
                    outcome.key = authenticate(keys, head)
                await self._service.answer(request, match, reply, outcome, request_id)
            except asyncio.CancelledError:
                if request.gone or not live.ended:
                    raise
                ended = ProxyError(503, "router_shutting_down", "the router is shutting down", retry_after=5.0)
                await _fail(request, reply, ended)
            except ProxyError as error:
                await _fail(request, reply, error)
        except (ClientGone, asyncio.CancelledError):
            outcome.status = 499
            client.cut()
        except Exception as error:
            log.exception("cannot answer request %s", request_id)
            await _fail(request, reply, ProxyError(500, "internal_error", f"internal error: {type(error).__name__}"))
        finally:
            self._live.discard(live)
            if not self._live:
                self._all_ended.set()
            request.ends(client)
            self._tell(Finished(head.method, route, request_id, request.peer, started, self._clock()), outcome)

    def _refused(self, peer: str, error: ProxyError) -> None:
        """A client whose request could not be read, or that was one too many."""
        outcome = Outcome(status=error.status, code=str(error.code), details=[error.message])
        now = self._clock()
        self._tell(Finished("", "-", "", peer, now, now), outcome)

    def _tell(self, finished: Finished, outcome: Outcome) -> None:
        """Log and count, in the loop's next turn: first come the bytes that others wait for."""
        if not self._untold:
            self._loop.call_soon(self._tell_all)
        self._untold.append((finished, outcome))

    def _tell_all(self) -> None:
        untold, self._untold = self._untold, []
        failure: Exception | None = None
        for tell in (log_request,) if self.observer is None else (log_request, self.observer):
            for finished, outcome in untold:
                try:
                    tell(finished, outcome)
                except Exception as error:  # noqa: BLE001 - the others are told all the same
                    failure = failure or error
        if failure is not None:
            with contextlib.suppress(Exception):  # the log may be what fails
                log.error("cannot log or count every request", exc_info=failure)


class _Live:
    """A request in flight, and the way to end it from outside."""

    __slots__ = ("_outcome", "_task", "client", "ended")

    def __init__(self, client: HttpClient, task: asyncio.Task[None] | None, outcome: Outcome) -> None:
        self.client = client
        self._outcome = outcome
        self.ended = False
        self._task = task

    @property
    def only_greeted(self) -> bool:
        """Whether it is a session whose client has not said yet what it wants."""
        return self._outcome.status == _SWITCHED and self._outcome.stage is Stage.BODY

    def end(self) -> None:
        """Stop the work, wherever it is; the client is then told."""
        if self._task is not None:
            self.ended = True
            self.client.close_after()
            self._task.cancel()


async def _fail(request: HttpRequest, reply: Reply, error: ProxyError) -> None:
    # A client that is still sending may not read before it is done: it gets the answer, then the connection ends.
    with contextlib.suppress(ClientGone):
        await reply.fail(error, close=not (request.complete or request.skip()))
