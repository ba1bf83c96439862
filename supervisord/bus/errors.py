"""What goes wrong on the bus, and what it is called there."""

from __future__ import annotations

from supervisord.bus.names import ERROR_PREFIX
from supervisord.control import ErrorCode

# The names that the D-Bus specification and the reference implementation give to a caller's mistakes.
UNKNOWN_OBJECT = "org.freedesktop.DBus.Error.UnknownObject"
UNKNOWN_INTERFACE = "org.freedesktop.DBus.Error.UnknownInterface"
UNKNOWN_METHOD = "org.freedesktop.DBus.Error.UnknownMethod"
UNKNOWN_PROPERTY = "org.freedesktop.DBus.Error.UnknownProperty"
PROPERTY_READ_ONLY = "org.freedesktop.DBus.Error.PropertyReadOnly"
INVALID_ARGS = "org.freedesktop.DBus.Error.InvalidArgs"
FAILED = "org.freedesktop.DBus.Error.Failed"


class BusError(Exception):
    """The bus, or our connection to it, does not do what we need; the text begins with "cannot"."""


class BusUnavailable(BusError):
    """Nobody answers at the bus address, or the connection broke."""


class NameTaken(BusError):
    """Another process owns our bus name."""

    def __init__(self, name: str, pid: int | None) -> None:
        owner = "pid unknown" if pid is None else f"pid {pid}"
        super().__init__(f"cannot own the bus name {name}: another vllm-supervisord is running ({owner})")
        self.name, self.pid = name, pid


class CallFailed(BusError):
    """A call was answered with an error. ``error`` is its D-Bus name, ``text`` what the other side said."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(f"{error}: {text}")
        self.error, self.text = error, text


def error_name(code: ErrorCode) -> str:
    """The D-Bus name of one of our own errors."""
    return ERROR_PREFIX + code
