"""Opening connections to one replica, over TCP or a Unix socket, safe for a burst and for a full backlog."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

#: Connections to one replica that are being opened at the same time.
CONNECTING = 32

#: Errors of this process or machine when it opens a connection; demoting a replica for them would take all down.
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

# Seconds between two looks at a full backlog.
_BACKLOG_PAUSE = 0.02

P = TypeVar("P", bound=asyncio.Protocol)


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
        """Hold a turn; raises ``ConnectionError`` if another's failure has answered the question meanwhile."""
        failures = self._failures
        async with self._turn:
            if failures != self._failures:
                raise ConnectionError(f"another connection failed just now: {self._last}")
            try:
                yield
            except OSError as error:
                if error.errno not in LOCAL_ERRORS:
                    self._failures += 1
                    self._last = str(error) or type(error).__name__
                raise


class Connector:
    """Opens connections to ``endpoint``: ``http://host:port`` or ``unix:/path``."""

    def __init__(self, endpoint: str) -> None:
        self._turns = _Turns()
        self._path = endpoint.removeprefix("unix:") if endpoint.startswith("unix:") else None
        address = urlsplit(endpoint)
        self._host, self._port = address.hostname or "localhost", address.port or 80

    async def open(self, factory: Callable[[], P], timeout: float) -> P:
        """A new connection; raises ``OSError``. ``timeout``: seconds to connect, after a wait for the turn."""
        loop = asyncio.get_running_loop()
        async with self._turns.take():
            try:
                async with asyncio.timeout(timeout):
                    sock = await (self._unix(self._path) if self._path is not None else self._tcp(loop))
            except TimeoutError:
                if self._path is not None:
                    raise OSError(errno.EAGAIN, "its backlog is full") from None
                raise OSError(errno.ETIMEDOUT, f"no connection within {timeout:g} s") from None
            with contextlib.ExitStack() as undo:
                undo.callback(sock.close)
                connect = loop.create_unix_connection if self._path is not None else loop.create_connection
                _, protocol = await connect(factory, sock=sock)
                undo.pop_all()
            return protocol

    async def _unix(self, path: str) -> socket.socket:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(_new_socket(socket.AF_UNIX))
            await _connect(sock, path)
            undo.pop_all()
            return sock

    async def _tcp(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        failure: OSError = OSError(errno.EADDRNOTAVAIL, "the host has no address")
        for family, _, _, _, address in await self._addresses(loop):
            try:
                with contextlib.ExitStack() as undo:
                    sock = undo.enter_context(_new_socket(family))
                    await loop.sock_connect(sock, address)
                    undo.pop_all()
                    return sock
            except OSError as error:
                failure = error
        raise failure

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        options = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}
        try:  # an address needs no thread to be resolved in
            return socket.getaddrinfo(self._host, self._port, flags=socket.AI_NUMERICHOST, **options)
        except socket.gaierror:
            return await loop.getaddrinfo(self._host, self._port, **options)


def _new_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


async def _connect(sock: socket.socket, path: str) -> None:
    # With a full backlog it says EAGAIN, and nothing is under way; the loop would wait for the socket to be writable,
    # which it is, and take it for connected: a burst after a wake would demote a healthy replica.
    while number := sock.connect_ex(path):
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number))
        await asyncio.sleep(_BACKLOG_PAUSE)
