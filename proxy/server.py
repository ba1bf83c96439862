"""The public port: its life from accept to drain, and each request from its head to its log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from uuid import uuid4

from aiohttp import web

from proxy import routes
from proxy.accesslog import log_request
from proxy.connection import ClientConnection, ClientServer, HttpClient
from proxy.errors import ProxyError
from proxy.exchange import ClientGone, Outcome
from proxy.headers import is_request_id
from proxy.relay import Relay
from proxy.reply import Reply
from proxy.routing import PolicyBook
from proxy.service import Service
from proxy.upstream import Upstreams
from supervisord.control import Failover
from supervisord.core.admission import Admission
from supervisord.core.spec import ModelSpec, ProxySpec

log = logging.getLogger("proxy.server")

#: Accepts that the kernel queues for us; above it a connecting client stalls for a second.
BACKLOG = 4096
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
        self._upstreams = Upstreams(spec)
        relay = Relay(admission, self._upstreams, on_failover, clock)
        self._service = Service(admission, spec, self._policies, relay)
        self._server: ClientServer | None = None
        self._runner: web.ServerRunner | None = None
        self._live: set[_Live] = set()
        self._all_ended = asyncio.Event()
        self._draining = False

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on ``sockets``, which are bound (and, from systemd, listening); they are closed with the proxy."""
        self._server = ClientServer(self._handle, self._spec)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_CUT_GRACE)
        await self._runner.setup()
        for listener in sockets:
            await web.SockSite(self._runner, listener, backlog=BACKLOG).start()

    def reconfigure(self, spec: ProxySpec, models: Sequence[ModelSpec]) -> None:
        """Take a new configuration; requests in flight are not touched, and ``spec.listen`` is the caller's matter."""
        self._spec = self._service.spec = spec
        self._policies.replace(models)
        self._upstreams.configure(spec)
        if self._server is not None:
            self._server.spec = spec

    @property
    def in_flight(self) -> int:
        """Requests that are being answered, local ones included."""
        return len(self._live)

    async def stop_accepting(self) -> None:
        """Close the listening sockets; a socket that systemd holds too queues connections for the next process."""
        for site in self._runner.sites if self._runner is not None else ():
            await site.stop()

    async def drain(self, timeout: float) -> None:
        """Wait until the requests in flight have ended, at most ``timeout`` seconds, then end the rest.

        Meanwhile kept connections are closed with the answer to their next request. A stream that is ended gets an SSE
        error event, anything else that has begun is cut.
        """
        self._draining = True
        if not await self._ended_within(timeout):
            for live in list(self._live):
                live.end()
            if not await self._ended_within(_CUT_GRACE):
                for live in list(self._live):
                    live.client.cut()
                await self._ended_within(_CUT_GRACE)

    async def stop(self) -> None:
        """Close everything; what is still in flight is ended as ``drain`` ends it."""
        await self.drain(0)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = self._server = None
        await self._upstreams.close()

    async def _ended_within(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while self._live:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        except TimeoutError:
            return False
        return True

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request from its head to its log line."""
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        connection.request_begins()
        started, route = self._clock(), "-"
        given_id = request.headers.get("X-Request-Id", "")
        request_id = given_id if is_request_id(given_id) else uuid4().hex
        outcome = Outcome()
        live = _Live(HttpClient(request))
        reply = Reply(live.client, outcome, request_id)
        self._live.add(live)
        try:
            if self._draining:
                live.client.close_after()
            match = routes.match(request.method, request.raw_path)
            route, reply.dialect = match.route.path, match.route.dialect
            await live.unless_ended(self._service.answer(request, match, reply, outcome, request_id))
        except ProxyError as error:
            await _fail(request, reply, error)
        except ClientGone:
            outcome.status = 499
            live.client.cut()
        except asyncio.CancelledError:  # aiohttp's word for a client that closed its connection
            outcome.status = 499
            raise
        except Exception as error:
            log.exception("cannot answer request %s", request_id)
            await _fail(request, reply, ProxyError(500, "internal_error", f"internal error: {type(error).__name__}"))
        finally:
            self._live.discard(live)
            if not self._live:
                self._all_ended.set()
            connection.request_ends()
            log_request(request.method, route, request_id, outcome, started, self._clock())
        return live.client.response if live.client.started else web.Response(status=499)


class _Live:
    """A request in flight, and the way to end it from outside."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self._scope: asyncio.Timeout | None = None
        self._ended = False

    async def unless_ended(self, work: Coroutine[None, None, None]) -> None:
        """Do the work; raises ``ProxyError`` when ``end`` stops it. A cancellation from elsewhere stays one."""
        try:
            async with asyncio.timeout(None) as self._scope:
                await work
        except TimeoutError:
            if not self._ended:
                raise
            raise ProxyError(503, "router_shutting_down", "the router is shutting down", retry_after=5.0) from None
        finally:
            self._scope = None

    def end(self) -> None:
        """Stop the work, wherever it is; the client is then told."""
        if self._scope is not None:
            self._ended = True
            self._scope.reschedule(asyncio.get_running_loop().time())


async def _fail(request: web.BaseRequest, reply: Reply, error: ProxyError) -> None:
    # A client that is still sending may not read before it is done: it gets the answer, then the connection ends.
    with contextlib.suppress(ClientGone):
        await reply.fail(error, close=not request.content.is_eof())
