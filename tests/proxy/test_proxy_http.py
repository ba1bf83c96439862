"""HTTP between client and engine: headers, expectations, limits, malformed requests, the log line."""

import asyncio
import logging

import pytest
from proxyrig import CHAT, STREAM, answer_ok, reply_bytes, request_bytes

from supervisord.core.admission import Ending


async def test_end_to_end_headers_pass_and_none_are_invented(rig):
    engine = await rig.engine()
    sent = (
        "Authorization: Bearer k\r\nUser-Agent: agent/1\r\nAccept: text/event-stream\r\nAccept-Encoding: zstd\r\n"
        "Content-Type: application/json\r\nCookie: a=b; c\r\nX-Own: 1\r\nX-Own: 2\r\nX-Request-Id: my-id.1\r\n"
    )
    await rig.post(headers=sent)
    received = engine.requests[0].headers
    expected = [("Host", "proxy.test"), *(tuple(line.split(": ", 1)) for line in sent.splitlines())]
    assert sorted(received) == sorted([*expected, ("Content-Length", str(len(engine.requests[0].body)))])


async def test_a_client_without_headers_has_none_added_but_the_request_id(rig):
    engine = await rig.engine()
    await rig.post()
    assert {name for name, _ in engine.requests[0].headers} == {"Host", "X-Request-Id", "Content-Length"}


async def test_hop_by_hop_headers_stay_on_their_hop(rig):
    async def answer(request, connection):
        extra = (
            "Connection: keep-alive, X-Private\r\nKeep-Alive: timeout=5\r\nX-Private: 1\r\nTrailer: x\r\n"
            "Proxy-Authenticate: Basic\r\nUpgrade: h2c\r\nX-Public: 1\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        )
        await connection.send(reply_bytes(b"{}", headers=extra))

    engine = await rig.engine("a", answer)
    response = await rig.post(
        headers=(
            "Connection: keep-alive, X-Secret ,TE\r\nX-Secret: 1\r\nTE: trailers\r\nKeep-Alive: 5\r\n"
            "Proxy-Connection: x\r\nProxy-Authorization: Basic eA==\r\nUpgrade: h2c\r\nTrailer: y\r\nX-Open: 1\r\n"
        )
    )
    upstream = {name.lower() for name, _ in engine.requests[0].headers}
    assert upstream == {"host", "x-open", "x-request-id", "content-length"}
    downstream = [name.lower() for name, _ in response.headers]
    assert not {"keep-alive", "x-private", "trailer", "proxy-authenticate", "upgrade"} & set(downstream)
    assert response.header("x-public") == "1"
    assert [value for name, value in response.headers if name == "Set-Cookie"] == ["a=1", "b=2"]


async def test_trailers_of_an_answer_end_here_and_the_connection_goes_on(rig):
    async def answer(request, connection):
        head = b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.send(head + b"2\r\n{}\r\n0\r\nX-Sum: 1\r\nContent-Length: 9\r\n\r\n")

    engine = await rig.engine("a", answer)
    client = await rig.send(request_bytes() * 2)
    for _ in range(2):
        response = await client.response()
        assert (response.status, response.body, response.header("trailer")) == (200, b"{}", None)
    assert len(engine.connections) == 1


@pytest.mark.parametrize("given", ["abc-123", "x" * 200])
async def test_a_request_id_is_passed_both_ways(rig, given):
    engine = await rig.engine()
    answer = await rig.post(headers=f"X-Request-Id: {given}\r\n")
    assert engine.requests[0].header("x-request-id") == given
    assert answer.header("x-request-id") == given
    refused = await rig.post({**CHAT, "model": "nobody"}, headers=f"X-Request-Id: {given}\r\n")
    assert refused.header("x-request-id") == given


@pytest.mark.parametrize("given", ["", "x" * 201, "a b", 'quote" d\x7f'])
async def test_a_request_id_that_would_spoil_logs_is_replaced(rig, given):
    engine = await rig.engine()
    answer = await rig.post(headers=f"X-Request-Id: {given}\r\n" if given else "")
    if answer.status == 400:  # a control character is no HTTP at all
        return
    made = answer.header("x-request-id")
    assert len(made) == 32
    assert engine.requests[0].header("x-request-id") == made


async def test_the_engine_s_own_request_id_and_server_headers_are_kept(rig):
    async def answer(request, connection):
        await connection.send(reply_bytes(b"{}", headers="X-Request-Id: engine\r\nServer: uvicorn\r\nDate: then\r\n"))

    await rig.engine("a", answer)
    response = await rig.post()
    for name, value in (("x-request-id", "engine"), ("server", "uvicorn"), ("date", "then")):
        assert [v for n, v in response.headers if n.lower() == name] == [value]


async def test_expect_100_continue_is_answered_by_us_and_not_forwarded(rig):
    engine = await rig.engine()
    head, _, body = request_bytes(headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    client = await rig.send(head + b"\r\n\r\n")
    assert (await client.head()).first_line == "HTTP/1.1 100 Continue"
    await client.send(body)
    assert (await client.response()).status == 200
    assert engine.requests[0].header("expect") is None
    assert engine.requests[0].body == body


async def test_an_expected_body_that_would_be_refused_is_not_asked_for(rig):
    rig.reconfigure(max_body=10)
    head, _, _ = request_bytes(headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    client = await rig.send(head + b"\r\n\r\n")
    assert (await client.response()).status == 413
    client = await rig.send(head.replace(b"/v1/chat/completions", b"/sleep") + b"\r\n\r\n")
    assert (await client.response()).status == 404


async def test_another_expectation_is_417(rig):
    assert (await rig.post(headers="Expect: 200-ok\r\n")).status == 417


async def test_an_http_1_0_client_is_not_sent_100_continue(rig):
    await rig.engine()
    client = await rig.send(request_bytes(headers="Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert (await client.response()).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST /rerank HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n{}   ",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: +4\r\n\r\n{}  ",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: b\nX-C: d\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A : b\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_malformed_or_ambiguous_http_is_400_and_ends_the_connection(rig, raw):
    engine = await rig.engine()
    client = await rig.send(raw)
    answer = await client.response()
    assert answer.status == 400
    assert answer.header("content-type").startswith("application/json")
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    await client.closed()
    assert engine.requests == []


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (431, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n"),
        (431, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n"),
        (431, b"POST /v1/completions HTTP/1.1\r\n" + b"X-Never: ends\r\n" * 20_000),
        (414, b"POST /v1/completions?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (414, b"POST /v1/completions?" + b"x" * 70_000),
    ],
    ids=["long field", "many fields", "long head", "long target", "endless target"],
)
async def test_a_head_beyond_the_limits_is_told_which(rig, status, raw):
    engine = await rig.engine()
    client = await rig.send(raw)
    answer = await client.response()
    assert answer.status == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    await client.closed()
    assert engine.requests == []


async def test_a_long_but_honest_header_passes(rig):
    engine = await rig.engine()
    await rig.post(headers=f"Authorization: Bearer {'x' * 30_000}\r\n")
    assert len(engine.requests[0].header("authorization")) == 30_007


async def test_a_head_that_never_ends_is_timed_out(rig):
    rig.reconfigure(client_header_timeout=0.05)
    client = await rig.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow")
    assert await client.closed() == b""
    kept = await rig.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await kept.response()).status == 200
    await kept.send(b"GET /hea")
    assert await kept.closed() == b""


async def test_a_long_request_is_not_timed_out_by_the_head_s_limit(rig):
    release = asyncio.Event()

    async def slow(request, connection):
        await release.wait()
        await answer_ok(request, connection)

    rig.reconfigure(client_header_timeout=0.02, keepalive=0.02)
    await rig.engine("a", slow)
    client = await rig.send(request_bytes())
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_later(0.1, passed.set_result, None)  # several times either limit
    await passed
    release.set()
    assert (await client.response()).status == 200
    assert await client.closed() == b""  # and then the idle limit


async def test_one_engine_connection_is_used_again_and_not_kept_past_vllm_s_five_seconds(rig):
    from proxy.engines.upstream import KEEPALIVE

    assert KEEPALIVE < 5
    engine = await rig.engine()
    for _ in range(5):
        await rig.post()
    assert len(engine.connections) == 1


@pytest.fixture
def access_log(caplog):
    caplog.set_level(logging.INFO, "proxy.access")
    return lambda: [record for record in caplog.records if record.name == "proxy.access"]


async def test_every_request_is_one_line_with_its_fields(rig, access_log):
    await rig.engine()
    await rig.post(headers="X-Request-Id: id-1\r\n")
    (record,) = access_log()
    fields = record.fields
    assert fields["ttfb"] <= fields["duration"]
    expected = {
        "method": "POST",
        "route": "/v1/chat/completions",
        "model": "m",
        "replica": "a",
        "reason": "spread",
        "status": 200,
        "bytes": 11,
        "request_id": "id-1",
        "code": "",
        "detail": "",
    }
    assert {name: fields[name] for name in expected} == expected
    assert record.message.startswith(
        "method=POST route=/v1/chat/completions model=m replica=a reason=spread status=200"
    )


async def test_what_a_client_writes_cannot_forge_log_lines(rig, access_log):
    await rig.post({**CHAT, "model": 'x" status=200\nmethod=GET'})
    await rig.get("/evil%0Astatus=200?x")
    first, second = access_log()
    assert "\n" not in first.message
    assert 'model="x\\" status=200\\nmethod=GET"' in first.message
    assert "status=404" in first.message
    assert "route=-" in second.message
    assert second.fields["code"] == "unknown_url"


@pytest.mark.usefixtures("heads_at_once")
async def test_a_client_that_left_in_mid_stream_is_499_in_the_log(rig, access_log):
    async def silent(request, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        await connection.closed()

    await rig.engine("a", silent)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    await client.close()
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])
    await rig.get("/health")
    assert access_log()[0].fields["status"] == 499


async def test_a_defect_of_ours_is_500_and_returns_what_was_taken(rig, access_log, monkeypatch):
    async def broken(self, lease, exchange):
        raise ZeroDivisionError

    monkeypatch.setattr("proxy.engines.upstream.Upstreams.send", broken)
    await rig.engine()
    answer = await rig.post()
    assert answer.status == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]
    assert access_log()[0].fields["status"] == 500


async def test_tls_on_a_plain_port_is_told_so_at_once(rig, caplog):
    caplog.set_level(logging.INFO)
    client = await rig.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    answer = await client.response()
    assert answer.status == 400
    assert "use http://, or give it a certificate" in answer.json()["error"]["message"]
    assert await client.closed() == b""
    assert "this is TLS" in caplog.text
