"""The state of everything: models, their replicas, who waits and who is in flight. Data and look-ups only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from supervisord.core.actions import Action, Note, NoteKind
from supervisord.core.admission import Chooser, NotYet
from supervisord.core.replica import Goal, Replica
from supervisord.core.spec import ModelSpec, SupervisorSpec
from supervisord.core.states import Cause, Life, advance


@dataclass(slots=True)
class Waiter:
    """One queued request."""

    ticket: int
    choose: Chooser
    #: Replicas that failed it, with the generation they had: after a restart they may be tried again.
    excluded: Mapping[str, int]
    deadline: float
    #: The only replicas that may have it; None: any.
    only: frozenset[str] | None = None

    def may_have(self, replica: Replica) -> bool:
        """Whether that replica could be given the request, were it ready."""
        wanted = self.only is None or replica.name in self.only
        return wanted and self.excluded.get(replica.name) != replica.generation


@dataclass(slots=True)
class Model:
    """One model; ``waiting`` is in order of arrival."""

    spec: ModelSpec
    replicas: list[Replica]
    waiting: dict[int, Waiter] = field(default_factory=dict)
    #: Tickets of those who wait for certain replicas only; some may not wait any more.
    picky: list[int] = field(default_factory=list)
    #: Those of them whose policy wants them to wait although a replica could have them, by ticket.
    held: dict[int, NotYet] = field(default_factory=dict)
    #: When the policy is asked again about those, at the latest.
    ask_at: float = 0.0
    #: Running mean of the time a request takes, seconds; 0.0 before the first.
    service_seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    def serving(self, name: str) -> frozenset[str]:
        """The replicas that answer to ``name``, as they said themselves or by their command line."""
        declared = name in self.spec.adapters
        return frozenset(r.name for r in self.replicas if name in r.adapters or (declared and r.spec.bundled))

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica in self.replicas)

    def leave_queue(self, ticket: int) -> Waiter | None:
        """Nobody waits under ``ticket`` any more; None when nobody did."""
        self.held.pop(ticket, None)
        return self.waiting.pop(ticket, None)


class OpenLease(NamedTuple):
    """What is remembered of a lease until it is returned."""

    model: str
    replica: Replica
    generation: int
    began: float


@dataclass(slots=True)
class Fleet:
    """Owned by one dispatcher; changed only by ``step`` and the admission functions, in place and synchronously."""

    supervisor: SupervisorSpec = field(default_factory=SupervisorSpec)
    models: dict[str, Model] = field(default_factory=dict)
    #: Model names and aliases.
    names: dict[str, Model] = field(default_factory=dict)
    #: Every replica, those that are leaving included.
    replicas: dict[str, Replica] = field(default_factory=dict)
    leases: dict[int, OpenLease] = field(default_factory=dict)
    draining: bool = False
    last_id: int = 0

    def next_id(self) -> int:
        """A number never used before, for operations, tickets and leases."""
        self.last_id += 1
        return self.last_id

    def nap_fits(self, replica: Replica) -> bool:
        """Whether host RAM has room for its weights at level 1, beside those of the other sleepers."""
        limit, need = self.supervisor.nap_memory, replica.spec.nap_memory
        if limit is None or need is None:
            return True
        napping = (Life.ASLEEP, Life.FALLING_ASLEEP, Life.WAKING)
        used = sum(
            other.spec.nap_memory or 0
            for other in self.replicas.values()
            if other is not replica
            # One that is still on its way there has its room already.
            and (other.goal is Goal.SLEEP1 or (other.level == 1 and other.life in napping))
        )
        return used + need <= limit

    def serving(self, name: str) -> tuple[Model, frozenset[str]] | None:
        """The model and the replicas whose engines answer to ``name``, which is no configured one: an adapter's.

        None where no model has it, or several do: which one was meant would be a guess.
        """
        found = [(model, names) for model in self.models.values() if (names := model.serving(name))]
        return found[0] if len(found) == 1 else None

    def model_of(self, replica: Replica) -> Model | None:
        """None for a replica that is leaving a model that is gone."""
        return self.models.get(replica.spec.model)


@dataclass(slots=True)
class Turn:
    """One event being handled: the state, the time, and what is to be done about it."""

    fleet: Fleet
    now: float
    actions: list[Action] = field(default_factory=list)

    def advance(self, replica: Replica, cause: Cause) -> None:
        """Move along the table; whatever look was under way is about the past from here on."""
        replica.life = advance(replica.name, replica.life, cause)
        replica.since = self.now
        replica.probe_op = 0

    def expect(self, replica: Replica, seconds: float) -> int:
        """A new operation number for ``replica`` that must be answered within ``seconds``."""
        replica.op = self.fleet.next_id()
        replica.op_deadline = self.now + seconds
        return replica.op

    def forget_operation(self, replica: Replica) -> None:
        """Whatever was awaited is no longer."""
        replica.op, replica.op_deadline, replica.steps, replica.step_index = 0, None, (), 0

    def note(
        self,
        kind: NoteKind,
        replica: Replica,
        message: str,
        *,
        warning: bool = False,
        level: int = 0,
        seconds: float | None = None,
    ) -> None:
        self.actions.append(Note(kind, replica.spec.model, replica.name, message, warning, level, seconds))
