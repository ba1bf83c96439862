"""What a client sees of the fleet over D-Bus, as plain frozen values, and the mirror that signals keep current.

The fields mirror ``supervisord/core/view.py``; on the bus durations and instants are microseconds, here they are
seconds (instants since the epoch, 0.0: never). A property that an older supervisor does not have reads as empty.
No D-Bus library is needed here: values come in unwrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from supervisord.bus import names

#: The properties of one interface; and all of them, by object path and interface, as GetManagedObjects has them.
Properties = Mapping[str, object]
Objects = dict[str, dict[str, dict[str, object]]]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica; see ``ReplicaView`` for the meaning of each field."""

    name: str
    model: str
    state: str
    sleep_level: int
    step: str
    health: str
    hold: str
    unit: str
    endpoint: str
    gpus: tuple[int, ...]
    in_flight: int
    last_error: str
    state_since: float
    idle_since: float
    wake_seconds: float
    start_seconds: float
    retry_at: float
    max_model_len: int
    served_names: tuple[str, ...]
    simulated: bool
    can_sleep: bool
    path: str


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model; see ``ModelView`` for the meaning of each field."""

    name: str
    aliases: tuple[str, ...]
    state: str
    held: bool
    routing: str
    in_flight: int
    waiting: int
    idle_since: float
    wake_seconds: float
    max_model_len: int
    #: Names, not object paths.
    replicas: tuple[str, ...]
    path: str
    waiting_for_kv: int = 0


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """The supervisor itself."""

    version: str
    draining: bool
    simulated: bool
    status: str
    listen: tuple[str, ...]
    config_files: tuple[str, ...]
    state_directory: str


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """Everything, at one moment. Models are in the order of their names, replicas in their model's order."""

    manager: ManagerStatus
    models: tuple[ModelStatus, ...]
    replicas: tuple[ReplicaStatus, ...]

    def replicas_of(self, model: str) -> tuple[ReplicaStatus, ...]:
        return tuple(replica for replica in self.replicas if replica.model == model)


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A replica appeared (``before`` is None), changed, or went (``after`` is None)."""

    before: ReplicaStatus | None
    after: ReplicaStatus | None


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A model appeared (``before`` is None), changed, or went (``after`` is None)."""

    before: ModelStatus | None
    after: ModelStatus | None


@dataclass(frozen=True, slots=True)
class ManagerChange:
    """The supervisor's own properties changed."""

    before: ManagerStatus
    after: ManagerStatus


@dataclass(frozen=True, slots=True)
class FailoverSeen:
    """The signal Failover."""

    model: str
    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class DaemonLeft:
    """The supervisor gave up its bus name: it stopped, or it is restarting."""


@dataclass(frozen=True, slots=True)
class DaemonReturned:
    """The supervisor owns its bus name again; the mirror was read anew."""

    fleet: FleetStatus


Change = ReplicaChange | ModelChange | ManagerChange | FailoverSeen | DaemonLeft | DaemonReturned


class Mirror:
    """The supervisor's objects as last heard of. Fed with GetManagedObjects once, then with signals."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def fleet(self) -> FleetStatus:
        models = [self._model(path) for path in self._objects]
        replicas = [self._replica(path) for path in self._objects]
        known = sorted((model for model in models if model is not None), key=lambda model: model.name)
        place = {(model.name, name): spot for model in known for spot, name in enumerate(model.replicas)}
        return FleetStatus(
            manager=self._manager(),
            models=tuple(known),
            replicas=tuple(
                sorted(
                    (replica for replica in replicas if replica is not None),
                    key=lambda each: (each.model, place.get((each.model, each.name), len(place)), each.name),
                )
            ),
        )

    def properties_changed(self, path: str, interface: str, changed: Properties) -> Change | None:
        """Apply one PropertiesChanged; None when it told nothing new."""
        before = self._read(path, interface)
        self._objects.setdefault(path, {}).setdefault(interface, {}).update(changed)
        return _difference(before, self._read(path, interface))

    def interfaces_added(self, path: str, interfaces: Mapping[str, Properties]) -> list[Change]:
        """Apply one InterfacesAdded."""
        before = {interface: self._read(path, interface) for interface in interfaces}
        for interface, properties in interfaces.items():
            self._objects.setdefault(path, {})[interface] = dict(properties)
        changes = [_difference(before[interface], self._read(path, interface)) for interface in interfaces]
        return [change for change in changes if change is not None]

    def interfaces_removed(self, path: str, interfaces: list[str]) -> list[Change]:
        """Apply one InterfacesRemoved."""
        changes: list[Change] = []
        for interface in interfaces:
            before = self._read(path, interface)
            self._objects.get(path, {}).pop(interface, None)
            change = _difference(before, self._read(path, interface))
            if change is not None:
                changes.append(change)
        if not self._objects.get(path, True):
            del self._objects[path]
        return changes

    def _read(self, path: str, interface: str) -> ReplicaStatus | ModelStatus | ManagerStatus | None:
        if interface == names.REPLICA_INTERFACE:
            return self._replica(path)
        if interface == names.MODEL_INTERFACE:
            return self._model(path)
        if interface == names.MANAGER_INTERFACE:
            return self._manager()
        return None

    def _manager(self) -> ManagerStatus:
        values = self._objects.get(names.ROOT_PATH, {}).get(names.MANAGER_INTERFACE, {})
        return ManagerStatus(
            version=_text(values, "Version"),
            draining=bool(values.get("Draining", False)),
            simulated=bool(values.get("Simulated", False)),
            status=_text(values, "Status"),
            listen=_texts(values, "Listen"),
            config_files=_texts(values, "ConfigFiles"),
            state_directory=_text(values, "StateDirectory"),
        )

    def _model(self, path: str) -> ModelStatus | None:
        values = self._objects.get(path, {}).get(names.MODEL_INTERFACE)
        if values is None:
            return None
        return ModelStatus(
            name=_text(values, "Name"),
            aliases=_texts(values, "Aliases"),
            state=_text(values, "State"),
            held=bool(values.get("Held", False)),
            routing=_text(values, "Routing"),
            in_flight=_count(values, "InFlight"),
            waiting=_count(values, "Waiting"),
            idle_since=_seconds(values, "IdleSinceUSec"),
            wake_seconds=_seconds(values, "WakeUSec"),
            max_model_len=_count(values, "MaxModelLen"),
            replicas=tuple(self._replica_name(replica) for replica in _texts(values, "Replicas")),
            path=path,
            waiting_for_kv=_count(values, "WaitingForKV"),
        )

    def _replica_name(self, path: str) -> str:
        values = self._objects.get(path, {}).get(names.REPLICA_INTERFACE, {})
        return _text(values, "Name") or names.unescape(path.rpartition("/")[2])

    def _replica(self, path: str) -> ReplicaStatus | None:
        values = self._objects.get(path, {}).get(names.REPLICA_INTERFACE)
        if values is None:
            return None
        return ReplicaStatus(
            name=_text(values, "Name"),
            model=_text(values, "Model"),
            state=_text(values, "State"),
            sleep_level=_count(values, "SleepLevel"),
            step=_text(values, "Step"),
            health=_text(values, "Health"),
            hold=_text(values, "Hold"),
            unit=_text(values, "Unit"),
            endpoint=_text(values, "Endpoint"),
            gpus=tuple(gpu for gpu in _list(values, "Gpus") if isinstance(gpu, int)),
            in_flight=_count(values, "InFlight"),
            last_error=_text(values, "LastError"),
            state_since=_seconds(values, "StateSinceUSec"),
            idle_since=_seconds(values, "IdleSinceUSec"),
            wake_seconds=_seconds(values, "WakeUSec"),
            start_seconds=_seconds(values, "StartUSec"),
            retry_at=_seconds(values, "RetryAtUSec"),
            max_model_len=_count(values, "MaxModelLen"),
            served_names=_texts(values, "ServedNames"),
            simulated=bool(values.get("Simulated", False)),
            can_sleep=bool(values.get("CanSleep", False)),
            path=path,
        )


def _difference(
    before: ReplicaStatus | ModelStatus | ManagerStatus | None,
    after: ReplicaStatus | ModelStatus | ManagerStatus | None,
) -> Change | None:
    """The change from one reading of an object to the next; both are readings of the same interface."""
    if before == after:
        return None
    either = after if after is not None else before
    if isinstance(either, ReplicaStatus):
        return ReplicaChange(_as_replica(before), _as_replica(after))
    if isinstance(either, ModelStatus):
        return ModelChange(_as_model(before), _as_model(after))
    if isinstance(before, ManagerStatus) and isinstance(after, ManagerStatus):
        return ManagerChange(before, after)
    return None


def _as_replica(status: object) -> ReplicaStatus | None:
    return status if isinstance(status, ReplicaStatus) else None


def _as_model(status: object) -> ModelStatus | None:
    return status if isinstance(status, ModelStatus) else None


def _text(values: Properties, key: str) -> str:
    value = values.get(key, "")
    return value if isinstance(value, str) else ""


def _list(values: Properties, key: str) -> list[object]:
    value = values.get(key, [])
    return value if isinstance(value, list) else []


def _texts(values: Properties, key: str) -> tuple[str, ...]:
    return tuple(item for item in _list(values, key) if isinstance(item, str))


def _count(values: Properties, key: str) -> int:
    value = values.get(key, 0)
    return value if isinstance(value, int) else 0


def _seconds(values: Properties, key: str) -> float:
    return _count(values, key) / 1e6
