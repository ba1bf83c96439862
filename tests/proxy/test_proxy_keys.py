"""API keys: the list of them, what a request must show, and what of it goes no further."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxyrig import STREAM, event_stream_head, reply_bytes, request_bytes
from wsrig import Realtime, handshake, opened

from proxy.clients.keys import KeyFileError, parse_keys
from proxy.credentials import Credentials

KEY, OTHER = "ada-key-0123456789abcdef", "bob-key-0123456789abcdef"
LIST = f"# who may ask\n\nada:{KEY}\n  bob : {OTHER}  \n"
BEARER = f"Authorization: Bearer {KEY}\r\n"


@pytest.fixture
def keyed(rig):
    rig.proxy.guard(Credentials(keys=parse_keys(LIST)))
    return rig


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "has no keys"),
        ("# only:this-is-a-comment-0123", "has no keys"),
        ("ada:short", "fewer than 16"),
        ("ada:", "fewer than 16"),
        ("short", "fewer than 16"),
        ("a b:0123456789abcdef", "no name"),
        (":0123456789abcdef", "no name"),
        ("ada:0123456789 abcdef", "has a space"),
        ("ada:0123456789abcdéf", "not ASCII"),
        (f"ada:{KEY}\nbob:{KEY}", "line 2: the same key stands further up, under the name ada"),
    ],
)
def test_a_list_with_a_mistake_says_where_and_never_tells_a_key(line, reason):
    with pytest.raises(KeyFileError) as error:
        parse_keys(line)
    assert reason in str(error.value)
    assert all(secret not in str(error.value) for secret in (KEY, "0123456789"))


def test_keys_have_names_their_own_or_their_place():
    keys = parse_keys(f"{KEY}\nbob:{OTHER}\r\nada:{'x' * 20}\nada:with:a:colon:0123456789\n{'y' * 20}")
    owners = [keys.owner(key.encode()) for key in (KEY, OTHER, "x" * 20, "with:a:colon:0123456789", "y" * 20)]
    assert owners == ["key-1", "bob", "ada", "ada", "key-5"]
    assert len(keys) == 5


@given(st.binary(max_size=40))
def test_nothing_else_is_a_key(shown):
    assert parse_keys(LIST).owner(shown) is None


def test_a_key_is_not_kept():
    keys = parse_keys(LIST)
    assert KEY not in repr(vars(keys))
    assert keys == parse_keys(f"bob:{OTHER}\nada:{KEY}")
    assert keys != parse_keys(f"eve:{OTHER}\nada:{KEY}")


@pytest.mark.parametrize(
    "headers", [BEARER, f"authorization: bearer  {KEY}\r\n", f"X-API-Key: {KEY}\r\n", f"Authorization: x\r\n{BEARER}"]
)
async def test_a_key_lets_in_is_named_in_the_log_and_goes_no_further(keyed, caplog, headers):
    caplog.set_level(logging.INFO, "proxy.access")
    engine = await keyed.engine()
    assert (await keyed.post(headers=headers)).status == 200
    (request,) = engine.requests
    assert KEY not in str(request.headers)
    (record,) = [record for record in caplog.records if record.name == "proxy.access"]
    assert record.fields["key"] == "ada"
    assert "key=ada" in record.getMessage()
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer wrong-0123456789abcdef\r\n",
        f"Authorization: Basic {KEY}\r\n",
        f"Authorization: Bearer {KEY}x\r\n",
        f"Authorization: Bearer {KEY[:-1]}\r\n",
        "Authorization: Bearer " + "\u00ff" * 20 + "\r\n",
        f"X-Api-Key: Bearer {KEY}\r\n",
        f"Proxy-Authorization: Bearer {KEY}\r\n",
        f"Connection: authorization\r\n{BEARER}",
    ],
)
async def test_without_a_key_of_ours_it_is_401_before_anything_happens(keyed, headers):
    engine = await keyed.engine()
    keyed.admission.asleep.add("a")
    answer = await keyed.post(headers=headers)
    assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "AuthenticationError"
    assert KEY not in answer.body.decode()
    assert keyed.admission.admitted == []  # so no stranger wakes a model
    assert engine.requests == []


async def test_401_comes_before_the_body_is_read_or_asked_for(keyed):
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100000\r\n\r\n"
    client = await keyed.send(head.encode())
    answer = await client.response()
    assert (answer.status, answer.header("connection")) == (401, "close")
    assert await client.closed() == b""


async def test_401_on_anthropics_route_is_in_its_shape(keyed):
    answer = await keyed.post(path="/v1/messages", headers="x-api-key: nobody-knows-0123456789\r\n")
    assert answer.status == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


async def test_health_is_open_the_models_are_not(keyed):
    assert (await keyed.get("/health")).status == 200
    assert (await keyed.get("/v1/models")).status == 401
    assert (await keyed.get("/v1/models/m")).status == 401
    client = await keyed.send(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{BEARER}\r\n".encode())
    assert (await client.response()).status == 200


async def test_credentials_that_are_none_of_ours_go_on(rig):
    engine = await rig.engine()
    for keys in (None, parse_keys(LIST)):
        rig.proxy.guard(Credentials(keys=keys, engine_keys={"a": "engine-key"}))
        mine = "x-api-key: theirs\r\n" if keys is None else f"x-api-key: {KEY}\r\n"
        await rig.post(headers=f"Authorization: Bearer theirs\r\n{mine}")
    first, second = engine.requests
    assert first.header("authorization") == second.header("authorization") == "Bearer theirs"
    assert (first.header("x-api-key"), second.header("x-api-key")) == ("theirs", None)


async def test_an_engine_gets_its_own_key_for_those_who_showed_ours_and_for_nobody_else(rig):
    engine = await rig.engine()
    for keys in (parse_keys(LIST), None):
        rig.proxy.guard(Credentials(keys=keys, engine_keys={"a": "engine-key", "b": "another"}))
        assert (await rig.post(headers=BEARER if keys else "")).status == 200
    assert [request.header("authorization") for request in engine.requests] == ["Bearer engine-key", None]


async def test_a_failover_gives_each_engine_its_own_key(rig):
    async def die(request, connection):
        connection.reset()
        raise ConnectionResetError

    rig.proxy.guard(Credentials(keys=parse_keys(LIST), engine_keys={"a": "key-of-a", "b": "key-of-b"}))
    a, b = await rig.engine("a", die), await rig.engine("b")
    assert (await rig.post(headers=BEARER)).status == 200
    assert {request.header("authorization") for request in a.requests} == {"Bearer key-of-a"}
    assert [request.header("authorization") for request in b.requests] == ["Bearer key-of-b"]


async def test_an_engine_gets_the_key_that_its_process_was_started_with(rig):
    def configure(*engine_keys: str) -> None:
        rig.proxy.guard(Credentials(parse_keys(LIST), dict(zip("ab", engine_keys, strict=False))))

    async def shown() -> str | None:
        engine.requests.clear()
        assert (await rig.post(headers=BEARER)).status == 200
        return engine.requests[0].header("authorization")

    engine = await rig.engine()
    configure("first")  # who was there before us has what is configured
    assert await shown() == "Bearer first"
    configure("second")
    configure("second", "of another")
    assert await shown() == "Bearer first"
    configure()
    assert await shown() == "Bearer first"
    rig.admission.runs["a"] += 1
    assert await shown() is None
    configure("third")
    assert await shown() is None
    rig.admission.runs["a"] += 1
    assert await shown() == "Bearer third"


async def test_new_keys_hold_from_the_next_request_on_and_cut_no_stream(keyed):
    async def stream(request, connection):
        await connection.send(event_stream_head() + b"9\r\ndata: 1\n\n\r\n")
        await connection.closed()

    await keyed.engine("a", stream)
    client = await keyed.send(request_bytes(STREAM, headers=BEARER))
    await client.head()
    keyed.proxy.guard(Credentials(keys=parse_keys(f"bob:{OTHER}")))
    assert await client.chunk() == b"data: 1\n\n"
    assert (await keyed.post(headers=BEARER)).status == 401
    assert len(keyed.admission.open) == 1


async def test_a_kept_connection_shows_its_key_with_every_request(keyed):
    async def answer(request, connection):
        await connection.send(reply_bytes(json.dumps({"n": 1}).encode()))

    await keyed.engine("a", answer)
    client = await keyed.send(request_bytes(headers=BEARER) + request_bytes() + request_bytes(headers=BEARER))
    assert [(await client.response()).status for _ in range(3)] == [200, 401, 200]


async def test_a_page_shows_its_key_as_a_subprotocol_because_it_can_do_no_other_way(keyed):
    keyed.proxy.guard(Credentials(keys=parse_keys(LIST), engine_keys={"a": "engine-key"}))
    engine = await keyed.engine("a", Realtime())
    client = await opened(
        keyed, "/v1/realtime?model=m", f"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{KEY}\r\n"
    )
    assert client.head.header("sec-websocket-protocol") == "realtime"
    assert KEY not in str(engine.requests[0].headers)
    assert engine.requests[0].header("authorization") == "Bearer engine-key"


@pytest.mark.parametrize("extra", ["", "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.nope\r\n"])
async def test_a_session_needs_a_key_too(keyed, extra):
    answer = await (await keyed.send(handshake("/v1/realtime", extra))).response()
    assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_api_key")
