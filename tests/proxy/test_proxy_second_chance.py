"""An engine on its way down answers, but not the question; and retries are bounded whatever happens."""

import pytest
from proxyrig import answer_ok, reply_bytes

from proxy.retries import RetryBudget
from supervisord.core.admission import Ending

GOING_DOWN = (
    b'{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","code":500}}'
)
ABORTED = b'{"choices":[{"message":{"content":"half of"},"finish_reason":"abort"}]}'
OWN_WORDS = (
    b'{"choices":[{"message":{"content":"it said \\"finish_reason\\":\\"abort\\" once"},"finish_reason":"stop"}]}'
)
BAD_REQUEST = b'{"error":{"message":"EngineDeadError is a word in this prompt","code":400}}'


def answers(body: bytes, status: str = "200 OK"):
    async def answer(request, connection):
        await connection.send(reply_bytes(body, status))

    return answer


async def resets(request, connection):
    connection.reset()
    raise ConnectionResetError


@pytest.mark.parametrize(("body", "status"), [(GOING_DOWN, "500 Internal Server Error"), (ABORTED, "200 OK")])
async def test_an_engine_that_is_stopped_by_somebody_costs_the_client_nothing(rig, body, status):
    first, second = await rig.engine("a", answers(body, status)), await rig.engine("b")
    answer = await rig.post()
    assert (answer.status, answer.header("x-vllmctl-replica")) == (200, "b")
    assert second.requests[0].body == first.requests[0].body != b""
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN), ("b", Ending.COMPLETED)]


@pytest.mark.parametrize(
    ("body", "status"),
    [(OWN_WORDS, "200 OK"), (BAD_REQUEST, "400 Bad Request"), (b'{"error":{"message":"out of memory"}}', "500 Oops")],
)
async def test_any_other_answer_is_the_engines_own_and_goes_through_untouched(rig, body, status):
    await rig.engine("a", answers(body, status))
    second = await rig.engine("b")
    answer = await rig.post()
    assert (answer.status, answer.body) == (int(status[:3]), body)
    assert second.requests == []


async def test_the_only_replica_gets_a_request_once_more_after_it_started_anew(rig):
    async def resets_once(request, connection):
        engine.behaviour = answer_ok
        await resets(request, connection)

    engine = await rig.engine("a", resets_once)
    rig.admission.restarts.add("a")
    answer = await rig.post()
    assert answer.status == 200
    assert rig.admission.endings == [("a", Ending.CONNECT_FAILED), ("a", Ending.COMPLETED)]


async def test_a_request_that_kills_every_engine_does_not_go_round_and_round(rig):
    engines = [await rig.engine(name, resets) for name in ("a", "b")]
    rig.admission.restarts.update({"a", "b"})
    answer = await rig.post()
    assert answer.status == 502
    assert answer.json()["error"]["code"] == "upstream_failed"
    assert [len(engine.requests) for engine in engines] == [1, 1]


async def test_the_same_request_kills_the_only_engine_twice_at_most(rig):
    engine = await rig.engine("a", resets)
    rig.admission.restarts.add("a")
    assert (await rig.post()).status == 502
    assert len(engine.requests) == 2


def test_retries_are_bounded_and_earned_back():
    budget = RetryBudget(reserve=2, share=0.5)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert budget.spend() is False
    budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]
