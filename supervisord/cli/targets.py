"""What a person's word means: a model, an alias of one, or a replica. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supervisord.bus.snapshot import FleetStatus, ModelStatus, ReplicaStatus
from supervisord.cli.exits import Exit, Failure
from supervisord.core.spec import Config, ModelSpec, ReplicaSpec


@dataclass(frozen=True, slots=True)
class Known:
    """Every name that there is, in the running supervisor or in a configuration."""

    #: Model -> its aliases.
    models: Mapping[str, tuple[str, ...]]
    #: Replica -> its model.
    replicas: Mapping[str, str]
    #: The files that say so; empty: the supervisor does.
    files: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Each once: models, aliases, replicas."""
        aliases = [alias for aliases in self.models.values() for alias in aliases]
        return list(dict.fromkeys([*self.models, *aliases, *self.replicas]))

    def meaning(self, word: str) -> tuple[str, str]:
        """Which kind, ``model`` or ``replica``, and which one ``word`` means. Raises ``Failure`` where none is meant.

        ``model:NAME`` and ``replica:NAME`` say which kind is. A model and its only replica may share a name: the model
        is meant, since both come to the same. Otherwise a name that both have is refused.
        """
        kind, colon, name = word.partition(":")
        if not colon or kind not in ("model", "replica"):
            kind, name = "", word
        models = [model for model in self.models if name == model] if kind != "replica" else []
        if not models and kind != "replica":
            models = [model for model, aliases in self.models.items() if name in aliases]
        replica = kind != "model" and name in self.replicas
        if models and replica and [each for each, model in self.replicas.items() if model == models[0]] != [name]:
            raise Failure(
                "Ambiguous", f"'{name}' is a model and a replica: say model:{name} or replica:{name}.", Exit.USAGE
            )
        if models:
            return "model", models[0]
        if replica:
            return "replica", name
        raise self._unknown(kind, name)

    def _unknown(self, kind: str, name: str) -> Failure:
        code = {"model": "NoSuchModel", "replica": "NoSuchReplica"}.get(kind, "NoSuchTarget")
        where = f" in {', '.join(self.files)}" if self.files else ""
        near = difflib.get_close_matches(name, self.words, 1)
        hint = "" if self.files else " 'vllmctl list' shows what there is."
        if near:
            hint = f" Did you mean '{near[0]}'?"
        return Failure(code, f"There is no {kind or 'model or replica'} named '{name}'{where}.{hint}", Exit.NO_SUCH)


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
    """The target that ``word`` names."""
    kind, name = known(fleet).meaning(word)
    if kind == "model":
        return model_target(fleet, next(model for model in fleet.models if model.name == name))
    return replica_target(next(replica for replica in fleet.replicas if replica.name == name))


def resolve_all(words: Sequence[str], fleet: FleetStatus) -> list[Target]:
    """Each target once, in the order in which they were named."""
    targets = {target.path: target for target in (resolve(word, fleet) for word in words)}
    return list(targets.values())


def known(fleet: FleetStatus) -> Known:
    """The names of what runs."""
    return Known(
        {model.name: model.aliases for model in fleet.models},
        {replica.name: replica.model for replica in fleet.replicas},
    )


def configured(words: Sequence[str], config: Config) -> list[tuple[ModelSpec, ReplicaSpec]]:
    """The replicas that ``words`` name, each once, whether the supervisor runs or not. Without words: all."""
    every = {replica.name: (model, replica) for model in config.models for replica in model.replicas}
    if not words:
        return list(every.values())
    names = Known(
        {model.name: model.aliases for model in config.models},
        {name: model.name for name, (model, _) in every.items()},
        config.files or ("any file",),
    )
    found: dict[str, tuple[ModelSpec, ReplicaSpec]] = {}
    for word in words:
        kind, name = names.meaning(word)
        found |= {key: pair for key, pair in every.items() if name == (pair[0].name if kind == "model" else key)}
    return list(found.values())
