"""What can be called on our objects, and what each call does.

``resolve`` finds the handler, or the caller's mistake in the specification's words; the handlers follow, the
specification's own interfaces first. The descriptions in ``xml/`` say which members there are and what they take.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from supervisord.bus import errors
from supervisord.bus.connection import Call, Variant, clean_text
from supervisord.bus.errors import CallFailed
from supervisord.bus.interfaces import (
    INTROSPECTABLE,
    OBJECT_MANAGER,
    PEER,
    PROPERTIES,
    STANDARD,
    Interface,
    introspection,
)
from supervisord.bus.names import (
    MANAGER_INTERFACE,
    MODEL_INTERFACE,
    REPLICA_INTERFACE,
    ROOT_PATH,
    model_path,
    replica_path,
)
from supervisord.bus.objects import Exported, Tree, Value
from supervisord.control import Control, ControlError, ErrorCode, Verb

#: The methods of models and replicas that are a plain verb. Sleep has a level and is apart.
_VERBS = {"Wake": Verb.WAKE, "Start": Verb.START, "Stop": Verb.STOP, "Restart": Verb.RESTART, "Drain": Verb.DRAIN}

#: Does one call's work and returns the body of the answer.
Handler = Callable[[Call], Awaitable[list[Any]]]


class Calls:
    """The methods of every object in the tree that ``tree`` returns at the time of the call."""

    def __init__(self, control: Control, interfaces: Mapping[str, Interface], tree: Callable[[], Tree]) -> None:
        self._control = control
        self._interfaces = interfaces
        self._tree = tree
        self._handlers: dict[tuple[str, str], Handler] = {
            (PEER, "Ping"): self._ping,
            (PEER, "GetMachineId"): self._machine_id,
            (INTROSPECTABLE, "Introspect"): self._introspect,
            (PROPERTIES, "Get"): self._get,
            (PROPERTIES, "GetAll"): self._get_all,
            (PROPERTIES, "Set"): self._set,
            (OBJECT_MANAGER, "GetManagedObjects"): self._managed_objects,
            (MANAGER_INTERFACE, "ListModels"): self._list_models,
            (MANAGER_INTERFACE, "ListReplicas"): self._list_replicas,
            (MANAGER_INTERFACE, "GetModel"): self._get_model,
            (MANAGER_INTERFACE, "GetReplica"): self._get_replica,
            (MANAGER_INTERFACE, "Reload"): self._reload,
        }
        for interface in (MODEL_INTERFACE, REPLICA_INTERFACE):
            for member in interfaces[interface].methods:
                self._handlers[interface, member] = self._command
        self._handlers[MODEL_INTERFACE, "ExplainRoute"] = self._explain_route

    def resolve(self, call: Call) -> tuple[Interface, Handler]:
        """The interface that ``call`` means and what does it, its arguments checked; raises ``CallFailed``."""
        here = self._interfaces_at(call.path)
        if not here:
            raise CallFailed(errors.UNKNOWN_OBJECT, f"there is no object {call.path}")
        if call.interface is not None and call.interface not in here:
            raise CallFailed(errors.UNKNOWN_INTERFACE, f"{call.path} has no interface {call.interface}")
        for name in here if call.interface is None else [call.interface]:
            method = self._interfaces[name].methods.get(call.member)
            if method is None:
                continue
            if method.takes != call.signature:
                text = f"{name}.{call.member} takes '{method.takes}', not '{call.signature}'"
                raise CallFailed(errors.INVALID_ARGS, text)
            return self._interfaces[name], self._handlers[name, call.member]
        raise CallFailed(errors.UNKNOWN_METHOD, f"{call.interface or call.path} has no method {call.member}")

    def _interfaces_at(self, path: str) -> list[str]:
        """Of an object, or of a path that only leads to objects; empty where there is neither."""
        exported = self._tree().get(path)
        if exported is not None:
            managing = [OBJECT_MANAGER] if path == ROOT_PATH else []
            return [exported.interface, PEER, INTROSPECTABLE, PROPERTIES, *managing]
        return [PEER, INTROSPECTABLE] if self._children(path) else []

    def _children(self, path: str) -> list[str]:
        """The nodes one level below ``path``."""
        prefix = path.rstrip("/") + "/"
        return sorted({below[len(prefix) :].split("/")[0] for below in self._tree() if below.startswith(prefix)})

    # ---- the specification's interfaces ----

    async def _ping(self, call: Call) -> list[Any]:
        return []

    async def _machine_id(self, call: Call) -> list[Any]:
        return [_read_machine_id()]

    async def _introspect(self, call: Call) -> list[Any]:
        here = [self._interfaces[name] for name in self._interfaces_at(call.path)]
        return [introspection(here, self._children(call.path))]

    async def _get(self, call: Call) -> list[Any]:
        interface, name = self._property(call)
        return [variant(interface.properties[name], self._tree()[call.path].values[name])]

    async def _get_all(self, call: Call) -> list[Any]:
        interface = self._property_interface(call)
        return [{} if interface.name in STANDARD else variants(interface, self._tree()[call.path])]

    async def _set(self, call: Call) -> list[Any]:
        interface, name = self._property(call)
        raise CallFailed(errors.PROPERTY_READ_ONLY, f"{interface.name}.{name} cannot be set")

    def _property(self, call: Call) -> tuple[Interface, str]:
        interface, name = self._property_interface(call), call.body[1]
        if name not in interface.properties:
            raise CallFailed(errors.UNKNOWN_PROPERTY, f"{interface.name} has no property {name}")
        return interface, name

    def _property_interface(self, call: Call) -> Interface:
        """The interface whose properties are meant; the specification lets a caller leave it empty."""
        name = call.body[0] or self._tree()[call.path].interface
        if name not in self._interfaces_at(call.path):
            raise CallFailed(errors.UNKNOWN_INTERFACE, f"{call.path} has no interface {name}")
        return self._interfaces[name]

    async def _managed_objects(self, call: Call) -> list[Any]:
        """What is below the root; the root's own properties are not part of it, as the specification has it."""
        return [
            {
                path: {exported.interface: variants(self._interfaces[exported.interface], exported)}
                for path, exported in self._tree().items()
                if path != ROOT_PATH
            }
        ]

    # ---- our own ----

    async def _list_models(self, call: Call) -> list[Any]:
        models = self._control.view().models
        return [[[m.name, m.state.value, m.in_flight, m.waiting, model_path(m.name)] for m in models]]

    async def _list_replicas(self, call: Call) -> list[Any]:
        replicas = self._control.view().replicas
        return [[[r.name, r.model, r.state.value, r.health.value, r.unit, replica_path(r.name)] for r in replicas]]

    async def _get_model(self, call: Call) -> list[Any]:
        name, models = call.body[0], self._control.view().models
        by_name = [model for model in models if model.name == name]
        by_alias = [model for model in models if name in model.aliases]
        for model in by_name or by_alias:
            return [model_path(model.name)]
        raise ControlError(ErrorCode.NO_SUCH_MODEL, _absent("model", name, (model.name for model in models)))

    async def _get_replica(self, call: Call) -> list[Any]:
        name, replicas = call.body[0], self._control.view().replicas
        if any(replica.name == name for replica in replicas):
            return [replica_path(name)]
        raise ControlError(ErrorCode.NO_SUCH_REPLICA, _absent("replica", name, (r.name for r in replicas)))

    async def _reload(self, call: Call) -> list[Any]:
        return [[clean_text(change) for change in await self._control.reload()]]

    async def _command(self, call: Call) -> list[Any]:
        """Every method of models and replicas that is a verb."""
        target = self._tree()[call.path]
        verb, level = (Verb.SLEEP, call.body[0]) if call.member == "Sleep" else (_VERBS[call.member], 0)
        if verb is Verb.SLEEP and level not in (1, 2):
            text = f"cannot put {target.name} to sleep at level {level}: the levels are 1 and 2"
            raise ControlError(ErrorCode.INVALID_ARGUMENT, text)
        if target.interface == MODEL_INTERFACE:
            await self._control.command_model(target.name, verb, level)
        else:
            await self._control.command_replica(target.name, verb, level)
        return []

    async def _explain_route(self, call: Call) -> list[Any]:
        route, body = call.body
        told = self._control.explain_route(self._tree()[call.path].name, route, bytes(body))
        bids = [[bid.replica, bid.seconds, bid.pending, bid.prefill, bid.cached_tokens] for bid in told.bids]
        return [told.replica, clean_text(told.reason), bids]


def variants(interface: Interface, exported: Exported) -> dict[str, Variant]:
    """All of an object's properties, in the order of the XML."""
    return {name: variant(signature, exported.values[name]) for name, signature in interface.properties.items()}


def variant(signature: str, value: Value) -> Variant:
    """One property's value, as it goes over the bus."""
    match value:
        case str():
            return Variant(signature, clean_text(value))
        case list():
            return Variant(signature, [clean_text(item) if isinstance(item, str) else item for item in value])
        case _:
            return Variant(signature, value)


def _absent(kind: str, name: str, known: Iterable[str]) -> str:
    return f"there is no {kind} '{name}'; configured: {', '.join(known) or 'none'}"


def _read_machine_id() -> str:
    for file in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if file.is_file():
            return file.read_text(encoding="ascii").strip()
    raise CallFailed(errors.FAILED, "this machine has no machine id")
