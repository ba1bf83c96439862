"""sd_notify: what the daemon tells systemd about itself (sd_notify(3)).

The socket is the sdnotify package's; the bytes are ours, because that package encodes Latin-1 and drops what it cannot
send, so that a status with any other letter would vanish.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping

from sdnotify import SystemdNotifier

_log = logging.getLogger(__name__)

#: Seconds that the few messages which must not be lost wait for a place in systemd's queue.
_WAIT = 2.0


class Notifier:
    """Sends to ``$NOTIFY_SOCKET``; where there is none, nothing happens. A failed message is logged, never raised."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._socket: socket.socket | None = None
        self._monotonic = monotonic
        self._status = ""
        address = os.environ.get("NOTIFY_SOCKET")
        if not address:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it drops a socket that it cannot connect, unclosed
            self._socket = SystemdNotifier().socket
        if self._socket is None:
            _log.error("cannot open NOTIFY_SOCKET %s: systemd will not hear of us", address)
        else:
            self._socket.setblocking(False)  # a full queue must not stop the loop

    @property
    def active(self) -> bool:
        """Whether systemd listens."""
        return self._socket is not None

    def ready(self, status: str = "") -> None:
        """Start-up, or a reload, is finished."""
        self._send("READY=1", *self._new_status(status), wait=_WAIT)

    def status(self, text: str) -> None:
        """One line for `systemctl status`; the same line is not sent twice."""
        self._send(*self._new_status(text))

    def reloading(self) -> None:
        """A reload begins; it ends with ``ready``. The time is for Type=notify-reload (253 and later)."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(self._monotonic() * 1_000_000)}", wait=_WAIT)

    def stopping(self, status: str = "") -> None:
        """The shutdown begins."""
        self._send("STOPPING=1", *self._new_status(status), wait=_WAIT)

    def watchdog(self) -> None:
        """The loop is alive."""
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """Starting, reloading or stopping goes on: it may take ``seconds`` more from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")

    def close(self) -> None:
        """Close the socket; later messages go nowhere."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _new_status(self, text: str) -> list[str]:
        text = " ".join(text.split())  # a line break would begin the next assignment
        if not text or text == self._status:
            return []
        self._status = text
        return [f"STATUS={text}"]

    def _send(self, *assignments: str, wait: float = 0.0) -> None:
        if self._socket is None or not assignments:
            return
        message = "\n".join(assignments).encode("utf-8", "replace")
        try:
            try:
                self._socket.send(message)
            except BlockingIOError:
                if not wait:
                    raise
                self._socket.settimeout(wait)
                self._socket.send(message)
        except OSError as error:
            self._status = ""  # it may have been in there
            _log.warning("cannot tell systemd %s: %s", assignments[0], error.strerror or error)
        finally:
            self._socket.setblocking(False)


def watchdog_interval(env: Mapping[str, str], pid: int) -> float | None:
    """Seconds between two ``watchdog`` messages: half of what systemd allows (sd_watchdog_enabled(3)).

    None where no watchdog is set, or it is set for a process other than ``pid``.
    """
    try:
        allowed = int(env.get("WATCHDOG_USEC", ""))
        watched = int(env.get("WATCHDOG_PID", pid))
    except ValueError:
        return None
    return allowed / 2 / 1_000_000 if allowed > 0 and watched == pid else None
