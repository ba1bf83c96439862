"""Taking in a configuration: by difference, so that only what changed is touched."""

from __future__ import annotations

from supervisord.core.actions import CommandFailure, NoteKind, Persist
from supervisord.core.canary import Fingerprint
from supervisord.core.events import Configured
from supervisord.core.fleet import Model, Turn
from supervisord.core.goals import fail_goal
from supervisord.core.record import Record
from supervisord.core.replica import Goal, Replica
from supervisord.core.spec import ModelSpec, ReplicaSpec
from supervisord.core.states import Life


def configured(turn: Turn, event: Configured) -> None:
    """Make the fleet what ``event`` says. Replicas that stay keep their state; those that go finish their requests."""
    fleet = turn.fleet
    fleet.supervisor = event.supervisor
    old_models = fleet.models
    records = dict(event.records)
    fingerprints = {name: (invocation, found) for name, invocation, found in event.fingerprints}
    fleet.models, fleet.names = {}, {}
    for spec in event.models:
        model = old_models.get(spec.name) or Model(spec, [])
        before = model.spec
        model.spec = spec
        model.replicas = [
            _take(turn, replica_spec, before, spec, records, fingerprints) for replica_spec in spec.replicas
        ]
        fleet.models[spec.name] = model
        for name in (spec.name, *spec.aliases):
            fleet.names[name] = model
    for name in event.outdated:
        _outdate(turn, fleet.replicas[name])
    for left in event.left_over:
        # As if it had been taken away now: its unit goes down, and then it is forgotten.
        replica = Replica(left, Life.STARTING, turn.now, op_began=turn.now, job_ended=True)
        replica.record = records.get(left.name)
        fleet.replicas[left.name] = replica
    kept = {replica.name for model in fleet.models.values() for replica in model.replicas}
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
    before: ModelSpec,
    after: ModelSpec,
    records: dict[str, Record],
    fingerprints: dict[str, tuple[str, Fingerprint]],
) -> Replica:
    replica = turn.fleet.replicas.get(spec.name)
    if replica is None or replica.spec.unit != spec.unit:
        if replica is not None:
            fail_goal(turn, replica, CommandFailure.GONE, f"its unit is {spec.unit} now")
        replica = Replica(spec, since=turn.now)
        record = records.get(spec.name)
        if record is not None:
            replica.record, replica.hold = record, record.hold
        if spec.name in fingerprints:
            replica.fingerprint_of, replica.fingerprint = fingerprints[spec.name]
        turn.fleet.replicas[spec.name] = replica
        return replica
    if replica.leaving:
        replica.leaving = False
        if replica.goal is Goal.STOPPED and not replica.tickets:
            replica.goal = None
    command_changed = spec.bundled and (
        before.serve != after.serve or before.aliases != after.aliases or replica.spec != spec
    )
    if command_changed and replica.life not in (Life.STOPPED, Life.FAILED):
        _outdate(turn, replica)
    replica.spec = spec
    return replica


def _outdate(turn: Turn, replica: Replica) -> None:
    replica.stale = True
    turn.note(NoteKind.RECONFIGURED, replica, "its command changed: it is restarted when nothing is in flight")


def drop_left(turn: Turn) -> None:
    """Forget leaving replicas whose work is over, and models that were kept for their last waiters."""
    fleet = turn.fleet
    for replica in [r for r in fleet.replicas.values() if r.leaving and not r.in_flight]:
        if replica.life is Life.STOPPED or (not replica.spec.bundled and replica.goal is None and not replica.op):
            del fleet.replicas[replica.name]
            if replica.record is not None:
                turn.actions.append(Persist(replica.name, 0, None))
    for model in [m for m in fleet.models.values() if not m.replicas and not m.waiting]:
        del fleet.models[model.name]
        if fleet.names.get(model.name) is model:
            del fleet.names[model.name]
