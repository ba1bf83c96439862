"""The JSON that ``--json`` prints. These shapes are a contract: keys are added, never renamed or removed.

Instants are seconds since the epoch, durations are seconds; what never happened or is not known is null.
vllmctl(1) describes every key.
"""

from __future__ import annotations

from supervisord.bus.snapshot import (
    Change,
    DaemonLeft,
    DaemonReturned,
    FailoverSeen,
    FleetStatus,
    ManagerChange,
    ManagerStatus,
    ModelChange,
    ModelStatus,
    ReplicaChange,
    ReplicaStatus,
)

Shape = dict[str, object]


def fleet_shape(fleet: FleetStatus) -> Shape:
    """``vllmctl status``."""
    return {
        "daemon": manager_shape(fleet.manager),
        "models": [model_shape(model) for model in fleet.models],
        "replicas": [replica_shape(replica) for replica in fleet.replicas],
    }


def manager_shape(manager: ManagerStatus) -> Shape:
    return {
        "version": manager.version,
        "status": manager.status,
        "draining": manager.draining,
        "simulated": manager.simulated,
        "listen": list(manager.listen),
        "config_files": list(manager.config_files),
        "state_directory": manager.state_directory,
    }


def model_shape(model: ModelStatus) -> Shape:
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "state": model.state,
        "held": model.held,
        "routing": model.routing,
        "in_flight": model.in_flight,
        "waiting": model.waiting,
        "waiting_for_kv": model.waiting_for_kv,
        "idle_since": model.idle_since or None,
        "wake_seconds": model.wake_seconds or None,
        "max_model_len": model.max_model_len or None,
        "replicas": list(model.replicas),
    }


def replica_shape(replica: ReplicaStatus) -> Shape:
    return {
        "name": replica.name,
        "model": replica.model,
        "state": replica.state,
        "sleep_level": replica.sleep_level,
        "step": replica.step,
        "health": replica.health,
        "hold": replica.hold,
        "unit": replica.unit,
        "endpoint": replica.endpoint,
        "gpus": list(replica.gpus),
        "in_flight": replica.in_flight,
        "last_error": replica.last_error,
        "state_since": replica.state_since or None,
        "idle_since": replica.idle_since or None,
        "wake_seconds": replica.wake_seconds or None,
        "start_seconds": replica.start_seconds or None,
        "retry_at": replica.retry_at or None,
        "max_model_len": replica.max_model_len or None,
        "served_names": list(replica.served_names),
        "simulated": replica.simulated,
        "can_sleep": replica.can_sleep,
    }


def change_shape(change: Change, now: float) -> Shape:
    """One line of ``vllmctl watch --json``: what changed, and the whole object as it is now (null: it went)."""
    if isinstance(change, ReplicaChange):
        return _object_change(
            now,
            "replica",
            replica_shape(change.before) if change.before else None,
            replica_shape(change.after) if change.after else None,
        )
    if isinstance(change, ModelChange):
        return _object_change(
            now,
            "model",
            model_shape(change.before) if change.before else None,
            model_shape(change.after) if change.after else None,
        )
    if isinstance(change, ManagerChange):
        return _object_change(now, "daemon", manager_shape(change.before), manager_shape(change.after))
    if isinstance(change, FailoverSeen):
        return {
            "time": now,
            "event": "failover",
            "model": change.model,
            "source": change.source,
            "target": change.target or None,
            "reason": change.reason,
        }
    if isinstance(change, DaemonReturned):
        return {"time": now, "event": "daemon-returned", **fleet_shape(change.fleet)}
    assert isinstance(change, DaemonLeft)
    return {"time": now, "event": "daemon-left"}


def _object_change(now: float, event: str, before: Shape | None, after: Shape | None) -> Shape:
    either = after or before or {}
    changed = [] if before is None or after is None else [key for key in after if after[key] != before[key]]
    return {"time": now, "event": event, "name": either.get("name"), "changed": changed, "value": after}
