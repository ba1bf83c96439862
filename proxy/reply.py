"""The answer to one client: what it was told so far decides how it can still be told of a failure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from proxy.errors import Dialect, ProxyError, error_body, error_event, error_headers
from proxy.exchange import Answer, Client, Outcome
from proxy.http.headers import Headers, ResponseHead, own_head


class Session(Protocol):
    """What an answer has become once the protocol has changed."""

    def fail(self, error: ProxyError) -> None:
        """Tell the client, and end."""
        ...


_EVENTS = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")]
_COMMENT = b": waiting for the model\n\n"


class Reply:
    """Wraps a ``Client`` for one exchange; every coroutine raises ``ClientGone`` where it does."""

    def __init__(self, client: Client, outcome: Outcome, request_id: str) -> None:
        self._client = client
        self._outcome = outcome
        self._request_id = request_id
        self._events = False
        self._tail = b""
        self._session: Session | None = None
        #: The shape of errors; the route's, once it is known.
        self.dialect = Dialect.OPENAI
        #: Lines that every head has.
        self.lines = b""
        #: Whether the client is told which replica answers, and why that one.
        self.tells_route = True

    @property
    def started(self) -> bool:
        """Whether a status was sent."""
        return self._client.started

    async def start(self, head: ResponseHead, extra: bytes = b"", *, at_once: bool = True) -> None:
        """Send the head of the response, with ``extra`` lines and the request's id.

        ``at_once`` false: the first bytes of the body, or the end, are on the way already.
        """
        await self._client.start(head, self._lines(head, extra), at_once=at_once)

    def whole(self, head: ResponseHead, body: bytes, extra: bytes = b"") -> None:
        """Send a response that is here from its head to its last byte, without waiting."""
        self._outcome.bytes_sent += self._client.whole(head, self._lines(head, extra), body)

    def _lines(self, head: ResponseHead, extra: bytes) -> bytes:
        """All lines of a head that is about to be sent."""
        self._events = head.is_event_stream and head.length is None and not head.encoded
        self._outcome.status = head.status
        own = b"" if head.has_request_id else b"X-Request-Id: %b\r\n" % self._request_id.encode()
        return b"%b%b%b%b" % (head.lines, extra, own, self.lines)

    def switch(self, lines: bytes, session: Session) -> Client:
        """Answer 101 with ``lines``: from now on it is ``session`` that speaks to the client, failures included."""
        self._client.switch(b"%bX-Request-Id: %b\r\n%b" % (lines, self._request_id.encode(), self.lines))
        self._outcome.status, self._session = 101, session
        return self._client

    async def write(self, data: bytes) -> None:
        """Send bytes of the body as they are."""
        self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
        self._outcome.bytes_sent += len(data)
        await self._client.write(data)

    async def pour(self, answer: Answer) -> None:
        """Pass an engine's body on as it comes; raises ``UpstreamBroken``."""
        try:
            await answer.pour(self._client)
        finally:
            self._outcome.bytes_sent += answer.poured
            self._tail = (self._tail + answer.tail)[-4:]

    async def comment(self) -> None:
        """Tell a stream's client that something is coming; the first time, that commits the answer to status 200."""
        if not self.started:
            await self.start(own_head(200, "OK", _EVENTS))
        await self.write(_COMMENT)

    async def end(self) -> None:
        """The answer is whole."""
        self._client.end()
        if self._client.full:
            await self._client.drained()

    @property
    def unfinished(self) -> bool:
        """Whether ``end`` has something to send, or to wait for."""
        return not self._client.over or self._client.full

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer of our own."""
        self.whole(own_head(status, HTTPStatus(status).phrase, headers, len(body)), body)
        if self._client.full:
            await self._client.drained()

    async def fail(self, error: ProxyError, *, close: bool = False) -> None:
        """Answer with an error; if an answer has begun, end it as ``break_off`` does. ``close``: the connection too.

        Nothing is said behind an answer that is whole, though its client may not have read all of it yet.
        """
        if self._session is None and self._client.over:
            return
        self._outcome.code = str(error.code)
        self._outcome.details.append(error.message)
        if self._session is not None:
            self._session.fail(error)
            return
        if self.started:
            await self.break_off(error_event(error, self.dialect))
            return
        if close:
            self._client.close_after()
        await self.answer(error.status, error_headers(error), error_body(error, self.dialect))

    async def break_off(self, event: bytes) -> None:
        """End an answer that is not whole: a stream with an error event and no ``[DONE]``, anything else by a cut."""
        if not self._events:
            self._client.cut()
            return
        self._client.close_after()
        if self._tail and not self._tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
            event = b"\n\n" + event  # the engine died within an event
        await self.write(event)
        await self.end()
