"""Admission: lease, wait or refuse, decided and counted in one step; and what becomes of those who wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from supervisord.core.actions import Deny, Fault, Grant, NoteKind
from supervisord.core.admission import Candidate, Chooser, Ending, Lease, NotYet, RefusalCode, Refuse
from supervisord.core.arbitration import fits
from supervisord.core.estimates import blend, queue_drain, retry_after
from supervisord.core.fleet import Fleet, Model, OpenLease, Turn, Waiter
from supervisord.core.goals import set_goal
from supervisord.core.observe import demote
from supervisord.core.refusals import hopeless, too_long, until_ready
from supervisord.core.replica import Goal, Replica
from supervisord.core.states import Health, Hold, Life

#: Requests in flight per awake replica at which a sleeping sibling is woken / a stopped one started besides.
#: Two, since a batch of two costs an engine next to nothing; a start takes minutes, so it needs a lasting crowd.
BUSY_ENOUGH_TO_WAKE = 2
BUSY_ENOUGH_TO_START = 8
#: Seconds after which a policy is asked again about a request that it holds, if nothing happens before.
ASKED_EVERY = 1.0

#: Which resting replica is brought back first: the one that is back soonest.
_SOONEST = {
    Life.READY: 0,
    Life.DRAINING: 0,
    Life.ASLEEP: 1,
    Life.FALLING_ASLEEP: 2,
    Life.STOPPED: 4,
    Life.STOPPING: 5,
    Life.FAILED: 6,
}


class LeaseError(Exception):
    """A lease was returned twice, or never given: a defect of the caller."""


#: What is excluded for nearly every request.
NOBODY: Mapping[str, int] = MappingProxyType({})

# Looked up for every request; a member of an Enum takes longer to look up than a call takes.
_OK, _TRIAL, _READY, _COMPLETED = Health.OK, Health.TRIAL, Life.READY, Ending.COMPLETED

# --- one request ---------------------------------------------------------------------------------------------------


def lease(
    turn: Turn,
    model: Model,
    choose: Chooser,
    excluded: Mapping[str, int],
    only: frozenset[str] | None = None,
    *,
    may_hold: bool = True,
) -> Lease | NotYet | None:
    """A place at one of the model's replicas, if any may have the request now. ``excluded``, ``only``: see ``Waiter``.

    ``NotYet``: one may, but the policy wants the request to wait. ``may_hold`` false: it would be refused otherwise,
    and slow is better; a policy that knows of no KV holds nobody. Also during the shutdown: it came over a connection
    that was accepted before, and an awake engine can answer.
    """
    open_to = _candidates(turn, model, excluded, only)
    if not open_to:
        return None
    choice = choose(_as_candidates(open_to, may_hold))
    if isinstance(choice, NotYet):
        return choice
    replica = turn.fleet.replicas[choice.replica]
    replica.in_flight += 1
    lease_id = turn.fleet.next_id()
    if replica.health is _TRIAL:
        replica.trial_lease = lease_id
    turn.fleet.leases[lease_id] = OpenLease(model.spec.name, replica, replica.generation, turn.now)
    return Lease(
        lease_id,
        model.spec.name,
        replica.spec.name,
        replica.spec.endpoint,
        replica.served_names + replica.adapters,
        choice.reason,
        choice.placement,
    )


def candidates(turn: Turn, model: Model) -> list[Candidate]:
    """Those that a new request may go to now."""
    return _as_candidates(_candidates(turn, model, NOBODY, None), may_hold=True)


def _as_candidates(replicas: Sequence[Replica], may_hold: bool) -> list[Candidate]:
    told = [replica.as_candidate() for replica in replicas]
    return told if may_hold else [candidate._replace(kv_tokens=None) for candidate in told]


def _candidates(turn: Turn, model: Model, excluded: Mapping[str, int], only: frozenset[str] | None) -> list[Replica]:
    open_to: list[Replica] = []
    for r in model.replicas:
        if not r.routable or (excluded and excluded.get(r.name) == r.generation):
            continue
        if only is None or r.name in only:
            open_to.append(r)
    candidates = [r for r in open_to if r.health is _OK or _on_trial(turn, r)]
    if not candidates:
        # The last live replica is never ejected: better a try than a sure refusal.
        alive = [r for r in open_to if r.health is not Health.DEAD]
        candidates = alive if only is not None else [r for r in alive if not _elsewhere(model, r)]
    return candidates


def queue(
    turn: Turn,
    model: Model,
    choose: Chooser,
    excluded: Mapping[str, int],
    ticket: int,
    only: frozenset[str] | None = None,
    held: NotYet | None = None,
) -> Refuse | None:
    """For a request that nobody may have now, or that is ``held``: None means that it waits under ``ticket``."""
    if turn.fleet.draining:
        return Refuse(RefusalCode.ROUTER_SHUTTING_DOWN, "The router is shutting down.", retry_after(5.0))
    if is_full(model):
        seconds = until_ready(turn, model) + queue_drain(len(model.waiting), model.service_seconds, len(model.replicas))
        seconds = max(seconds, held.likely_in if held is not None else 0.0)
        message = f"{len(model.waiting)} requests are waiting for the model `{model.name}` already."
        return Refuse(RefusalCode.QUEUE_FULL, message, retry_after(seconds))
    waiter = Waiter(ticket, choose, excluded, turn.now + model.spec.wake.timeout, only)
    if held is not None:
        _hold(turn, model, ticket, held)
    if only is not None and held is None:
        _bring_back_any_of(turn, model, only)
        if not _has_hope(turn, model, waiter):
            return hopeless(turn, model, only)
        model.picky.append(ticket)
    model.waiting[ticket] = waiter
    bring_back(turn, model)
    if not _has_hope(turn, model, waiter):
        model.leave_queue(ticket)
        return hopeless(turn, model, only)
    return None


def is_full(model: Model) -> bool:
    """As many wait as may."""
    return len(model.waiting) >= model.spec.wake.max_waiting


def finish(turn: Turn, lease_id: int, ending: Ending, detail: str) -> bool:
    """Take a lease back; True when something may follow.

    It failed, or answers again, or its being empty matters, or somebody is held who may have its room now.
    """
    returned = turn.fleet.leases.pop(lease_id, None)
    if returned is None:
        raise LeaseError(f"lease {lease_id} is not in flight")
    replica = returned.replica
    replica.in_flight -= 1
    replica.idle_since = turn.now
    model = turn.fleet.models.get(returned.model)
    revived = False
    if ending is _COMPLETED:
        replica.failures, replica.strikes, replica.progress_at = 0, 0, turn.now
        if replica.health is _TRIAL:
            revived = True
            replica.health = _OK  # and who waits for another replica need not any more
            turn.note(NoteKind.REVIVED, replica, "a request succeeded again")
        if model is not None:
            model.service_seconds = blend(model.service_seconds, max(turn.now - returned.began, 1e-6))
    elif ending in (Ending.CONNECT_FAILED, Ending.STREAM_BROKEN) and returned.generation == replica.generation:
        if replica.life is Life.READY:
            # Those that fail together, or one that had to be tried all the same, are one failure.
            replica.strikes += replica.health is not Health.SUSPECT
            demote(turn, replica, f"{ending}: {detail}" if detail else str(ending))
        return True
    if replica.trial_lease == lease_id:
        replica.trial_lease = 0  # where its client left before anything was known, the next one is the trial
        return True
    if model is not None and model.held:
        return True
    return revived or (replica.in_flight == 0 and not _is_at_rest(turn.fleet, replica))


def _is_at_rest(fleet: Fleet, replica: Replica) -> bool:
    """Nobody has been waiting for this replica to be empty; all that begins is its idle clock, for which a tick comes.

    Most requests end so, and settling the whole fleet after each would cost more than anything else here.
    """
    if replica.life is not _READY or replica.health is not _OK or replica.leaving or replica.stale:
        return False
    for other in fleet.replicas.values():
        if other.goal is not None:  # it may have to wait for room, or for its turn on the GPU
            return False
    return not [model for model in fleet.models.values() if model.waiting]


def abandon(fleet: Fleet, ticket: int) -> bool:
    """The waiting client left. True when it was still waiting. What was begun for it goes on."""
    return any(model.leave_queue(ticket) is not None for model in fleet.models.values())


def _on_trial(turn: Turn, replica: Replica) -> bool:
    return replica.health is Health.TRIAL and not replica.trial_lease and turn.now >= replica.trial_at


def _elsewhere(model: Model, suspect: Replica) -> bool:
    """Another replica will soon be there instead of this suspect one."""
    return any(r is not suspect and r.coming and r.life in (Life.WAKING, Life.STARTING) for r in model.replicas)


# --- bringing replicas back ------------------------------------------------------------------------------------------


def bring_back(turn: Turn, model: Model) -> None:
    """Want as many replicas as requests wait: one request wakes one, a burst wakes all, each once.

    Whoever can be served this very moment (a wake has just ended) waits for nobody: it is about to be granted.
    """
    if turn.fleet.draining or not model.waiting:
        return
    if model.picky:
        model.picky = [ticket for ticket in model.picky if ticket in model.waiting]
        for only in {model.waiting[ticket].only for ticket in model.picky}:
            _bring_back_any_of(turn, model, only or frozenset())
    healthy = [r for r in model.replicas if r.routable and r.health is Health.OK]
    waiting = len(model.waiting) if not healthy else _shut_out(model, healthy)
    coming = sum(1 for r in model.replicas if r.coming)
    for replica in _resting(turn, model):
        if coming >= waiting:
            break
        set_goal(turn, replica, Goal.AWAKE, why="a request arrived")
        coming += 1
    if model.held and not coming:
        _bring_more_kv(turn, model)


def _bring_more_kv(turn: Turn, model: Model) -> None:
    """A sleeping sibling has the KV that the held ones wait for, and a stopped one where several do.

    But nobody has to rest for it: they are served as they are.
    """
    for replica in _resting(turn, model):
        asleep = replica.life in (Life.DRAINING, Life.ASLEEP, Life.FALLING_ASLEEP)
        if (asleep or len(model.held) >= BUSY_ENOUGH_TO_WAKE) and fits(turn.fleet, replica):
            set_goal(turn, replica, Goal.AWAKE, why="long conversations wait for KV")
            return


def _bring_back_any_of(turn: Turn, model: Model, only: frozenset[str]) -> None:
    """One of ``only`` is wanted, unless one is there or comes already."""
    if turn.fleet.draining or any((r.routable or r.coming) and r.name in only for r in model.replicas):
        return
    for replica in _resting(turn, model):
        if replica.name in only:
            set_goal(turn, replica, Goal.AWAKE, why="a request arrived that only it can answer")
            return


def _shut_out(model: Model, healthy: Sequence[Replica]) -> int:
    """How many wait whom no healthy replica may serve; counted no further than there are replicas to bring back.

    Without those who wait for certain replicas: another one is of no use to them.
    """
    count = 0
    for waiter in model.waiting.values():
        count += waiter.only is None and all(waiter.excluded.get(r.name) == r.generation for r in healthy)
        if count >= len(model.replicas):
            break
    return count


def _resting(turn: Turn, model: Model) -> list[Replica]:
    free = [r for r in model.replicas if r.hold is Hold.NONE and not r.coming and not r.yields_to]
    resting = [r for r in free if r.life is not Life.READY and r.may_retry(turn.now)]
    return sorted(resting, key=lambda r: (_SOONEST.get(r.life, 9), r.level))


def wake_another_if_busy(turn: Turn, model: Model) -> bool:
    """After a lease: a crowd on the awake replicas brings a resting one back. True when a goal was set."""
    if len(model.replicas) == 1 or turn.fleet.draining:
        return False
    awake, least = 0, BUSY_ENOUGH_TO_START
    for replica in model.replicas:
        if replica.routable:
            if replica.in_flight < BUSY_ENOUGH_TO_WAKE:
                return False
            awake += 1
            least = min(least, replica.in_flight)
    if awake in (0, len(model.replicas)) or any(r.coming for r in model.replicas):
        return False
    for replica in _resting(turn, model):
        if replica.life in (Life.DRAINING, Life.ASLEEP, Life.FALLING_ASLEEP) or least >= BUSY_ENOUGH_TO_START:
            set_goal(turn, replica, Goal.AWAKE, why="the awake replicas are busy")
            return True
    return False


# --- those who wait --------------------------------------------------------------------------------------------------


def settle_waiting(turn: Turn, model: Model) -> None:
    """Grant in order of arrival, refuse whom nothing can help any more, leave the rest waiting."""
    if not model.waiting:
        return
    nobody_yet = not turn.fleet.draining and not any(r.routable for r in model.replicas)
    if nobody_yet and any(_is_hope(turn, r) for r in model.replicas):
        # Thousands may wait here: only who has waited too long is looked at, and they are in order.
        model.held.clear()
        _refuse_overdue(turn, model)
        return
    # Of those that are held nobody goes before the first; all are asked now and then, should an order be forgotten.
    everybody = turn.now >= model.ask_at
    still_held = False
    for ticket, waiter in list(model.waiting.items()):
        held = ticket in model.held
        last_time = turn.fleet.draining or turn.now >= waiter.deadline
        outcome: Lease | NotYet | Refuse | None
        if turn.fleet.draining and not held:
            outcome = None  # nothing is brought back for it any more
        elif held and still_held and not everybody and not last_time:
            continue
        else:
            may_hold = not (held and last_time)
            try:
                outcome = lease(turn, model, waiter.choose, waiter.excluded, waiter.only, may_hold=may_hold)
            except Exception as error:  # noqa: BLE001 - its own request is told; what else follows, follows
                model.leave_queue(ticket)
                turn.actions.append(Fault(ticket, error))
                continue
            still_held = still_held or isinstance(outcome, NotYet)
        if isinstance(outcome, NotYet):
            _hold(turn, model, ticket, outcome)
        elif outcome is None:
            model.held.pop(ticket, None)
        if outcome is None or isinstance(outcome, NotYet):
            outcome = _end_of_waiting(turn, model, waiter)
        if outcome is None:
            continue
        model.leave_queue(ticket)
        turn.actions.append(Grant(ticket, outcome) if isinstance(outcome, Lease) else Deny(ticket, outcome))
    if everybody:
        model.ask_at = turn.now + ASKED_EVERY


def _hold(turn: Turn, model: Model, ticket: int, answer: NotYet) -> None:
    if not model.held:
        model.ask_at = turn.now + ASKED_EVERY
    model.held[ticket] = answer


def _end_of_waiting(turn: Turn, model: Model, waiter: Waiter) -> Refuse | None:
    if turn.fleet.draining:
        return Refuse(RefusalCode.ROUTER_SHUTTING_DOWN, "The router is shutting down.", retry_after(5.0))
    if turn.now >= waiter.deadline:
        return too_long(turn, model, waiter.ticket)
    return None if _has_hope(turn, model, waiter) else hopeless(turn, model, waiter.only)


def _refuse_overdue(turn: Turn, model: Model) -> None:
    while model.waiting:
        waiter = next(iter(model.waiting.values()))
        if turn.now < waiter.deadline:
            return
        model.leave_queue(waiter.ticket)
        turn.actions.append(Deny(waiter.ticket, too_long(turn, model, waiter.ticket)))


def _is_hope(turn: Turn, replica: Replica) -> bool:
    """It will be there for everybody, or it is not known yet that it will not."""
    return replica.coming or replica.autopsy_until > turn.now or bool(replica.yields_to)


def _has_hope(turn: Turn, model: Model, waiter: Waiter) -> bool:
    if waiter.ticket in model.held:
        return True  # a replica could have it this very moment
    for replica in model.replicas:
        if waiter.only is not None and replica.name not in waiter.only:
            continue
        if _is_hope(turn, replica):
            return True
        # Excluded and under suspicion: the look that is under way decides whether it is restarted. (On trial it was
        # found well: it is not, and whoever failed there is not helped by waiting for another's success.)
        undecided = replica.routable and replica.health in (Health.SUSPECT, Health.DEAD)
        if undecided and waiter.excluded.get(replica.name) == replica.generation:
            return True
    return False
