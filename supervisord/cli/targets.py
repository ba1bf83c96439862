"""What a person's word means: a model, an alias of one, or a replica. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from supervisord.bus.snapshot import FleetStatus, ModelStatus, ReplicaStatus
from supervisord.cli.exits import Exit, Failure


@dataclass(frozen=True, slots=True)
class Target:
    """One model or one replica. ``replicas``: itself, or all of the model."""

    kind: str
    name: str
    path: str
    replicas: tuple[ReplicaStatus, ...]


def model_target(fleet: FleetStatus, model: ModelStatus) -> Target:
    return Target("model", model.name, model.path, fleet.replicas_of(model.name))


def replica_target(replica: ReplicaStatus) -> Target:
    return Target("replica", replica.name, replica.path, (replica,))


def resolve(word: str, fleet: FleetStatus) -> Target:
    """The target that ``word`` names; ``model:NAME`` and ``replica:NAME`` say which kind is meant.

    A model and its only replica may share a name: the model is meant, since both come to the same. Otherwise a name
    that both have is refused.
    """
    kind, colon, name = word.partition(":")
    if not colon or kind not in ("model", "replica"):
        kind, name = "", word
    models = [model for model in fleet.models if name == model.name] if kind != "replica" else []
    if not models and kind != "replica":
        models = [model for model in fleet.models if name in model.aliases]
    replicas = [replica for replica in fleet.replicas if name == replica.name] if kind != "model" else []
    if models and replicas and fleet.replicas_of(models[0].name) != tuple(replicas):
        raise Failure(
            "Ambiguous", f"'{name}' is a model and a replica: say model:{name} or replica:{name}.", Exit.USAGE
        )
    if models:
        return model_target(fleet, models[0])
    if replicas:
        return replica_target(replicas[0])
    raise Failure(*_unknown(kind, name, fleet))


def resolve_all(words: Sequence[str], fleet: FleetStatus) -> list[Target]:
    """Each target once, in the order in which they were named."""
    targets = {target.path: target for target in (resolve(word, fleet) for word in words)}
    return list(targets.values())


def known_names(fleet: FleetStatus) -> list[str]:
    """Every word that ``resolve`` takes, each once: models, aliases, replicas."""
    words = [model.name for model in fleet.models]
    words += [alias for model in fleet.models for alias in model.aliases]
    words += [replica.name for replica in fleet.replicas]
    return list(dict.fromkeys(words))


def _unknown(kind: str, name: str, fleet: FleetStatus) -> tuple[str, str, Exit]:
    what = kind or "model or replica"
    code = {"model": "NoSuchModel", "replica": "NoSuchReplica"}.get(kind, "NoSuchTarget")
    near = difflib.get_close_matches(name, known_names(fleet), 1)
    hint = f" Did you mean '{near[0]}'?" if near else " 'vllmctl list' shows what there is."
    return code, f"There is no {what} named '{name}'.{hint}", Exit.NO_SUCH
