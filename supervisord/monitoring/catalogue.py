"""Every metric: its name, kind, labels and meaning. The collector and docs/monitoring.md take them from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from supervisord.fleet_events import EVENTS

PREFIX = "vllm_supervisord_"


class Kind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. ``name`` is without the prefix, and without a counter's ``_total``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As it is scraped."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


_MODEL, _REPLICA = ("model",), ("model", "replica")

REQUESTS = Metric(
    "requests",
    Kind.COUNTER,
    "Requests that are over, by route and status (499: the client left; code: ours, where it was refused).",
    ("model", "replica", "route", "status", "code"),
)
DURATION = Metric("request_duration_seconds", Kind.HISTOGRAM, "From a request's head to its answer's end.", _REPLICA)
FIRST_TOKEN = Metric(
    "time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "From a stream's request to its first event, the wait included.",
    _REPLICA,
)
QUEUED = Metric(
    "queue_seconds", Kind.HISTOGRAM, "What requests waited for a replica to be there (0: did not wait).", _MODEL
)
BYTES_IN = Metric("request_bytes", Kind.COUNTER, "Bytes of request bodies, decoded.", _REPLICA)
BYTES_OUT = Metric("response_bytes", Kind.COUNTER, "Bytes of response bodies.", _REPLICA)
PROMPT_TOKENS = Metric("prompt_tokens", Kind.COUNTER, "Prompt tokens, where the answer told.", _REPLICA)
COMPLETION_TOKENS = Metric("completion_tokens", Kind.COUNTER, "Completion tokens, where the answer told.", _REPLICA)
CACHED_TOKENS = Metric(
    "prompt_tokens_cached", Kind.COUNTER, "Prompt tokens found in the prefix cache, where the answer told.", _REPLICA
)
CACHE_TOLD_TOKENS = Metric(
    "prompt_tokens_cache_told", Kind.COUNTER, "Prompt tokens of the answers that told how many were cached.", _REPLICA
)
PLACEMENTS = Metric(
    "placements",
    Kind.COUNTER,
    "Requests by what routing knew: stays (where its prefix is), moves (elsewhere), cold (it is nowhere), blind (any).",
    (*_REPLICA, "placement"),
)
GONE = Metric(
    "client_disconnects",
    Kind.COUNTER,
    "Clients that left, by what they waited for: body, queue, prefill or stream.",
    (*_MODEL, "stage"),
)
RETRIES = Metric("retries", Kind.COUNTER, "Attempts of requests at a replica, after their first.", _MODEL)
CONNECTIONS = Metric("connections", Kind.GAUGE, "Clients connected to the public port.")
ANSWERING = Metric(
    "requests_in_progress", Kind.GAUGE, "Requests being answered on the public port, local answers included."
)

WAITING = Metric("waiting", Kind.GAUGE, "Requests that wait for a replica.", _MODEL)
WAITING_FOR_KV = Metric(
    "waiting_for_kv", Kind.GAUGE, "Of those, long conversations that wait for room in a KV cache.", _MODEL
)
IN_FLIGHT = Metric("in_flight", Kind.GAUGE, "Requests at the replica.", _REPLICA)
STATE = Metric(
    "replica_state", Kind.GAUGE, "1 for the state that the replica is in, 0 for the others.", (*_REPLICA, "state")
)
HEALTH = Metric("replica_health", Kind.GAUGE, "1 for what its health is believed to be.", (*_REPLICA, "health"))
SLEEP_LEVEL = Metric("replica_sleep_level", Kind.GAUGE, "0 unless asleep or falling asleep.", _REPLICA)
HELD = Metric("replica_held", Kind.GAUGE, "1 while an operator holds it down or drained.", _REPLICA)
STATE_SINCE = Metric(
    "replica_state_since_timestamp_seconds", Kind.GAUGE, "When it came into its state, since the epoch.", _REPLICA
)
IDLE_SINCE = Metric(
    "replica_idle_since_timestamp_seconds",
    Kind.GAUGE,
    "When its last request ended, since the epoch; 0: it had none.",
    _REPLICA,
)
INFO = Metric(
    "replica_info",
    Kind.GAUGE,
    "1; its unit, and whether its engine is the simulator.",
    (*_REPLICA, "unit", "simulated"),
)
WAKE_SECONDS = Metric("wake_seconds", Kind.HISTOGRAM, "What wakes took, by the level slept at.", (*_MODEL, "level"))
START_SECONDS = Metric(
    "start_seconds", Kind.HISTOGRAM, "What starts took, until ready (an adopted replica's: little).", _MODEL
)

BUILD = Metric("build_info", Kind.GAUGE, "1; the supervisor's version and its Python's.", ("version", "python"))
DRAINING = Metric("draining", Kind.GAUGE, "1 while the supervisor shuts down.")
LOOP_LAG = Metric("loop_lag_seconds", Kind.HISTOGRAM, "How late the event loop ran a timer, sampled every second.")

#: One counter for each event that is journalled.
EVENT_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        event: Metric(row.name, Kind.COUNTER, row.help, (*_REPLICA, "level") if row.by_level else _REPLICA)
        for event, row in EVENTS.items()
    }
)

CATALOGUE: tuple[Metric, ...] = (
    REQUESTS,
    DURATION,
    FIRST_TOKEN,
    QUEUED,
    PLACEMENTS,
    GONE,
    RETRIES,
    BYTES_IN,
    BYTES_OUT,
    PROMPT_TOKENS,
    COMPLETION_TOKENS,
    CACHED_TOKENS,
    CACHE_TOLD_TOKENS,
    CONNECTIONS,
    ANSWERING,
    WAITING,
    WAITING_FOR_KV,
    IN_FLIGHT,
    STATE,
    HEALTH,
    SLEEP_LEVEL,
    HELD,
    STATE_SINCE,
    IDLE_SINCE,
    INFO,
    *EVENT_METRICS.values(),
    WAKE_SECONDS,
    START_SECONDS,
    BUILD,
    DRAINING,
    LOOP_LAG,
)
