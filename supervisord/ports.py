"""The few small interfaces between the supervisor's loop and the world. I/O is behind them, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class UnitStatus:
    """One reading of a systemd unit. A level, not an edge: the newest reading replaces the one before."""

    unit: str
    load_state: str  # loaded, not-found, masked, bad-setting, error
    active_state: str  # inactive, activating, active, reloading, deactivating, failed
    sub_state: str  # dead, start, running, auto-restart, stop-sigterm ...
    #: 32 hex digits; changes with every start. Empty when the unit never ran.
    invocation: str = ""
    #: ``success``, ``exit-code``, ``signal``, ``timeout``, ``oom-kill``, ``start-limit-hit`` ...
    result: str = "success"
    main_pid: int = 0
    exec_main_status: int = 0
    n_restarts: int = 0
    #: The service's own STATUS= text.
    status_text: str = ""


class UnitError(Exception):
    """systemd refused a command. ``code`` is a D-Bus error name; the text is for people."""

    def __init__(self, unit: str, code: str, message: str) -> None:
        super().__init__(message)
        self.unit, self.code = unit, code


class ServiceManager(Protocol):
    """systemd as the supervisor needs it. Every command returns when its job has ended."""

    async def start(self, unit: str) -> str:
        """Start; returns the job's result (``done``, ``failed``, ``timeout``, ``canceled``, ``dependency``, ``skipped``)."""
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


class EngineState(StrEnum):
    """What one probe of an engine found."""

    UNREACHABLE = "unreachable"  # refused: not listening (stopped or still loading)
    HUNG = "hung"  # connected, no answer in time
    BROKEN = "broken"  # answered, but health or is_sleeping is a 5xx
    AWAKE = "awake"
    ASLEEP = "asleep"
    WRONG_MODEL = "wrong_model"  # something else answers on this endpoint


@dataclass(frozen=True, slots=True)
class Probe:
    """One look at an engine. Looking never wakes it and never counts as activity."""

    state: EngineState
    detail: str = ""
    served_names: tuple[str, ...] = ()
    max_model_len: int | None = None
    #: False when /is_sleeping is 404 (no dev mode): such an engine can only be stopped.
    can_sleep: bool = True
    simulated: bool = False


class EngineError(Exception):
    """A control call failed; the text says which call, and what the engine answered."""


class Engine(Protocol):
    """One engine's control face; vLLM is the first of several. Each call is one HTTP request, bounded by ``timeout`` seconds."""

    async def probe(self, timeout: float) -> Probe: ...

    async def sleep(self, level: int, timeout: float) -> None: ...

    async def wake_up(self, tags: Sequence[str], timeout: float) -> None:
        """``tags`` empty: everything."""
        ...

    async def reload_weights(self, timeout: float) -> None: ...

    async def reset_prefix_cache(self, timeout: float) -> None: ...

    async def close(self) -> None: ...
