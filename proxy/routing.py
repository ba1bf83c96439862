"""Which replica gets a request: pure policies over one request's facts and the replicas that may be chosen now.

One policy instance per model. Nothing here knows HTTP or a random number, and the clock is given: the same calls at the
same times give the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.policies.classic import Adaptive, Affinity, RoundRobin
from proxy.policies.policy import Clock, Policy
from proxy.policies.prefill import Prefill
from supervisord.core.spec import ModelSpec

#: ``[models.NAME] routing``.
POLICIES: dict[str, Callable[[Clock], Policy]] = {
    "adaptive": lambda clock: Adaptive(),
    "affinity": lambda clock: Affinity(),
    "roundrobin": lambda clock: RoundRobin(),
    "prefill": Prefill,
}


class PolicyBook:
    """The policy of every model, found by its name or an alias."""

    def __init__(self, models: Sequence[ModelSpec], clock: Clock) -> None:
        self._clock = clock
        self._policies: dict[str, tuple[str, Policy]] = {}
        self._names: dict[str, str] = {}
        self.replace(models)

    def replace(self, models: Sequence[ModelSpec]) -> None:
        """Take a new configuration; a model whose routing did not change keeps what its policy remembers."""
        old, self._policies, self._names = self._policies, {}, {}
        for model in models:
            kind, policy = old.get(model.name, ("", None))
            if policy is None or kind != model.routing:
                policy = POLICIES[model.routing](self._clock)
            self._policies[model.name] = (model.routing, policy)
            self._names.update(dict.fromkeys(model.aliases, model.name))
        self._names.update({model.name: model.name for model in models})

    def policy(self, model: str) -> Policy:
        """The policy of a model's name or alias; an unknown model has no replicas, so any does."""
        entry = self._policies.get(self._names.get(model, ""))
        return entry[1] if entry else RoundRobin()
