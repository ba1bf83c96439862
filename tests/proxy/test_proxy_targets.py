"""Targets in every form that RFC 9112 knows, and the methods that ask about a route or echo a request."""

import pytest
from proxyrig import CHAT, request_bytes

from proxy.routes import ROUTES

BODY = b'{"model": "m", "prompt": "x"}'
PATHS = [row.path.replace("{id}", "m") for row in ROUTES]


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("http://proxy.test/v1/completions", "proxy.test", "/v1/completions"),
        ("HTTP://other.test:8000/v1/completions?a=%2F..&b", "other.test:8000", "/v1/completions?a=%2F..&b"),
        ("https://[::1]:8443/v1/completions", "[::1]:8443", "/v1/completions"),
        ("http://127.0.0.1:9/v1/completions?", "127.0.0.1:9", "/v1/completions?"),
    ],
)
async def test_a_target_in_absolute_form_is_its_path_here_and_its_host_counts(rig, target, host, path):
    engine = await rig.engine()
    assert (await rig.post(BODY, target)).status == 200
    (request,) = engine.requests
    assert request.first_line == f"POST {path} HTTP/1.1"
    assert [value for name, value in request.headers if name.lower() == "host"] == [host]
    assert request.body == BODY


async def test_an_http_1_0_client_may_use_the_absolute_form_without_host(rig):
    engine = await rig.engine()
    head = f"POST http://only.here/v1/completions HTTP/1.0\r\nContent-Length: {len(BODY)}\r\n\r\n"
    client = await rig.send(head.encode() + BODY)
    assert (await client.response()).status == 200
    assert engine.requests[0].header("host") == "only.here"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/health"])
async def test_local_routes_take_the_absolute_form_too(rig, path):
    assert (await rig.get(f"http://proxy.test{path}")).status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prefix", ["", "http://proxy.test"])
async def test_options_tells_what_a_route_allows_and_asks_nobody(rig, path, prefix):
    engine = await rig.engine()
    client = await rig.send(
        f"OPTIONS {prefix}{path} HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    )
    answer = await client.response()
    row = next(row for row in ROUTES if row.path.replace("{id}", "m") == path)
    assert answer.status == 204
    assert answer.header("allow") == ", ".join([*row.methods, "OPTIONS"])
    assert answer.header("content-length") is None  # RFC 9110 8.6: none with 204
    assert answer.header("x-request-id")
    assert (await client.response()).status == 200
    assert engine.requests == []
    assert rig.admission.admitted == []


@pytest.mark.parametrize("target", ["*", "http://proxy.test"])
async def test_options_of_the_server_is_what_any_route_allows(rig, target):
    answer = await rig.get(target, "OPTIONS")
    assert answer.status == 204
    assert set(answer.header("allow").split(", ")) == {m for row in ROUTES for m in row.methods} | {"OPTIONS"}


async def test_options_of_an_unknown_path_is_404(rig):
    assert (await rig.get("/sleep", "OPTIONS")).status == 404


async def test_options_with_a_body_is_answered_and_the_next_request_is_the_next(rig):
    await rig.engine()
    body = b'{"x": 1}'
    head = f"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    client = await rig.send(head + body + request_bytes())
    assert [(await client.response()).status for _ in range(2)] == [204, 200]


async def test_trace_echoes_nothing(rig):
    client = await rig.send(b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n")
    answer = await client.response()
    assert answer.status == 405
    assert answer.header("allow") == "GET, HEAD, OPTIONS"
    assert b"secret" not in answer.body


@pytest.mark.parametrize("target", ["127.0.0.1:9", "proxy.test:443", "/v1/completions"])
async def test_connect_opens_no_tunnel(rig, target):
    engine = await rig.engine()
    client = await rig.send(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + request_bytes())
    assert (await client.response()).status in (400, 405)
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/health"])
async def test_head_is_get_without_its_body(rig, path):
    whole = await rig.get(path)
    client = await rig.send(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\nGET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await client.response(method="HEAD")
    assert (head.status, head.header("content-length")) == (200, str(len(whole.body)))
    assert (await client.response()).body == whole.body  # and not the body of the answer before


async def test_an_error_for_head_has_no_body_either(rig):
    client = await rig.send(
        b"HEAD /v1/models/nobody HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    head = await client.response(method="HEAD")
    assert head.status == 404
    assert int(head.header("content-length")) > 0
    assert (await client.response()).status == 200


async def test_a_target_in_absolute_form_names_no_engine(rig):
    engine = await rig.engine()
    for target in (f"{engine.endpoint}/sleep", f"{engine.endpoint}/metrics", f"{engine.endpoint}/v1/../sleep"):
        assert (await rig.post(CHAT, target)).status == 404
    assert engine.requests == []
