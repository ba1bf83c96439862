"""The allow-list: what is forwarded, and that nothing else ever is, whatever its spelling."""

import asyncio

import pytest
from proxyrig import CHAT, listed, request_bytes

from proxy.routes import ROUTES, Handler

FORWARDED = [row.path for row in ROUTES if row.handler is Handler.ENGINE_JSON]

NASTY = [
    "/",
    "/sleep",
    "/sleep?level=1",
    "/%73leep",
    "/SLEEP",
    "//sleep",
    "/./sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/abort_requests",
    "/release_kv_cache_memory",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/fault_tolerance/apply",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/invocations",
    "/server_info",
    "/metrics",
    "/version",
    "/ping",
    "/docs",
    "/openapi.json",
    "/upstream/m/sleep",
    "/v1/../sleep",
    "/v1/chat/completions/../../../sleep",
    "/v1/chat/completions/..%2f..%2fsleep",
    "/v1/chat/completions/%2e%2e/%2e%2e/sleep",
    "/v1/chat/completions;/../sleep",
    "/v1/chat/completions;jsessionid=1",
    "/v1/chat/completions/",
    "/v1/chat/completions#/sleep",
    "/v1/chat/completions%00",
    "/v1/chat/completions%3f",
    "/v1/chat%2fcompletions",
    "/v1//chat/completions",
    "/v1/./chat/completions",
    "/v1/Chat/Completions",
    "/V1/chat/completions",
    "/v1\\chat\\completions",
    "v1/chat/completions",
    "/v1/models/../../sleep",
    "/v1/models/%2e%2e%2f%2e%2e%2fsleep",
    "/v1/responses/../../sleep",
    "/v1/responses/%2e%2e/%2e%2e/sleep",
    "/v1/responses/..",
    "/v1/audio/transcriptions/../../../sleep",
    "http://127.0.0.1:7771/sleep",
    "http://127.0.0.1/v1/chat/completions/../sleep",
    "http://127.0.0.1/%73leep",
    "http://127.0.0.1//v1/chat/completions",
    "http://127.0.0.1",
    "http://127.0.0.1?/v1/chat/completions",
    "http://a@127.0.0.1/v1/chat/completions",
    "http:///sleep",
    "http:/v1/chat/completions",
    "unix://x/v1/chat/completions",
    "*",
]


@pytest.mark.parametrize("path", FORWARDED)
async def test_every_route_of_the_list_is_forwarded_with_its_query(rig, path):
    engine = await rig.engine()
    body = b'{"model": "m", "input": "x", "prompt": "x"}'
    answer = await rig.post(body, f"{path}?a=%2F..%zz&b=;c&a=2")
    assert answer.status == 200
    assert engine.requests[0].first_line == f"POST {path}?a=%2F..%zz&b=;c&a=2 HTTP/1.1"
    assert engine.requests[0].body == body


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_no_spelling_of_another_path_is_forwarded(rig, method):
    engine = await rig.engine()
    for target in NASTY:
        client = await rig.send(request_bytes(CHAT, target).replace(b"POST", method.encode(), 1))
        answer = await client.response()
        assert answer.status in (400, 404, 405), target  # 400: not even HTTP
        assert {"message", "type", "code"} <= set(answer.json()["error"]), target
    assert engine.requests == []
    assert rig.admission.admitted == []


async def test_a_non_ascii_path_is_refused(rig):
    client = await rig.send(request_bytes(CHAT, "/v1/chat/compl\xe9tions?x"))
    assert (await client.response()).status in (400, 404)


async def test_an_unknown_path_says_so_in_the_shape_of_openai(rig):
    answer = await rig.post(CHAT, "/sleep?level=2")
    assert answer.status == 404
    assert answer.header("content-type") == "application/json"
    assert answer.json() == {
        "error": {
            "message": "Unknown request URL: POST /sleep",
            "type": "NotFoundError",
            "param": None,
            "code": "unknown_url",
        }
    }


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "HEAD"])
async def test_a_wrong_method_is_405_with_allow(rig, method):
    client = await rig.send(f"{method} /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await client.response(method=method)
    assert answer.status == 405
    assert answer.header("allow") == "POST, OPTIONS"


@pytest.mark.parametrize("method", ["BREW", "GETX", "get", "PRI", "DESCRIBE", "M!X"])
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/no/such", "http://x/v1/models"])
async def test_a_method_that_nobody_knows_is_501(rig, method, target):
    client = await rig.send(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await client.response()
    assert answer.status == 501
    assert answer.json() == {
        "error": {
            "message": f"cannot parse the request: {method} is no method that is known here",
            "type": "NotImplementedError",
            "param": None,
            "code": 501,
        }
    }


@pytest.mark.parametrize(
    "head",
    [
        b"BREW /v1/models HTTP/1.1\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"BREW * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"B(W /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b" /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost : x\r\n\r\n",
    ],
)
async def test_a_head_that_is_wrong_in_another_way_too_is_400(rig, head):
    client = await rig.send(head)
    assert (await client.response()).status == 400


async def test_health_is_200_without_an_engine(rig):
    answer = await rig.get("/health")
    assert (answer.status, answer.body) == (200, b"")
    assert (await rig.get("/health", "HEAD")).status == 200
    assert rig.admission.admitted == []


async def test_models_lists_every_model_and_alias_with_its_state_and_asks_nobody(rig):
    rig.admission.models = (listed("org/name", ("short",)), listed("other"))
    answer = await rig.get("/v1/models")
    assert answer.status == 200
    assert answer.json()["object"] == "list"
    rows = answer.json()["data"]
    assert [(row["id"], row["root"]) for row in rows] == [
        ("org/name", "org/name"),
        ("short", "org/name"),
        ("other", "other"),
    ]
    assert rows[0] == {
        "id": "org/name",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "vllm",
        "root": "org/name",
        "parent": None,
        "max_model_len": 114688,
        "state": "asleep",
        "routing": "adaptive",
        "wake_seconds": 2.5,
        "simulated": True,
    }
    assert rig.admission.admitted == []


@pytest.mark.parametrize("path", ["/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/short"])
async def test_one_model_is_found_by_its_name_or_alias(rig, path):
    rig.admission.models = (listed("org/name", ("short",)),)
    answer = await rig.get(path)
    assert answer.status == 200
    assert answer.json()["root"] == "org/name"


async def test_an_unknown_model_is_404(rig):
    answer = await rig.get("/v1/models/nobody")
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    answer = await rig.post({**CHAT, "model": "nobody"})
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"
    assert answer.header("retry-after") is None


async def test_errors_on_the_messages_route_have_the_shape_of_anthropic(rig):
    answer = await rig.post({**CHAT, "model": "nobody"}, "/v1/messages")
    assert answer.status == 404
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_answers_to_many_requests_on_one_connection_stay_in_order(rig):
    await rig.engine()
    client = await rig.connect()
    await client.send(request_bytes() + request_bytes(CHAT, "/sleep") + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        assert [(await client.response()).status for _ in range(3)] == [200, 404, 200]
