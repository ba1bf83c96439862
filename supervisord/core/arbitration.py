"""Models that do not fit onto a GPU together: who makes room for whom, and when.

Room is counted from what people declared (``memory.gpu`` of each replica, ``gpu_memory`` of each GPU); where either is
not said, nothing is known and everything fits. A replica that is wanted asks others to rest, idle ones first and the
longest idle of those. Two bounds keep two models from taking turns for ever or for nothing: whoever has just become
ready stays for a minimum residency, and whoever waits has waited long enough before a busy one must drain for it.
Requests in flight are never cut: a busy replica finishes them behind a closed gate.
"""

from __future__ import annotations

from collections.abc import Iterable

from supervisord.core.actions import NoteKind
from supervisord.core.fleet import Fleet, Turn
from supervisord.core.goals import set_goal
from supervisord.core.replica import Goal, Replica
from supervisord.core.states import Health, Hold, Life

#: How often a replica that waits for room looks again: residency and patience run out by themselves. Seconds.
LOOK_AGAIN = 1.0
#: States that hold no GPU memory worth counting. (A failed unit that is still up does: see ``_holds``.)
_RESTING = (Life.STOPPED, Life.ASLEEP)


def could_ever_fit(fleet: Fleet, replica: Replica) -> bool:
    """False when it declares more than a GPU has: no eviction helps."""
    capacity, need = fleet.supervisor.gpu_memory, replica.spec.gpu_memory
    return capacity is None or need is None or need <= capacity


def fits(fleet: Fleet, replica: Replica, without: Iterable[Replica] = ()) -> bool:
    """Whether there is room for it on each of its GPUs, beside those that hold memory there now."""
    capacity, need = fleet.supervisor.gpu_memory, replica.spec.gpu_memory
    if capacity is None or need is None:
        return True
    gone = [replica.name, *(other.name for other in without)]
    for gpu in replica.spec.gpus:
        used = sum(
            other.spec.gpu_memory or 0
            for other in fleet.replicas.values()
            if other.name not in gone and gpu in other.spec.gpus and _holds(other)
        )
        if used + need > capacity:
            return False
    return True


def _holds(replica: Replica) -> bool:
    if replica.life is Life.FAILED:
        return replica.occupies_gpu
    return replica.life not in _RESTING


def make_room(turn: Turn, replica: Replica) -> bool:
    """True when ``replica`` may start or wake now; else others have been asked to rest for it, where they may be."""
    if fits(turn.fleet, replica) and not _is_being_left(turn.fleet, replica):
        replica.room_at = None
        return True
    replica.room_at = turn.now + LOOK_AGAIN
    chosen = [other for other in turn.fleet.replicas.values() if other.yields_to == replica.name]
    for other in _victims(turn, replica):
        if fits(turn.fleet, replica, chosen):
            break
        chosen.append(other)
    if fits(turn.fleet, replica, chosen):
        for other in chosen:
            _ask_to_rest(turn, other, replica)
    return False


def _is_being_left(fleet: Fleet, replica: Replica) -> bool:
    """The one that it comes after still holds one of its GPUs, and goes down as soon as it is through.

    Whatever is declared: it is the same model under another name, and there is no room for it twice. An engine that ran
    beside the one that goes may go on doing so.
    """
    mine = set(replica.spec.gpus)
    return any(
        other.leaving
        and other.spec.bundled
        and (other.spec.model == replica.spec.model or not replica.looked)
        and _holds(other)
        and mine.intersection(other.spec.gpus)
        for other in fleet.replicas.values()
    )


def _victims(turn: Turn, replica: Replica) -> list[Replica]:
    """Who may be asked, in the order in which they are: idle before busy, the longest idle first."""
    patient = turn.now - replica.wanted_since < turn.fleet.supervisor.make_room_after
    mine = set(replica.spec.gpus)

    def may_be_asked(other: Replica) -> bool:
        resident = turn.now - other.since >= turn.fleet.supervisor.min_residency
        idle = other.in_flight == 0 and not _is_waited_for(turn.fleet, other)
        return (
            other is not replica
            and other.life is Life.READY
            and bool(mine.intersection(other.spec.gpus))
            and not other.yields_to
            and not _is_about_to_serve(turn.fleet, other)
            # For a request, a sibling that is there is as good, unless it can be answered by this very one only; and an
            # operator wants this very one.
            and (
                other.spec.model != replica.spec.model
                or bool(replica.tickets)
                or _cannot_stand_in(turn.fleet, other, replica)
            )
            and other.hold is not Hold.DRAINED
            and other.goal in (None, Goal.AWAKE)
            and resident
            and (idle or not patient)
        )

    asked = [other for other in turn.fleet.replicas.values() if may_be_asked(other)]
    return sorted(asked, key=lambda other: (other.in_flight > 0, other.idle_since))


def _is_waited_for(fleet: Fleet, replica: Replica) -> bool:
    model = fleet.model_of(replica)
    return model is not None and bool(model.waiting)


def _cannot_stand_in(fleet: Fleet, other: Replica, replica: Replica) -> bool:
    """Somebody waits whom ``replica`` could answer and its sibling could not."""
    model = fleet.model_of(replica)
    if model is None:
        return False
    picky = [model.waiting[ticket] for ticket in model.picky if ticket in model.waiting]
    return any(waiter.may_have(replica) and not waiter.may_have(other) for waiter in picky)


def _is_about_to_serve(fleet: Fleet, replica: Replica) -> bool:
    """It has just become ready, and who waited for it is granted at the end of this turn."""
    model = fleet.model_of(replica)
    if model is None or not replica.routable or replica.health is not Health.OK:
        return False
    # Not for those that it could serve now and that are held: they may be held for minutes.
    return any(waiter.may_have(replica) for ticket, waiter in model.waiting.items() if ticket not in model.held)


def _ask_to_rest(turn: Turn, replica: Replica, beneficiary: Replica) -> None:
    if replica.yields_to == beneficiary.name:
        return
    goal = Goal.SLEEP1 if replica.sleeps_well and turn.fleet.nap_fits(replica) else Goal.STOPPED
    turn.note(NoteKind.EVICTED, replica, f"makes room for {beneficiary.name} ({goal})")
    set_goal(turn, replica, goal, why=f"{beneficiary.name} needs its GPU")
    replica.yields_to = beneficiary.name


def release(fleet: Fleet) -> None:
    """Who rests has made room; who was to make room for somebody that no longer wants it need not."""
    for replica in fleet.replicas.values():
        if replica.yields_to:
            beneficiary = fleet.replicas.get(replica.yields_to)
            wants = beneficiary is not None and (
                beneficiary.goal is Goal.AWAKE or beneficiary.life in (Life.STARTING, Life.WAKING)
            )
            if not wants or replica.life in (*_RESTING, Life.FAILED):
                replica.yields_to = ""
