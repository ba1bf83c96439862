"""The way to the engines, by aiohttp: one connection pool per replica, over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpProcessingError, RawResponseMessage
from yarl import URL

from proxy.body import Body, Splice
from proxy.connectors import LOCAL_ERRORS, TCPConnector, UnixConnector, error_number
from proxy.exchange import ConnectFailed, Exchange, LocalFault, NoFirstByte, UpstreamBroken
from supervisord.core.admission import Lease
from supervisord.core.spec import ProxySpec

#: Seconds an idle connection is kept. vLLM's server (uvicorn) closes after 5; one near that limit loses a request.
KEEPALIVE = 4.0

_MAX_HEAD_LINE = 64 * 1024
_NO_AUTOMATIC_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class Upstreams:
    """Sends exchanges to replicas. ``spec`` gives the timeouts."""

    def __init__(self, spec: ProxySpec) -> None:
        self._spec = spec
        self._pools: dict[str, _Pool] = {}

    async def send(self, lease: Lease, exchange: Exchange) -> EngineAnswer:
        """See ``proxy.exchange.Upstream``.

        A kept connection can have been closed by the engine while the request was on its way. That says nothing about
        the replica, so a request that dies on a *reused* connection before any response byte is sent once more on a new
        one; on a new one it is ``ConnectFailed``.
        """
        pool = self._pools.get(lease.endpoint)
        if pool is None:
            pool = self._pools[lease.endpoint] = _Pool(lease.endpoint)
        splice = exchange.splice_for(lease)
        try:
            return await self._request(pool.kept, pool, exchange, splice)
        except _StaleConnection:
            return await self._request(pool.new, pool, exchange, splice)

    def configure(self, spec: ProxySpec) -> None:
        """Take new timeouts. The pool of a replica that is gone stays: empty, because idle connections are not kept."""
        self._spec = spec

    async def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            await pool.close()
        self._pools.clear()

    async def _request(
        self, session: aiohttp.ClientSession, pool: _Pool, exchange: Exchange, splice: Splice | None
    ) -> EngineAnswer:
        upload = _Upload(exchange.body, splice)
        trace = _Trace()
        try:
            async with asyncio.timeout(self._spec.first_byte_timeout):
                response = await session.request(
                    exchange.route.methods[0],
                    URL(pool.base + exchange.target, encoded=True),
                    data=upload,
                    headers=[*exchange.headers, ("Content-Length", str(upload.size))],
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._spec.connect_timeout),
                    trace_request_ctx=trace,
                )
        except aiohttp.ClientConnectionError as error:
            raise _classify(error, pool.endpoint, reused=trace.reused) from error
        except aiohttp.ClientError as error:
            raise UpstreamBroken(f"cannot understand the engine's answer: {error}") from error
        except TimeoutError:
            upload.cut()
            limit = self._spec.first_byte_timeout
            raise NoFirstByte(f"no response byte from {pool.endpoint} within {limit:g} s") from None
        except BaseException:
            upload.cut()
            raise
        return EngineAnswer(response, upload)


class EngineAnswer:
    """See ``proxy.exchange.Answer``."""

    def __init__(self, response: aiohttp.ClientResponse, upload: _Upload) -> None:
        self._response, self._upload = response, upload
        self.status = response.status
        self.reason = response.reason or ""
        self.headers = list(response.headers.items())

    def accept(self) -> None:
        if self._upload.complete:
            self._upload.body.close()

    async def read(self) -> bytes:
        """What came since the last call; aiohttp stops reading the socket above 128 kB."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            raise UpstreamBroken(f"the connection broke within the answer: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Cut unless complete, in which case aiohttp has put the connection back already."""
        if self._response.closed and self._upload.complete:
            return
        self._upload.cut()
        self._response.close()


class _Pool:
    """The connections to one replica."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket = endpoint.removeprefix("unix:") if endpoint.startswith("unix:") else None
        self.base = "http://localhost" if self._socket is not None else endpoint.rstrip("/")
        #: Keeps connections and uses them again.
        self.kept = self._session()
        self._new: aiohttp.ClientSession | None = None

    @property
    def new(self) -> aiohttp.ClientSession:
        """Opens a connection for each request, for those that died on a kept one."""
        if self._new is None:
            self._new = self._session(force_close=True)
        return self._new

    async def close(self) -> None:
        """Close every connection."""
        await self.kept.close()
        if self._new is not None:
            await self._new.close()

    def _session(self, *, force_close: bool = False) -> aiohttp.ClientSession:
        options: dict[str, Any] = {"limit": 0, "force_close": force_close}
        if not force_close:
            options["keepalive_timeout"] = KEEPALIVE
        connector = UnixConnector(self._socket, **options) if self._socket is not None else TCPConnector(**options)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTOMATIC_HEADERS,
            max_line_size=_MAX_HEAD_LINE,
            max_field_size=_MAX_HEAD_LINE,
            trace_configs=[_trace_config()],
        )


class _Trace:
    """Whether a request went over a connection that had carried another."""

    reused = False


def _trace_config() -> aiohttp.TraceConfig:
    async def reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config


class _Upload(aiohttp.Payload):
    """A body on its way up. aiohttp's own for bytes would copy it whole and cannot say how far it is."""

    def __init__(self, body: Body, splice: Splice | None) -> None:
        super().__init__(None, content_type="application/octet-stream")
        self.body, self._splice = body, splice
        self._size = body.spliced_size(splice)
        self._transport: asyncio.Transport | None = None
        self.complete = False

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body on its way has no text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        # Only aiohttp's concrete writer has it, and only while the connection is open: kept for cut().
        self._transport = getattr(writer, "transport", None)
        for piece in self.body.pieces(self._splice):
            await writer.write(piece)
        self.complete = True

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)

    def cut(self) -> None:
        """Drop what was not sent yet: a plain close would wait until an engine that hangs has read it."""
        if self._transport is not None:
            self._transport.abort()


class _StaleConnection(Exception):
    pass


def _classify(error: aiohttp.ClientConnectionError, endpoint: str, *, reused: bool) -> Exception:
    if isinstance(error, aiohttp.ServerDisconnectedError) and isinstance(error.message, RawResponseMessage):
        return UpstreamBroken("the connection broke within the head of the answer")
    if reused:
        return _StaleConnection()
    if error_number(error) in LOCAL_ERRORS:
        return LocalFault(f"cannot open a connection to {endpoint}: {error}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return ConnectFailed(f"{endpoint} closed the connection without an answer")
    return ConnectFailed(f"cannot reach {endpoint}: {error}")
