"""Wake on request: held until awake, comments for streams, and nothing left when the client goes."""

import asyncio
import json
import logging

import pytest
from proxyrig import CHAT, STREAM, answer_ok, chunk, event_stream_head, reply_bytes, request_bytes

from supervisord.core.admission import Ending, RefusalCode, Refuse

COMMENT = b": waiting for the model\n\n"


async def asleep(rig, behaviour=answer_ok):
    engine = await rig.engine("a", behaviour)
    rig.admission.asleep.add("a")
    return engine


async def stream_one(request, connection):
    await connection.send(event_stream_head() + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def test_a_request_waits_until_its_model_is_awake(rig):
    engine = await asleep(rig)
    answer = asyncio.create_task(rig.post())
    await rig.until(lambda: rig.admission.waiting)
    assert engine.requests == []
    rig.admission.wake("a")
    assert (await answer).status == 200
    assert rig.admission.endings == [("a", Ending.COMPLETED)]
    assert rig.admission.abandoned == 0


async def test_a_thousand_requests_wait_and_each_is_answered_once(rig):
    engine = await asleep(rig)
    answers = [asyncio.create_task(rig.post()) for _ in range(1000)]
    await rig.until(lambda: len(rig.admission.waiting) == 1000)
    rig.admission.wake("a")
    assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 1000
    assert len(engine.requests) == 1000
    assert rig.admission.endings == [("a", Ending.COMPLETED)] * 1000


async def test_a_thousand_requests_over_a_unix_socket_blame_nobody(rig, tmp_path):
    await rig.engine("a", path=str(tmp_path / "engine.sock"))
    rig.admission.asleep.add("a")
    answers = [asyncio.create_task(rig.post()) for _ in range(1000)]
    await rig.until(lambda: len(rig.admission.waiting) == 1000)
    rig.admission.wake("a")
    assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 1000
    assert rig.failovers == []


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_wait_that_fails_soon_has_a_normal_status_and_retry_after(rig, body):
    await asleep(rig)
    answer = asyncio.create_task(rig.post(body))
    await rig.until(lambda: rig.admission.waiting)
    rig.admission.refuse_waiting(Refuse(RefusalCode.MODEL_WAKING, "still waking", 12.3))
    answer = await answer
    assert answer.status == 503
    assert answer.json()["error"] == {
        "message": "still waking",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": "model_waking",
    }
    assert answer.header("retry-after") == "13"


@pytest.mark.parametrize("retry_after", [None, 0.0, 0.2])
async def test_retry_after_is_absent_or_at_least_a_second(rig, retry_after):
    rig.admission.refusal = Refuse(RefusalCode.MODEL_HELD, "down", retry_after)
    assert (await rig.post()).header("retry-after") == (None if retry_after is None else "1")


async def test_a_client_that_leaves_while_it_waits_is_499_and_reaches_no_engine(rig, caplog):
    engine = await asleep(rig)
    client = await rig.send(request_bytes())
    await rig.until(lambda: rig.admission.waiting)
    with caplog.at_level(logging.INFO, "proxy.access"):
        await client.close()
        await rig.until(lambda: rig.admission.abandoned)
        await rig.get("/health")
    assert not rig.admission.waiting
    rig.admission.wake("a")
    assert engine.requests == []
    assert "status=499" in caplog.records[0].message


async def test_a_client_that_leaves_as_its_lease_is_granted_returns_it(rig):
    engine = await asleep(rig)
    client = await rig.send(request_bytes())
    await rig.until(lambda: rig.admission.waiting)
    (wait, _, _) = next(iter(rig.admission.waiting.values()))
    # The same turn of the loop: the lease is granted, and the connection is lost before the request runs again.
    handler = next(iter(rig.proxy._server.connections))
    rig.admission.wake("a")
    assert wait.outcome.done()
    handler.connection_lost(ConnectionResetError())
    await rig.until(lambda: not rig.admission.open)
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]
    assert engine.requests == []
    client.reset()


async def test_a_waiting_stream_gets_comments_and_then_its_events(rig):
    rig.reconfigure(wait_comment_after=0.02)
    await asleep(rig, stream_one)
    client = await rig.send(request_bytes(STREAM))
    head = await client.head()
    assert head.status == 200
    assert head.header("content-type") == "text/event-stream"
    assert await client.chunk() == COMMENT
    rig.admission.wake("a")
    received = b""
    while data := await client.chunk():
        received += data
    assert received.replace(COMMENT, b"") == b"data: 1\n\ndata: [DONE]\n\n"
    assert rig.admission.endings == [("a", Ending.COMPLETED)]


async def test_comments_repeat_while_the_wait_goes_on(rig):
    rig.reconfigure(wait_comment_after=0.01)
    await asleep(rig, stream_one)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    assert [await client.chunk(), await client.chunk()] == [COMMENT, COMMENT]


@pytest.mark.parametrize("comment_after", [0.01, None])
async def test_who_asked_for_no_stream_or_no_comments_gets_a_status_however_late(rig, comment_after):
    rig.reconfigure(wait_comment_after=comment_after)
    await asleep(rig)
    client = await rig.send(request_bytes(CHAT if comment_after else STREAM))
    await rig.until(lambda: rig.admission.waiting)
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_later(0.05, passed.set_result, None)  # several times the silence
    await passed
    rig.admission.refuse_waiting(Refuse(RefusalCode.WAKE_FAILED, "no", 1))
    assert (await client.response()).status == 503


async def _stream_that_waited(rig) -> object:
    rig.reconfigure(wait_comment_after=0.01)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    assert await client.chunk() == COMMENT
    return client


async def _events(client) -> list[bytes]:
    received = b""
    while data := await client.chunk():
        received += data
    return [event for event in received.split(b"\n\n") if event and event != COMMENT.strip()]


async def test_a_wait_that_fails_after_a_comment_is_an_error_event(rig):
    await asleep(rig)
    client = await _stream_that_waited(rig)
    rig.admission.refuse_waiting(Refuse(RefusalCode.WAKE_FAILED, "out of memory", 60))
    (event,) = await _events(client)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "wake_failed"
    assert await client.closed() == b""


async def test_an_engine_s_error_after_a_comment_is_its_own_error_object(rig):
    refusal = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}

    async def refuse(request, connection):
        await connection.send(reply_bytes(json.dumps(refusal, indent=2).encode(), "400 Bad Request"))

    await asleep(rig, refuse)
    client = await _stream_that_waited(rig)
    rig.admission.wake("a")
    (event,) = await _events(client)
    assert json.loads(event.removeprefix(b"data: ")) == refusal
    assert rig.admission.endings == [("a", Ending.COMPLETED)]


async def test_an_engine_s_answer_that_is_no_stream_is_an_error_event(rig):
    async def plain(request, connection):
        await connection.send(reply_bytes(b"<html>busy</html>", "502 Bad Gateway", "Content-Type: text/html\r\n"))

    await asleep(rig, plain)
    client = await _stream_that_waited(rig)
    rig.admission.wake("a")
    (event,) = await _events(client)
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert "<html>busy</html>" in error["message"]


async def test_a_failed_replica_after_a_comment_still_fails_over(rig):
    async def die(request, connection):
        connection.reset()
        raise ConnectionResetError

    await asleep(rig, die)
    client = await _stream_that_waited(rig)
    await rig.engine("b", stream_one)
    rig.admission.wake("a")
    assert await _events(client) == [b"data: 1", b"data: [DONE]"]
    assert rig.admission.endings == [("a", Ending.CONNECT_FAILED), ("b", Ending.COMPLETED)]


async def test_every_code_of_a_refusal_reaches_the_client(rig):
    for code in RefusalCode:
        rig.admission.refusal = Refuse(code, f"because {code}", 5.0)
        answer = await rig.post()
        assert answer.status == (404 if code is RefusalCode.MODEL_NOT_FOUND else 503)
        assert answer.json()["error"]["code"] == code.value
        assert answer.header("retry-after") == (None if code is RefusalCode.MODEL_NOT_FOUND else "5")
