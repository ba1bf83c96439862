"""The prefill work that a replica still has to do, in seconds: charged at dispatch, released at the first byte.

An engine prefills in the order in which requests came, so the first one's work shrinks as time goes by. What is short
is computed together, in one step, and its first bytes come at once: it shares the time of the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass

#: First bytes that come within so many seconds of each other are of one step of the engine.
TOGETHER = 0.005


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
    #: Seconds it took, and the predicted ones of those that were computed beside it meanwhile; None: not known.
    took: float | None = None
    beside: float = 0.0

    @property
    def own(self) -> float | None:
        """Its share of the seconds it took."""
        if self.took is None or not self.beside:
            return self.took
        return self.took * self.seconds / (self.seconds + self.beside)


class Pending:
    """One replica's queue of prefill work."""

    def __init__(self) -> None:
        self._charges: dict[Charge, None] = {}
        #: The one that is being computed; None: nothing is.
        self._head: Charge | None = None
        #: The one that was the first before it; None: nothing was. It took no known time if no first byte of it came.
        self._before: Charge | None = None
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

    def done(self, charge: Charge, now: float) -> None:
        """Its first byte came. It is told how long that took if it was the first of the queue."""
        if not charge.open:
            return
        head, before = self._head, self._before
        if head is not charge:
            if head is not None:
                head.beside += charge.seconds  # in the same step, or at least in the same time
        elif before is not None and now - charge.began < TOGETHER:
            if before.took is not None:
                before.took += now - charge.began
                before.beside += charge.seconds
        else:
            charge.took = now - charge.began
            self._before = charge
        self._take_out(charge, now)

    def release(self, charge: Charge, now: float) -> None:
        """It is gone."""
        if charge.open:
            if self._head is charge:
                self._before = charge
            self._take_out(charge, now)

    def seconds(self, now: float) -> float:
        """The work left."""
        head = self._head
        while head is not None and not head.streams and now - head.began >= head.seconds:
            self._before = head
            self._take_out(head, head.began + head.seconds)  # nobody will tell: it is taken to be as predicted
            head = self._head
        if head is None:
            return 0.0
        return max(0.0, self._total - min(now - head.began, head.seconds))

    def _take_out(self, charge: Charge, now: float) -> None:
        del self._charges[charge]
        charge.open = False
        if not self._charges:
            self._head, self._before, self._total = None, None, 0.0
            return
        self._total -= charge.seconds
        if self._head is charge:
            self._head = next(iter(self._charges))
            self._head.began = now
