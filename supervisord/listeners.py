"""The sockets that we accept on: systemd's where it hands some over, else our own."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The FileDescriptorName= of vllm-supervisord.socket, and of a socket unit for the status listener.
PROXY_FD_NAME, STATUS_FD_NAME = "proxy", "status"
BACKLOG = 4096
#: Who has the public port where systemd has it.
SOCKET_UNIT = "vllm-supervisord.socket"
_MEND = (
    "It hands its socket to vllm-supervisord.service only: start that instead of the program,"
    " or give this one another [proxy] listen."
)

log = logging.getLogger(__name__)


class ListenFailed(Exception):
    """The configured address cannot be listened on."""


def listening(
    handed_over: Mapping[str, Sequence[socket.socket]], listen: str, *, socket_unit_active: bool = False
) -> list[socket.socket]:
    """Sockets named ``proxy`` from systemd; without any, one bound to ``listen`` (``host:port``), and that is said.

    ``socket_unit_active``: systemd listens for us, whether it handed anything over or not. Raises ``ListenFailed``.
    """
    given = list(handed_over.get(PROXY_FD_NAME, ()))
    unknown = sorted(handed_over.keys() - {PROXY_FD_NAME, STATUS_FD_NAME})
    for sock in (sock for name in unknown for sock in handed_over[name]):
        sock.close()
    if unknown:
        log.warning("systemd handed over sockets that are not ours, named %s: they are not used", ", ".join(unknown))
    if given:
        return given
    if socket_unit_active:
        log.warning("%s is active, but handed no socket over: listening on %s instead. %s", SOCKET_UNIT, listen, _MEND)
    try:
        return [bound(listen)]
    except ListenFailed as failure:
        if socket_unit_active and os.strerror(errno.EADDRINUSE) in str(failure):
            whose = f"{SOCKET_UNIT} is active and has handed no socket over: the port may be its own"
            raise ListenFailed(f"{failure}; {whose}. {_MEND}") from None
        raise


def bound(listen: str) -> socket.socket:
    """A listening socket at ``host:port`` or ``unix:/path``; raises ``ListenFailed``."""
    if listen.startswith("unix:"):
        return _bound_unix(Path(listen.removeprefix("unix:")))
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenFailed(f"cannot listen on {listen}: {error.strerror or error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ListenFailed(f"cannot listen on {listen}: {error.strerror or error}") from None
    return made


def unbind(listen: str) -> None:
    """Take away what a closed socket of ``bound`` has left: the file of a Unix socket."""
    if listen.startswith("unix:"):
        with contextlib.suppress(OSError):
            Path(listen.removeprefix("unix:")).unlink()


def address_of(sock: socket.socket) -> str:
    """``host:port`` or ``unix:/path``, for people."""
    name = sock.getsockname()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else f"unix:{name}"


def _bound_unix(path: Path) -> socket.socket:
    """What a process that was killed left behind is replaced; what somebody listens on is not."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            path.unlink()
        made.bind(os.fspath(path))
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ListenFailed(f"cannot listen on unix:{path}: {error.strerror or error}") from None
    return made


def _is_stale(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                return probe.connect_ex(os.fspath(path)) != 0
    return False
