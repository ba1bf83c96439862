"""Web pages: none by default, and exactly those that the configuration names otherwise."""

import pytest
from proxyrig import CHAT, STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.clients.cors import EXPOSED, MAX_AGE
from proxy.clients.keys import parse_keys
from proxy.credentials import Credentials
from supervisord.core.admission import RefusalCode, Refuse

PAGE = "https://chat.example"
#: A type for which a browser asks first.
ASKED = "Content-Type: application/json\r\n"
ENGINES_OPINION = (
    "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\nAccess-Control-Max-Age: 9\r\n"
    "Access-Control-Expose-Headers: x\r\nContent-Type: application/json\r\n"
)


async def permissive(request, connection):
    await connection.send(reply_bytes(b"{}", headers=ENGINES_OPINION))


def cors_of(answer) -> dict[str, str]:
    pairs = [(name.lower(), value) for name, value in answer.headers if name.lower().startswith("access-control")]
    assert len(pairs) == len(dict(pairs)), "a field twice"
    return {name.removeprefix("access-control-"): value for name, value in pairs}


def preflight_head(origin: str = PAGE, headers: str = "authorization,content-type") -> bytes:
    return (
        f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\n"
        f"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: {headers}\r\n\r\n"
    ).encode()


async def preflight(rig, *args):
    return await (await rig.send(preflight_head(*args))).response()


async def test_without_a_list_no_page_may_whatever_the_engine_says(rig):
    await rig.engine("a", permissive)
    answer = await rig.post(headers=f"Origin: {PAGE}\r\n{ASKED}")
    assert answer.status == 200
    assert cors_of(answer) == {}
    assert answer.header("vary") is None
    assert cors_of(await preflight(rig)) == {}


async def test_a_listed_origin_may_and_reads_what_it_needs(rig):
    rig.reconfigure(cors_origins=("http://localhost:3000", PAGE))
    await rig.engine("a", permissive)
    answer = await rig.post(headers=f"Origin: {PAGE}\r\n")
    assert cors_of(answer) == {"allow-origin": PAGE, "allow-credentials": "true", "expose-headers": EXPOSED}
    assert answer.header("vary") == "Origin"
    assert {"x-request-id", "x-vllmctl-replica", "x-vllmctl-route"} < {name.lower() for name, _ in answer.headers}


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example.evil",
        "https://evil-chat.example",
        "http://chat.example",
        "https://chat.example:444",
        "HTTPS://CHAT.EXAMPLE",
        "null",
        "*",
        "",
        f"{PAGE}, {PAGE}",
    ],
)
async def test_another_origin_may_not(rig, origin):
    rig.reconfigure(cors_origins=(PAGE,))
    await rig.engine("a", permissive)
    for answer in (await rig.post(headers=f"Origin: {origin}\r\n{ASKED}"), await preflight(rig, origin)):
        assert answer.status < 300
        assert cors_of(answer) == {}
        assert answer.header("vary") == "Origin"  # or a cache between gives this answer to a page that may


@pytest.mark.parametrize("origin", [PAGE, "null"])
@pytest.mark.parametrize(
    "fields",
    [
        "",
        "Content-Type: text/plain;charset=UTF-8\r\n",
        "Content-Type: application/x-www-form-urlencoded\r\n",
        "Content-Type: Multipart/Form-Data; boundary=x\r\nSec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\n",
        "Authorization: Basic dTpw\r\n",  # the reader's, whom a proxy before us had asked for it
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/transcriptions", "/v1/responses/resp_1/cancel"])
async def test_what_a_browser_sends_without_asking_wakes_nobody_for_a_page_that_may_not(rig, origin, fields, path):
    rig.reconfigure(cors_origins=("http://localhost:3000",))
    engine = await rig.engine()
    answer = await rig.post(path=path, headers=f"Origin: {origin}\r\n{fields}")
    assert (answer.status, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert (rig.admission.admitted, engine.requests) == ([], [])


@pytest.mark.parametrize(
    "fields",
    [
        "",  # no browser
        f"Origin: {PAGE}\r\n{ASKED}",
        f"Origin: {PAGE}\r\nContent-Type: application/json; charset=utf-8\r\n",
        f"Origin: {PAGE}\r\nAuthorization: Bearer theirs\r\n",
        f"Origin: {PAGE}\r\nX-Api-Key: theirs\r\n",
        f"Origin: {PAGE}\r\nSec-Fetch-Site: same-origin\r\n",  # its proxy calls us by another name
        "Origin: moz-extension://0-0\r\nSec-Fetch-Site: none\r\n",
        "Origin: http://proxy.test\r\nSec-Fetch-Site: same-origin\r\n",
        "Origin: HTTPS://PROXY.test\r\n",
        "Origin: http://localhost:3000\r\n",
    ],
)
async def test_what_no_page_of_another_site_can_send_unasked_goes_through(rig, fields):
    rig.reconfigure(cors_origins=("http://localhost:3000",))
    await rig.engine()
    assert (await rig.post(headers=fields)).status == 200


async def test_a_page_that_showed_a_key_was_asked_for(rig):
    rig.proxy.guard(Credentials(keys=parse_keys("page:0123456789abcdef")))
    await rig.engine()
    key = "Authorization: Bearer 0123456789abcdef\r\n"
    assert (await rig.post(headers=f"Origin: {PAGE}\r\n{key}")).status == 200


async def test_a_request_of_no_page_is_told_that_the_answer_depends_on_the_origin(rig):
    rig.reconfigure(cors_origins=(PAGE,))
    answer = await rig.get("/v1/models")
    assert cors_of(answer) == {}
    assert answer.header("vary") == "Origin"


async def test_every_origin_may_and_none_with_credentials(rig):
    rig.reconfigure(cors_origins=("*",))
    await rig.engine("a", permissive)
    answer = await rig.post(headers=f"Origin: {PAGE}\r\n")
    assert cors_of(answer) == {"allow-origin": "*", "expose-headers": EXPOSED}
    assert "allow-credentials" not in cors_of(await preflight(rig))


async def test_a_preflight_is_answered_here(rig):
    rig.reconfigure(cors_origins=(PAGE,))
    engine = await rig.engine()
    answer = await preflight(rig)
    assert answer.status == 204
    assert cors_of(answer) == {
        "allow-origin": PAGE,
        "allow-credentials": "true",
        "allow-methods": "POST, OPTIONS",
        "allow-headers": "authorization,content-type",
        "max-age": str(MAX_AGE),
        "expose-headers": EXPOSED,
    }
    assert engine.requests == []


@pytest.mark.parametrize("headers", ["a b\tc", "x" * 5000, "ok, <script>"])
async def test_a_preflight_for_what_is_no_list_of_fields_is_given_none(rig, headers):
    rig.reconfigure(cors_origins=(PAGE,))
    assert "allow-headers" not in cors_of(await preflight(rig, PAGE, headers))


async def test_errors_can_be_read_by_the_page_too(rig):
    rig.reconfigure(cors_origins=(PAGE,))
    await rig.engine()
    rig.admission.refusal = Refuse(RefusalCode.QUEUE_FULL, "full", 3.0)
    origin = f"Origin: {PAGE}\r\n"
    for status, answer in (
        (503, await rig.post(headers=origin)),
        (400, await rig.post(b"nonsense", headers=origin)),
        (404, await rig.post(CHAT, "/sleep", headers=origin)),
        (415, await rig.post(headers=origin + "Content-Encoding: x\r\n")),
    ):
        assert answer.status == status
        assert cors_of(answer)["allow-origin"] == PAGE


async def test_a_page_with_a_key_asks_first_without_it_and_may_read_that_its_key_is_wrong(rig):
    rig.proxy.guard(Credentials(keys=parse_keys("page:0123456789abcdef")))
    rig.reconfigure(cors_origins=(PAGE,))
    await rig.engine()
    assert (await preflight(rig)).status == 204
    origin = f"Origin: {PAGE}\r\n"
    for key, status in (("", 401), ("Authorization: Bearer 0123456789abcdef\r\n", 200)):
        answer = await rig.post(headers=origin + key)
        assert (answer.status, cors_of(answer)["allow-origin"]) == (status, PAGE)


async def test_a_stream_has_them_once_though_it_began_with_comments(rig):
    rig.reconfigure(cors_origins=(PAGE,), wait_comment_after=0.01)

    async def stream(request, connection):
        await connection.send(event_stream_head() + chunk(b"data: 1\n\n") + b"0\r\n\r\n")

    await rig.engine("a", stream)
    rig.admission.asleep.add("a")
    client = await rig.send(request_bytes(STREAM, headers=f"Origin: {PAGE}\r\n"))
    head = await client.head()
    assert cors_of(head)["allow-origin"] == PAGE
    rig.admission.wake("a")
    await rig.until(lambda: rig.admission.finished)
