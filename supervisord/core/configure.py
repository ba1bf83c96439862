"""Taking in a configuration: by difference, so that only what changed is touched."""

from __future__ import annotations

from dataclasses import replace

from supervisord.core.actions import CommandFailure, NoteKind, Persist, SaveFingerprint
from supervisord.core.canary import Fingerprint
from supervisord.core.events import Configured
from supervisord.core.fleet import Model, Turn
from supervisord.core.goals import fail_goal
from supervisord.core.idle import Rung
from supervisord.core.record import Record
from supervisord.core.replica import Goal, Replica
from supervisord.core.spec import ModelSpec, ReplicaSpec
from supervisord.core.states import Life


def configured(turn: Turn, event: Configured) -> None:
    """Make the fleet what ``event`` says. Replicas that stay keep their state; those that go finish their requests."""
    fleet = turn.fleet
    fleet.supervisor = event.supervisor
    old_models, old_replicas = fleet.models, dict(fleet.replicas)
    records = dict(event.records)
    fingerprints = {name: (invocation, found) for name, invocation, found in event.fingerprints}
    fleet.models, fleet.names = {}, {}
    for spec in event.models:
        model = old_models.get(spec.name) or Model(spec, [])
        model.spec = spec
        model.replicas = [_take(turn, each, spec, old_replicas, records, fingerprints) for each in spec.replicas]
        fleet.models[spec.name] = model
        for name in (spec.name, *spec.aliases):
            fleet.names[name] = model
    for name in event.outdated:
        _outdate(turn, fleet.replicas[name])
    for left in event.left_over:
        # As if it had been taken away now: its unit goes down, and then it is forgotten.
        replica = Replica(left, Life.STARTING, turn.now, op_began=turn.now, job_ended=True)
        if left.name in fleet.replicas:
            _name_after_unit(replica)
        else:
            replica.record = records.get(left.name)
        fleet.replicas[replica.name] = replica
    kept = {replica.name for model in fleet.models.values() for replica in model.replicas}
    _drop_renamed(turn, kept)
    for replica in fleet.replicas.values():
        if replica.name not in kept and not replica.leaving:
            replica.leaving = True
            fail_goal(turn, replica, CommandFailure.GONE, "it is no longer configured")
            turn.note(NoteKind.RECONFIGURED, replica, "is no longer configured: it gets no more requests")
    for name, model in old_models.items():
        if name not in fleet.models:
            model.replicas = []
            # Nobody can answer them any more; settling refuses them.
            if model.waiting:
                fleet.models[name] = model
                fleet.names.setdefault(name, model)


def _take(
    turn: Turn,
    spec: ReplicaSpec,
    model: ModelSpec,
    before: dict[str, Replica],
    records: dict[str, Record],
    fingerprints: dict[str, tuple[str, Fingerprint]],
) -> Replica:
    replica, command = before.get(spec.name), (spec, model.serve, model.aliases)
    if replica is None or replica.spec.unit != spec.unit:
        return _make(turn, Replica(spec, since=turn.now, command=command), before, records, fingerprints)
    if replica.leaving:
        replica.leaving = False
        if replica.goal is Goal.STOPPED and not replica.tickets:
            replica.goal = None
    may_run = replica.unit is None or replica.rung is not Rung.STOPPED or replica.occupies_gpu
    if spec.bundled and replica.command != command and may_run:
        if not replica.stale:
            replica.runs = replica.command
        if command != replica.runs:
            _outdate(turn, replica)
        else:
            _is_itself_again(turn, replica)
    replica.spec, replica.command = spec, command
    return replica


def _make(
    turn: Turn,
    replica: Replica,
    before: dict[str, Replica],
    records: dict[str, Record],
    fingerprints: dict[str, tuple[str, Fingerprint]],
) -> Replica:
    """A replica that is new, or has another unit now, or another name for the unit of one that is not configured."""
    name, fleet = replica.name, turn.fleet
    namesake = before.get(name)
    engine = next((r for r in before.values() if r.spec.unit == replica.spec.unit), None)
    replica.record = records.get(name)
    if replica.record is not None:
        replica.hold = replica.record.hold
    if name in fingerprints:
        replica.fingerprint_of, replica.fingerprint = fingerprints[name]
    if namesake is not None:
        # What an operator said of it is of its name.
        replica.record, replica.hold = namesake.record, namesake.hold
        fail_goal(turn, namesake, CommandFailure.GONE, f"its unit is {replica.spec.unit} now")
        if namesake.spec.bundled:
            namesake.record = None
            _name_after_unit(namesake)
            fleet.replicas[namesake.name] = namesake
    elif engine is not None:
        replica.hold = engine.hold
    if engine is not None:
        _take_over(turn, engine, replica)
    fleet.replicas[name] = replica
    return replica


def _take_over(turn: Turn, engine: Replica, replica: Replica) -> None:
    """What is in flight in an engine is so whatever its replica is called; what it does is looked at afresh."""
    fleet = turn.fleet
    if engine.record is not None:  # what its weights are worth
        replica.record = replace(engine.record, hold=replica.hold)
        turn.actions.append(Persist(replica.name, 0, replica.record))
    if replica.spec.bundled and engine.command != replica.command:
        replica.runs = engine.runs if engine.stale else engine.command
        _outdate(turn, replica)
    if engine.fingerprint is not None:
        replica.fingerprint_of, replica.fingerprint = engine.fingerprint_of, engine.fingerprint
        turn.actions.append(SaveFingerprint(replica.name, engine.fingerprint_of, engine.fingerprint))
    replica.generation = engine.generation + 1
    replica.in_flight, engine.in_flight = engine.in_flight, 0
    for number, lease in fleet.leases.items():
        if lease.replica is engine:
            fleet.leases[number] = lease._replace(replica=replica)


def _name_after_unit(replica: Replica) -> None:
    """Its name is another's now; its unit goes down all the same."""
    replica.spec = replace(replica.spec, name=replica.spec.unit)


def _drop_renamed(turn: Turn, kept: set[str]) -> None:
    """Forget those whose unit has another name now: nothing is left for them to do."""
    fleet = turn.fleet
    units = {fleet.replicas[name].spec.unit for name in kept}
    for replica in [r for r in fleet.replicas.values() if r.name not in kept and r.spec.unit in units]:
        fail_goal(turn, replica, CommandFailure.GONE, "it has another name now")
        _forget(turn, replica)


def _is_itself_again(turn: Turn, replica: Replica) -> None:
    replica.stale = False
    if replica.goal is Goal.RESTARTED and not replica.tickets:
        replica.goal = None
    turn.note(NoteKind.RECONFIGURED, replica, "its command is again the one that it was started with")


def _outdate(turn: Turn, replica: Replica) -> None:
    replica.stale = True
    if replica.life is Life.READY:
        replica.probe_at = turn.now  # whether it can still be asked, by the name and at the place of now
    turn.note(NoteKind.RECONFIGURED, replica, "its command changed: it is restarted when nothing is in flight")


def drop_left(turn: Turn) -> None:
    """Forget leaving replicas whose work is over, and models that were kept for their last waiters."""
    fleet = turn.fleet
    for replica in [r for r in fleet.replicas.values() if r.leaving and not r.in_flight]:
        if replica.life is Life.STOPPED or (not replica.spec.bundled and replica.goal is None and not replica.op):
            _forget(turn, replica)
    for model in [m for m in fleet.models.values() if not m.replicas and not m.waiting]:
        del fleet.models[model.name]
        if fleet.names.get(model.name) is model:
            del fleet.names[model.name]


def _forget(turn: Turn, replica: Replica) -> None:
    del turn.fleet.replicas[replica.name]
    if replica.record is not None:
        turn.actions.append(Persist(replica.name, 0, None))
