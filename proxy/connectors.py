"""Opening connections to one replica: aiohttp's connectors, made safe for a burst and for a full backlog."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError
from aiohttp.client_proto import ResponseHandler

#: Connections to one replica that are being opened at the same time.
CONNECTING = 32

#: Errors of this process or machine when it opens a connection; demoting a replica for them would take all down.
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

# Seconds between two looks at a full backlog.
_BACKLOG_PAUSE = 0.02


def error_number(error: BaseException) -> int | None:
    """The errno of a failed connection, None where it has none."""
    number = getattr(getattr(error, "os_error", error), "errno", None)
    return number if isinstance(number, int) else None


class _Turns:
    """Lets ``CONNECTING`` connections be opened at a time; the others wait, and their time to connect has not begun.

    When a thousand begin at once, one round of the loop takes seconds, and each would time out by our own slowness. Who
    still waits when one fails, fails with it: behind a replica that hangs the last of them would wait for minutes.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(CONNECTING)
        self._failures = 0
        self._last = ""

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold a turn; raises ``ClientConnectionError`` if another's failure has answered the question meanwhile."""
        failures = self._failures
        async with self._turn:
            if failures != self._failures:
                raise aiohttp.ClientConnectionError(f"another connection failed just now: {self._last}")
            try:
                yield
            except (aiohttp.ClientError, OSError) as error:
                if error_number(error) not in LOCAL_ERRORS:
                    self._failures += 1
                    self._last = str(error) or type(error).__name__
                raise


class TCPConnector(aiohttp.TCPConnector):
    """aiohttp's, with turns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turns = _Turns()

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with self._turns.take():
            return await super()._create_connection(req, traces, timeout)


class UnixConnector(aiohttp.UnixConnector):
    """aiohttp's, with turns, and a full backlog is waited for within the time to connect.

    ``connect`` on a non-blocking Unix socket then says EAGAIN, and nothing is under way; asyncio waits for the socket
    to be writable, which it is, and takes it for connected. A burst after a wake would demote a healthy replica.
    """

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self._turns = _Turns()

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with self._turns.take():
            with contextlib.ExitStack() as undo:
                sock = undo.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                try:
                    async with asyncio.timeout(timeout.sock_connect):
                        await _connect(sock, self.path)
                except TimeoutError:
                    full = OSError(errno.EAGAIN, "its backlog is full")
                    raise UnixClientConnectorError(self.path, req.connection_key, full) from None
                except OSError as error:
                    raise UnixClientConnectorError(self.path, req.connection_key, error) from error
                loop = asyncio.get_running_loop()
                _, protocol = await loop.create_unix_connection(self._factory, sock=sock)
                undo.pop_all()
        return protocol


async def _connect(sock: socket.socket, path: str) -> None:
    while number := sock.connect_ex(path):
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number))
        await asyncio.sleep(_BACKLOG_PAUSE)
