"""The worker process that talks to systemd through pystemd; started by ``commands.py``, ended by the end of its input.

pystemd holds the interpreter for the whole of a call, and systemd answers nobody while it reloads, so such a call must
not be made where streams are relayed (docs/decisions/0002-pystemd-worker.md has the figures). This file is run as a
script and imports nothing of ours. Both ways, a message is its length in four bytes, big-endian, and then JSON:

    {"id": 7, "call": "start", "args": ["vllm@a.service"]}     {"id": 7, "value": "/org/freedesktop/systemd1/job/12"}
                                                               {"id": 7, "error": [D-Bus error name, text]}

A request is answered before the next one is read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

from pystemd.dbusexc import DBusBaseError
from pystemd.dbuslib import DBus, apply_signature

SYSTEMD, ROOT = b"org.freedesktop.systemd1", b"/org/freedesktop/systemd1"
PROPERTIES = b"org.freedesktop.DBus.Properties"
ERROR = "org.freedesktop.DBus.Error."
NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
#: The connection itself failed: it is opened anew for the next request.
BROKEN = {errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN, errno.ECONNREFUSED, errno.EBADF}
#: The properties that are handed on; a unit that is not a service lacks some.
READ = (
    *("Id", "LoadState", "ActiveState", "SubState", "InvocationID", "Result", "MainPID", "ExecMainStatus"),
    *("NRestarts", "StatusText", "StandardOutput", "FragmentPath", "DropInPaths"),
    "StateChangeTimestampMonotonic",
)


class CallFailed(Exception):
    """systemd or the bus answered with an error, or not at all; ``name`` is a D-Bus error name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Systemd:
    """The commands, each one blocking call, on a bus connection that is opened when it is first needed."""

    def __init__(self, system: bool = False) -> None:
        self._system = system
        self._bus: Any = None

    def start(self, unit: str) -> str:
        """Queue a start job; returns its object path."""
        return str(plain(self._manager(b"StartUnit", b"ss", unit, "replace")))

    def stop(self, unit: str) -> str:
        """Queue a stop job; returns its object path."""
        return str(plain(self._manager(b"StopUnit", b"ss", unit, "replace")))

    def restart(self, unit: str) -> str:
        """Queue a restart job (a start, where the unit is inactive); returns its object path."""
        return str(plain(self._manager(b"RestartUnit", b"ss", unit, "replace")))

    def reset_failed(self, unit: str) -> None:
        """Forget the failure and the count of starts; a unit that systemd has not in memory has neither."""
        try:
            self._manager(b"ResetFailedUnit", b"s", unit)
        except CallFailed as failure:
            if failure.name != NO_SUCH_UNIT:
                raise

    def kill(self, unit: str, number: int) -> None:
        """Send a signal to every process of the unit."""
        self._manager(b"KillUnit", b"ssi", unit, "all", number)

    def daemon_reload(self) -> None:
        """Read all unit files again."""
        self._manager(b"Reload", b"")

    def read(self, path: str) -> dict[str, Any]:
        """The properties ``READ`` of the unit at an object path, from one reply and so of one instant.

        A missing unit has the LoadState ``not-found``. GetAll of the interface "" is systemd's "of all interfaces".
        """
        found = self._call(path.encode(), PROPERTIES, b"GetAll", b"s", "")
        return {name: plain(found[name.encode()], name) for name in READ if name.encode() in found}

    def job_unit(self, job: str) -> str:
        """The unit of a job that is still queued or running; empty when the job has ended."""
        try:
            unit = self._call(job.encode(), PROPERTIES, b"Get", b"ss", "org.freedesktop.systemd1.Job", "Unit")
        except CallFailed as failure:
            if failure.name == ERROR + "UnknownObject":
                return ""
            raise
        return str(plain(unit[0]))

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.close()

    def _manager(self, method: bytes, signature: bytes, *args: str | int) -> Any:
        return self._call(ROOT, b"org.freedesktop.systemd1.Manager", method, signature, *args)

    def _call(self, path: bytes, interface: bytes, method: bytes, signature: bytes, *args: str | int) -> Any:
        values = [arg.encode() if isinstance(arg, str) else arg for arg in args]
        try:
            if self._bus is None:
                bus = DBus(user_mode=not self._system)
                bus.open()
                self._bus = bus
            return self._bus.call_method(SYSTEMD, path, interface, method, apply_signature(signature, values)).body
        except DBusBaseError as error:
            failure, broken = translate(error)
            if broken:
                self.close()
            raise failure from None


def translate(error: DBusBaseError) -> tuple[CallFailed, bool]:
    """Our error for one of pystemd's, and whether the connection is unusable.

    pystemd keeps the D-Bus name only of errors that it has no class for; for the others the class tells it.
    """
    text = cast(str, plain(error.err_message)) or f"error {error.errno}"
    name = cast(str, plain(error.err_name))
    kind = type(error).__name__
    if abs(error.errno) in BROKEN or kind in ("DBusDisconnectedError", "DBusConnectionRefusedError"):
        return CallFailed(ERROR + "Disconnected", text), True
    if name:
        return CallFailed(name, text), False
    if kind == "DBusNoSuchUnitError":
        return CallFailed(NO_SUCH_UNIT, text), False
    if kind == "DBusBaseError":
        return CallFailed(ERROR + errno.errorcode.get(abs(error.errno), "Failed"), text), True
    return CallFailed(ERROR + kind.removeprefix("DBus").removesuffix("Error"), text), False


def plain(value: Any, name: str = "") -> Any:
    """pystemd's bytes as text, in lists and tuples too; an ID's bytes as hex digits."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if name == "InvocationID":
        return bytes(value).hex()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def serve(channel: socket.socket, systemd: Systemd) -> None:
    """Answer requests until the other side closes."""
    calls: dict[str, Callable[..., Any]] = {
        "start": systemd.start,
        "stop": systemd.stop,
        "restart": systemd.restart,
        "reset_failed": systemd.reset_failed,
        "kill": systemd.kill,
        "daemon_reload": systemd.daemon_reload,
        "read": systemd.read,
        "job_unit": systemd.job_unit,
    }
    with channel.makefile("rb") as requests:
        while head := requests.read(4):
            request = json.loads(requests.read(int.from_bytes(head, "big")))
            answer: dict[str, Any] = {"id": request["id"]}
            try:
                answer["value"] = calls[request["call"]](*request["args"])
            except CallFailed as failure:
                answer["error"] = [failure.name, str(failure)]
            body = json.dumps(answer).encode()
            channel.sendall(len(body).to_bytes(4, "big") + body)


def main(args: list[str]) -> None:
    """Serve on standard input, a socket, until it ends; a signal to the whole service must not end us before."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    # An error here is one of sending: the supervisor is gone, and nobody waits for the answer.
    with contextlib.suppress(ConnectionError):
        serve(channel, Systemd(system="--system" in args))
    # At once, so that the supervisor, which sees the socket close, need not wait for the interpreter to tidy up.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
