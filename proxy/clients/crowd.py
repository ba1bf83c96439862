"""How many connections one client has. Pure."""

from __future__ import annotations

import socket

_LOOPBACK = b"\x7f"
_MAPPED = bytes(10) + b"\xff\xff"


def client_of(peer: str) -> bytes:
    """Whom a limit per client means by an address: an IPv4 address, the /64 network of an IPv6 one.

    A host has a whole /64 to itself, as often as it likes another address of it. Nobody (empty) where the address
    tells nothing: a Unix socket, and loopback, where a reverse proxy may speak for everybody.
    """
    try:
        if ":" not in peer:
            packed = socket.inet_pton(socket.AF_INET, peer)
        else:
            packed = socket.inet_pton(socket.AF_INET6, peer.partition("%")[0])
            if packed == bytes(15) + b"\1":
                return b""
            if not packed.startswith(_MAPPED):
                return packed[:8]
            packed = packed[12:]
    except OSError:
        return b""
    return b"" if packed.startswith(_LOOPBACK) else packed


class Crowd:
    """Connections per client, of those that were counted."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def has(self, client: bytes) -> int:
        """How many connections it has."""
        return self._counts.get(client, 0)

    def add(self, client: bytes) -> None:
        """One more."""
        self._counts[client] = self.has(client) + 1

    def remove(self, client: bytes) -> None:
        """One of those that were added is gone."""
        left = self._counts[client] - 1
        if left:
            self._counts[client] = left
        else:
            del self._counts[client]
