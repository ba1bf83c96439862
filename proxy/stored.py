"""What engines keep of responses: finding the replica that has one, and the routes that ask for it.

No lease is needed to ask: it is the engine's HTTP server that answers, from its memory, asleep or awake. So asking
wakes nobody and keeps nobody awake. Whoever goes on from a response computes, and is admitted as any other request, to
that replica only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

from proxy.errors import ProxyError
from proxy.exchange import Answer, ConnectFailed, Exchange, LocalFault, NoFirstByte, Outcome, Upstream, UpstreamBroken
from proxy.http.body import Body
from proxy.http.headers import RequestHead
from proxy.owners import Owners, is_response_id, response_id
from proxy.reading.facts import Facts
from proxy.reply import Reply
from proxy.routes import Route
from supervisord.core.admission import Admission, Choice, Ending, Lease, Running, Wait

#: Seconds in which an engine must begin to answer from its memory.
PATIENCE = 10.0
#: Seconds between two looks at a response that is computed in the background.
LOOK = 2.0
#: The most of a stored response that is read to learn how it stands, bytes.
_MOST = 8 * 1024 * 1024

_UNFINISHED = ("queued", "in_progress")
_FAILURES = (ConnectFailed, NoFirstByte, UpstreamBroken, LocalFault, TimeoutError)


class StoredResponses:
    """Responses in the memory of engines. ``clock`` is monotonic, seconds."""

    def __init__(self, admission: Admission, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._upstream = upstream
        self._clock = clock
        self._owners = Owners()
        self._background: set[asyncio.Task[None]] = set()

    async def find(self, response: str, exchange: Exchange) -> Running | None:
        """The replica that has it; those that run are asked where it is not known, as after a restart of this process.

        ``exchange``: on whose behalf. None where nobody has it.
        """
        if not is_response_id(response):
            return None
        running = self._admission.running()
        known = self._owners.find(response, running)
        if known is not None or not running:
            return known
        question = _about(response, exchange)
        answers = await asyncio.gather(*(self._status(place, question) for place in running))
        for place, status in zip(running, answers, strict=True):
            if status is not None:
                self._owners.learn(response, place)
                return place
        return None

    def learner(self, exchange: Exchange) -> Callable[[Lease, bytes], None]:
        """What notes down who answered ``exchange``, by the beginning of the answer."""

        def learn(lease: Lease, beginning: bytes) -> None:
            response = response_id(beginning)
            place = next((place for place in self._admission.running() if place.replica == lease.replica), None)
            if not response or place is None:
                return
            self._owners.learn(response, place)
            if exchange.facts.background:
                self._hold(place, _about(response, exchange))

        return learn

    async def answer(self, response: str, exchange: Exchange, reply: Reply) -> None:
        """Give a client what the replica of that response says; raises ``ProxyError``, and ``ClientGone``."""
        outcome, place = exchange.outcome, await self.find(response, exchange)
        if place is None:
            message = f"Response with id '{response}' not found."
            raise ProxyError(404, 404, message, param="response_id", kind="invalid_request_error")
        outcome.model, outcome.replica, outcome.reason = place.model, place.replica, "owner"
        try:
            answer = await self._ask(place, exchange)
            try:
                outcome.first_byte = self._clock()
                lines = f"x-vllmctl-replica: {place.replica}\r\nx-vllmctl-route: owner\r\n" if reply.tells_route else ""
                await reply.start(answer.head, lines.encode("latin-1", "replace"))
                await reply.pour(answer)
            finally:
                answer.close()
        except _FAILURES as failure:
            why = str(failure) or f"no answer within {PATIENCE:g} s"
            raise ProxyError(502, "upstream_failed", f"replica {place.replica}: {why}") from None
        if exchange.head.method == "DELETE" and answer.head.status < 300:
            self._owners.forget(response)
        await reply.end()

    async def close(self) -> None:
        """Hold nothing any more: what engines compute in the background goes on without us."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)

    def _hold(self, place: Running, question: Exchange) -> None:
        """Keep the replica from being put to rest while it computes a response that no connection waits for."""

        def choose(candidates: object) -> Choice:
            return Choice(place.replica, "background")

        lease = self._admission.admit(place.model, choose, only=frozenset({place.replica}))
        if isinstance(lease, Wait):  # it is being drained: that is somebody's wish, and waits for the engine itself
            self._admission.abandon(lease)
        elif isinstance(lease, Lease):
            task = asyncio.get_running_loop().create_task(self._watch(place, question, lease))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _watch(self, place: Running, question: Exchange, lease: Lease) -> None:
        try:
            while self._is_there(place) and await self._is_unfinished(place, question):  # noqa: ASYNC110
                await asyncio.sleep(LOOK)  # what is waited for happens in another process
        finally:
            # Neither an answer, whose time would be learned from, nor a failure.
            self._admission.finish(lease, Ending.CLIENT_GONE, "its response is no longer computed in the background")

    def _is_there(self, place: Running) -> bool:
        return any((there.replica, there.run) == (place.replica, place.run) for there in self._admission.running())

    async def _is_unfinished(self, place: Running, question: Exchange) -> bool:
        # An engine that is too busy to say so has not said that it is done.
        return await self._status(place, question, silent=_UNFINISHED[0]) in _UNFINISHED

    async def _status(self, place: Running, question: Exchange, silent: str | None = None) -> str | None:
        """How a response stands there; None where it is not, ``silent`` where the engine does not say."""
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await self._upstream.send(place, question)
                try:
                    found = json.loads(await answer.read(_MOST)) if answer.head.status == 200 else None
                finally:
                    answer.close()
        except _FAILURES:
            return silent
        except ValueError:
            return None
        return str(found.get("status")) if isinstance(found, dict) else None

    async def _ask(self, place: Running, exchange: Exchange) -> Answer:
        async with asyncio.timeout(PATIENCE):
            return await self._upstream.send(place, exchange)


def _about(response: str, exchange: Exchange) -> Exchange:
    """The question how a response stands, with the credentials of the client that ``exchange`` is of."""
    head = replace(
        exchange.head, method="GET", target=f"/v1/responses/{response}", content_encoding="", length=0, expect=""
    )
    return stored_exchange(exchange.id, exchange.route, head, Body(0), exchange.outcome)


def stored_exchange(
    request_id: str, route: Route, head: RequestHead, body: Body, outcome: Outcome, *, decoded: bool = False
) -> Exchange:
    """An exchange that names no model."""
    return Exchange(request_id, route, head, body, decoded, Facts(), "", None, outcome)
