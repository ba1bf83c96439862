"""From an admitted request to an answered one: bytes up, bytes down, another replica only before the first byte.

Every lease is returned in one place, the ``finally`` of ``_attempt``, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from proxy.errors import ProxyError, engine_error_event, refused
from proxy.exchange import (
    Answer,
    ConnectFailed,
    Exchange,
    LocalFault,
    NoFirstByte,
    Outcome,
    Stage,
    Upstream,
    UpstreamBroken,
)
from proxy.policies.policy import Policy
from proxy.reply import Reply
from proxy.retries import RetryBudget
from proxy.usage import Usage, usage_of
from proxy.waiting import wait_for_replica
from supervisord.control import Failover
from supervisord.core.admission import Admission, Ending, Lease, RefusalCode, Refuse, Wait

log = logging.getLogger("proxy.relay")

#: A plain answer of at most so many bytes goes to the client when it is whole. An engine sends the head of one and then
#: its body: a client that had seen the head of an engine that was killed in between could not be helped any more.
MOST_HELD = 1024 * 1024

#: An engine sends the head of a stream before it has done anything for it. Held until the first event comes, a stream
#: that dies in the queue or in its prefill costs the client nothing either; after so many seconds the head goes out
#: alone, for somebody on the way may be waiting for one.
HEAD_HELD = 15.0

#: What vLLM says with a 500 when it takes no more requests, or its core is dead.
_GOING_DOWN = (b"cannot schedule new futures", b"EngineDeadError", b"EngineCore encountered an issue")
#: How vLLM ends a request that it gave up by itself, with a 200: the client is still there, so nobody asked for that.
_ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')

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
        self._on_failover = on_failover
        self._clock = clock
        self._retries = RetryBudget()

    async def run(self, exchange: Exchange, reply: Reply, policy: Policy, comment_after: float | None) -> None:
        """Answer one request; raises ``ProxyError`` where the answer is an error of ours (in a stream: its end).

        Each replica gets it once. A replica that failed it and has started anew since may get it once more, but only
        where it was the only one tried: a request that kills engines must not go round and round.
        """
        try:
            await self._run(exchange, reply, policy, comment_after)
        finally:
            usage = exchange.outcome.usage
            policy.finished(exchange.facts, usage.cached_share if usage is not None else None)

    async def _run(self, exchange: Exchange, reply: Reply, policy: Policy, comment_after: float | None) -> None:
        choose = partial(policy.choose, exchange.facts)
        tried: dict[str, str] = {}
        attempts = 0
        source = ""  # a replica that failed, until its failover is reported
        while True:
            decision = self._admission.admit(exchange.model, choose, exclude=frozenset(tried))
            if isinstance(decision, Wait):
                if source:
                    self._report(exchange, source, "", tried[source])
                    source = ""
                silence = comment_after if exchange.facts.stream else None
                decision = await self._wait(decision, exchange.outcome, reply, silence)
            if source:
                self._report(exchange, source, decision.replica if isinstance(decision, Lease) else "", tried[source])
            if isinstance(decision, Refuse):
                if tried and decision.code is RefusalCode.NO_LIVE_REPLICA:
                    raise _all_failed(tried, decision.retry_after)
                raise refused(decision)
            if decision.replica in tried and attempts > 1:
                self._admission.finish(decision, Ending.CLIENT_GONE, "it failed this request before")
                raise _all_failed(tried, None)
            attempts += 1
            failure = await self._attempt(decision, exchange, reply, policy)
            if failure is None:
                self._retries.earn()
                return
            source = decision.replica
            tried[source] = failure
            policy.forget(exchange.facts, source)
            if not self._retries.spend():
                self._report(exchange, source, "", failure)
                raise _all_failed(tried, None)

    async def _wait(self, wait: Wait, outcome: Outcome, reply: Reply, silence: float | None) -> Lease | Refuse:
        outcome.stage, began = Stage.QUEUE, self._clock()
        try:
            return await wait_for_replica(self._admission, wait, reply, silence)
        finally:
            outcome.queued += self._clock() - began

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
                whole = await _whole(answer)
                answer.accept()
                computed = partial(self._computed, exchange, policy)
                outcome.usage = await self._pass_on(answer, whole, lease, reply, computed)
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
            self._admission.finish(lease, ending, detail)
        await reply.end()
        return None

    async def _pass_on(
        self, answer: Answer, whole: bytes | None, lease: Lease, reply: Reply, computed: Callable[[], None]
    ) -> Usage | None:
        """The engine's answer, untouched and as it comes; an engine's 429, 500 or 503 is an answer like any other.

        ``whole``: its body, if that is here already. ``computed`` is called at the first byte that took computing: an
        engine sends the head of a stream before it does anything. Returns what the end tells of tokens.
        """
        head = answer.head
        if not reply.started:
            ours = f"x-vllmctl-replica: {lease.replica}\r\nx-vllmctl-route: {lease.reason}\r\n"
            await reply.start(head, ours.encode("latin-1", "replace"), at_once=whole is None)
        elif head.status != 200 or not head.is_event_stream:
            # The client was told 200 while it waited: all that is left to give it is an event.
            body = await answer.read(_MAX_ERROR_BODY) if whole is None else whole
            await reply.break_off(engine_error_event(head.status, body, reply.dialect))
            return None
        if whole is None:
            await answer.begins()
        if head.status == 200:
            computed()
        if whole is None:
            await reply.pour(answer)
        elif whole:
            await reply.write(whole)
        return usage_of(answer.ending if whole is None else whole)

    def _computed(self, exchange: Exchange, policy: Policy) -> None:
        exchange.outcome.computed, exchange.outcome.stage = self._clock(), Stage.STREAM
        policy.first_byte(exchange.facts)

    def _report(self, exchange: Exchange, source: str, target: str, reason: str) -> None:
        model = exchange.outcome.model
        # A silent failover hides a dead card.
        fields = {"event": "failover", "model": model, "replica": source, "target": target, "request_id": exchange.id}
        log.warning("failover: %s -> %s: %s", source, target or "nobody", reason, extra={"fields": fields})
        self._on_failover(Failover(model, source, target, reason))


class _LostAnswer(Exception):
    """The engine died while its answer was held; the client has seen nothing of it: another replica may answer."""


async def _whole(answer: Answer) -> bytes | None:
    """The body of a plain answer that is short enough to be held, else None; raises ``_LostAnswer``.

    An engine on its way down answers, but not the question: that answer is lost as well.
    """
    if answer.head.is_event_stream and answer.head.status == 200:
        await _first_event(answer)
        return None
    length = answer.head.length
    if length is None or length > MOST_HELD or answer.head.is_event_stream:
        return None
    try:
        whole = await answer.read(length)
    except UpstreamBroken as failure:
        raise _LostAnswer(str(failure)) from None
    if answer.head.status == 500 and any(words in whole for words in _GOING_DOWN):
        raise _LostAnswer("the engine is shutting down")
    if answer.head.status == 200 and any(words in whole for words in _ABORTED):
        raise _LostAnswer("the engine aborted the request")
    return whole


async def _first_event(answer: Answer) -> None:
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_HELD):
                await answer.begins()
    except UpstreamBroken as failure:
        raise _LostAnswer(str(failure)) from None


def _all_failed(tried: dict[str, str], retry_after: float | None) -> ProxyError:
    failures = "; ".join(f"{replica}: {reason}" for replica, reason in tried.items())
    message = f"every live replica failed before it answered ({failures})"
    return ProxyError(502, "upstream_failed", message, retry_after=retry_after)
