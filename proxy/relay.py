"""From an admitted request to an answered one: bytes up, bytes down, another replica only before the first byte.

Every lease is returned in one place, the ``finally`` of ``_attempt``, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from proxy.attempts import Attempts, tell_the_end
from proxy.errors import ProxyError, engine_error_event
from proxy.exchange import (
    Answer,
    ConnectFailed,
    Exchange,
    LocalFault,
    NoFirstByte,
    Stage,
    Upstream,
    UpstreamBroken,
)
from proxy.http.headers import ResponseHead
from proxy.policies.policy import Policy
from proxy.reading.aborted import answer_aborted, event_aborted
from proxy.reading.usage import Usage, usage_of
from proxy.reply import Reply
from proxy.waiting import wait_for_replica
from supervisord.control import Failover
from supervisord.core.admission import Admission, Ending, Lease, Refuse, Wait

#: A plain answer of at most so many bytes goes to the client when it is whole. An engine sends the head of one and then
#: its body: a client that had seen the head of an engine that was killed in between could not be helped any more.
MOST_HELD = 1024 * 1024

#: An engine sends the head of a stream before it has done anything for it. Held until the first event comes, a stream
#: that dies in the queue or in its prefill costs the client nothing either; after so many seconds the head goes out
#: alone, for somebody on the way may be waiting for one.
HEAD_HELD = 15.0

#: What vLLM says with a 500 when it takes no more requests, or its core is dead.
_GOING_DOWN = (b"cannot schedule new futures", b"EngineDeadError", b"EngineCore encountered an issue")

#: The most of an engine's error answer that is turned into an SSE event, bytes.
_MAX_ERROR_BODY = 64 * 1024


class Relay:
    """Carries exchanges between clients and engines. ``clock`` is monotonic, seconds."""

    def __init__(
        self,
        admission: Admission,
        upstream: Upstream,
        on_failover: Callable[[Failover], None],
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._upstream = upstream
        self._clock = clock
        #: Shared with what else goes from replica to replica.
        self.attempts = Attempts(admission, on_failover, clock)

    def run(
        self, exchange: Exchange, reply: Reply, policy: Policy, comment_after: float | None
    ) -> Coroutine[Any, Any, None]:
        """Answers one request; raises ``ProxyError`` where the answer is an error of ours (in a stream: its end)."""
        silence = comment_after if exchange.facts.stream else None

        def wait(decision: Wait) -> Awaitable[Lease | Refuse]:
            return wait_for_replica(self._admission, decision, reply, silence)

        def attempt(lease: Lease) -> Awaitable[str | None]:
            return self._attempt(lease, exchange, reply, policy)

        return self.attempts.run(exchange, policy, wait, attempt)

    async def _attempt(self, lease: Lease, exchange: Exchange, reply: Reply, policy: Policy) -> str | None:
        """Use up one lease; returns why another replica should have the request, None when it was answered."""
        outcome = exchange.outcome
        outcome.model, outcome.replica, outcome.reason = lease.model, lease.replica, lease.reason
        outcome.placement, outcome.stage = lease.placement, Stage.PREFILL
        outcome.attempts += 1
        ending, detail = Ending.CLIENT_GONE, ""
        try:
            answer = await self._upstream.send(lease, exchange)
            try:
                outcome.first_byte = self._clock()
                whole = _at_hand(answer)
                if whole is None:
                    whole = await _whole(answer)
                answer.accept()
                if exchange.learn is not None and answer.head.status == 200:
                    exchange.learn(lease, answer.beginning if whole is None else whole)
                if whole is not None and not reply.started:
                    reply.whole(answer.head, whole, _told(lease) if reply.tells_route else b"")
                    if answer.head.status == 200:
                        self._computed(exchange, policy)
                    outcome.usage = usage_of(whole)
                else:
                    outcome.usage = await self._pass_on(answer, whole, lease, reply, exchange, policy)
                ending = Ending.COMPLETED
            finally:
                answer.close()
        except _LostAnswer as failure:
            ending, detail = Ending.STREAM_BROKEN, str(failure)
            return detail
        except ConnectFailed as failure:
            ending, detail = Ending.CONNECT_FAILED, str(failure)
            return detail
        except NoFirstByte as failure:
            ending, detail = Ending.CONNECT_FAILED, str(failure)
            raise ProxyError(504, "upstream_timeout", f"replica {lease.replica}: {failure}") from None
        except UpstreamBroken as failure:
            ending, detail = Ending.STREAM_BROKEN, str(failure)
            raise ProxyError(502, "upstream_failed", f"replica {lease.replica}: {failure}") from None
        except LocalFault as failure:
            detail = str(failure)
            raise ProxyError(503, "out_of_resources", str(failure), retry_after=1.0) from None
        finally:
            try:
                if ending in (Ending.COMPLETED, Ending.CLIENT_GONE):
                    # Nobody else gets it. The policy knows before those are asked again whom it holds.
                    tell_the_end(exchange, policy)
            finally:
                self._admission.finish(lease, ending, detail)
        if reply.unfinished:
            await reply.end()
        return None

    async def _pass_on(
        self, answer: Answer, whole: bytes | None, lease: Lease, reply: Reply, exchange: Exchange, policy: Policy
    ) -> Usage | None:
        """The engine's answer, untouched and as it comes; an engine's 429, 500 or 503 is an answer like any other.

        ``whole``: its body, if that is here already. Returns what the end tells of tokens.
        """
        head = answer.head
        if not reply.started:
            await reply.start(head, _told(lease) if reply.tells_route else b"")
        elif head.status != 200 or not head.is_event_stream:
            # The client was told 200 while it waited: all that is left to give it is an event.
            body = await answer.read(_MAX_ERROR_BODY) if whole is None else whole
            await reply.break_off(engine_error_event(head.status, body, reply.dialect))
            return None
        await answer.begins()
        if head.status == 200:  # the first byte that took computing: an engine sends a stream's head before it does any
            self._computed(exchange, policy)
        await reply.pour(answer)
        return usage_of(answer.ending)

    def _computed(self, exchange: Exchange, policy: Policy) -> None:
        exchange.outcome.computed, exchange.outcome.stage = self._clock(), Stage.STREAM
        policy.first_byte(exchange.facts)


def _told(lease: Lease) -> bytes:
    """Which replica answers and why, for a client that is told."""
    return f"x-vllmctl-replica: {lease.replica}\r\nx-vllmctl-route: {lease.reason}\r\n".encode("latin-1", "replace")


class _LostAnswer(Exception):
    """The engine died while its answer was held; the client has seen nothing of it: another replica may answer."""


def _at_hand(answer: Answer) -> bytes | None:
    """As ``_whole``, where all of it has come with its head, as most often; None does not say that it is not held."""
    whole = answer.at_hand() if _is_held(answer.head) else None
    return None if whole is None else _checked(answer.head, whole)


async def _whole(answer: Answer) -> bytes | None:
    """The body of a plain answer that is short enough to be held, else None; raises ``_LostAnswer``."""
    head = answer.head
    if head.is_event_stream and head.status == 200:
        await _first_event(answer)
        return None
    if head.length is None or not _is_held(head):
        return None
    try:
        return _checked(head, await answer.read(head.length))
    except UpstreamBroken as failure:
        raise _LostAnswer(str(failure)) from None


def _is_held(head: ResponseHead) -> bool:
    return head.length is not None and head.length <= MOST_HELD and not head.is_event_stream


def _checked(head: ResponseHead, whole: bytes) -> bytes:
    """An engine on its way down answers, but not the question: that answer is lost as well."""
    if head.status == 500 and any(words in whole for words in _GOING_DOWN):
        raise _LostAnswer("the engine is shutting down")
    if head.status == 200 and answer_aborted(whole):
        raise _LostAnswer("the engine aborted the request")
    return whole


async def _first_event(answer: Answer) -> None:
    if not answer.beginning:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEAD_HELD):
                    await answer.begins()
        except UpstreamBroken as failure:
            raise _LostAnswer(str(failure)) from None
    if event_aborted(answer.beginning):
        raise _LostAnswer("the engine aborted the request")
