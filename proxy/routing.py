"""Which replica gets a request: pure policies over one request's facts and the replicas that may be chosen now.

One policy instance per model. Nothing here knows HTTP or a random number, and the clock is given: the same calls at the
same times give the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.policies.classic import Adaptive, Affinity, RoundRobin
from proxy.policies.policy import Clock, Policy
from proxy.policies.prefill import Prefill
from proxy.policies.seats import LONGEST_HOLD
from supervisord.core.spec import ModelSpec

#: ``[models.NAME] routing``.
POLICIES: dict[str, Callable[[Clock], Policy]] = {
    "adaptive": lambda clock: Adaptive(),
    "affinity": lambda clock: Affinity(),
    "roundrobin": lambda clock: RoundRobin(),
    "prefill": Prefill,
}


class UnknownPolicy(Exception):
    """A request asks for a policy that is none."""


def longest_hold(model: ModelSpec) -> float:
    """Seconds for which the model's long conversations may be held: not for as long as anybody may wait at all."""
    return min(LONGEST_HOLD, model.wake.timeout / 2) if model.admission == "kv" else 0.0


class PolicyBook:
    """The policy of every model, found by its name or an alias."""

    def __init__(self, models: Sequence[ModelSpec], clock: Clock) -> None:
        self._clock = clock
        self._policies: dict[str, tuple[str, Policy]] = {}
        self._specs: dict[str, ModelSpec] = {}
        #: Those that single requests ask for, besides the model's own.
        self._others: dict[tuple[str, str], Policy] = {}
        self._names: dict[str, str] = {}
        self.replace(models)

    def replace(self, models: Sequence[ModelSpec]) -> None:
        """Take a new configuration; a model whose routing did not change keeps what is remembered."""
        old, self._policies, self._names = self._policies, {}, {}
        self._specs = {model.name: model for model in models}
        for model in models:
            kind, policy = old.get(model.name, ("", None))
            if policy is None or kind != model.routing:
                policy = self._new(model.routing, model)
            self._policies[model.name] = (model.routing, policy)
            self._names.update(dict.fromkeys(model.aliases, model.name))
        self._names.update({model.name: model.name for model in models})
        self._others = {key: policy for key, policy in self._others.items() if key[0] in self._policies}
        policies = [(name, policy) for name, (_, policy) in self._policies.items()]
        for name, policy in [*policies, *((key[0], policy) for key, policy in self._others.items())]:
            if isinstance(policy, Prefill):
                policy.longest_hold = longest_hold(self._specs[name])

    def _new(self, routing: str, model: ModelSpec) -> Policy:
        policy = POLICIES[routing](self._clock)
        if isinstance(policy, Prefill):
            policy.longest_hold = longest_hold(model)
        return policy

    def knows(self, name: str) -> bool:
        """Whether that is a model's name or alias."""
        return name in self._names

    def model(self, name: str) -> str:
        """The model of a name or alias; empty where there is none."""
        return self._names.get(name, "")

    def policy(self, model: str, asked: str = "") -> Policy:
        """The policy of a model's name or alias; an unknown model has no replicas, so any does.

        ``asked``: another one, which remembers apart; raises ``UnknownPolicy``.
        """
        name = self._names.get(model, "")
        entry = self._policies.get(name)
        if asked and asked not in POLICIES:
            raise UnknownPolicy(f"there is no routing policy {asked[:60]!r}, only {', '.join(POLICIES)}")
        if entry is None:
            return RoundRobin()
        if not asked or asked == entry[0]:
            return entry[1]
        other = self._others.get((name, asked))
        if other is None:
            other = self._others[name, asked] = self._new(asked, self._specs[name])
        return other
