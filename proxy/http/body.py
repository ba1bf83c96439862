"""A request body on its way through: collected under a size cap, read where it stands, sent on in pieces.

A body is kept until the first response byte, so that a request can go to another replica; a large upload is kept in an
unnamed temporary file, which no crash can leave behind.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from proxy.errors import ProxyError

#: Bytes written to a connection, or read from the file, at a time.
PIECE = 256 * 1024
#: A body of more bytes is not copied to be in one piece with its head.
_JOINED = 16 * 1024


@dataclass(frozen=True, slots=True)
class Splice:
    """Bytes ``start`` to ``end`` of a body replaced by ``replacement``."""

    start: int
    end: int
    replacement: bytes


class Body:
    """Bytes of a request: at most ``limit``, of which ``spool_after`` (None: all) stay in memory."""

    def __init__(self, limit: int, spool_after: int | None = None) -> None:
        self._limit = limit
        self._spool_after = spool_after
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self.size = 0

    @property
    def spooled(self) -> bool:
        """Whether the bytes are in a file."""
        return self._file is not None

    def append(self, data: bytes) -> None:
        """Add bytes; raises ``ProxyError``: 413 past the limit, 503 where the file has no room."""
        self.size = size = self.size + len(data)
        if size > self._limit:
            raise too_large(self._limit)
        if self._file is None and (self._spool_after is None or size <= self._spool_after):
            self._memory += data
            return
        with _room():
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
                self._file.write(self._memory)
                self._memory = bytearray()
            self._file.write(data)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end``; shorter at the end of the body. Raises 503 as ``append``, for what it put off."""
        if self._file is None:
            return bytes(memoryview(self._memory)[start:end])
        with _room():
            self._file.seek(start)
            return self._file.read(max(0, end - start))

    def text_bytes(self) -> bytearray:
        """The whole body, not copied where it is in memory. Not to be changed."""
        return self._memory if self._file is None else bytearray(self.read(0, self.size))

    def find(self, needle: bytes, start: int) -> int:
        """The first index of ``needle`` at or after ``start``, or -1."""
        if self._file is None:
            return self._memory.find(needle, start)
        while start < self.size:
            piece = self.read(start, start + PIECE + len(needle) - 1)
            at = piece.find(needle)
            if at >= 0:
                return start + at
            start += PIECE
        return -1

    def after(self, head: bytes) -> bytes | None:
        """``head`` and the body in one piece; None where that piece would be long."""
        return head + self._memory if self._file is None and self.size <= _JOINED else None

    def pieces(self, splice: Splice | None = None) -> Iterator[bytes | memoryview]:
        """The body in pieces fit for one write each, with ``splice`` applied."""
        return self._pieces(0, self.size) if splice is None else self._spliced(splice)

    def _spliced(self, splice: Splice) -> Iterator[bytes | memoryview]:
        yield from self._pieces(0, splice.start)
        yield splice.replacement
        yield from self._pieces(splice.end, self.size)

    def spliced_size(self, splice: Splice | None) -> int:
        """The length of what ``pieces`` gives."""
        return self.size if splice is None else self.size - (splice.end - splice.start) + len(splice.replacement)

    def close(self) -> None:
        """Give memory and file back; the body is empty afterwards."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # it is closed, and had no room for the last bytes
                self._file.close()
            self._file = None
        self._memory = bytearray()
        self.size = 0

    def _pieces(self, start: int, end: int) -> Iterator[bytes | memoryview]:
        view = memoryview(self._memory)
        for at in range(start, end, PIECE):
            stop = min(at + PIECE, end)
            yield self.read(at, stop) if self._file is not None else view[at:stop]


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """A disk that is full is neither the client's fault nor the port's end."""
    try:
        yield
    except OSError as error:
        reason = f"cannot keep the request body in a file: {error.strerror or error}"
        raise ProxyError(503, "out_of_resources", reason, retry_after=1.0) from None


def too_large(limit: int) -> ProxyError:
    """413."""
    return ProxyError(413, "request_too_large", f"the request body is larger than {limit} bytes")
