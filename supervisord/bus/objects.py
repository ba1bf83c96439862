"""What is exported: the fleet's snapshot as objects with property values, and the difference of two such readings.

Pure: no bus, no clock. Values are plain Python values in the types that the XML gives each property.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from supervisord.bus.names import (
    MANAGER_INTERFACE,
    MODEL_INTERFACE,
    REPLICA_INTERFACE,
    ROOT_PATH,
    model_path,
    replica_path,
)
from supervisord.core.view import FleetView, ModelView, ReplicaView

#: What a property can be: a basic value, or an array of them.
Value = str | int | bool | list[str] | list[int]


@dataclass(frozen=True, slots=True)
class ManagerFacts:
    """What the Manager tells beyond the fleet's state."""

    version: str
    #: ``host:port`` of every socket that accepts requests.
    listen: tuple[str, ...]
    config_files: tuple[str, ...]
    state_directory: str
    #: The configuration names the simulator as an engine; replicas found to be simulated count too.
    simulated: bool


@dataclass(frozen=True, slots=True)
class Exported:
    """One object: the model's or replica's name (empty for the Manager), its interface and its properties."""

    name: str
    interface: str
    values: Mapping[str, Value]


#: Objects by path.
Tree = Mapping[str, Exported]


@dataclass(frozen=True, slots=True)
class Difference:
    """From one tree to the next. Paths are in the order in which clients should hear of them."""

    removed: tuple[str, ...]
    added: tuple[str, ...]
    #: The properties whose values differ, of objects that are in both.
    changed: Mapping[str, Mapping[str, Value]]


def tree_of(view: FleetView, facts: ManagerFacts) -> Tree:
    """Every object that there is to see now, the Manager first."""
    objects = {ROOT_PATH: Exported("", MANAGER_INTERFACE, _manager(view, facts))}
    for model in view.models:
        objects[model_path(model.name)] = Exported(model.name, MODEL_INTERFACE, _model(model))
    for replica in view.replicas:
        objects[replica_path(replica.name)] = Exported(replica.name, REPLICA_INTERFACE, _replica(replica))
    return objects


def difference(old: Tree, new: Tree) -> Difference:
    """What clients that know ``old`` must be told to know ``new``."""
    changed = {}
    for path, exported in new.items():
        if path in old and exported.values != old[path].values:
            before = old[path].values
            changed[path] = {name: value for name, value in exported.values.items() if value != before[name]}
    return Difference(
        removed=tuple(path for path in old if path not in new),
        added=tuple(path for path in new if path not in old),
        changed=changed,
    )


def _manager(view: FleetView, facts: ManagerFacts) -> dict[str, Value]:
    return {
        "Version": facts.version,
        "Draining": view.draining,
        "Simulated": facts.simulated or any(replica.simulated for replica in view.replicas),
        "Status": view.status_line(),
        "Listen": list(facts.listen),
        "ConfigFiles": list(facts.config_files),
        "StateDirectory": facts.state_directory,
    }


def _model(model: ModelView) -> dict[str, Value]:
    return {
        "Name": model.name,
        "Aliases": list(model.aliases),
        "State": model.state.value,
        "Held": model.held,
        "Routing": model.routing,
        "InFlight": model.in_flight,
        "Waiting": model.waiting,
        "WaitingForKV": model.waiting_for_kv,
        "IdleSinceUSec": microseconds(model.idle_since),
        "WakeUSec": microseconds(model.wake_seconds),
        "MaxModelLen": model.max_model_len,
        "Replicas": [replica_path(name) for name in model.replicas],
    }


def _replica(replica: ReplicaView) -> dict[str, Value]:
    return {
        "Name": replica.name,
        "Model": replica.model,
        "ModelPath": model_path(replica.model),
        "State": replica.state.value,
        "SleepLevel": replica.sleep_level,
        "Step": replica.step,
        "Health": replica.health.value,
        "Hold": replica.hold.value,
        "Unit": replica.unit,
        "Endpoint": replica.endpoint,
        "Gpus": list(replica.gpus),
        "InFlight": replica.in_flight,
        "LastError": replica.last_error,
        "StateSinceUSec": microseconds(replica.state_since),
        "IdleSinceUSec": microseconds(replica.idle_since),
        "WakeUSec": microseconds(replica.wake_seconds),
        "StartUSec": microseconds(replica.start_seconds),
        "RetryAtUSec": microseconds(replica.retry_at),
        "MaxModelLen": replica.max_model_len,
        "ServedNames": list(replica.served_names),
        "Simulated": replica.simulated,
        "CanSleep": replica.can_sleep,
    }


def microseconds(seconds: float) -> int:
    """systemd's unit for times on the bus; a moment before the epoch (or a clock set back) is 0, never."""
    return max(0, round(seconds * 1_000_000))
