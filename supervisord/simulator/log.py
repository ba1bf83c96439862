"""Log lines as vLLM writes them, on stderr, each flushed at once; the process name says that nothing here is real."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TextIO


class EngineLog:
    """``stream`` None: say nothing (a simulator inside a test)."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._prefix = f"(APIServer simulated pid={os.getpid()})"

    def info(self, source: str, message: str) -> None:
        self._line(f"INFO {time.strftime('%m-%d %H:%M:%S')} [{source}] {message}")

    def error(self, source: str, message: str) -> None:
        for line in message.splitlines():
            self._line(f"ERROR {time.strftime('%m-%d %H:%M:%S')} [{source}] {line}")

    def uvicorn(self, message: str) -> None:
        """A line of the HTTP server, in uvicorn's own format."""
        self._line(f"INFO:     {message}")

    def _line(self, text: str) -> None:
        if self._stream is not None:
            # Whoever read the log is gone: the engine goes on.
            with contextlib.suppress(BrokenPipeError):
                self._stream.write(f"{self._prefix} {text}\n")
                self._stream.flush()
