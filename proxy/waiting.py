"""A request that waits for a replica to wake: for a stream a comment now and then, so that nobody cuts the silence."""

from __future__ import annotations

import asyncio

from proxy.reply import Reply
from supervisord.core.admission import Admission, Lease, Refuse, Wait

#: Seconds between two comments, at least, however small the configured silence is.
_LEAST_INTERVAL = 1.0


async def wait_for_replica(
    admission: Admission, wait: Wait, reply: Reply, comment_after: float | None
) -> Lease | Refuse:
    """Await the outcome, which the supervisor bounds by the model's wake timeout.

    ``comment_after``: seconds of silence after which the client is sent a comment, None for never. If this does not
    return (the client left, the request was cut), the place in the queue is given up.
    """
    interval = comment_after
    try:
        # wait() rather than await: cancelling this request must not cancel the supervisor's future.
        while not (await asyncio.wait((wait.outcome,), timeout=interval))[0]:
            await reply.comment()
            interval = max(comment_after or 0.0, _LEAST_INTERVAL)
    except BaseException:
        admission.abandon(wait)
        raise
    return wait.outcome.result()
