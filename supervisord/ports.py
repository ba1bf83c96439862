"""The few small interfaces between the supervisor's loop and the world. I/O is behind them, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from supervisord.core.canary import Fingerprint
from supervisord.core.readings import EngineState, Probe, UnitStatus

__all__ = ["Engine", "EngineError", "EngineState", "Probe", "ServiceManager", "UnitError", "UnitStatus"]


class UnitError(Exception):
    """systemd refused a command. ``code`` is a D-Bus error name; the text is for people."""

    def __init__(self, unit: str, code: str, message: str) -> None:
        super().__init__(message)
        self.unit, self.code = unit, code


class ServiceManager(Protocol):
    """systemd as the supervisor needs it. Every command returns when its job has ended."""

    async def start(self, unit: str) -> str:
        """Start; returns the job's result (``done``, ``failed``, ``timeout``, ``canceled``, ``dependency`` ...)."""
        ...

    async def stop(self, unit: str) -> str: ...

    async def restart(self, unit: str) -> str: ...

    async def reset_failed(self, unit: str) -> None: ...

    async def kill(self, unit: str, signal: int) -> None:
        """Signal every process of the unit's control group."""
        ...

    async def status(self, units: Sequence[str]) -> list[UnitStatus]:
        """Read each unit once; a unit that does not exist has load_state ``not-found``."""
        ...

    def watch(self, units: Sequence[str], on_change: Callable[[UnitStatus], None]) -> None:
        """Replace the set of watched units; ``on_change`` is called in the loop's thread after every change."""
        ...

    async def last_lines(self, unit: str, count: int = 20) -> list[str]:
        """The unit's newest log lines, oldest first; empty when no log can be read."""
        ...


class EngineError(Exception):
    """A control call failed; the text says which call, and what the engine answered."""


class Engine(Protocol):
    """One engine's control face; vLLM is the first of several. Each call is bounded by ``timeout`` seconds."""

    async def probe(self, timeout: float) -> Probe: ...

    async def verify(self, timeout: float) -> Probe:
        """The one question that a sleep or wake ends with: asleep or awake? Of the probe, only ``state`` is told."""
        ...

    async def sleep(self, level: int, timeout: float) -> None: ...

    async def wake_up(self, tags: Sequence[str], timeout: float) -> None:
        """``tags`` empty: everything."""
        ...

    async def reload_weights(self, timeout: float) -> None: ...

    async def reset_prefix_cache(self, timeout: float) -> None: ...

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        """What it answers to a fixed prompt at temperature 0; None when it has no route that tells."""
        ...

    async def close(self) -> None: ...
