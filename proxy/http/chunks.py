"""The chunked transfer coding (RFC 9112 7.1), read strictly, in the pieces in which it comes.

The same scanner takes bodies out of their chunks and passes chunks on as they are. Extensions are ignored within
limits and go no further, and neither do trailers: nobody asked for them (RFC 9110 6.5.1).
"""

from __future__ import annotations

import re
from functools import lru_cache

#: Longest size line with its extension, all extensions together, all trailers together: bytes.
MAX_SIZE_LINE = 256
MAX_EXTENSIONS = 16 * 1024
MAX_TRAILERS = 16 * 1024

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
# States in place of a number of bytes that are still to come.
_SIZE, _BREAK, _TRAILERS, _END = 0, -1, -2, -3


class ChunkError(Exception):
    """Bytes that are no chunks."""


@lru_cache(maxsize=1024)
def _size(line: bytes) -> tuple[int, int]:
    """The size of a chunk, and the length of its extension."""
    found = _SIZE_LINE.fullmatch(line)
    if found is None:
        raise ChunkError("a chunk has no size")
    return int(found[1], 16), len(found[2] or b"")


@lru_cache(maxsize=4096)
def _line_of(length: int) -> bytes:
    """What a chunk of so many bytes, framing included, begins with; empty where it would hold less than five."""
    for digits in range(1, 8):
        line = b"%x\r\n" % max(0, length - digits - 4)
        if len(line) == digits + 2 and length - digits - 4 > 4:
            return line
    return b""


class Chunks:
    """A chunked body on its way. ``size`` counts its bytes without their framing."""

    __slots__ = ("_event", "_extensions", "_held", "_left", "_tail", "_trailers", "excess", "size")

    def __init__(self) -> None:
        self._left = _SIZE
        self._held = b""
        self._extensions = 0
        self._trailers = 0
        self.size = 0
        #: Of the tail: what came last, if it was one whole chunk, or else the bytes themselves.
        self._event = self._tail = b""
        #: What followed the end.
        self.excess = b""

    @property
    def done(self) -> bool:
        """Whether the body is whole."""
        return self._left == _END

    @property
    def tail(self) -> bytes:
        """The last four bytes of the body."""
        return self._event[-6:-2] if self._event else self._tail

    @property
    def open_bytes(self) -> int | None:
        """Bytes that the chunk still wants of which the last was passed on; 0: only its line break; None: no chunk."""
        if self._left == _BREAK:
            return 0
        return self._left if self._left > 0 else None

    def pass_on(self, data: bytes) -> bytes:
        """``data``'s chunks as they are: whole framing only, and without the last chunk, which ends the body."""
        if self._left == _SIZE and not self._held:  # most often one whole chunk, an event
            line = _line_of(len(data))
            if line and data.startswith(line) and data.endswith(b"\r\n"):
                self.size += len(data) - len(line) - 2
                self._event = data
                return data
        data, end, spans, cuts = self._scan(data)
        if spans:
            start, stop = spans[-1]
            tail = data[max(start, stop - 4) : stop] if stop - start >= 4 else self._tail_of(data, spans)
            self._event, self._tail = b"", tail
        if cuts:
            return self._without(data, end, cuts)
        return data if end == len(data) else data[:end]

    def take_out(self, data: bytes) -> list[bytes]:
        """The bytes of the body in ``data``."""
        data, _, spans, _ = self._scan(data)
        if spans:
            self._event, self._tail = b"", self._tail_of(data, spans)
        return [data[start:stop] for start, stop in spans]

    def _tail_of(self, data: bytes, spans: list[tuple[int, int]]) -> bytes:
        return (self.tail + b"".join([data[max(start, stop - 4) : stop] for start, stop in spans[-4:]]))[-4:]

    def _without(self, data: bytes, end: int, cuts: list[tuple[int, int, bytes]]) -> bytes:
        pieces, at = [], 0
        for start, stop, instead in cuts:
            pieces += [data[at:start], instead]
            at = stop
        return b"".join([*pieces, data[at:end]])

    def _scan(self, data: bytes) -> tuple[bytes, int, list[tuple[int, int]], list[tuple[int, int, bytes]]]:
        """``data`` after what was held, where its complete part ends, the spans of the body, lines to replace."""
        if self._held:
            data = self._held + data
        left, at, end, size = self._left, 0, len(data), 0
        spans: list[tuple[int, int]] = []
        cuts: list[tuple[int, int, bytes]] = []
        if left < _BREAK:
            if left == _END:
                self.excess += data
            else:
                self._skip_trailers(data)
            return data, 0, spans, cuts
        while True:
            if left > 0:
                stop = at + left
                if stop > end:
                    if end > at:
                        spans.append((at, end))
                        size += end - at
                        left, at = stop - end, end
                    break
                spans.append((at, stop))
                size += left
                left, at = _BREAK, stop
            if left == _BREAK:
                if not data.startswith(b"\r\n", at):
                    if end - at >= 2 or data[at:] not in (b"", b"\r"):
                        raise ChunkError("a chunk does not end where it should")
                    break
                left = _SIZE
                at += 2
            line_end = data.find(b"\r\n", at, at + MAX_SIZE_LINE)
            if line_end < 0:
                if end - at >= MAX_SIZE_LINE or b"\n" in data[at:]:
                    raise ChunkError("a chunk's size is no line")
                break
            chunk, extension = _size(data[at:line_end])
            if chunk == 0:
                self._left = _TRAILERS
                self._held = b""
                self.size += size
                self._skip_trailers(data[line_end + 2 :])
                return data, at, spans, cuts
            if extension:
                self._extensions += extension
                if self._extensions > MAX_EXTENSIONS:
                    raise ChunkError("too many chunk extensions")
                cuts.append((at, line_end, b"%x" % chunk))
            left, at = chunk, line_end + 2
        self._left = left
        self._held = data[at:]
        self.size += size
        return data, at, spans, cuts

    def _skip_trailers(self, data: bytes) -> None:
        at = 0
        while True:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                if len(data) - at + self._trailers > MAX_TRAILERS or b"\n" in data[at:]:
                    raise ChunkError("a trailer is no line")
                self._held = data[at:]
                return
            if line_end == at:
                self._left, self._held, self.excess = _END, b"", data[at + 2 :]
                return
            self._trailers += line_end - at
            if self._trailers > MAX_TRAILERS or not _TRAILER.fullmatch(data, at, line_end):
                raise ChunkError("a trailer is no field, or there are too many")
            at = line_end + 2
