"""What the outside may see of the fleet: frozen snapshots for D-Bus, vllmctl and the status line.

Times are seconds; instants are seconds since the epoch (0.0: never).
"""

from __future__ import annotations

from dataclasses import dataclass

from supervisord.core.admission import Running
from supervisord.core.fleet import Fleet, Model
from supervisord.core.replica import Replica
from supervisord.core.states import Health, Hold, Life


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica."""

    name: str
    model: str
    state: Life
    #: 0 unless asleep or falling asleep; 1 or 2.
    sleep_level: int
    health: Health
    hold: Hold
    #: The step of the sequence under way, in words (``reload_weights``), or empty.
    step: str
    unit: str
    endpoint: str
    gpus: tuple[int, ...]
    in_flight: int
    #: Why it failed last, one line; empty when nothing ever did.
    last_error: str
    state_since: float
    idle_since: float
    #: How long the last wake and the last start took, seconds; 0.0 before the first.
    wake_seconds: float
    start_seconds: float
    max_model_len: int
    served_names: tuple[str, ...]
    simulated: bool
    can_sleep: bool
    #: When a failed replica may be tried again; 0.0 when no back-off runs.
    retry_at: float


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model: the sum of its replicas."""

    name: str
    aliases: tuple[str, ...]
    routing: str
    #: The state of its best replica (ready before waking before starting before asleep before stopped before failed).
    state: Life
    held: bool
    in_flight: int
    waiting: int
    #: Since when no request has been in flight or waiting; 0.0 while one is.
    idle_since: float
    wake_seconds: float
    max_model_len: int
    replicas: tuple[str, ...]
    #: Names that its engines answer to and the configuration does not have: adapters.
    adapters: tuple[str, ...] = ()
    #: How many of those that wait are held until there is room in a KV cache.
    waiting_for_kv: int = 0


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything."""

    models: tuple[ModelView, ...]
    replicas: tuple[ReplicaView, ...]
    draining: bool

    def status_line(self) -> str:
        """Plain words for sd_notify's STATUS= and the head of ``vllmctl status``."""
        awake = sum(1 for replica in self.replicas if replica.state in (Life.READY, Life.DRAINING))
        parts = [f"{awake}/{len(self.replicas)} awake", f"{sum(m.in_flight for m in self.models)} in flight"]
        waiting = sum(m.waiting for m in self.models)
        if waiting:
            parts.append(f"{waiting} waiting")
        failed = [r.name for r in self.replicas if r.state is Life.FAILED]
        if failed:
            parts.append(f"failed: {', '.join(failed)}")
        if self.draining:
            parts.append("shutting down")
        return ", ".join(parts)


#: A model is in the state of its best replica.
_BEST_FIRST = (
    Life.READY,
    Life.WAKING,
    Life.STARTING,
    Life.DRAINING,
    Life.FALLING_ASLEEP,
    Life.ASLEEP,
    Life.STOPPING,
    Life.STOPPED,
    Life.FAILED,
)


#: States in which there is a process that listens.
_RUNNING = frozenset({Life.READY, Life.DRAINING, Life.FALLING_ASLEEP, Life.ASLEEP, Life.WAKING})


def look(fleet: Fleet, shift: float = 0.0) -> FleetView:
    """A snapshot of the whole fleet. ``shift``: what the epoch's clock shows more than the loop's, seconds."""
    return FleetView(
        tuple(_model_view(model, fleet, shift) for model in fleet.models.values()),
        tuple(_replica_view(replica, shift) for replica in fleet.replicas.values()),
        fleet.draining,
    )


def running(fleet: Fleet) -> list[Running]:
    """The replicas whose processes can be asked, whatever the engine in them does."""
    return [
        Running(model.name, replica.name, replica.spec.endpoint, replica.invocation, replica.served_names)
        for model in fleet.models.values()
        for replica in model.replicas
        if replica.life in _RUNNING
    ]


def _model_view(model: Model, fleet: Fleet, shift: float) -> ModelView:
    replicas = model.replicas
    idle_since = 0.0 if model.in_flight or model.waiting else max((r.idle_since for r in replicas), default=0.0)
    served = dict.fromkeys((*model.spec.adapters, *(name for r in replicas for name in r.adapters)))
    return ModelView(
        name=model.name,
        aliases=model.spec.aliases,
        routing=model.spec.routing,
        state=min((r.life for r in replicas), key=_BEST_FIRST.index, default=Life.STOPPED),
        held=bool(replicas) and all(r.hold is not Hold.NONE for r in replicas),
        in_flight=model.in_flight,
        waiting=len(model.waiting),
        idle_since=_shown(idle_since, shift),
        wake_seconds=max((r.last_wake_seconds for r in replicas), default=0.0),
        max_model_len=min((r.max_model_len for r in replicas if r.max_model_len), default=0),
        replicas=tuple(r.name for r in replicas),
        adapters=tuple(name for name in served if name not in fleet.names and fleet.serving(name) is not None),
        waiting_for_kv=len(model.held),
    )


def _replica_view(replica: Replica, shift: float) -> ReplicaView:
    step = replica.steps[replica.step_index].words if replica.steps else ""
    return ReplicaView(
        name=replica.name,
        model=replica.spec.model,
        state=replica.life,
        sleep_level=replica.level if replica.life in (Life.ASLEEP, Life.FALLING_ASLEEP) else 0,
        health=replica.health,
        hold=replica.hold,
        step=step,
        unit=replica.spec.unit,
        endpoint=replica.spec.endpoint,
        gpus=replica.spec.gpus,
        in_flight=replica.in_flight,
        last_error=replica.last_error,
        state_since=_shown(replica.since, shift),
        idle_since=_shown(replica.idle_since, shift),
        wake_seconds=replica.last_wake_seconds,
        start_seconds=replica.start_seconds,
        max_model_len=replica.max_model_len,
        served_names=replica.served_names,
        simulated=replica.simulated,
        can_sleep=replica.can_sleep,
        retry_at=_shown(replica.retry_at if replica.life is Life.FAILED else 0.0, shift),
    )


def _shown(instant: float, shift: float) -> float:
    return instant + shift if instant else 0.0
