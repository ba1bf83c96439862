"""What is scraped: everything of the catalogue, in both formats, from what is known."""

import pytest
from monitored import ROUTE, at, fleet, over, replica, scraped, sources, spec, streamed
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from proxy.tally import RequestTally
from supervisord.control import Failover
from supervisord.core.actions import Note, NoteKind
from supervisord.core.states import Health, Hold, Life
from supervisord.fleet_events import FleetEvents
from supervisord.monitoring.catalogue import CATALOGUE, Kind
from supervisord.monitoring.collector import exposition


@pytest.fixture
def busy():
    """A fleet to which everything has happened."""
    tally, events = RequestTally(), FleetEvents()
    tally.configure([spec()])
    streamed(tally)
    over(tally, model="nobody", replica="", status=404, code="model_not_found")
    over(tally, replica="b", attempts=2)
    for kind in NoteKind:
        events.note(Note(kind, "chat", "a", "", level=1, seconds=2.5))
    events.failed_over(Failover("chat", "a", "b", ""))
    view = fleet(
        replica("a", in_flight=2),
        replica("b", state=Life.ASLEEP, sleep_level=1, health=Health.SUSPECT, hold=Hold.DRAINED),
        waiting=4,
    )
    return sources(view, events, tally)


async def test_the_catalogue_is_what_is_scraped(busy):
    body, content_type = await exposition(busy, "")
    assert content_type.startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    ours = {name: family for name, family in families.items() if name.startswith("vllm_supervisord_")}
    assert ours.keys() == {metric.full_name.removesuffix("_total") for metric in CATALOGUE}
    for metric in CATALOGUE:
        family = ours[metric.full_name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        assert family.samples, metric.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(metric.labels), metric.name
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds"} <= families.keys()


async def test_openmetrics_is_spoken_to_whom_asks_for_it(busy):
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain"
    body, content_type = await exposition(busy, accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name for family in openmetrics_families(body.decode())}
    assert {f"vllm_supervisord_{metric.name}" for metric in CATALOGUE} <= families
    assert body.count(b"# EOF") == 1


async def test_requests_are_told_by_what_became_of_them(busy):
    found = await scraped(busy)
    one = {"route": ROUTE, "status": "200", "code": ""}
    assert at(found, "requests_total", model="chat", replica="a", **one) == 1
    assert at(found, "requests_total", model="chat", replica="b", **one) == 1
    refused = {"route": ROUTE, "status": "404", "code": "model_not_found"}
    assert at(found, "requests_total", model="-", replica="", **refused) == 1
    a = {"model": "chat", "replica": "a"}
    assert at(found, "request_duration_seconds_sum", **a) == 30.0
    assert at(found, "request_duration_seconds_bucket", le="20.0", **a) == 0
    assert at(found, "request_duration_seconds_bucket", le="40.0", **a) == 1
    assert at(found, "time_to_first_token_seconds_count", **a) == 1
    assert at(found, "prompt_tokens_cached_total", **a) == 800
    assert at(found, "placements_total", placement="stays", **a) == 1
    assert at(found, "retries_total", model="chat") == 1
    assert (at(found, "connections"), at(found, "requests_in_progress")) == (7, 3)


async def test_states_are_those_of_the_moment(busy):
    found = await scraped(busy)
    a, b = ({"model": "chat", "replica": name} for name in "ab")
    assert at(found, "waiting", model="chat") == 4
    assert (at(found, "in_flight", **a), at(found, "in_flight", **b)) == (2, 0)
    states = {life: at(found, "replica_state", state=life.value, **b) for life in Life}
    assert {life for life, value in states.items() if value == 1} == {Life.ASLEEP}
    assert sum(states.values()) == 1
    assert at(found, "replica_health", health="suspect", **b) == 1
    assert (at(found, "replica_sleep_level", **b), at(found, "replica_held", **b)) == (1, 1)
    assert at(found, "replica_info", unit="vllm@a.service", simulated="true", **a) == 1


async def test_events_are_counted_under_their_own_names(busy):
    found = await scraped(busy)
    a, b = ({"model": "chat", "replica": name} for name in "ab")
    for name in ("failovers", "demotions", "escalations", "evictions", "canary_failures"):
        assert (at(found, f"{name}_total", **a), at(found, f"{name}_total", **b)) == (1, 0)
    assert (at(found, "wakes_total", level="1", **a), at(found, "wakes_total", level="2", **a)) == (1, 0)
    assert at(found, "wake_seconds_sum", model="chat", level="1") == 2.5


async def test_a_counter_is_there_before_anything_happened():
    # Else the first failover of a daemon would be a new series, and no increase for anybody to be alarmed by.
    found = await scraped(sources(fleet(replica("a"))))
    names = {name for name, _ in found}
    for metric in CATALOGUE:
        if metric.kind is Kind.COUNTER and metric.labels[:2] == ("model", "replica") and metric.name != "requests":
            assert f"{metric.name}_total" in names
    assert at(found, "failovers_total", model="chat", replica="a") == 0


async def test_names_with_odd_characters_are_quoted():
    model = 'org/it"s\\odd'
    found = await scraped(sources(fleet(replica("a", model))))
    assert at(found, "in_flight", model=model, replica="a") == 0
