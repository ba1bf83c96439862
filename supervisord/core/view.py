"""What the outside may see of the fleet: frozen snapshots for D-Bus, vllmctl and the status line.

Times are seconds; instants are seconds since the epoch (0.0: never).
"""

from __future__ import annotations

from dataclasses import dataclass

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
