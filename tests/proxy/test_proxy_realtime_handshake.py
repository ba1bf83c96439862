"""Opening /v1/realtime: what is a handshake, who may, and that Upgrade means nothing anywhere else."""

from __future__ import annotations

import pytest
from proxyrig import Rig, request_bytes
from wsrig import CREATED, KEY, UPDATE, Realtime, greeted, handshake, opened, text

from proxy.realtime.upgrade import check_handshake
from supervisord.core.admission import RefusalCode, Refuse

WRONG = {
    "no upgrade": (handshake(Upgrade=None), 426),
    "h2c": (handshake(Upgrade="h2c"), 426),
    "not the option": (handshake(Connection="keep-alive"), 426),
    "no connection": (handshake(Connection=None), 426),
    "no version": (handshake(Sec_WebSocket_Version=None), 426),
    "version 12": (handshake(Sec_WebSocket_Version="12"), 426),
    "two versions": (handshake(extra="Sec-WebSocket-Version: 8\r\n"), 426),
    "a list of versions": (handshake(Sec_WebSocket_Version="13, 8"), 426),
    "no key": (handshake(Sec_WebSocket_Key=None), 400),
    "an empty key": (handshake(Sec_WebSocket_Key=""), 400),
    "a short key": (handshake(Sec_WebSocket_Key="AAAA"), 400),
    "no base64": (handshake(Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ=!"), 400),
    "a key that is not ASCII": (handshake(Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZ\xe9=="), 400),
    "two keys": (handshake(extra=f"Sec-WebSocket-Key: {KEY}\r\n"), 400),
    "a body": (handshake(extra="Content-Length: 5\r\n") + b"hello", 400),
    "a chunked body": (handshake(extra="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", 400),
    "HTTP/1.0": (handshake().replace(b"HTTP/1.1", b"HTTP/1.0", 1), 426),
    "POST": (handshake().replace(b"GET", b"POST", 1), 405),
    "two models": (handshake("/v1/realtime?model=m&model=n"), 400),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_no_handshake_is_an_http_error(rig: Rig, name: str):
    raw, status = WRONG[name]
    await rig.engine("a", Realtime())
    client = await rig.send(raw)
    answer = await client.response()
    assert answer.status == status
    assert answer.json()["error"]["message"]
    if status == 426:
        assert answer.header("upgrade") == "websocket"
        if "version" in name:
            assert answer.header("sec-websocket-version") == "13"
    assert not rig.engines["a"].requests
    assert not rig.admission.admitted


@pytest.mark.parametrize(
    "changed",
    [
        {"Upgrade": "WebSocket"},
        {"Upgrade": "h2c, websocket"},
        {"Connection": "keep-alive, upgrade"},
        {"Connection": "close, Upgrade"},
    ],
)
async def test_spellings_that_are_allowed_are_taken(rig: Rig, changed: dict[str, str]):
    await rig.engine("a", Realtime())
    client = await rig.send(handshake(**changed))
    assert (await client.head()).status == 101


async def test_frames_behind_the_handshake_are_not_lost(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    first = text(UPDATE, mask=True)
    client = await rig.send(handshake() + first)
    assert (await client.head()).status == 101
    engine = await realtime.peer()
    await engine.read()
    assert engine.raw == first


async def test_frames_behind_a_handshake_that_is_refused_are_nobody_s(rig: Rig):
    await rig.engine("a", Realtime())
    smuggled = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    client = await rig.send(handshake(Sec_WebSocket_Version="8") + smuggled)
    assert (await client.response()).status == 426
    assert (await client.response()).status == 200  # a request of its own, to us, as on any connection
    assert not rig.engines["a"].requests


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "websocket, h2c"])
async def test_upgrade_on_other_routes_is_not_followed(rig: Rig, protocol: str):
    engine = await rig.engine()
    fields = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n"
    client = await rig.send(request_bytes(headers=fields))
    assert (await client.response()).status == 200
    assert engine.requests[0].header("upgrade") is None
    assert engine.requests[0].header("connection") is None
    await client.send(request_bytes())
    assert (await client.response()).status == 200  # the connection speaks HTTP still


async def test_an_engine_that_switches_protocols_on_another_route_is_not_followed(rig: Rig):
    async def switches(request, connection):
        await connection.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")

    await rig.engine("a", switches)
    assert (await rig.post()).status == 502


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        ("http://proxy.test", (), 101),
        ("https://PROXY.test", (), 101),
        ("http://proxy.test:81", (), 403),
        ("http://evil.test", (), 403),
        ("null", (), 403),
        ("file://", (), 403),
        ("http://[", (), 403),
        ("http://[proxy.test]", (), 403),
        ("http://app.test:3000", ("http://app.test:3000",), 101),
        ("http://app.test:3001", ("http://app.test:3000",), 403),
        ("null", ("null",), 101),
        ("http://evil.test", ("*",), 101),
    ],
)
async def test_a_page_of_another_site_may_not_open_a_session(rig: Rig, origin: str, allowed: tuple, status: int):
    await rig.engine("a", Realtime())
    rig.reconfigure(cors_origins=allowed)
    client = await rig.send(handshake(Origin=origin))
    head = await client.head()
    assert head.status == status


async def test_two_origins_must_both_be_allowed(rig: Rig):
    await rig.engine("a", Realtime())
    client = await rig.send(handshake(extra="Origin: http://evil.test\r\n", Origin="http://proxy.test"))
    assert (await client.response()).status == 403


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Refuse(RefusalCode.QUEUE_FULL, "full", 3.2), 503),
        (Refuse(RefusalCode.MODEL_HELD, "held", None), 503),
        (Refuse(RefusalCode.MODEL_NOT_FOUND, "The model `x` does not exist."), 404),
    ],
)
async def test_a_refusal_before_the_handshake_is_an_http_error(rig: Rig, refusal: Refuse, status: int):
    rig.admission.refusal = refusal
    client = await rig.send(handshake("/v1/realtime?model=x"))
    answer = await client.response()
    assert (answer.status, answer.json()["error"]["code"]) == (status, refusal.code.value)
    assert answer.header("retry-after") == ("4" if refusal.retry_after else None)
    await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.response()).status == 200


@pytest.mark.parametrize(
    ("refusal", "close"),
    [
        (Refuse(RefusalCode.QUEUE_FULL, "full", 3.2), 1013),
        (Refuse(RefusalCode.MODEL_HELD, "held", None), 1013),
        (Refuse(RefusalCode.MODEL_NOT_FOUND, "The model `x` does not exist."), 1008),
        (Refuse(RefusalCode.ROUTER_SHUTTING_DOWN, "bye", 5.0), 1012),
    ],
)
async def test_a_refusal_after_the_handshake_is_an_event_and_a_close(rig: Rig, refusal: Refuse, close: int):
    client = await greeted(rig)
    rig.admission.refusal = refusal
    await client.say(UPDATE)
    event = await client.event()
    expected = {"type": "error", "error": refusal.message, "code": refusal.code.value}
    assert event == expected | ({"retry_after": 4 if refusal.retry_after == 3.2 else 5} if refusal.retry_after else {})
    assert await client.close_code() == close
    await client.gone()


async def test_subprotocols_that_are_not_known_are_not_taken(rig: Rig):
    await rig.engine("a", Realtime())
    client = await opened(rig, extra="Sec-WebSocket-Protocol: chat, superchat\r\n")
    assert client.head.header("sec-websocket-protocol") is None


async def test_a_request_id_is_made_where_none_came(rig: Rig):
    await rig.engine("a", Realtime())
    client = await opened(rig, "/v1/realtime?model=m")
    assert client.head.header("x-request-id") == rig.engines["a"].requests[0].header("x-request-id")
    assert (await client.read()).data == CREATED


def test_the_example_of_the_rfc():
    from proxy.http.heads import parse_request
    from proxy.realtime.upgrade import answer_lines

    head = parse_request(handshake())
    check_handshake(head, ())
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer_lines(head)
