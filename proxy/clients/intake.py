"""Taking a request's body in: what is expected, how long it may be, and out of its coding."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from proxy.errors import ProxyError
from proxy.exchange import Request
from proxy.http.body import Body, too_large
from proxy.http.codings import Decoder, decoder_for
from supervisord.core.spec import ProxySpec

#: Bytes that are unpacked as they come. Four hundred bytes can hold a quarter of a gigabyte, which takes more than a
#: second to unpack: what is larger than an honest body is unpacked in a thread, so that everybody else goes on.
AT_ONCE = 2 * 1024 * 1024


async def receive_body(request: Request, spec: ProxySpec, spool_after: int | None) -> tuple[Body, bool]:
    """The request's body, decoded, and whether it was compressed; raises ``ProxyError`` or ``ClientGone``."""
    head = request.head
    decoder = decoder_for(head.content_encoding, spec.max_body)
    if head.length is not None and head.length > spec.max_body:
        raise too_large(spec.max_body)
    # 100-continue is between the client and us; the engine never sees it (RFC 9110 10.1.1).
    if head.expect and head.http11:
        if head.expect != "100-continue":
            raise ProxyError(417, "expectation_failed", f"cannot meet the expectation {head.expect[:60]!r}")
        request.ask_for_body()
    body = Body(spec.max_body, spool_after)
    try:
        if decoder is None:
            if not request.take(body.append):
                await request.receive()
        else:
            unpacking = _Unpacking(decoder, body, spec.max_body)
            if not request.take(unpacking.take):
                await request.receive()
            await unpacking.finish()
    except BaseException:
        body.close()
        raise
    return body, decoder is not None


class _Unpacking:
    """A compressed body on its way into ``body``, of which at most ``limit`` bytes may come."""

    def __init__(self, decoder: Decoder, body: Body, limit: int) -> None:
        self._decoder, self._body, self._limit = decoder, body, limit
        self._received = 0
        #: Where unpacking has stopped, and what came afterwards; both are for a thread.
        self._rest: Iterator[bytes] | None = None
        self._later: list[bytes] = []
        self._given_up = False

    def take(self, data: bytes) -> None:
        """Some more of it."""
        self._received += len(data)
        if self._received > self._limit:
            raise too_large(self._limit)
        if self._rest is not None:
            self._later.append(data)
            return
        pieces = self._decoder.feed(data)
        for piece in pieces:
            self._body.append(piece)
            if self._body.size > AT_ONCE:
                self._rest = pieces
                return

    async def finish(self) -> None:
        """All has come; raises ``ProxyError`` where it was not what it said."""
        if self._rest is not None:
            work = asyncio.ensure_future(asyncio.to_thread(self._unpack, self._rest))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # The thread has the body in its hands: it must be done with it before anybody closes it.
                # A client's leaving may be told twice.
                self._given_up = True
                while not work.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([work])
                with contextlib.suppress(ProxyError):
                    work.result()
                raise
        self._decoder.finish()

    def _unpack(self, rest: Iterator[bytes]) -> None:
        for pieces in (rest, *map(self._decoder.feed, self._later)):
            for piece in pieces:
                if self._given_up:
                    return
                self._body.append(piece)
