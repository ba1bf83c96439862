"""Log lines with fields, in the journal's own form where there is a journal, as plain text where there is none.

The journal's native protocol is one datagram of ``KEY=value`` lines, a value with newlines being preceded by its
length (systemd's "Native Journal Protocol"). So ``journalctl VLLMCTL_EVENT=failover`` finds every failover.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

SOCKET = Path("/run/systemd/journal/socket")
#: The name under which a log record carries its fields: ``log.info("...", extra={FIELDS: {...}})``.
FIELDS = "fields"
#: A record of which this is true has all of its fields in its text.
TOLD = "told"
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: A longer datagram is refused by the kernel's default limits; a log line has no business being longer.
_LONGEST = 128 * 1024


def set_up_logging(level: int, env: Mapping[str, str], journal: Path = SOCKET) -> None:
    """Send the root logger's records to the journal when our stderr is the journal, else to stderr."""
    handler: logging.Handler
    if _stderr_is_journal(env) and journal.is_socket():
        handler = JournalHandler(journal)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(PlainFormatter())
    # A record needs no look at its thread and process (the logging HOWTO's "Optimization"): there is one of each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _stderr_is_journal(env: Mapping[str, str]) -> bool:
    """$JOURNAL_STREAM is the device and inode of the stream that systemd gave us; it may have been redirected since."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return env.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class PlainFormatter(logging.Formatter):
    """``message key=value ...`` on one line."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, TOLD, False):
            return f"{record.levelname} {record.msg}"
        fields: Mapping[str, object] = getattr(record, FIELDS, {})
        text = super().format(record)
        untold = (
            f"{key}={value}" for key, value in fields.items() if value not in ("", None) and f"{key}=" not in text
        )
        return " ".join([text, *untold])


class JournalHandler(logging.Handler):
    """Writes native journal entries; one that cannot be written goes to stderr as text."""

    def __init__(self, path: Path = SOCKET) -> None:
        super().__init__()
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # A journal that is busy must not stall the relay: the line is dropped to stderr instead.
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.sendto(self._entry(record)[:_LONGEST], self._path)
        except OSError:
            print(f"<{_PRIORITY.get(record.levelno, 6)}>{self.format(record)}", file=sys.stderr)
        except Exception:  # noqa: BLE001 - logging must not raise; logging's own way of saying so
            self.handleError(record)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _entry(self, record: logging.LogRecord) -> bytes:
        fields: dict[str, object] = {
            "MESSAGE": record.msg if getattr(record, TOLD, False) else self.format(record),
            "PRIORITY": _PRIORITY.get(record.levelno, 6),
            "SYSLOG_IDENTIFIER": "vllm-supervisord",
            "CODE_FUNC": f"{record.name}.{record.funcName}",
        }
        given: Mapping[str, object] = getattr(record, FIELDS, {})
        fields.update({_name(key): value for key, value in given.items() if value is not None and value != ""})
        text = "".join([f"{name}={value}\n" for name, value in fields.items()])
        if text.count("\n") == len(fields):  # as it is in all but a few: no value has a line break
            return _bytes(text)
        return b"".join(_field(name, str(value)) for name, value in fields.items())


@lru_cache(256)
def _name(key: str) -> str:
    return f"VLLMCTL_{key.upper()}"


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, which JSON can spell and a client can send
        return text.encode("utf-8", "backslashreplace")


def _field(key: str, value: str) -> bytes:
    data = _bytes(value)
    if b"\n" in data:
        return key.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
    return key.encode() + b"=" + data + b"\n"
