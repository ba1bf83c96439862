"""The sockets of the public port: systemd's where it hands some over, else our own."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

#: The FileDescriptorName= of vllm-supervisord.socket.
PROXY_FD_NAME = "proxy"
BACKLOG = 4096


class ListenFailed(Exception):
    """The configured address cannot be listened on."""


def listening(handed_over: Mapping[str, Sequence[socket.socket]], listen: str) -> list[socket.socket]:
    """Sockets named ``proxy`` from systemd; without any, one bound to ``listen`` (``host:port``)."""
    given = list(handed_over.get(PROXY_FD_NAME, ()))
    for name, sockets in handed_over.items():
        if name != PROXY_FD_NAME:
            for unknown in sockets:
                unknown.close()
    if given:
        return given
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
    return [made]
