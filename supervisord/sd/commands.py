"""The small interface to systemd's commands: an asynchronous client of the worker process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisord.bus.address import NoSessionBus
from supervisord.sd.errors import DISCONNECTED, TIMEOUT

_log = logging.getLogger(__name__)

#: How long systemd may take for one answer, in sd-bus's spelling and in seconds; a daemon-reload of a big desktop
#: session takes a few seconds, and systemd answers nobody meanwhile.
SYSTEMD_BUS_TIMEOUT, ANSWER_LIMIT = "25s", 30.0
#: An unused worker is ended after this many seconds: it costs 15 MB, and a new one is up in 0.1 s.
IDLE_LIMIT = 60.0
#: A call that took longer is logged, seconds.
SLOW = 1.0
#: What systemd tells this process about itself is not the worker's.
_OURS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class CommandFailed(Exception):
    """systemd refused a command or did not answer. ``name`` is a D-Bus error name, the text is systemd's own."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Commands:
    """Sends calls to a worker process, which is started when one is needed and ended when none was for a while."""

    def __init__(self, address: Callable[[], str], *, system: bool = False, idle_limit: float = IDLE_LIMIT) -> None:
        """``address`` gives the address of the bus for each new worker, and may raise ``NoSessionBus``."""
        self._address, self._system, self._idle_limit = address, system, idle_limit
        self._launching = asyncio.Lock()
        #: The one that is asked, and those that were let go and may still have to answer.
        self._worker: _Worker | None = None
        self._leaving: set[_Worker] = set()
        self._idle: asyncio.TimerHandle | None = None

    async def call(self, name: str, *args: str | int) -> Any:
        """Make one call of ``worker.Systemd`` and return its value; raises ``CommandFailed``."""
        loop = asyncio.get_running_loop()
        async with self._launching:
            if self._worker is None or self._worker.ended:
                try:
                    self._worker = await _Worker.launch(self._address(), self._system)
                except (NoSessionBus, OSError) as error:
                    raise CommandFailed(DISCONNECTED, str(error)) from error
        if self._idle is not None:
            self._idle.cancel()
        worker, began = self._worker, loop.time()
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                return await worker.ask(name, args)
        except TimeoutError:
            worker.kill()
            raise CommandFailed(TIMEOUT, f"systemd did not answer within {ANSWER_LIMIT:.0f} s") from None
        finally:
            if (took := loop.time() - began) > SLOW:
                _log.info("systemd took %.1f s to answer %s %s", took, name, " ".join(map(str, args)))
            if worker is self._worker and not worker.waiting:
                self._idle = loop.call_later(self._idle_limit, self.release)

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id while there is one."""
        return self._worker.pid if self._worker is not None and not self._worker.ended else None

    def release(self) -> None:
        """Let the worker end once it has answered what it was asked; the next call starts another."""
        worker, self._worker = self._worker, None
        if worker is not None and not worker.ended:
            self._leaving.add(worker)
            worker.end_input()
            worker.answers.add_done_callback(lambda _: self._leaving.discard(worker))

    async def close(self) -> None:
        """End the worker; calls in flight fail."""
        if self._idle is not None:
            self._idle.cancel()
        workers = [*self._leaving, *([self._worker] if self._worker is not None else [])]
        self._worker = None
        for worker in workers:
            worker.kill()
            await worker.answers


class _Worker:
    """One worker process, from its launch to its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.pid, self.ended = process.pid, False
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self.answers = asyncio.get_running_loop().create_task(self._read_answers(), name="systemd commands")

    @classmethod
    async def launch(cls, address: str, system: bool) -> _Worker:
        env = {name: value for name, value in os.environ.items() if name not in _OURS}
        env["SYSTEMD_BUS_TIMEOUT"] = SYSTEMD_BUS_TIMEOUT
        env["DBUS_SYSTEM_BUS_ADDRESS" if system else "DBUS_SESSION_BUS_ADDRESS"] = address
        ours, theirs = socket.socketpair()
        with theirs:
            process = _start(["--system"] if system else [], theirs, env)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    async def ask(self, name: str, args: tuple[str | int, ...]) -> Any:
        self._asked += 1
        number = self._asked
        body = json.dumps({"id": number, "call": name, "args": args}).encode()
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(len(body).to_bytes(4, "big") + body)
            return await answer
        finally:
            del self.waiting[number]

    async def _read_answers(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(4), "big")
                message = json.loads(await self._reader.readexactly(length))
                answer = self.waiting.get(message["id"])
                if answer is None or answer.done():
                    continue  # whoever asked has left
                if "error" in message:
                    answer.set_exception(CommandFailed(*message["error"]))
                else:
                    answer.set_result(message["value"])
        self.ended = True
        self._writer.close()
        # The socket is closed by the worker's death and by nothing before it, so this wait is over at once.
        status = self._process.wait()
        if status not in (0, -signal.SIGKILL):
            _log.warning(
                "the process for systemd commands ended with status %d; the next command starts another", status
            )
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(CommandFailed(DISCONNECTED, "the process for systemd commands ended"))

    def end_input(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def kill(self) -> None:
        self.ended = True
        self._process.kill()


def _start(args: list[str], channel: socket.socket, env: dict[str, str]) -> subprocess.Popen[bytes]:
    # -P: the worker's folder has modules with names like "bus", which are not what its imports mean.
    command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), *args]
    return subprocess.Popen(command, stdin=channel.fileno(), stdout=subprocess.DEVNULL, env=env)
