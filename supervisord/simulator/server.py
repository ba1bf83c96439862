"""One simulated engine process: bind, load, listen, and the several ways in which it ends.

In a test it runs inside the test's own loop (``async with Simulator(options) as simulator``); ``main`` makes a process
of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from aiohttp import web

from supervisord.simulator.api import Api
from supervisord.simulator.app import VERSION, build
from supervisord.simulator.clock import Clock
from supervisord.simulator.engine import Engine
from supervisord.simulator.faults import TIMED, Faults
from supervisord.simulator.log import EngineLog
from supervisord.simulator.options import Options

#: vLLM's (uvicorn's) own.
BACKLOG = 2048
#: Simulated seconds from the core's death to the process's end, and from SIGTERM to it.
DEATH_SECONDS = 0.5
STOP_SECONDS = 1.0
#: Real seconds: how long the last answers may take to be written, and the least that is left for their bytes to go out.
LAST_ANSWERS = 1.0
LAST_BYTES = 0.02


class StartFailed(Exception):
    """The start-fails fault struck."""


class Simulator:
    """``own_process``: a crash is a real SIGKILL; otherwise (inside a test) every socket is torn down at once."""

    def __init__(self, options: Options, log: EngineLog | None = None, *, own_process: bool = False) -> None:
        self.options = options
        self.faults = Faults()
        self.clock = Clock(options.clock_factor)
        self._log = log or EngineLog(None)
        self._own_process = own_process
        self.engine = Engine(options, self.clock, self.faults, self._log, self._died, self._crash)
        self._api = api = Api(options, self.engine, self.faults, self.clock)
        self._runner = web.AppRunner(
            build(api, self._log, self.arm),
            handler_cancellation=True,  # a client that leaves ends its request at once
            auto_decompress=False,  # vLLM does not decode request bodies
            keepalive_timeout=options.keepalive,
            access_log=None,
            max_line_size=1 << 20,
            max_field_size=1 << 20,
            shutdown_timeout=0.2,
        )
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._port = options.port
        self._timers: list[asyncio.TimerHandle] = []
        self._reopening: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._dying: asyncio.Task[None] | None = None
        #: Resolves to the exit code.
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for name, arg, count in options.faults:
            if name not in TIMED and name != "refuse":
                self.faults.arm(name, arg, count)

    async def __aenter__(self) -> Simulator:
        self.bind()
        await self.load()
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:PORT`` or ``unix:/path``."""
        if self.options.uds is not None:
            return f"unix:{self.options.uds}"
        host = "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host
        return f"http://{host}:{self._port}"

    # --- start ----------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Take the address, as vLLM does before it loads; nobody listens yet. Raises OSError (busy, stale file)."""
        if self.options.uds is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(self.options.uds)
            return
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((self.options.host, self._port))
        self._port = self._socket.getsockname()[1]

    async def load(self) -> None:
        """Load the model: time passes. Raises ``StartFailed``."""
        self._log.info("core.py", f"Initializing a V1 LLM engine ({VERSION}) with config: model='{self.options.model}'")
        self._log.info("gpu_model_runner.py", f"Starting to load model {self.options.model}... (simulated)")
        await self.clock.sleep(self.options.load_time)
        fault = self.faults.armed("start-fails")
        if fault and _counts_down(fault.arg):
            raise StartFailed
        gib = self.options.memory.weights / 1024**3
        self._log.info("gpu_model_runner.py", f"Model loading took {gib:.2f} GiB memory (simulated)")
        self._log.info("kv_cache_utils.py", f"GPU KV cache size: {self.options.kv_tokens:,} tokens (simulated)")

    async def listen(self) -> None:
        """Answer from now on. Raises OSError."""
        self._log.info("api_server.py", f"Starting vLLM API server 0 on {self.endpoint} (simulated, no GPU)")
        self.engine.start()
        await self._runner.setup()
        await self._open()
        for line in ("Started server process", "Waiting for application startup.", "Application startup complete."):
            self._log.uvicorn(line)
        self._log.uvicorn(f"Uvicorn running on {self.endpoint} (Press CTRL+C to quit) (simulated)")
        for name, arg, count in self.options.faults:
            if name in TIMED or name == "refuse":
                self.arm(name, arg, 1 if count is None else count)

    async def _open(self) -> None:
        server = self._runner.server
        assert server is not None
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(server, sock=self._socket, backlog=BACKLOG)

    # --- faults ---------------------------------------------------------------------------------------------------

    def arm(self, name: str, arg: str, count: int | None) -> None:
        """Arm a fault; those of a moment that is now, strike. Raises ``UnknownFault``."""
        fault = self.faults.arm(name, arg, count)
        if fault is None:
            if name == "hang":
                self.engine.unhang()
            elif name == "refuse":
                self._after(0.0, self._reopen)
        elif name == "refuse":
            self.faults.arm(name, count=0)
            self._shut()
            if float(arg or 0):
                self._after(float(arg), self._reopen)
        elif name in TIMED and (not arg or arg.replace(".", "", 1).isdigit()):
            self.faults.arm(name, count=0)
            if float(arg or 0):
                self._after(float(arg), lambda: self.engine.strike(fault))
            else:
                self.engine.strike(fault)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(self.clock.real(seconds), action))

    def _shut(self) -> None:
        """Close the listener and idle connections; a Unix socket's file stays, as the real one's does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()

    def _reopen(self) -> None:
        if self._server is None and self._stopping is None and not self.ended.done():
            if self.options.uds is not None:
                Path(self.options.uds).unlink(missing_ok=True)
            try:
                self.bind()
            except OSError as error:
                self._log.error("api_server.py", f"cannot listen again: {error}")
                self._end(1)
                return
            self._reopening = asyncio.get_running_loop().create_task(self._open())

    # --- end ------------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM or SIGINT. A second one does not wait."""
        if self.faults.armed("ignore-sigterm"):
            self._log.info("simulator", "fault ignore-sigterm: ignored")
        elif self._stopping is not None:
            self._end(0)
        else:
            self._log.uvicorn("Shutting down")
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        if not self.options.shutdown_timeout:
            self._shut()
            self.engine.abort()
            await self._api.close_sessions()
            await self._last_answers(STOP_SECONDS)
        else:
            # The listener stays, /health stays 200, new requests get 500; streams have N seconds, then they hang.
            self.engine.takes_requests = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self.clock.real(self.options.shutdown_timeout)):
                    await self.engine.empty()
            self.engine.freeze()
            await self.engine.empty()
            await self._last_answers(0.0)
        self._log.uvicorn("Finished server process")
        self._end(0)

    def _died(self) -> None:
        async def follow() -> None:
            await self._last_answers(DEATH_SECONDS)
            self._end(0)

        if self.faults.armed("lie-health") is None:
            self._dying = asyncio.get_running_loop().create_task(follow())

    async def _last_answers(self, seconds: float) -> None:
        """Give the answers under way their time, then ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_ANSWERS):
                await self._api.quiet.wait()
        await asyncio.sleep(max(LAST_BYTES, self.clock.real(seconds)))

    def _crash(self) -> None:
        if self._own_process:
            os.kill(os.getpid(), signal.SIGKILL)
        self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)
            self._shut()
            for connection in self._runner.server.connections if self._runner.server else []:
                if connection.transport is not None:
                    connection.transport.close()

    async def close(self) -> None:
        """Give everything back. Like the real engine it leaves its Unix socket's file behind."""
        for timer in self._timers:
            timer.cancel()
        tasks = [task for task in (self._stopping, self._dying, self._reopening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._shut()
        await self._runner.cleanup()
        await self.engine.close()
        if self._socket is not None:
            self._socket.close()


def _counts_down(path: str) -> bool:
    """Does this start fail? Always without a file; else as often as the number in it says, which is counted down."""
    if not path:
        return True
    file = Path(path)
    try:
        left = int(file.read_text())
    except (OSError, ValueError):
        return False
    if left > 0:
        file.write_text(str(left - 1))
    return left > 0
