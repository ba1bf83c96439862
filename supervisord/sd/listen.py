"""The sockets that systemd hands over at the start (sd_listen_fds(3)), by name."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

#: SD_LISTEN_FDS_START: the first descriptor that is handed over.
FIRST = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class ListenError(Exception):
    """What was handed over cannot be used; the text names the variable or descriptor."""


def take_sockets(environ: MutableMapping[str, str], pid: int) -> dict[str, list[socket.socket]]:
    """The listening sockets that were handed to this process, ``pid``, by FileDescriptorName=; empty when none were.

    The order of names is not stable, so only a name tells what a socket is for; several sockets of one name keep their
    order. The variables are removed from ``environ``, and the descriptors are not inherited further.
    Raises ``ListenError``.
    """
    listen_pid, listen_fds, names = (environ.pop(variable, "") for variable in _VARIABLES)
    if not listen_fds:
        return {}
    count = _number("LISTEN_FDS", listen_fds)
    if _number("LISTEN_PID", listen_pid) != pid:
        return {}
    # systemd names a socket after its unit where FileDescriptorName= is not set, and so never leaves a name out.
    labels = names.split(":") if names else ["unknown"] * count
    if len(labels) != count:
        raise ListenError(
            f"cannot use the sockets from systemd: LISTEN_FDS is {count}, but LISTEN_FDNAMES is {names!r}"
        )
    found: dict[str, list[socket.socket]] = {}
    try:
        for number, label in enumerate(labels, FIRST):
            found.setdefault(label, []).append(_listening_socket(number, label))
    except ListenError:
        for sockets in found.values():
            for each in sockets:
                each.close()
        raise
    return found


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ListenError(f"cannot use the sockets from systemd: {variable} is {text!r}, not a number") from None


def _listening_socket(number: int, label: str) -> socket.socket:
    where = f"cannot use descriptor {number} ({label}) from systemd"
    try:
        os.set_inheritable(number, False)
        taken = socket.socket(fileno=number)
    except OSError as error:
        raise ListenError(f"{where}: {error.strerror}") from None
    if not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        taken.close()
        raise ListenError(f"{where}: it is not a listening stream socket")
    taken.setblocking(False)
    return taken
