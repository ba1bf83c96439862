"""The prefill work that a replica still has to do, in seconds: charged at dispatch, released at the first byte.

An engine prefills in the order in which requests came, so the first one's work shrinks as time goes by.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Charge:
    """The work of one request, seconds as predicted."""

    seconds: float
    #: Its first byte says when its prefill is done; an answer that comes whole says it only when all is done.
    streams: bool
    #: When it began to be the first of the queue.
    began: float = 0.0
    #: It is in the queue.
    open: bool = True


class Pending:
    """One replica's queue of prefill work."""

    def __init__(self) -> None:
        self._charges: dict[Charge, None] = {}
        #: The one that is being computed; None: nothing is.
        self._head: Charge | None = None
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._charges)

    def add(self, charge: Charge, now: float) -> None:
        """The request was sent."""
        if self._head is None:
            self._head = charge
            charge.began = now
        self._charges[charge] = None
        self._total += charge.seconds

    def release(self, charge: Charge, now: float) -> float | None:
        """Its prefill is done, or it is gone. Returns the seconds it took if it was the first of the queue."""
        if not charge.open:
            return None
        took = now - charge.began if self._head is charge else None
        self._take_out(charge, now)
        return took

    def seconds(self, now: float) -> float:
        """The work left."""
        head = self._head
        while head is not None and not head.streams and now - head.began >= head.seconds:
            self._take_out(head, head.began + head.seconds)  # nobody will tell: it is taken to be as predicted
            head = self._head
        if head is None:
            return 0.0
        return max(0.0, self._total - min(now - head.began, head.seconds))

    def _take_out(self, charge: Charge, now: float) -> None:
        del self._charges[charge]
        charge.open = False
        if not self._charges:
            self._head, self._total = None, 0.0
            return
        self._total -= charge.seconds
        if self._head is charge:
            self._head = next(iter(self._charges))
            self._head.began = now
