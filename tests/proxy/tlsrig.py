"""What tests of TLS stand on: one certificate, and clients that tell an end that was said from one that was not."""

from __future__ import annotations

import socket
import ssl

from pki import pair
from proxyrig import PATIENCE

FIRST = pair("first")


class BlockingClient:
    """A client of the standard library's blocking sockets: they tell an end that was said from one that was not."""

    def __init__(self, port: int) -> None:
        raw = socket.create_connection(("127.0.0.1", port), PATIENCE)
        context = FIRST.client()
        context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # Python's default: an end that nobody said passes for one
        self.socket = context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_to_the_end(self) -> bytes:
        """All that comes until the other side says its goodbye; raises ``OSError`` where it does not."""
        received = b""
        while piece := self.socket.recv(65536):
            received += piece
        return received

    def close(self) -> None:
        self.socket.close()
