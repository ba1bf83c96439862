"""Random histories against the invariants: everything that can happen, in any order, checked after every step.

A failing run prints the shortest history that Hypothesis finds; it is reproduced with the printed @reproduce_failure
line or seed.
"""

from collections.abc import Mapping

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from world import Call, CallEngine, EngineState, IdleLadder, Life, Phase, SupervisorSpec, Verb, WakeLimits, World, model

from supervisord.core import step as core
from supervisord.core.actions import Persist, ProbeEngine, RunUnitJob, UnitVerb
from supervisord.core.admission import Choice, Ending, Lease, NotYet, Refuse
from supervisord.core.arbitration import fits
from supervisord.core.events import Configured
from supervisord.core.replica import OPERATING

GPUS = {"a": (0,), "b": (1,), "c": (1,), "d": (0, 1)}
IDLE = IdleLadder(sleep1=60, sleep2=300, stop=900)
WAKE = WakeLimits(timeout=120, max_waiting=4)
MODELS = (
    model("chat", ("a", "b"), GPUS, IDLE, WAKE, memory=45, nap=40),
    model("embed", ("c",), GPUS, IDLE, WAKE, memory=45, nap=40),
    model("big", ("d",), GPUS, IdleLadder(), WAKE, memory=80),
)
NAMES = ("a", "b", "c", "d")
ROOM = SupervisorSpec(gpu_memory=100, nap_memory=100, min_residency=30, make_room_after=20)


class CheckedWorld(World):
    """Checks what must hold at the moment of an action or a lease."""

    #: How each replica was before the step whose actions are looked at.
    lives: Mapping[str, Life] = {}

    #: Replicas whose start, if they are starting, was asked for by the core: others come up by themselves, or by hand.
    started: set[str]

    def __init__(self, *models, **options):
        self.started = set()
        super().__init__(*models, **options)

    def do(self, event):
        self.lives = {name: replica.life for name, replica in self.fleet.replicas.items()}
        super().do(event)
        starting = {name for name, replica in self.fleet.replicas.items() if replica.life is Life.STARTING}
        self.started &= starting

    def on_lease(self, lease):
        engine = self.engines[lease.replica]
        # Invariant 4. What somebody does by hand between two looks cannot be known: the rules do that to sleepers only.
        assert engine.whole, f"a request went to {lease.replica}, whose weights are not whole"
        assert self.replica(lease.replica).hold == "none"

    def on_action(self, action):
        replica = self.fleet.replicas.get(action.replica)
        if replica is None:
            return
        began = (
            (isinstance(action, RunUnitJob) and action.op and action.verb is not UnitVerb.RESTART)
            or (isinstance(action, CallEngine) and action.call is Call.SLEEP)
        )  # fmt: skip
        if isinstance(action, CallEngine) and action.call is Call.SLEEP:
            assert replica.in_flight == 0, "slept with requests in flight"  # invariant 2
            assert self.disk[action.replica].phase is Phase.FALLING_ASLEEP  # invariant 6
        if isinstance(action, CallEngine) and action.call is Call.WAKE_UP:
            assert self.disk[action.replica].phase is Phase.WAKING
        if isinstance(action, RunUnitJob) and action.op and action.verb is UnitVerb.STOP:
            # Of one that was given up what is left is stopped; its requests went in before, and hang there.
            given_up = self.lives.get(action.replica) is Life.FAILED
            assert replica.in_flight == 0 or given_up, "stopped with requests in flight"
        if isinstance(action, RunUnitJob) and action.op and action.verb is not UnitVerb.STOP:
            self.started.add(action.replica)
        if began:  # invariant 7; a unit that restarts by itself asks nobody
            mine = set(replica.spec.gpus)
            for other in self.fleet.replicas.values():
                ours = other.op and (other.life is not Life.STARTING or other.name in self.started)
                busy = other is not replica and other.life in OPERATING and ours
                assert not (busy and mine & set(other.spec.gpus)), f"{replica.name} and {other.name} at once on a GPU"
        if isinstance(action, RunUnitJob) and action.op and action.verb is UnitVerb.START:
            assert fits(self.fleet, replica), f"{replica.name} is started where there is no room"


class Histories(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = CheckedWorld(*MODELS, supervisor=ROOM, running=("a", "c"))
        self.tickets: set[int] = set()
        self.abandoned: set[int] = set()
        for engine in self.world.engines.values():
            engine.kv_tokens = 1000

    # --- clients ---

    def seat(self, candidates):
        """A policy for long requests: one at a time, and nobody is held where no KV is known of."""
        known = any(candidate.kv_tokens for candidate in candidates)
        if known and any(lease.reason == "seated" and lease.model == "chat" for lease in self.world.open.values()):
            return NotYet("held for KV", 5.0)
        return Choice(min(candidates, key=lambda c: (c.in_flight, c.name)).name, "seated")

    @rule(excluded=st.sets(st.sampled_from(NAMES), max_size=1))
    def a_long_request_arrives(self, excluded):
        answer = self.world.admit("chat", excluded, choose=self.seat)
        if isinstance(answer, int):
            self.tickets.add(answer)

    @rule(
        name=st.sampled_from(["chat", "embed", "big"]),
        excluded=st.sets(st.sampled_from(NAMES), max_size=2),
        only=st.none() | st.sets(st.sampled_from(NAMES), max_size=2),
    )
    def a_request_arrives(self, name, excluded, only):
        answer = self.world.admit(name, excluded, only)
        if isinstance(answer, Lease):
            assert only is None or answer.replica in only
        if isinstance(answer, int):
            self.tickets.add(answer)

    @rule(pick=st.integers(0, 50), ending=st.sampled_from(list(Ending)))
    def a_request_ends(self, pick, ending):
        leases = list(self.world.open.values())
        if leases:
            self.world.finish(leases[pick % len(leases)], ending)

    @rule(pick=st.integers(0, 50))
    def a_waiting_client_leaves(self, pick):
        waiting = sorted(self.tickets - self.world.outcomes.keys() - self.abandoned)
        if waiting:
            ticket = waiting[pick % len(waiting)]
            assert core.abandon(self.world.fleet, ticket)
            self.abandoned.add(ticket)

    # --- the world ---

    @rule(pick=st.integers(0, 50))
    def an_effect_ends_well(self, pick):
        if self.world.pending:
            self.world.complete(self.world.pending[pick % len(self.world.pending)])

    @rule(pick=st.integers(0, 50))
    def an_effect_fails(self, pick):
        pending = self.world.pending
        if pending:
            self.world.complete(pending[pick % len(pending)], error="it does not work")

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 61.0, 301.0, 1000.0]))
    def time_passes(self, seconds):
        self.world.later(seconds)

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["stop", "crash", "restart", "start"]))
    def somebody_uses_systemctl(self, name, how):
        engine = self.world.engines[name]
        if how in ("stop", "crash"):
            engine.stop("failed" if how == "crash" else "inactive")
        elif how == "restart" or engine.active != "active":
            engine.start()
        self.world.drift(name)

    @rule(name=st.sampled_from(NAMES))
    def an_engine_dies_silently(self, name):
        self.world.engines[name].answering = False

    @rule(name=st.sampled_from(NAMES))
    def somebody_wakes_a_sleeper_by_hand(self, name):
        if self.world.life(name) is Life.ASLEEP:
            self.world.engines[name].level = 0

    @rule(name=st.sampled_from(NAMES), lies=st.booleans(), fails=st.booleans())
    def an_engine_changes_its_manners(self, name, lies, fails):
        self.world.engines[name].sleep_lies = lies
        self.world.engines[name].starts_fail = fails

    # --- operators ---

    @rule(name=st.sampled_from(NAMES), verb=st.sampled_from(list(Verb)), level=st.sampled_from([1, 2]))
    def an_operator_commands(self, name, verb, level):
        self.world.command(name, verb, level)

    @rule()
    def the_configuration_is_read_again(self):
        self.world.do(Configured(MODELS, ROOM))

    # --- invariants ---

    @invariant()
    def leases_are_counted(self):
        for name in NAMES:
            held = sum(1 for lease in self.world.open.values() if lease.replica == name)
            assert self.world.replica(name).in_flight == held
        assert self.world.fleet.leases.keys() == self.world.open.keys()

    @invariant()
    def nobody_is_forgotten(self):
        waiting = {t for m in self.world.fleet.models.values() for t in m.waiting}
        assert self.tickets == waiting | (self.world.outcomes.keys() & self.tickets) | self.abandoned

    @invariant()
    def nobody_waits_for_a_replica_that_could_serve(self):
        for m in self.world.fleet.models.values():
            for waiter in (w for ticket, w in m.waiting.items() if ticket not in m.held):
                for r in m.replicas:
                    open_to = r.routable and r.health == "ok" and waiter.may_have(r)
                    assert not open_to, f"{waiter.ticket} waits beside {r.name}"

    @invariant()
    def who_is_held_waits_and_is_held_for_somebody(self):
        for m in self.world.fleet.models.values():
            assert m.held.keys() <= m.waiting.keys()
            if m.held:
                assert any(lease.reason == "seated" for lease in self.world.open.values())
                assert core.next_due(self.world.fleet) <= self.world.now + 1.0

    @invariant()
    def queues_are_bounded(self):
        assert all(len(m.waiting) <= WAKE.max_waiting for m in self.world.fleet.models.values())

    @invariant()
    def what_is_under_way_is_timed(self):
        for r in self.world.fleet.replicas.values():
            if r.life in OPERATING:
                assert r.op_deadline is not None, f"{r.name} is {r.life} for ever"
            if r.life in (Life.READY, Life.DRAINING, Life.ASLEEP):
                assert r.probe_at is not None, f"nobody looks at {r.name}"

    @precondition(lambda self: self.world.pending)
    @rule()
    def everything_comes_to_rest_when_the_world_behaves(self):
        self._behave()

    def teardown(self):
        for _ in range(4):
            self._behave()
            for lease in list(self.world.open.values()):
                self.world.finish(lease)
            self.world.later(400)
            self.world.run()
        waiting = [t for m in self.world.fleet.models.values() for t in m.waiting]
        assert not waiting
        assert all(r.in_flight == 0 for r in self.world.fleet.replicas.values())

    def _behave(self):
        for engine in self.world.engines.values():
            engine.sleep_lies = engine.starts_fail = False
            engine.answering = engine.active == "active"
        for _ in range(300):
            if not self.world.pending:
                break
            self.world.complete(self.world.pending[0])
        else:
            raise AssertionError(f"work without end: {self.world.pending}")


Histories.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHistories = Histories.TestCase

__all__ = ["EngineState", "Lease", "Persist", "ProbeEngine", "Refuse", "TestHistories"]
