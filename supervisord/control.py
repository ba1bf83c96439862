"""What an operator may ask of the supervisor; the D-Bus service is a thin skin over this.

Every coroutine returns when the work is done and raises ``ControlError`` when it failed or was overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from supervisord.core.admission import Explanation
from supervisord.core.verbs import Verb
from supervisord.core.view import FleetView

__all__ = ["Control", "ControlError", "ErrorCode", "Failover", "Verb"]


class ErrorCode(StrEnum):
    """The last part of our D-Bus error names (``io.github.vllmctl1.Error.NoSuchModel``)."""

    NO_SUCH_MODEL = "NoSuchModel"
    NO_SUCH_REPLICA = "NoSuchReplica"
    INVALID_ARGUMENT = "InvalidArgument"
    SUPERSEDED = "Superseded"  # a later command or a request wanted something else
    HELD = "Held"
    SLEEP_UNSUPPORTED = "SleepUnsupported"
    SLEEP_FAILED = "SleepFailed"
    WAKE_FAILED = "WakeFailed"
    START_FAILED = "StartFailed"
    STOP_FAILED = "StopFailed"
    UNIT_MISSING = "UnitMissing"
    CONFIG_INVALID = "ConfigInvalid"
    SHUTTING_DOWN = "ShuttingDown"
    INTERNAL = "Internal"


class ControlError(Exception):
    """An operator's command failed. The text is one or more plain sentences."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Failover:
    """A request left one replica for another before its first byte."""

    model: str
    source: str
    #: Empty when no other replica was left.
    target: str
    reason: str


class Control(Protocol):
    """The supervisor's control face."""

    def view(self) -> FleetView: ...

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` (often, so be cheap) after any change of the view; returns the unsubscribe."""
        ...

    def subscribe_failovers(self, on_failover: Callable[[Failover], None]) -> Callable[[], None]: ...

    async def command_model(self, model: str, verb: Verb, level: int = 0) -> None:
        """``level``: 1 or 2 for SLEEP, else ignored."""
        ...

    async def command_replica(self, replica: str, verb: Verb, level: int = 0) -> None: ...

    def explain_route(self, model: str, route: str, body: bytes) -> Explanation:
        """Where a request of ``model`` with this body at this path would go now, and why; nothing is sent.

        Raises ``ControlError`` INVALID_ARGUMENT for a path or a body that no request could have.
        """
        ...

    async def reload(self) -> Sequence[str]:
        """Read the configuration again; returns what changed, one sentence each (empty: nothing)."""
        ...
