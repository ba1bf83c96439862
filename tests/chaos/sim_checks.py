"""The invariants of DESIGN.md, checked after every step of the core and at every action that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_loop import EPOCH, Process

from supervisord.core import step as core
from supervisord.core.actions import Action, Call, CallEngine, Note, NoteKind, RunUnitJob, UnitVerb
from supervisord.core.events import Configured, Event
from supervisord.core.fleet import Fleet
from supervisord.core.readings import EngineState
from supervisord.core.replica import OPERATING, Replica
from supervisord.core.spec import Config
from supervisord.core.states import Health, Hold, Life

if TYPE_CHECKING:
    from sim_clients import Client
    from sim_world import World

_LOOKED_AT = (Life.READY, Life.DRAINING, Life.ASLEEP)
#: A fault may still work this long after the replica was ready again (a call that was carried out late). Seconds.
AFTERMATH = 300.0
#: Events in 10 seconds that no fleet of this size has without running in circles.
BUSY = 5000
#: Errors that rule 5 or a lack of our own resources makes right whatever else is alive.
_RIGHT_ANYHOW = ("504 upstream_timeout", "503 out_of_resources", "503 router_shutting_down", "404 model_not_found")


class _Seen:
    """What is remembered of one replica between two steps."""

    __slots__ = ("idle_since", "life", "ok_since", "ours", "replica", "settled_at", "since")

    def __init__(self, replica: Replica, now: float) -> None:
        self.replica, self.life, self.idle_since = replica, replica.life, replica.idle_since
        self.since = replica.since
        #: Its present state was entered by an operation of ours, not because the world drifted.
        self.ours = False
        self.settled_at = now
        #: Since when it gets requests and is not suspected.
        self.ok_since: float | None = None


class Checks:
    """Of one supervisor process."""

    fleet: Fleet

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._seen: dict[str, _Seen] = {}
        self._untouched: dict[str, tuple[object, ...]] = {}
        self._waiting: dict[str, int] = {}
        self._count = 0
        #: Events since an instant.
        self._events, self._events_since = 0, 0.0

    # --- after each step ---

    def before(self, event: Event) -> None:
        if isinstance(event, Configured):
            self._remember_untouched(event)

    def after(self, event: Event | None) -> None:
        world, fleet = self._world, self.fleet
        world.steps += 1
        self._count += 1
        if world.trace is not None and event is not None:
            world.say(f"{event}")
        if not self._process.alive:
            world.fail("13", "a killed supervisor's core took a step")
        if event is not None:
            self._check_pace(event)
        leases = fleet.leases
        per_replica: dict[int, int] = {}
        waiting = 0
        if len(leases) < 16 or self._count % 16 == 0:
            for lease in leases.values():
                per_replica[id(lease.replica)] = per_replica.get(id(lease.replica), 0) + 1
        else:
            per_replica = {-1: 0}
        for replica in fleet.replicas.values():
            seen = self._seen.get(replica.name)
            if seen is None or seen.replica is not replica:
                seen = self._seen[replica.name] = _Seen(replica, world.now)
            if -1 not in per_replica and replica.in_flight != per_replica.get(id(replica), 0):
                world.fail("3", f"{replica.name} counts {replica.in_flight} in flight, {per_replica} are")
            life = replica.life
            if life is not seen.life or replica.since != seen.since:
                self._advanced(replica, seen)
            elif replica.idle_since != seen.idle_since and event is not None:
                world.fail("9", f"{replica.name}'s idle clock was set by {event}")
            seen.idle_since = replica.idle_since
            if life is Life.DRAINING and replica.goal is None and not fleet.draining:
                world.fail("liveness", f"{replica.name} drains for nothing")
            if life in OPERATING:
                if replica.op_deadline is None:
                    world.fail("liveness", f"{replica.name} is {life} for ever")
            elif life in _LOOKED_AT and replica.probe_at is None:
                world.fail("liveness", f"nobody looks at {replica.name}, which is {life}")
            if replica.routable and replica.health is Health.OK:
                if seen.ok_since is None:
                    seen.ok_since = world.now
            else:
                seen.ok_since = None
        for model in fleet.models.values():
            if model.waiting:
                waiting += len(model.waiting)
                self._check_waiting(model)
            self._waiting[model.name] = len(model.waiting)
        if len(leases) + waiting > self._process_clients():
            world.fail("3", f"{len(leases)} leases and {waiting} waiting of {self._process_clients()} requests")
        if self._untouched:
            self._check_untouched()

    def _check_pace(self, event: Event) -> None:
        if self._world.now > self._events_since + 10.0:
            self._events, self._events_since = 0, self._world.now
        self._events += 1
        if self._events > BUSY:
            self._world.fail("liveness", f"{BUSY} events in 10 s, the last: {event}")

    def _process_clients(self) -> int:
        supervisor = self._world.supervisor
        return supervisor.clients.count if supervisor is not None else 0

    def _check_waiting(self, model) -> None:
        before = self._waiting.get(model.name, 0)
        if len(model.waiting) > max(model.spec.wake.max_waiting, before):
            self._world.fail("11", f"{len(model.waiting)} wait for {model.name}")
        if not model.held.keys() <= model.waiting.keys():
            self._world.fail("3", f"{model.held.keys()} are held for {model.name}, and do not wait")
        self._world.most_held = max(self._world.most_held, len(model.held))
        free = [r for r in model.replicas if r.routable and r.health is Health.OK]
        for replica in free:
            for ticket, waiter in model.waiting.items():
                if ticket not in model.held and waiter.may_have(replica):
                    self._world.fail("liveness", f"a request waits beside {replica.name}")
                    return

    def _advanced(self, replica: Replica, seen: _Seen) -> None:
        world, life, before = self._world, replica.life, seen.life
        seen.life, seen.since, seen.ours = life, replica.since, replica.op != 0
        if life in (Life.READY, Life.ASLEEP):
            seen.settled_at = world.now
        unit = world.units[replica.spec.unit]
        said = unit.said
        if life is Life.ASLEEP and said is not EngineState.ASLEEP and unit.said_before is not EngineState.ASLEEP:
            world.fail("8", f"{replica.name} counts as asleep, and the engine said {said}")
        awake = EngineState.AWAKE in (said, unit.said_before)
        if life is Life.READY and before is Life.WAKING and not awake:
            world.fail("8", f"{replica.name} counts as awake, and the engine said {said}")
        # One that became ready and at once makes room for others went through both in one step: its idle clock began.
        was_ready = replica.idle_since == replica.since
        if before is Life.STARTING and life is Life.STOPPING and not (was_ready or self._stop_was_wanted(replica)):
            world.fail("1", f"a start of {replica.name} that had begun is stopped")

    def _stop_was_wanted(self, replica: Replica) -> bool:
        """By an operator or the configuration; or its start ended in the same step, found asleep or in the way."""
        found_asleep = self._world.units[replica.spec.unit].said is EngineState.ASLEEP
        return replica.hold is Hold.DOWN or replica.leaving or replica.stale or found_asleep or bool(replica.yields_to)

    # --- at an action ---

    def action(self, action: Action) -> None:
        if not isinstance(action, RunUnitJob | CallEngine):
            return
        if not self._process.alive:
            self._world.fail("13", f"a killed supervisor does {action}")
        replica = self.fleet.replicas.get(action.replica)
        if replica is None or not action.op:
            return
        fail = self._world.fail
        if isinstance(action, CallEngine):
            if action.call is Call.SLEEP:
                if replica.in_flight:
                    fail("2", f"{replica.name} is slept with {replica.in_flight} in flight")
                self._check_gpu(replica)
        else:
            seen = self._seen.get(replica.name)
            given_up = seen is not None and seen.life is Life.FAILED  # its requests hang in a broken engine
            if action.verb is UnitVerb.STOP and replica.in_flight and not given_up:
                fail("2", f"{replica.name} is stopped with {replica.in_flight} in flight")
            if action.verb is not UnitVerb.RESTART:
                self._check_gpu(replica)
            if self.fleet.draining:
                fail("13", f"{action.verb} of {replica.name} during the shutdown")

    def _check_gpu(self, replica: Replica) -> None:
        mine = set(replica.spec.gpus)
        for other in self.fleet.replicas.values():
            if other is replica or other.life not in OPERATING or not mine.intersection(other.spec.gpus):
                continue
            seen = self._seen.get(other.name)
            ours = seen is not None and seen.life is other.life and seen.ours
            # A unit that came up by itself asked nobody; that its answers are looked at then is no operation of ours.
            if ours or (other.op and other.life is not Life.STARTING):
                self._world.fail("7", f"{replica.name} and {other.name} ({other.life}) at once on a GPU")

    def note(self, note: Note) -> None:
        if note.kind is not NoteKind.ESCALATED:
            return
        replica, world = self.fleet.replicas[note.replica], self._world
        seen = self._seen.get(note.replica)
        unit = world.units[replica.spec.unit]
        engine = unit.engine
        sick = engine is None or engine.dead or engine.hung or not engine.listening
        blame = max(world.choices.blame.get(unit.name, -1.0), world.choices.blame.get("", -1.0))
        if not sick and seen is not None and blame < seen.settled_at - AFTERMATH:
            world.fail("13", f"{note.replica} is restarted without a reason: {note.message}")

    # --- what clients see ---

    def leaves_when_granted(self) -> bool:
        return bool(self._world.choices.fault("", "grant", ("its client leaves",)))

    def error_shown(self, client: Client, answer: str, text: str, *, headed: bool) -> None:
        """A client gets an error: was there a replica that could have served it all the time?"""
        if headed or answer in _RIGHT_ANYHOW:
            return
        model = self.fleet.names.get(client.model)
        for replica in model.replicas if model is not None else ():
            seen, unit = self._seen.get(replica.name), self._world.units[replica.spec.unit]
            if seen is None or seen.ok_since is None or seen.ok_since > client.arrived or unit.engine is None:
                continue
            good = unit.engine.good_since
            if unit.active == "active" and good is not None and good <= client.arrived:
                self._world.fail("no needless error", f"'{answer}' ({text}), and {replica.name} could have answered")

    # --- reloads ---

    def _remember_untouched(self, event: Configured) -> None:
        self._untouched = {}
        fleet = self.fleet
        due = core.next_due(fleet)
        if event.supervisor != fleet.supervisor or (due is not None and due <= EPOCH + self._world.now):
            return
        for spec in event.models:
            model = fleet.models.get(spec.name)
            # Who is held may be let in whenever anything happens.
            if model is not None and model.spec == spec and not model.held:
                for replica in model.replicas:
                    # One that waits for its back-off to end, or for room, may get it from what did change.
                    if replica.life is not Life.FAILED and replica.goal is None:
                        self._untouched[replica.name] = _state(replica)

    def _check_untouched(self) -> None:
        for name, before in self._untouched.items():
            after = _state(self.fleet.replicas[name])
            if before != after:
                self._world.fail("12", f"a reload that did not change {name} made {after} of {before}")
        self._untouched = {}

    def configured(self, config: Config) -> None:
        names = {replica.name for model in config.models for replica in model.replicas}
        for name in names - self.fleet.replicas.keys():
            self._world.fail("12", f"{name} is configured and not known")


def _state(replica: Replica) -> tuple[object, ...]:
    return (
        replica.life,
        replica.op,
        replica.generation,
        replica.in_flight,
        replica.record,
        replica.hold,
        replica.level,
    )
