"""sd_notify(3) in the few lines that the launcher needs."""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Sequence


class Notifier:
    """Sends to the manager's socket. ``address`` is ``$NOTIFY_SOCKET``: a path, or ``@`` and an abstract name."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str) -> None:
        """One message of ``NAME=value`` lines. Raises OSError when it cannot be sent."""
        self._send(lines, ())

    def barrier(self, timeout: float) -> bool:
        """Wait until the manager has read all that was sent, at most ``timeout`` seconds.

        The manager drops a message when the sender has ended already, as it cannot tell its unit any more: so wait
        before ending.
        """
        reader, writer = os.pipe()
        try:
            self._send(("BARRIER=1",), (writer,))
        finally:
            os.close(writer)
        try:
            poll = select.poll()
            poll.register(reader, select.POLLHUP)
            return bool(poll.poll(timeout * 1000))
        finally:
            os.close(reader)

    def _send(self, lines: Sequence[str], fds: Sequence[int]) -> None:
        # One line each: a line break in a text would begin the next assignment.
        message = "\n".join(" ".join(line.split("\n")) for line in lines).encode(errors="replace")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendmsg([message], rights, 0, self._address)
