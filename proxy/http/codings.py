"""Undoing content codings (RFC 9110 8.4) piece by piece: no input, however small, can make more than a piece at a time.

The size of what comes out is limited by whoever takes it, and of what is between two codings here.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli

from proxy.errors import ProxyError, bad_request
from proxy.http.body import PIECE, too_large

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: What a refused client is told, the best first.
ACCEPTED = "zstd, br, gzip, deflate"
#: Codings on top of each other that are undone; nobody has a use for more.
MOST_CODINGS = 2
#: Base 2 logarithm of zstd's largest window: nobody may need more than 8 MiB (RFC 9659), and nobody gets more.
ZSTD_WINDOW = 23
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW}


class Decoder(Protocol):
    """Undoes a content coding piece by piece."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decoded pieces of about ``PIECE`` bytes; raises ``ProxyError`` 400 for data that is not what it claims."""
        ...

    def finish(self) -> None:
        """The body has ended; raises ``ProxyError`` 400 if it is cut short."""
        ...


def decoder_for(content_encoding: str, limit: int) -> Decoder | None:
    """A decoder for a request's Content-Encoding, None where nothing is to be undone; raises ``ProxyError`` 415.

    ``limit``: bytes that may be between two codings; 413 beyond.
    """
    if not content_encoding:
        return None
    codings = [coding.strip().lower() for coding in content_encoding.split(",")]
    applied = [coding for coding in codings if coding not in ("", "identity")]
    if len(applied) > MOST_CODINGS:
        raise _unsupported(content_encoding)
    decoder: Decoder | None = None
    for coding in reversed(applied):  # they are listed in the order in which they were applied
        if coding not in _DECODERS:
            raise _unsupported(coding)
        inner = _DECODERS[coding]()
        decoder = inner if decoder is None else _Chain(decoder, inner, limit)
    return decoder


def _unsupported(coding: str) -> ProxyError:
    # RFC 9110 15.5.16: the answer tells which codings would do.
    return ProxyError(
        415,
        "unsupported_content_encoding",
        f"cannot decode a request body with Content-Encoding {coding[:60]!r}, only {ACCEPTED}, "
        f"at most {MOST_CODINGS} of them",
        headers=(("Accept-Encoding", ACCEPTED),),
    )


def _not(coding: str, why: object) -> ProxyError:
    return bad_request(f"cannot decode the {coding} request body: {why}")


class _Chain:
    """Two codings, the one that was applied last undone first."""

    def __init__(self, outer: Decoder, inner: Decoder, limit: int) -> None:
        self._outer, self._inner, self._limit = outer, inner, limit
        self._between = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        for piece in self._outer.feed(data):
            self._between += len(piece)
            if self._between > self._limit:
                raise too_large(self._limit)
            yield from self._inner.feed(piece)

    def finish(self) -> None:
        self._outer.finish()
        self._inner.finish()


class _Zlib:
    """gzip, of which several members may follow each other, and deflate."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate is None or self._inflate.eof:  # the first, or one more gzip member
                self._inflate = zlib.decompressobj(self._wbits(data[0]))
            try:
                piece = self._inflate.decompress(data, PIECE)
                while len(piece) == PIECE and not self._inflate.eof:  # at the end that tail is unused_data as well
                    yield piece
                    piece = self._inflate.decompress(self._inflate.unconsumed_tail, PIECE)
            except zlib.error as error:
                raise _not(self._coding, error) from None
            if piece:
                yield piece
            data = self._inflate.unused_data

    def finish(self) -> None:
        if self._inflate is not None and not self._inflate.eof:
            raise _not(self._coding, "it is cut short")

    def _wbits(self, first_byte: int) -> int:
        if self._coding == "gzip":
            return 16 + zlib.MAX_WBITS
        # "deflate" means zlib's format (CM 8 in the low bits), but some clients send the raw one (RFC 9110 8.4.1.2).
        return zlib.MAX_WBITS if first_byte & 0x0F == 8 else -zlib.MAX_WBITS


class _Zstd:
    """zstd, of which several frames may follow each other."""

    def __init__(self) -> None:
        self._frame: zstd.ZstdDecompressor | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._frame is None or self._frame.eof:
                self._frame = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
            frame = self._frame
            try:
                piece = frame.decompress(data, PIECE)
                while len(piece) == PIECE and not frame.eof:
                    yield piece
                    piece = frame.decompress(b"", PIECE)
            except zstd.ZstdError as error:
                raise _not("zstd", error) from None
            if piece:
                yield piece
            data = frame.unused_data if frame.eof else b""

    def finish(self) -> None:
        if self._frame is not None and not self._frame.eof:
            raise _not("zstd", "it is cut short")


class _Brotli:
    """br. Its library says no more of what is wrong than that something is, and gives up to two pieces at a time."""

    def __init__(self) -> None:
        self._stream: brotli.Decompressor | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        if not data:
            return
        if self._stream is None:
            self._stream = brotli.Decompressor()
        stream = self._stream
        try:
            piece = stream.process(data, output_buffer_limit=PIECE)
            # Whether it takes more says nothing: all input may be taken, and most of the output still to come.
            while piece:
                yield piece
                piece = stream.process(b"", output_buffer_limit=PIECE)
        except brotli.error:
            raise _not("br", "it is damaged") from None

    def finish(self) -> None:
        if self._stream is not None and not self._stream.is_finished():
            raise _not("br", "it is cut short")


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: _Zlib("gzip"),
    "x-gzip": lambda: _Zlib("gzip"),
    "deflate": lambda: _Zlib("deflate"),
    "zstd": _Zstd,
    "br": _Brotli,
}
