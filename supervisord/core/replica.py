"""One replica's state, as the core keeps it, and the questions it can answer about itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from supervisord.core.admission import Candidate
from supervisord.core.canary import Fingerprint
from supervisord.core.idle import Rung
from supervisord.core.readings import UnitStatus
from supervisord.core.record import Record
from supervisord.core.sequences import Step
from supervisord.core.spec import ReplicaSpec
from supervisord.core.states import Health, Hold, Life

# What is asked of every replica for every request. (A member of an Enum takes longer to look up than a call takes.)
_READY, _NOT_HELD = Life.READY, Hold.NONE

#: States in which something is being done to the GPU; at most one replica of a GPU is in one of them.
OPERATING = frozenset({Life.STARTING, Life.FALLING_ASLEEP, Life.WAKING, Life.STOPPING})
#: States in which the engine can be asked.
ANSWERING = frozenset({Life.READY, Life.DRAINING, Life.ASLEEP})


class Goal(StrEnum):
    """Where a replica is being brought. Cleared when reached, failed or replaced."""

    AWAKE = "awake"
    SLEEP1 = "sleep1"
    SLEEP2 = "sleep2"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    DRAINED = "drained"

    @property
    def level(self) -> int:
        """The sleep level wanted; 0 for anything but a sleep."""
        return {Goal.SLEEP1: 1, Goal.SLEEP2: 2}.get(self, 0)


#: A goal as the rung that it leads to.
GOAL_OF_RUNG = {Rung.SLEEP1: Goal.SLEEP1, Rung.SLEEP2: Goal.SLEEP2, Rung.STOPPED: Goal.STOPPED}


@dataclass(slots=True)
class Replica:
    """Mutable, but only inside ``step`` and the admission calls of fleet.py. Times are the loop's clock, seconds."""

    spec: ReplicaSpec
    life: Life = Life.STOPPED
    since: float = 0.0
    health: Health = Health.OK
    hold: Hold = Hold.NONE

    #: Sleep level while asleep, falling asleep or waking; 0 otherwise.
    level: int = 0
    #: Grows whenever the prefix cache is lost.
    generation: int = 0
    in_flight: int = 0
    #: Last completion, or ready for a reason that counts.
    idle_since: float = 0.0
    #: Last sign of the engine doing its work.
    progress_at: float = 0.0

    goal: Goal | None = None
    #: Since when it is wanted awake; when to look for room on its GPUs again; for whom it makes room itself.
    wanted_since: float = 0.0
    room_at: float | None = None
    yields_to: str = ""
    #: Commands answered when the goal ends.
    tickets: list[int] = field(default_factory=list)

    #: The result that is awaited; 0: none. Results with another number are stale.
    op: int = 0
    op_deadline: float | None = None
    steps: tuple[Step, ...] = ()
    step_index: int = 0
    op_began: float = 0.0
    #: The job of this STARTING or STOPPING has ended, so readings of the unit are about its result.
    job_ended: bool = False

    #: None until the first reading.
    unit: UnitStatus | None = None
    #: The unit's invocation that readiness or sleep was seen in; another one means a restart behind our back.
    known_invocation: str = ""
    #: The run that a job of ours has put an end to: what is still told of it is late.
    past_invocation: str = ""
    record: Record | None = None
    #: When the record is written once more: the last write failed.
    save_at: float | None = None

    #: When to look at the engine again, and the number of the look under way (0: none).
    probe_at: float | None = None
    probe_op: int = 0
    #: Looks in a row that found the engine wanting, and since when.
    misses: int = 0
    missing_since: float = 0.0
    #: What the engine's token counters said at the last miss.
    progress: int | None = None
    #: Requests that failed there in a row; when the next one may be tried, and whether one is being tried.
    strikes: int = 0
    trial_at: float = 0.0
    trial_lease: int = 0
    looked: bool = False

    #: Failed starts and wakes in a row; restarts of the unit since it was last ready.
    failures: int = 0
    escalations: int = 0
    retry_at: float = 0.0
    #: When the unit of a failed replica is stopped if it is still up: it holds GPUs that others need.
    sweep_at: float | None = None
    #: Until then the failed unit's last lines are awaited; 0.0: not.
    autopsy_until: float = 0.0
    last_error: str = ""
    #: The idle ladder is left alone until then: the last rest could not be begun.
    rest_at: float = 0.0
    #: Sleep was tried in this invocation and did not do what it says: only stop from now on.
    sleep_broken: bool = False
    #: All that the configuration says of how a bundled one is started, and whether it changed under a running engine,
    #: which is restarted when that disturbs nobody.
    command: object = None
    stale: bool = False
    #: What one whose command changed was started with; None: not known.
    runs: object = None
    #: What a whole engine of ours answers, and the unit's invocation it was taken in.
    fingerprint: Fingerprint | None = None
    fingerprint_of: str = ""
    #: The run whose engine has no route that a fingerprint could be taken through.
    no_canary_of: str = ""
    #: No longer configured: goes when nothing is in flight and (bundled) its unit is down.
    leaving: bool = False

    wake_seconds: dict[int, float] = field(default_factory=dict)
    start_seconds: float = 0.0
    last_wake_seconds: float = 0.0
    served_names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len: int = 0
    #: What its KV cache holds, in tokens; 0: not told.
    kv_tokens: int = 0
    can_sleep: bool = True
    simulated: bool = False
    #: What policies were told of it last.
    told: Candidate | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def routable(self) -> bool:
        """May get a request now."""
        return self.life is _READY and self.hold is _NOT_HELD

    def as_candidate(self) -> Candidate:
        """As a policy sees it: the same object for as long as nothing of it changes."""
        told = self.told
        if (
            told is None
            or told.in_flight != self.in_flight
            or told.generation != self.generation
            or told.kv_tokens != (self.kv_tokens or None)
        ):
            told = self.told = Candidate(self.spec.name, self.in_flight, self.generation, self.kv_tokens or None)
        return told

    @property
    def coming(self) -> bool:
        """Will be routable without anything more being decided."""
        if self.hold is not Hold.NONE or self.goal in (Goal.STOPPED, Goal.SLEEP1, Goal.SLEEP2, Goal.DRAINED):
            return False
        return self.life in (Life.STARTING, Life.WAKING) or self.goal in (Goal.AWAKE, Goal.RESTARTED)

    @property
    def sleeps_well(self) -> bool:
        return self.can_sleep and not self.sleep_broken

    @property
    def unit_up(self) -> bool:
        return self.unit is not None and self.unit.active_state in ("active", "reloading")

    @property
    def invocation(self) -> str:
        return self.unit.invocation if self.unit is not None else ""

    @property
    def rung(self) -> Rung:
        """How deep it rests."""
        if self.life is Life.ASLEEP:
            return Rung.SLEEP1 if self.level == 1 else Rung.SLEEP2
        return Rung.STOPPED if self.life in (Life.STOPPED, Life.FAILED) else Rung.AWAKE

    @property
    def occupies_gpu(self) -> bool:
        """Something is being done to its GPUs; a failed unit that is still up counts too."""
        return self.life in OPERATING or (
            self.life is Life.FAILED and self.unit is not None and self.unit.active_state not in ("inactive", "failed")
        )

    def may_retry(self, now: float) -> bool:
        """A failed replica may be tried again."""
        return self.life is not Life.FAILED or now >= self.retry_at

    def shares_gpu_with(self, others: Iterable[Replica]) -> Replica | None:
        """The other replica that is doing something on one of this one's GPUs, if any."""
        mine = set(self.spec.gpus)
        for other in others:
            if other is not self and other.occupies_gpu and mine.intersection(other.spec.gpus):
                return other
        return None
