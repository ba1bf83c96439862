"""Taking a request's body in: what is expected, how long it may be, and out of its coding."""

from __future__ import annotations

from collections.abc import Callable

from proxy.body import Body, too_large
from proxy.codings import Decoder, decoder_for
from proxy.errors import ProxyError
from proxy.exchange import Request
from supervisord.core.spec import ProxySpec


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
        await request.receive(body.append if decoder is None else _decoding(decoder, body))
        if decoder is not None:
            decoder.finish()
    except BaseException:
        body.close()
        raise
    return body, decoder is not None


def _decoding(decoder: Decoder, body: Body) -> Callable[[bytes], None]:
    def take(data: bytes) -> None:
        for piece in decoder.feed(data):
            body.append(piece)

    return take
