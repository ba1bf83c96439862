"""Requests as they are counted: under configured names, once each, in the right place."""

import pytest
from monitored import ROUTE, over, spec, streamed

from proxy.exchange import Stage
from proxy.tally import NO_MODEL, RequestKey, RequestTally
from supervisord.core.admission import Placement
from supervisord.core.histogram import Histogram


@pytest.fixture
def tally():
    tally = RequestTally()
    tally.configure([spec()])
    return tally


def test_a_stream_is_counted_at_its_replica(tally):
    streamed(tally)
    counted = tally.replicas["chat", "a"]
    assert tally.requests == {RequestKey("chat", "a", ROUTE, 200, ""): 1}
    assert (counted.duration.total, counted.first_token.total) == (30.0, 4.5)
    assert (counted.bytes_in, counted.bytes_out) == (400, 9000)
    assert (counted.prompt_tokens, counted.completion_tokens, counted.cached_tokens) == (1000, 50, 800)
    assert counted.placements[Placement.STAYS] == 1
    assert tally.models["chat"].queued.total == 3.0


def test_the_first_token_of_an_answer_that_comes_whole_is_not_known(tally):
    over(tally, computed=101.0)
    assert tally.replicas["chat", "a"].first_token.cumulative()[-1] == 0


def test_what_clients_write_is_no_name_to_count_under(tally):
    for number in range(100):
        over(tally, model=f"made-up-{number}", replica="", status=404, code="model_not_found")
    assert tally.requests == {RequestKey(NO_MODEL, "", ROUTE, 404, "model_not_found"): 100}
    assert not tally.replicas
    assert not tally.models


def test_an_alias_counts_for_its_model(tally):
    over(tally, model="default", replica="", status=503, code="queue_full", queued=1.0)
    assert tally.requests == {RequestKey("chat", "", ROUTE, 503, "queue_full"): 1}
    assert tally.models["chat"].queued.total == 1.0


def test_clients_that_leave_are_counted_by_where_they_were(tally):
    over(tally, replica="", status=499, stage=Stage.QUEUE)
    over(tally, status=499, stage=Stage.STREAM)
    over(tally, status=499, stage=Stage.STREAM)
    over(tally, model="", replica="", status=499, stage=Stage.BODY)
    gone = tally.models["chat"].gone
    assert {stage: number for stage, number in gone.items() if number} == {Stage.QUEUE: 1, Stage.STREAM: 2}
    assert tally.models[NO_MODEL].gone[Stage.BODY] == 1


def test_attempts_after_the_first_are_retries(tally):
    over(tally)
    over(tally, attempts=3)
    assert tally.models["chat"].retries == 2


def test_what_was_counted_stays_when_the_configuration_changes(tally):
    over(tally)
    tally.configure([spec("other")])
    over(tally, model="chat", replica="", status=404)
    assert tally.requests[RequestKey("chat", "a", ROUTE, 200, "")] == 1
    assert tally.requests[RequestKey(NO_MODEL, "", ROUTE, 404, "")] == 1


def test_a_bound_of_a_histogram_is_part_of_its_bucket():
    seconds = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1):
        seconds.observe(value)
    assert seconds.cumulative() == [2, 4, 5]
    assert seconds.total == pytest.approx(7.1)
