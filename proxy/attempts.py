"""Finding a replica for a request, and another one while nothing has reached the client: the loop around attempts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from proxy.errors import ProxyError, refused
from proxy.exchange import Exchange, Stage
from proxy.policies.policy import Policy
from proxy.retries import RetryBudget
from supervisord.control import Failover
from supervisord.core.admission import Admission, Ending, Lease, RefusalCode, Refuse, Wait

log = logging.getLogger("proxy.relay")

#: Uses up one lease; returns why another replica should have the request, None when it was answered.
Attempt = Callable[[Lease], Awaitable[str | None]]
#: Awaits the outcome of a wait in the queue, or gives the place up.
Waiter = Callable[[Wait], Awaitable[Lease | Refuse]]


_NOBODY: frozenset[str] = frozenset()


class Attempts:
    """Goes from replica to replica; the budget of retries is one for all requests. ``clock``: seconds."""

    def __init__(
        self, admission: Admission, on_failover: Callable[[Failover], None], clock: Callable[[], float]
    ) -> None:
        self._admission = admission
        self._on_failover = on_failover
        self._clock = clock
        self._retries = RetryBudget()

    async def run(self, exchange: Exchange, policy: Policy, wait: Waiter, attempt: Attempt) -> None:
        """Have one request answered; raises ``ProxyError`` where the answer is an error of ours.

        Each replica gets it once. A replica that failed it and has started anew since may get it once more, but only
        where it was the only one tried: a request that kills engines must not go round and round.
        """
        choose = partial(policy.choose, exchange.facts)
        tried: dict[str, str] = {}
        exclude: frozenset[str] = _NOBODY
        attempts = 0
        source = ""  # a replica that failed, until its failover is reported
        try:
            while True:
                decision = self._admission.admit(exchange.model, choose, exclude=exclude, only=exchange.only)
                if isinstance(decision, Wait):
                    if source:
                        self._report(exchange, source, "", tried[source])
                        source = ""
                    decision = await self._wait(decision, wait, exchange)
                if source:
                    target = decision.replica if isinstance(decision, Lease) else ""
                    self._report(exchange, source, target, tried[source])
                if isinstance(decision, Refuse):
                    if tried and decision.code is RefusalCode.NO_LIVE_REPLICA:
                        raise _all_failed(tried, decision.retry_after)
                    raise refused(decision)
                if decision.replica in tried and attempts > 1:
                    self._admission.finish(decision, Ending.CLIENT_GONE, "it failed this request before")
                    raise _all_failed(tried, None)
                attempts += 1
                failure = await attempt(decision)
                if failure is None:
                    self._retries.earn()
                    return
                source = decision.replica
                tried[source] = failure
                exclude = frozenset(tried)
                policy.forget(exchange.facts, source)
                if not self._retries.spend():
                    self._report(exchange, source, "", failure)
                    raise _all_failed(tried, None)
        finally:
            tell_the_end(exchange, policy)

    async def _wait(self, decision: Wait, wait: Waiter, exchange: Exchange) -> Lease | Refuse:
        outcome = exchange.outcome
        if decision.reason:
            outcome.reason = decision.reason
            fields = {"model": exchange.model, "request_id": exchange.id}
            log.info("request %s is %s", exchange.id, decision.reason, extra={"fields": fields})
        outcome.stage, began = Stage.QUEUE, self._clock()
        try:
            return await wait(decision)
        finally:
            outcome.queued += self._clock() - began

    def _report(self, exchange: Exchange, source: str, target: str, reason: str) -> None:
        model = exchange.outcome.model
        # A silent failover hides a dead card.
        fields = {"event": "failover", "model": model, "replica": source, "target": target, "request_id": exchange.id}
        log.warning("failover: %s -> %s: %s", source, target or "nobody", reason, extra={"fields": fields})
        self._on_failover(Failover(model, source, target, reason))


def tell_the_end(exchange: Exchange, policy: Policy) -> None:
    """The request is over, whatever came of it. The first call counts."""
    if exchange.told:
        return
    exchange.told = True
    usage = exchange.outcome.usage
    if usage is None:
        policy.finished(exchange.facts, None)
    else:
        policy.finished(exchange.facts, usage.cached_share, usage.prompt)


def _all_failed(tried: dict[str, str], retry_after: float | None) -> ProxyError:
    failures = "; ".join(f"{replica}: {reason}" for replica, reason in tried.items())
    message = f"every live replica failed before it answered ({failures})"
    return ProxyError(502, "upstream_failed", message, retry_after=retry_after)
