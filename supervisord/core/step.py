"""``step``: one event in, the actions out. The only way in which the fleet's state changes, but for admission.

The state is changed in place and synchronously; the clock is an argument and nothing here touches the world, so the
same history always leads to the same state. After the event itself the whole fleet is settled: goals are set by the
clocks, pursued, and those who wait are granted or refused, until nothing more follows.
"""

from __future__ import annotations

from supervisord.core import admit as door
from supervisord.core import arbitration, configure, lifecycle, observe
from supervisord.core.actions import Action, Answer, CommandFailure, NoteKind, Persist, ProbeEngine
from supervisord.core.admission import Candidate, Chooser, Ending, Lease, NotYet, RefusalCode, Refuse
from supervisord.core.events import (
    Command,
    Configured,
    EngineAnswered,
    Event,
    Fingerprinted,
    LastLines,
    Persisted,
    Probed,
    ShutDown,
    Tick,
    UnitChanged,
    UnitJobDone,
)
from supervisord.core.fleet import Fleet, Turn
from supervisord.core.goals import fail_goal, ladder_of, set_config_goal, set_goal, set_idle_goal
from supervisord.core.idle import leads_anywhere, next_rung_after
from supervisord.core.persist import save_hold
from supervisord.core.pursuit import pursue
from supervisord.core.replica import Goal, Replica
from supervisord.core.sequences import VerifyStep
from supervisord.core.states import Hold, Life
from supervisord.core.verbs import Verb

#: Settling reaches a fixed point in a few rounds; more would be two rules that undo each other.
MAX_ROUNDS = 20


def step(fleet: Fleet, event: Event, now: float) -> list[Action]:
    """Apply ``event`` at ``now`` (seconds, never going back) and return what is to be done."""
    turn = Turn(fleet, now)
    apply(turn, event)
    settle(turn)
    return turn.actions


def admit(
    fleet: Fleet, name: str, choose: Chooser, exclude: frozenset[str], now: float, only: frozenset[str] | None = None
) -> tuple[Lease | Refuse | int, list[Action]]:
    """Decide for one request: a lease (counted), a refusal, or the ticket under which it waits."""
    turn = Turn(fleet, now)
    model = fleet.names.get(name)
    if model is None and (serving := fleet.serving(name)) is not None:
        model, those = serving
        only = those if only is None else only & those
    if model is None:
        return Refuse(RefusalCode.MODEL_NOT_FOUND, f"The model `{name}` does not exist."), turn.actions
    excluded = {r.name: r.generation for r in model.replicas if r.name in exclude} if exclude else door.NOBODY
    # Those who came first go first: nobody overtakes a queue that could be served.
    lease = door.lease(turn, model, choose, excluded, only)
    if isinstance(lease, NotYet) and (fleet.draining or door.is_full(model)):
        lease = door.lease(turn, model, choose, excluded, only, may_hold=False)
    if isinstance(lease, Lease):
        if door.wake_another_if_busy(turn, model):
            settle(turn)
        return lease, turn.actions
    ticket = fleet.next_id()
    goals = [replica.goal for replica in model.replicas]
    refusal = door.queue(turn, model, choose, excluded, ticket, only, lease)
    if refusal is not None:
        return refusal, turn.actions
    # The thousandth that waits for one wake changes nothing for the others.
    if goals != [replica.goal for replica in model.replicas]:
        settle(turn)
    return ticket, turn.actions


def candidates(fleet: Fleet, name: str, now: float) -> list[Candidate]:
    """Those that a new request of a model (or alias) may go to now; empty for an unknown one."""
    model = fleet.names.get(name)
    return door.candidates(Turn(fleet, now), model) if model is not None else []


def finish(fleet: Fleet, lease_id: int, ending: Ending, detail: str, now: float) -> list[Action] | None:
    """Take a lease back; None: nothing follows, except that the replica's idle clock may begin (``idle_due``).

    Raises ``LeaseError`` when it is not in flight.
    """
    turn = Turn(fleet, now)
    if not door.finish(turn, lease_id, ending, detail):
        return None
    settle(turn)
    return turn.actions


def abandon(fleet: Fleet, ticket: int) -> bool:
    """A waiting client left; True when it was still waiting."""
    return door.abandon(fleet, ticket)


def held_for(fleet: Fleet, name: str, ticket: int) -> str:
    """Why the policy holds a waiting request; empty when it waits for a replica."""
    model = fleet.names.get(name)
    if model is None and (serving := fleet.serving(name)) is not None:
        model = serving[0]
    held = model.held.get(ticket) if model is not None else None
    return held.reason if held is not None else ""


def apply(turn: Turn, event: Event) -> None:
    """The event's own consequence."""
    fleet = turn.fleet
    if isinstance(event, Configured):
        configure.configured(turn, event)
        return
    if isinstance(event, ShutDown):
        fleet.draining = True
        for replica in fleet.replicas.values():
            if replica.life not in (Life.STARTING, Life.WAKING, Life.FALLING_ASLEEP, Life.STOPPING):
                fail_goal(turn, replica, CommandFailure.SHUTTING_DOWN, "the supervisor is shutting down")
        return
    if isinstance(event, Tick):
        for replica in fleet.replicas.values():
            _tick(turn, replica)
        return
    known = fleet.replicas.get(event.replica)
    if known is None:
        if isinstance(event, Command):
            message = f"replica {event.replica} is no longer configured"
            turn.actions.append(Answer(event.ticket, CommandFailure.GONE, message))
        return
    _apply_to(turn, known, event)


def _apply_to(
    turn: Turn,
    replica: Replica,
    event: UnitChanged | UnitJobDone | EngineAnswered | Probed | Persisted | Fingerprinted | LastLines | Command,
) -> None:
    match event:
        case UnitChanged(_, status):
            observe.unit_changed(turn, replica, status)
        case UnitJobDone(_, op):
            if op and op == replica.op:
                observe.job_done(turn, replica, event)
        case EngineAnswered(_, op, error, before, after):
            if op and op == replica.op:
                if lifecycle.memory_kept(before, after):
                    replica.sleep_broken = True
                if error:
                    lifecycle.step_failed(turn, replica, error)
                else:
                    lifecycle.step_done(turn, replica)
        case Persisted(_, op, error):
            replica.save_at = turn.now + lifecycle.REST_AGAIN if error else None
            if op == replica.op and op:
                if error:
                    lifecycle.step_failed(turn, replica, error)
                else:
                    lifecycle.step_done(turn, replica)
            elif error:
                turn.note(NoteKind.RECORD_FAILED, replica, f"its state is not on disk: {error}", warning=True)
        case Probed(_, op, probe):
            if op and op == replica.op and replica.steps and isinstance(replica.steps[replica.step_index], VerifyStep):
                lifecycle.verified(turn, replica, probe)
            elif op and op == replica.probe_op:
                replica.probe_op = 0
                observe.looked(turn, replica, probe)
        case Fingerprinted(_, op, fingerprint, error):
            if op and op == replica.op:
                if error:
                    lifecycle.step_failed(turn, replica, error)
                else:
                    lifecycle.fingerprinted(turn, replica, fingerprint)
        case LastLines(_, lines):
            if replica.life is Life.FAILED and replica.autopsy_until:
                lifecycle.add_last_lines(replica, lines)
                turn.note(NoteKind.EXPLAINED, replica, replica.last_error, warning=True)
        case Command():
            _command(turn, replica, event)


def _tick(turn: Turn, replica: Replica) -> None:
    if replica.op_deadline is not None and turn.now >= replica.op_deadline:
        observe.overdue(turn, replica)
    if replica.room_at is not None and turn.now >= replica.room_at:
        replica.room_at = None  # pursuit looks again, and says when the next time is
    if replica.sweep_at is not None and turn.now >= replica.sweep_at:
        replica.sweep_at = None
        if replica.life is Life.FAILED and replica.goal is None and replica.occupies_gpu and not turn.fleet.draining:
            set_goal(turn, replica, Goal.STOPPED)
    if replica.autopsy_until and turn.now >= replica.autopsy_until:
        replica.autopsy_until = 0.0
    if replica.save_at is not None and turn.now >= replica.save_at:
        # A sequence under way writes for itself, if it has anything to write.
        replica.save_at = turn.now + lifecycle.REST_AGAIN if replica.steps else None
        if not replica.steps:
            turn.actions.append(Persist(replica.name, 0, replica.record))
    if replica.probe_at is not None and turn.now >= replica.probe_at:
        timeout = turn.fleet.supervisor.probe_timeout
        replica.probe_at = turn.now + timeout + lifecycle.GRACE  # unless the answer sets it sooner
        replica.probe_op = turn.fleet.next_id()
        turn.actions.append(ProbeEngine(replica.name, replica.probe_op, timeout))


def _command(turn: Turn, replica: Replica, command: Command) -> None:
    verb, ticket = command.verb, command.ticket

    def refuse(failure: CommandFailure, message: str) -> None:
        turn.actions.append(Answer(ticket, failure, f"replica {replica.name}: {message}"))

    if turn.fleet.draining:
        refuse(CommandFailure.SHUTTING_DOWN, "the supervisor is shutting down")
        return
    if replica.hold is Hold.DOWN and verb in (Verb.SLEEP, Verb.WAKE, Verb.RESTART, Verb.DRAIN):
        refuse(CommandFailure.HELD, "it is held down; 'up' (Start) ends that")
        return
    # What an operator asks for is tried now, whatever failed before.
    replica.retry_at = 0.0
    match verb:
        case Verb.SLEEP:
            if not replica.can_sleep:
                refuse(
                    CommandFailure.SLEEP_UNSUPPORTED,
                    "its engine has no sleep endpoints (VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode switch them on)",
                )
                return
            if replica.life is Life.FAILED:
                refuse(CommandFailure.SLEEP_FAILED, f"it has failed: {replica.last_error}")
                return
            replica.sleep_broken = False
            set_goal(turn, replica, Goal.SLEEP2 if command.level == 2 else Goal.SLEEP1, ticket=ticket)
        case Verb.WAKE | Verb.START:
            _set_hold(turn, replica, Hold.NONE)
            set_goal(turn, replica, Goal.AWAKE, ticket=ticket)
        case Verb.STOP:
            set_goal(turn, replica, Goal.STOPPED, ticket=ticket)
            _set_hold(turn, replica, Hold.DOWN)
        case Verb.RESTART:
            # A start under way is as good: two who want a restart are both told when the engine is ready.
            begun = replica.life is Life.STARTING and replica.goal is Goal.AWAKE
            set_goal(turn, replica, Goal.AWAKE if begun else Goal.RESTARTED, ticket=ticket)
        case Verb.DRAIN:
            _set_hold(turn, replica, Hold.DRAINED)
            set_goal(turn, replica, Goal.DRAINED, ticket=ticket)


def _set_hold(turn: Turn, replica: Replica, hold: Hold) -> None:
    if replica.hold is hold:
        return
    replica.hold = hold
    kind = NoteKind.RELEASED if hold is Hold.NONE else NoteKind.HELD
    turn.note(kind, replica, {Hold.NONE: "hold ended", Hold.DOWN: "held down", Hold.DRAINED: "held drained"}[hold])
    if not replica.steps:  # a sequence under way has its intent there, and the hold is written at its end
        save_hold(turn, replica)


def settle(turn: Turn) -> None:
    """Let everything follow that follows, until nothing more does."""
    for _ in range(MAX_ROUNDS):
        before = len(turn.actions), [(r.life, r.goal) for r in turn.fleet.replicas.values()]
        arbitration.release(turn.fleet)
        for model in turn.fleet.models.values():
            door.bring_back(turn, model)
        for replica in _by_urgency(turn.fleet):
            if not turn.fleet.draining:
                set_config_goal(turn, replica)
                set_idle_goal(turn, replica)
            pursue(turn, replica)
        for model in turn.fleet.models.values():
            door.settle_waiting(turn, model)
        configure.drop_left(turn)
        if before == (len(turn.actions), [(r.life, r.goal) for r in turn.fleet.replicas.values()]):
            return
    raise RuntimeError("the fleet does not settle: two rules undo each other")


def _by_urgency(fleet: Fleet) -> list[Replica]:
    """Who may have a contended GPU first: whose oldest request waits longest, then commands, then the rest."""

    def key(replica: Replica) -> tuple[float, bool]:
        model = fleet.model_of(replica)
        oldest = next(iter(model.waiting.values()), None) if model is not None and replica.goal is Goal.AWAKE else None
        return (oldest.ticket if oldest is not None else float("inf"), not replica.tickets)

    return sorted(fleet.replicas.values(), key=key)


def next_due(fleet: Fleet) -> float | None:
    """When the next ``Tick`` is needed, on the clock of ``now``; None: nothing is timed."""
    due: list[float] = []
    for replica in fleet.replicas.values():
        if replica.op_deadline is not None:
            due.append(replica.op_deadline)
        if replica.probe_at is not None:
            due.append(replica.probe_at)
        if replica.room_at is not None:
            due.append(replica.room_at)
        if replica.sweep_at is not None:
            due.append(replica.sweep_at)
        if replica.autopsy_until:
            due.append(replica.autopsy_until)
        if replica.save_at is not None:
            due.append(replica.save_at)
        idle = idle_due(fleet, replica)
        if idle is not None:
            due.append(idle)
    for model in fleet.models.values():
        first = next(iter(model.waiting.values()), None)
        if first is not None:
            due.append(first.deadline)
        if model.held:
            due.append(model.ask_at)
    return min(due, default=None)


def idle_due(fleet: Fleet, replica: Replica) -> float | None:
    """When its idleness leads to something; None: never, or not while it goes on as it does."""
    model = fleet.models.get(replica.spec.model)
    if model is None or not leads_anywhere(model.spec.idle):
        return None
    ladder = ladder_of(fleet, replica)
    if ladder is None:
        return None
    rung = next_rung_after(ladder, replica.rung, can_sleep=replica.can_sleep)
    return max(replica.idle_since + rung, replica.rest_at) if rung is not None else None


def adopted(fleet: Fleet) -> bool:
    """The first reconciliation is done: every unit was read, and every running engine looked at once.

    Those that are to be stopped are nobody's to wait for.
    """
    return all(
        r.leaving or (r.unit is not None and (not r.unit_up or r.looked or r.life is Life.STOPPING))
        for r in fleet.replicas.values()
    )
