"""The metrics as Prometheus' families, made when somebody scrapes and from what is known: no engine is asked.

A family is read and written in one go, so that its numbers belong together; between two families the loop does its
other work, for a whole fleet's take longer than a stream should wait (docs/monitoring.md has the figures).
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from proxy.tally import ReplicaTally, RequestTally
from supervisord import __version__
from supervisord.core.histogram import Histogram
from supervisord.core.states import Health, Hold, Life
from supervisord.core.view import FleetView, ReplicaView
from supervisord.fleet_events import EVENTS, FleetEvents, Happening
from supervisord.monitoring import catalogue as names
from supervisord.monitoring.catalogue import PREFIX, Kind, Metric
from supervisord.monitoring.lag import LoopLag

#: Levels that a replica can sleep at; their counters are there from the beginning.
LEVELS = (1, 2)

Labels = Sequence[str]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the numbers are. Every one is read where it is kept, at the scrape."""

    view: Callable[[], FleetView]
    events: FleetEvents
    requests: RequestTally
    lag: LoopLag
    #: Clients connected to the public port, and requests being answered there.
    load: Callable[[], tuple[int, int]]


async def exposition(sources: Sources, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that ``accept`` asks for, and its content type."""
    encode, content_type = choose_encoder(accept)
    parts = []
    for family in families(sources):
        parts.append(encode(_One(family)).removesuffix(_END))
        await asyncio.sleep(0)
    if content_type.startswith("application/openmetrics-text"):
        parts.append(_END)
    return b"".join(parts), content_type


_END = b"# EOF\n"


class _One(Collector):
    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        return (self._family,)


def families(sources: Sources) -> Iterator[Family]:
    """Every family of the catalogue, and the process's usual ones (``process_...``)."""
    view = sources.view()
    yield from _requests(sources.requests, view)
    connections, answering = sources.load()
    yield _family(names.CONNECTIONS, [((), connections)])
    yield _family(names.ANSWERING, [((), answering)])
    yield from _states(view)
    yield from _events(sources.events, view)
    yield _family(names.BUILD, [((__version__, platform.python_version()), 1)])
    yield _family(names.DRAINING, [((), view.draining)])
    yield _histograms(names.LOOP_LAG, [((), sources.lag.seconds)])
    yield from ProcessCollector(registry=None).collect()


def _requests(tally: RequestTally, view: FleetView) -> Iterator[Family]:
    counts = [((*key[:3], str(key.status), key.code), number) for key, number in tally.requests.items()]
    yield _family(names.REQUESTS, counts)
    # A configured replica has its numbers from the beginning: a first event is an increase, not a new series.
    none = ReplicaTally()
    replicas = {(replica.model, replica.name): none for replica in view.replicas} | tally.replicas
    yield _histograms(names.DURATION, [(key, each.duration) for key, each in replicas.items()])
    yield _histograms(names.FIRST_TOKEN, [(key, each.first_token) for key, each in replicas.items()])
    models = tally.models
    yield _histograms(names.QUEUED, [((name,), each.queued) for name, each in models.items()])
    placements = [((*key, kind), n) for key, each in replicas.items() for kind, n in each.placements.items()]
    yield _family(names.PLACEMENTS, placements)
    yield _family(names.GONE, [((name, stage), n) for name, each in models.items() for stage, n in each.gone.items()])
    yield _family(names.RETRIES, [((name,), each.retries) for name, each in models.items()])
    for metric, attribute in (
        (names.BYTES_IN, "bytes_in"),
        (names.BYTES_OUT, "bytes_out"),
        (names.PROMPT_TOKENS, "prompt_tokens"),
        (names.COMPLETION_TOKENS, "completion_tokens"),
        (names.CACHED_TOKENS, "cached_tokens"),
        (names.CACHE_TOLD_TOKENS, "prompt_tokens_told"),
    ):
        yield _family(metric, [(key, getattr(each, attribute)) for key, each in replicas.items()])


def _states(view: FleetView) -> Iterator[Family]:
    replicas = view.replicas
    yield _family(names.WAITING, [((model.name,), model.waiting) for model in view.models])
    yield _family(names.WAITING_FOR_KV, [((model.name,), model.waiting_for_kv) for model in view.models])

    def each(metric: Metric, value: Callable[[ReplicaView], float]) -> Family:
        return _family(metric, [((r.model, r.name), value(r)) for r in replicas])

    yield each(names.IN_FLIGHT, lambda r: r.in_flight)
    yield _family(names.STATE, [((r.model, r.name, life), r.state is life) for r in replicas for life in Life])
    yield _family(names.HEALTH, [((r.model, r.name, kind), r.health is kind) for r in replicas for kind in Health])
    yield each(names.SLEEP_LEVEL, lambda r: r.sleep_level)
    yield each(names.HELD, lambda r: r.hold is not Hold.NONE)
    yield each(names.STATE_SINCE, lambda r: r.state_since)
    yield each(names.IDLE_SINCE, lambda r: r.idle_since)
    simulated = {True: "true", False: "false"}
    yield _family(names.INFO, [((r.model, r.name, r.unit, simulated[r.simulated]), 1) for r in replicas])


def _events(events: FleetEvents, view: FleetView) -> Iterator[Family]:
    for event, row in EVENTS.items():
        levels = LEVELS if row.by_level else (0,)
        counts = {Happening(event, r.model, r.name, level): 0 for r in view.replicas for level in levels}
        counts |= {happening: number for happening, number in events.counts.items() if happening.event == event}
        samples = []
        for (_, model, replica, level), number in counts.items():
            samples.append(((model, replica, str(level)) if row.by_level else (model, replica), number))
        yield _family(names.EVENT_METRICS[event], samples)
    wakes = [((model, str(level)), seconds) for (model, level), seconds in events.wakes.items()]
    yield _histograms(names.WAKE_SECONDS, wakes)
    yield _histograms(names.START_SECONDS, [((model,), seconds) for model, seconds in events.starts.items()])


def _family(metric: Metric, samples: Iterable[tuple[Labels, float]]) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(PREFIX + metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histograms(metric: Metric, samples: Iterable[tuple[Labels, Histogram]]) -> Family:
    family = HistogramMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
    for labels, seconds in samples:
        bounds = [*(str(bound) for bound in seconds.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, seconds.cumulative(), strict=True)), seconds.total)
    return family
