"""Requests counted as they end, in plain numbers under configured names only: never under what a client wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from proxy.accesslog import CLIENT_GONE
from proxy.exchange import Finished, Outcome, Stage
from supervisord.core.admission import Placement
from supervisord.core.histogram import Histogram
from supervisord.core.spec import ModelSpec

#: Stands for every model that is not configured, and for no model at all; no configured one can be called so.
NO_MODEL = "-"

#: Seconds. A cached prompt's first token takes tens of milliseconds, a cold 100k prompt's half a minute; an answer
#: from fractions of a second to half an hour.
FIRST_TOKEN_BOUNDS = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 3.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)
DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
QUEUE_BOUNDS = (0.0, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class RequestKey(NamedTuple):
    """What requests are counted apart by. ``code`` is our refusal's, empty where an engine answered."""

    model: str
    replica: str
    route: str
    status: int
    code: str


class ReplicaTally:
    """What one replica's requests came to."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "cached_tokens",
        "completion_tokens",
        "duration",
        "first_token",
        "placements",
        "prompt_tokens",
        "prompt_tokens_told",
    )

    def __init__(self) -> None:
        self.duration = Histogram(DURATION_BOUNDS)
        #: Of streams.
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.bytes_in = self.bytes_out = 0
        self.prompt_tokens = self.completion_tokens = 0
        #: Cached tokens, and the prompt tokens of those answers that told how many were cached.
        self.cached_tokens = self.prompt_tokens_told = 0
        self.placements = dict.fromkeys(Placement, 0)


class ModelTally:
    """What one model's requests went through, whichever replica got them."""

    __slots__ = ("gone", "queued", "retries")

    def __init__(self) -> None:
        #: Seconds; 0 for who did not wait.
        self.queued = Histogram(QUEUE_BOUNDS)
        #: Clients that left, by what they waited for.
        self.gone = dict.fromkeys(Stage, 0)
        #: Attempts after the first.
        self.retries = 0


class RequestTally:
    """An ``Observer`` that counts. Costs the loop about three microseconds a request (docs/monitoring.md)."""

    def __init__(self) -> None:
        self.requests: dict[RequestKey, int] = {}
        self.replicas: dict[tuple[str, str], ReplicaTally] = {}
        self.models: dict[str, ModelTally] = {}
        self._names: dict[str, str] = {}

    def configure(self, models: Iterable[ModelSpec]) -> None:
        """The names that there are from now on. What was counted stays."""
        self._names = {name: model.name for model in models for name in (model.name, *model.aliases)}

    def __call__(self, finished: Finished, outcome: Outcome) -> None:
        """Count a request that is over."""
        replica = outcome.replica
        # With a replica the name is its lease's; before, it is what the client wrote.
        model = outcome.model if replica else self._names.get(outcome.model, NO_MODEL)
        key = RequestKey(model, replica, finished.route, outcome.status, outcome.code)
        self.requests[key] = self.requests.get(key, 0) + 1
        if replica:
            self._count_at(model, replica, finished, outcome)
        gone = outcome.status == CLIENT_GONE
        if model == NO_MODEL and not gone:
            return
        counted = self.models.get(model)
        if counted is None:
            counted = self.models[model] = ModelTally()
        if gone:
            counted.gone[outcome.stage] += 1
        if outcome.attempts > 1:
            counted.retries += outcome.attempts - 1
        counted.queued.observe(outcome.queued)

    def _count_at(self, model: str, replica: str, finished: Finished, outcome: Outcome) -> None:
        counted = self.replicas.get((model, replica))
        if counted is None:
            counted = self.replicas[model, replica] = ReplicaTally()
        counted.duration.observe(finished.ended - finished.started)
        if outcome.stream and outcome.computed is not None:
            counted.first_token.observe(outcome.computed - finished.started)
        counted.bytes_in += outcome.bytes_received
        counted.bytes_out += outcome.bytes_sent
        if outcome.placement is not None:
            counted.placements[outcome.placement] += 1
        usage = outcome.usage
        if usage is not None:
            counted.prompt_tokens += usage.prompt
            counted.completion_tokens += usage.completion or 0
            if usage.cached is not None:
                counted.cached_tokens += usage.cached
                counted.prompt_tokens_told += usage.prompt
