"""A request body on its way through: collected under a size cap, decoded if it was compressed, sent on as it is.

A body is kept until the first response byte, so that a request can go to another replica; a large upload is kept in an
unnamed temporary file, which no crash can leave behind.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Protocol

from proxy.errors import ProxyError, bad_request

#: Bytes written to a connection, or read from the file, at a time.
PIECE = 256 * 1024


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
        """Add bytes; raises ``ProxyError`` 413 past the limit."""
        self.size += len(data)
        if self.size > self._limit:
            raise too_large(self._limit)
        if self._file is None and self._spool_after is not None and self.size > self._spool_after:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += data
        else:
            self._file.write(data)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end``; shorter at the end of the body."""
        if self._file is None:
            return bytes(memoryview(self._memory)[start:end])
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

    def pieces(self, splice: Splice | None = None) -> Iterator[bytes | memoryview]:
        """The body in pieces fit for one write each, with ``splice`` applied."""
        if splice is None:
            yield from self._pieces(0, self.size)
            return
        yield from self._pieces(0, splice.start)
        yield splice.replacement
        yield from self._pieces(splice.end, self.size)

    def spliced_size(self, splice: Splice | None) -> int:
        """The length of what ``pieces`` gives."""
        return self.size if splice is None else self.size - (splice.end - splice.start) + len(splice.replacement)

    def close(self) -> None:
        """Give memory and file back; the body is empty afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._memory = bytearray()
        self.size = 0

    def _pieces(self, start: int, end: int) -> Iterator[bytes | memoryview]:
        view = memoryview(self._memory)
        for at in range(start, end, PIECE):
            stop = min(at + PIECE, end)
            yield self.read(at, stop) if self._file is not None else view[at:stop]


def too_large(limit: int) -> ProxyError:
    """413."""
    return ProxyError(413, "request_too_large", f"the request body is larger than {limit} bytes")


class Decoder(Protocol):
    """Undoes a content coding piece by piece."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decoded pieces of at most ``PIECE`` bytes; raises ``ProxyError`` 400 for data that is not what it claims."""
        ...

    def finish(self) -> None:
        """The body has ended; raises ``ProxyError`` 400 if it is cut short."""
        ...


def decoder_for(content_encoding: str) -> Decoder | None:
    """A decoder for a request's Content-Encoding, None where nothing is to be undone; raises ``ProxyError`` 415."""
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding in ("gzip", "x-gzip"):
        return _ZlibDecoder("gzip")
    if coding == "deflate":
        return _ZlibDecoder("deflate")
    # RFC 9110 15.5.16: the answer tells which codings would do.
    raise ProxyError(
        415,
        "unsupported_content_encoding",
        f"cannot decode a request body with Content-Encoding {coding[:60]!r}, only gzip and deflate",
        headers=(("Accept-Encoding", "gzip, deflate"),),
    )


class _ZlibDecoder:
    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate is None or self._inflate.eof:  # the first, or one more gzip member
                self._inflate = zlib.decompressobj(self._wbits(data[0]))
            try:
                piece = self._inflate.decompress(data, PIECE)
                while len(piece) == PIECE:
                    yield piece
                    piece = self._inflate.decompress(self._inflate.unconsumed_tail, PIECE)
            except zlib.error as error:
                raise bad_request(f"cannot decode the {self._coding} request body: {error}") from None
            if piece:
                yield piece
            data = self._inflate.unused_data

    def finish(self) -> None:
        if self._inflate is not None and not self._inflate.eof:
            raise bad_request(f"cannot decode the {self._coding} request body: it is cut short")

    def _wbits(self, first_byte: int) -> int:
        if self._coding == "gzip":
            return 16 + zlib.MAX_WBITS
        # "deflate" means zlib's format (CM 8 in the low bits), but some clients send the raw one (RFC 9110 8.4.1.2).
        return zlib.MAX_WBITS if first_byte & 0x0F == 8 else -zlib.MAX_WBITS
