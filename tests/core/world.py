"""A small deterministic world for the core: units, engines with vLLM's sleep quirks, a disk, and a clock.

The core's actions are kept in ``pending`` until the test completes them, in any order, well or badly; completing one
changes the world and gives the core the event. So a test decides every interleaving.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisord.core import step as core
from supervisord.core.actions import (
    Action,
    Answer,
    Call,
    CallEngine,
    Deny,
    Fault,
    Grant,
    Note,
    NoteKind,
    Persist,
    ProbeEngine,
    ReadLastLines,
    RunUnitJob,
    SaveFingerprint,
    TakeFingerprint,
    UnitVerb,
)
from supervisord.core.admission import Choice, Ending, Lease, Refuse
from supervisord.core.canary import Fingerprint
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
from supervisord.core.fleet import Fleet
from supervisord.core.readings import EngineState, Probe, UnitStatus
from supervisord.core.record import Phase, Record
from supervisord.core.replica import Replica
from supervisord.core.spec import IdleLadder, ModelSpec, ReplicaSpec, SupervisorSpec, WakeLimits
from supervisord.core.states import Life
from supervisord.core.verbs import Verb

NO_LADDER, USUAL_WAKE, USUAL = IdleLadder(), WakeLimits(), SupervisorSpec()


def spread(candidates):
    """A policy that needs no facts: least in flight, first of equals."""
    return Choice(min(candidates, key=lambda c: c.in_flight).name, "spread")


def model(name="chat", replicas=("a",), gpus=None, idle=NO_LADDER, wake=USUAL_WAKE, aliases=(), memory=None, nap=None):
    specs = tuple(
        ReplicaSpec(
            r, name, f"vllm@{r}.service", f"unix:/run/{r}.sock", True, tuple((gpus or {}).get(r, ())), memory, nap
        )
        for r in replicas
    )
    return ModelSpec(name, specs, aliases=aliases, idle=idle, wake=wake)


@dataclass
class FakeEngine:
    """One unit and its engine."""

    unit: str
    active: str = "inactive"
    run: int = 0
    level: int = 0
    whole: bool = True
    answering: bool = False
    starts_fail: bool = False
    sleep_lies: bool = False
    can_sleep: bool = True
    hangs: bool = False
    tokens: int = 0
    no_route: bool = False
    kv_tokens: int | None = None
    calls: list[str] = field(default_factory=list)

    def start(self):
        self.run += 1
        self.level, self.whole = 0, True
        if self.starts_fail:
            self.active, self.answering = "failed", False
        else:
            self.active, self.answering = "active", True

    def stop(self, state="inactive"):
        self.active, self.answering = state, False

    def status(self) -> UnitStatus:
        return UnitStatus(self.unit, "loaded", self.active, "", f"{self.run:032x}" if self.run else "")

    def probe(self) -> Probe:
        if not self.answering:
            return Probe(EngineState.UNREACHABLE)
        if self.hangs:
            return Probe(EngineState.HUNG, progress=self.tokens)
        state = EngineState.ASLEEP if self.level else EngineState.AWAKE
        kv_tokens = self.kv_tokens if state is EngineState.AWAKE else None
        return Probe(state, can_sleep=self.can_sleep, served_names=("chat",), max_model_len=4096, kv_tokens=kv_tokens)

    def call(self, action: CallEngine) -> str:
        self.calls.append(f"{action.call} {action.level or ''}{','.join(action.tags)}".strip())
        if not self.answering:
            return "connection refused"
        match action.call:
            case Call.SLEEP:
                if self.level == 0 and not self.sleep_lies:
                    self.level = action.level
                    self.whole = action.level == 1
            case Call.WAKE_UP:
                # weights alone leave it paused; everything, or the rest, resumes
                if action.tags != ("weights",):
                    self.level = 0
            case Call.RELOAD_WEIGHTS:
                self.whole = True
            case Call.RESET_PREFIX_CACHE:
                pass
        return ""


class World:
    def __init__(self, *models: ModelSpec, supervisor=USUAL, records=(), fingerprints=(), now=1000.0, running=()):
        self.now = now
        self.fleet = Fleet()
        self.models = models
        self.supervisor = supervisor
        self.engines: dict[str, FakeEngine] = {}
        self.disk: dict[str, Record] = dict(records)
        self.fingerprints: dict[str, tuple[str, Fingerprint]] = dict(fingerprints)
        self.pending: list[Action] = []
        self.outcomes: dict[int, Lease | Refuse | Exception] = {}
        self.answers: dict[int, Answer] = {}
        self.notes: list[Note] = []
        self.open: dict[int, Lease] = {}
        for spec in models:
            for r in spec.replicas:
                self.engines[r.name] = FakeEngine(r.unit)
        for name in running:
            self.engines[name].start()
        kept = tuple((name, *found) for name, found in self.fingerprints.items())
        self.do(Configured(models, supervisor, tuple(self.disk.items()), kept))
        for name in self.engines:
            self.do(UnitChanged(name, self.engines[name].status()))

    # --- driving ---

    def do(self, event: Event) -> None:
        self.take(core.step(self.fleet, event, self.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant(ticket, lease):
                    assert ticket not in self.outcomes
                    self.outcomes[ticket] = lease
                    self.open[lease.id] = lease
                    self.on_lease(lease)
                case Deny(ticket, refusal):
                    assert ticket not in self.outcomes
                    self.outcomes[ticket] = refusal
                case Fault(ticket, error):
                    assert ticket not in self.outcomes
                    self.outcomes[ticket] = error
                case Answer(ticket):
                    assert ticket not in self.answers
                    self.answers[ticket] = action
                case Note():
                    self.notes.append(action)
                case _:
                    self.on_action(action)
                    self.pending.append(action)

    def on_action(self, action: Action) -> None:
        """For checks in subclasses."""

    def on_lease(self, lease: Lease) -> None:
        """For checks in subclasses."""

    def admit(self, name="chat", exclude=frozenset(), only=None, choose=spread):
        """A lease, a refusal, or a ticket."""
        wanted = None if only is None else frozenset(only)
        answer, actions = core.admit(self.fleet, name, choose, frozenset(exclude), self.now, wanted)
        if isinstance(answer, Lease):
            self.open[answer.id] = answer
            self.on_lease(answer)
        self.take(actions)
        return answer

    def finish(self, lease: Lease, ending=Ending.COMPLETED, detail="") -> None:
        del self.open[lease.id]
        self.take(core.finish(self.fleet, lease.id, ending, detail, self.now) or [])

    def command(self, replica: str, verb: Verb, level=0) -> int:
        ticket = self.fleet.next_id()
        self.do(Command(ticket, replica, verb, level))
        return ticket

    def complete(self, action: Action, error: str = "", result: str = "failed") -> None:
        """Carry one pending action out (or let it fail) and tell the core. One replica's writes stay in order."""
        if isinstance(action, Persist):
            action = next(p for p in self.pending if isinstance(p, Persist) and p.replica == action.replica)
        self.pending.remove(action)
        engine = self.engines[action.replica]
        match action:
            case RunUnitJob(_, op, _, verb):
                if error:
                    self.do(UnitJobDone(action.replica, op, result, engine.status(), error, ("boom",)))
                    return
                if verb is UnitVerb.STOP:
                    engine.stop()
                else:
                    engine.start()
                result = "failed" if engine.active == "failed" else "done"
                if op:
                    lines = ("it broke",) if result == "failed" else ()
                    self.do(UnitJobDone(action.replica, op, result, engine.status(), "", lines))
                self.do(UnitChanged(action.replica, engine.status()))
            case CallEngine(_, op):
                self.do(EngineAnswered(action.replica, op, error or engine.call(action)))
            case ProbeEngine(_, op):
                self.do(Probed(action.replica, op, Probe(EngineState.HUNG) if error else engine.probe()))
            case Persist(name, op, record):
                if not error:
                    if record is None:
                        self.disk.pop(name, None)
                    else:
                        self.disk[name] = record
                self.do(Persisted(name, op, error))
            case TakeFingerprint(_, op):
                seen = None if engine.no_route else Fingerprint(("yes",), (-0.1 if engine.whole else -9.0,))
                self.do(Fingerprinted(action.replica, op, None if error else seen, error))
            case SaveFingerprint(name, invocation, fingerprint):
                self.fingerprints[name] = (invocation, fingerprint)
            case ReadLastLines(name, _):
                self.do(LastLines(name, ("it broke",)))

    def run(self, rounds=400) -> None:
        """Complete everything that is pending, and let the clock go on only as far as looks at loading engines need."""
        for _ in range(rounds):
            if self.pending:
                self.complete(self.pending[0])
                continue
            if not any(r.life in (Life.STARTING,) or r.probe_at == self.now for r in self.fleet.replicas.values()):
                return
            self.later(0.25)
        raise AssertionError("the world does not come to rest")

    def later(self, seconds: float) -> None:
        """Let time pass, with a tick whenever one is due."""
        end = self.now + seconds
        while True:
            due = core.next_due(self.fleet)
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            self.do(Tick())
            for action in [p for p in self.pending if isinstance(p, ProbeEngine)]:
                self.complete(action)
            if due == core.next_due(self.fleet):
                self.now += 0.001
        self.now = max(self.now, end)
        self.do(Tick())

    def drift(self, name: str) -> None:
        """Tell the core what the unit is now."""
        self.do(UnitChanged(name, self.engines[name].status()))

    # --- looking ---

    def replica(self, name="a") -> Replica:
        return self.fleet.replicas[name]

    def life(self, name="a") -> Life:
        return self.replica(name).life

    def noted(self, kind: NoteKind) -> int:
        return sum(1 for note in self.notes if note.kind is kind)

    def pending_of(self, kind: type) -> list:
        return [action for action in self.pending if isinstance(action, kind)]


LADDER = IdleLadder(sleep1=600, sleep2=3600, stop=28800)


def ready_world(**options) -> World:
    """One replica, ready, with the usual ladder; ``options`` as for ``model``."""
    world = World(model(idle=options.pop("idle", LADDER), **options), running=("a",))
    world.run()
    assert world.life() is Life.READY
    return world


def asleep_world(level=1, **options) -> World:
    """The same, asleep at ``level``."""
    world = ready_world(**options)
    ticket = world.command("a", Verb.SLEEP, level)
    world.run()
    assert world.answers[ticket].failure is None
    assert world.life() is Life.ASLEEP
    return world


__all__ = [
    "LADDER",
    "Action",
    "Answer",
    "Call",
    "CallEngine",
    "Command",
    "Configured",
    "EngineState",
    "FakeEngine",
    "IdleLadder",
    "Life",
    "Phase",
    "Probe",
    "Record",
    "Refuse",
    "ShutDown",
    "SupervisorSpec",
    "Verb",
    "WakeLimits",
    "World",
    "asleep_world",
    "model",
    "ready_world",
]
