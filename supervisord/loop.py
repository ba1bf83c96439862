"""The dispatcher: the only writer of the fleet's state, in one asyncio thread.

A synchronous ``dispatch`` is atomic: an event is applied, everything that follows is decided, and only then are the
effects set going. Their results come back as events. Admission goes through the same door, so that the decision and
its lease are one call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from supervisord.core import step as core
from supervisord.core.actions import Action, Answer, Deny, Fault, Grant, Note
from supervisord.core.admission import Candidate, Chooser, Ending, Lease, ListedModel, Refuse, Running, Wait
from supervisord.core.events import Command, Event, Tick
from supervisord.core.fleet import Fleet
from supervisord.core.verbs import Verb
from supervisord.core.view import FleetView, look, running

log = logging.getLogger(__name__)

#: Seconds by which the epoch's clock must have gone another way than ours (a suspend, a clock that was set) until other
#: instants are shown to people: each look would differ from the one before otherwise.
SHIFT = 1.0


class Dispatcher:
    """Implements ``Admission`` for the proxy and takes events from everybody else."""

    def __init__(
        self,
        perform: Callable[[Action], None],
        on_note: Callable[[Note], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``perform`` sets one effect going and returns at once; its result is dispatched later, never from within.

        ``wall``: seconds since the epoch.
        """
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        # What is counted from must never go back: wall time once, then the loop's own clock.
        self._wall, self._began = wall, wall()
        self._epoch = self._began - self._loop.time()
        self._shift = 0.0
        self._fleet = Fleet()
        self._perform = perform
        self._on_note = on_note
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._waiting: dict[int, asyncio.Future[Lease | Refuse]] = {}
        self._commands: dict[int, asyncio.Future[Answer]] = {}
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """Seconds since the epoch, monotonic: without the time in which the machine was suspended since our start."""
        return self._epoch + self._time()

    # --- events ---

    def dispatch(self, event: Event) -> None:
        """Apply one event and set going what follows."""
        self._carry_out(core.step(self._fleet, event, self.now()))
        self._changed()

    async def command(self, replica: str, verb: Verb, level: int = 0) -> Answer:
        """One operator's command to one replica; returns when it is done, failed or overtaken."""
        ticket = self._fleet.next_id()
        future = self._commands[ticket] = self._loop.create_future()
        try:
            self.dispatch(Command(ticket, replica, verb, level))
            answer: Answer = await future
            return answer
        finally:
            del self._commands[ticket]

    def view(self) -> FleetView:
        shift = self._wall() - self.now()
        if abs(shift - self._shift) >= SHIFT:
            self._shift = shift
        return look(self._fleet, self._shift)

    def adopted(self) -> bool:
        """The first reconciliation is done."""
        return core.adopted(self._fleet)

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` after every change of the state; returns the unsubscribe."""
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)

    def close(self) -> None:
        """No further ticks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- admission ---

    def admit(
        self,
        model: str,
        choose: Chooser,
        *,
        exclude: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
    ) -> Lease | Wait | Refuse:
        answer, actions = core.admit(self._fleet, model, choose, exclude, self.now(), only)
        if not isinstance(answer, int):
            if actions:
                self._carry_out(actions)
                self._rearm()
            self._tell()
            return answer
        wait = Wait(answer, self._loop.create_future(), core.held_for(self._fleet, model, answer))
        self._waiting[answer] = wait.outcome
        self._carry_out(actions)
        self._changed()
        return wait

    def candidates(self, model: str) -> Sequence[Candidate]:
        return core.candidates(self._fleet, model, self.now())

    def finish(self, lease: Lease, ending: Ending, detail: str = "") -> None:
        actions = core.finish(self._fleet, lease.id, ending, detail, self.now())
        if actions is not None:
            self._carry_out(actions)
            self._changed()
            return
        # Nearly every request ends so. The timer may be early for what is due, and then sets itself anew, never late.
        replica = self._fleet.replicas.get(lease.replica)
        due = core.idle_due(self._fleet, replica) if replica is not None and not replica.in_flight else None
        if due is not None and (self._timer is None or due < self._timer_due):
            self._set_timer(due)
        self._tell()

    def abandon(self, wait: Wait) -> None:
        self._waiting.pop(wait.ticket, None)
        if core.abandon(self._fleet, wait.ticket):
            self._changed()
        elif wait.outcome.done() and not wait.outcome.cancelled() and wait.outcome.exception() is None:
            granted = wait.outcome.result()
            if isinstance(granted, Lease):
                self.finish(granted, Ending.CLIENT_GONE)
        wait.outcome.cancel()

    def running(self) -> Sequence[Running]:
        return running(self._fleet)

    def listing(self) -> Sequence[ListedModel]:
        view = self.view()
        simulated = {r.name for r in view.replicas if r.simulated}
        return [
            ListedModel(
                name=model.name,
                aliases=model.aliases,
                state=str(model.state),
                max_model_len=model.max_model_len or None,
                created=int(self._began),
                simulated=bool(simulated.intersection(model.replicas)),
                routing=model.routing,
                wake_seconds=model.wake_seconds or None,
                adapters=model.adapters,
            )
            for model in view.models
        ]

    # --- consequences ---

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Grant(ticket, outcome) | Deny(ticket, outcome):
                    self._resolve(ticket, outcome)
                case Fault(ticket, error):
                    self._fail(ticket, error)
                case Answer(ticket):
                    future = self._commands.get(ticket)
                    if future is not None and not future.done():
                        future.set_result(action)
                case Note():
                    self._on_note(action)
                case _:
                    self._perform(action)

    def _resolve(self, ticket: int, outcome: Lease | Refuse) -> None:
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            future.set_result(outcome)
        elif isinstance(outcome, Lease):
            # Its client was cancelled in this very moment and has not said so yet: the lease must not leak.
            log.debug("lease %d was granted to a client that had left", outcome.id)
            self._loop.call_soon(self.finish, outcome, Ending.CLIENT_GONE)

    def _fail(self, ticket: int, error: Exception) -> None:
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            future.set_exception(error)  # raised where its request waits, which logs and answers it

    def _changed(self) -> None:
        self._rearm()
        self._tell()

    def _tell(self) -> None:
        for on_change in self._listeners:
            on_change()

    def _rearm(self) -> None:
        due = core.next_due(self._fleet)
        if due is None:
            self.close()
        elif self._timer is None or due != self._timer_due:
            self._set_timer(due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due = self._loop.call_at(due - self._epoch, self._tick), due

    def _tick(self) -> None:
        self._timer = None
        self.dispatch(Tick())
