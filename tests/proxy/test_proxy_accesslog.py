"""What the line of a request tells beyond its status: who asked, how long it waited, where its client left it."""

import asyncio
import json
import logging
import re
from random import Random

import pytest
from proxyrig import STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.accesslog import log_request
from proxy.errors import bad_request
from proxy.exchange import Finished, Outcome
from proxy.reading.usage import Usage

USAGE = b'"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":25}}'


@pytest.fixture
def lines(rig, caplog):
    """Returns, when so many requests are over, the fields of their lines."""
    caplog.set_level(logging.INFO, "proxy.access")
    over = asyncio.Event()
    rig.proxy.observer = lambda finished, outcome: over.set()

    async def told(count=1):
        async with asyncio.timeout(10):
            while len(found := [r.fields for r in caplog.records if r.name == "proxy.access"]) < count:
                over.clear()
                await over.wait()
        return found

    return told


async def stream_with_usage(request, connection):
    await connection.send(event_stream_head() + chunk(b'data: {"x":1}\n\n'))
    await connection.send(chunk(b"data: {" + USAGE + b"}\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def silent(request, connection):
    await asyncio.Event().wait()


async def test_a_stream_tells_its_client_its_first_token_and_its_tokens(rig, lines):
    await rig.engine("a", stream_with_usage)
    await rig.post(STREAM)
    (fields,) = await lines()
    assert (fields["client"], fields["stream"]) == ("127.0.0.1", "yes")
    assert [fields[f"{kind}_tokens"] for kind in ("prompt", "completion", "cached")] == [100, 7, 25]
    assert fields["ttfb"] <= fields["ttft"] <= fields["duration"]
    assert fields["bytes_in"] == len(request_bytes(STREAM).partition(b"\r\n\r\n")[2])
    assert not fields.keys() & {"queued", "attempts", "gone_in"}


async def test_an_answer_without_usage_tells_no_tokens_and_no_first_token(rig, lines):
    await rig.engine()
    await rig.post()
    (fields,) = await lines()
    assert fields["stream"] == "no"
    assert not fields.keys() & {"prompt_tokens", "completion_tokens", "cached_tokens", "ttft"}


async def test_the_wait_for_a_wake_is_told(rig, lines):
    await rig.engine("a")
    rig.admission.asleep.add("a")
    client = await rig.send(request_bytes())
    await rig.until(lambda: bool(rig.admission.waiting))
    rig.admission.wake("a")
    await client.response()
    (fields,) = await lines()
    assert 0 < fields["queued"] <= fields["duration"]


async def test_a_failover_is_a_second_attempt(rig, lines):
    async def die(request, connection):
        connection.reset()
        raise ConnectionResetError

    await rig.engine("a", die)
    await rig.engine("b", lambda request, connection: connection.send(reply_bytes(b"{" + USAGE + b"}")))
    await rig.post()
    (fields,) = await lines()
    assert (fields["attempts"], fields["replica"], fields["completion_tokens"]) == (2, "b", 7)


@pytest.mark.usefixtures("heads_at_once")
@pytest.mark.parametrize("stage", ["body", "queue", "prefill", "stream"])
async def test_a_client_that_leaves_tells_where_it_was(rig, lines, stage):
    go = asyncio.Event()

    async def stream(request, connection):
        await connection.send(event_stream_head() + chunk(b'data: {"x":1}\n\n'))
        await go.wait()

    engine = await rig.engine("a", stream if stage == "stream" else silent)
    raw = request_bytes(STREAM)
    if stage == "queue":
        rig.admission.asleep.add("a")
    client = await rig.send(raw[:-5] if stage == "body" else raw)
    match stage:
        case "queue":
            await rig.until(lambda: bool(rig.admission.waiting))
        case "prefill":
            await engine.arrived.wait()
        case "stream":
            await client.head()
            await client.chunk()
        case "body":
            await rig.get("/health")  # by then it was read as far as it came
    await client.close()
    fields = (await lines(2 if stage == "body" else 1))[-1]
    assert (fields["status"], fields["gone_in"]) == (499, stage)


async def test_what_is_no_request_is_one_line_too(rig, lines):
    client = await rig.send(b"NONSENSE\r\n\r\n")
    assert (await client.response()).status == 400
    (fields,) = await lines()
    assert (fields["status"], fields["route"], fields["client"]) == (400, "-", "127.0.0.1")
    assert "cannot parse the request" in fields["detail"]


async def test_an_answer_to_head_has_the_length_of_a_body_of_which_nothing_is_sent(rig, lines):
    for asked, (path, status) in enumerate([("/v1/models", 200), ("/nowhere", 404)]):
        answered = [await rig.get(path, method) for method in ("GET", "HEAD")]
        assert [answer.status for answer in answered] == [status, status]
        assert int(answered[1].header("content-length")) > 0
        told = await lines(2 * asked + 2)
        assert [fields["bytes"] for fields in told[-2:]] == [len(answered[0].body), 0]


VALUES = ["r0", "a=b", 'a"b', "a\\b", "a b", "ü", "\n", "\ud800", "a" * 1000, "a" * 1001]
#: As a whole line is read: a name, and a value that is plain or in JSON's quotes.
SAID = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^" ]+)(?: |$)')


class Failing(logging.Handler):
    """Fails at the first line that it is given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def emit(self, record):
        self.given.append(record.fields["client"])
        if len(self.given) == 1:
            raise OSError("no space left")


async def test_a_count_or_a_line_that_fails_loses_no_other(rig, caplog):
    caplog.set_level(logging.INFO)
    handler, counted, over = Failing(), [], asyncio.Event()

    def count(finished, outcome):
        counted.append(finished.peer)
        if finished.peer == "three":
            over.set()
        raise RuntimeError("a defect")

    rig.proxy.observer = count
    logging.getLogger("proxy.access").addHandler(handler)
    try:
        for peer in ("one", "two", "three"):
            rig.proxy._refused(peer, bad_request("of one turn of the loop"))
        async with asyncio.timeout(10):
            await over.wait()
    finally:
        logging.getLogger("proxy.access").removeHandler(handler)
    assert handler.given == counted == ["one", "two", "three"]
    [said] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert said.getMessage() == "cannot log or count every request"
    assert said.exc_info[0] is OSError


@pytest.mark.parametrize("seed", range(200))
def test_the_text_of_a_line_says_what_its_fields_say(seed, caplog):
    random = Random(seed)

    def some(*values):
        return random.choice(["m", "m", "m", *values])

    finished = Finished("POST", "/v1", some(*VALUES), some(*VALUES), 1.0, 1.5)
    outcome = Outcome(
        status=random.choice([200, 499]),
        **{name: some("", *VALUES) for name in ("model", "replica", "reason")},
        **{name: random.choice(["", "", "", *VALUES]) for name in ("code", "key")},
        first_byte=random.choice([None, 1.25, 1.25]),
        computed=1.3,
        stream=random.random() < 0.5,
        attempts=random.choice([0, 1, 2]),
        queued=random.choice([0.0, 0.5]),
        usage=random.choice([None, Usage(1, 2, 3), Usage(1, None, None)]),
        close=random.choice([None, 1000]),
        details=random.choice([[], ["it broke", "twice"]]),
    )
    with caplog.at_level(logging.INFO, "proxy.access"):
        log_request(finished, outcome)
    (record,) = caplog.records
    said = SAID.findall(record.message)
    assert "".join(f"{name}={value} " for name, value in said).rstrip() == record.message
    expected = {name: value for name, value in record.fields.items() if value not in ("", None)}
    assert [name for name, _ in said] == list(expected)
    for name, text in said:
        value = json.loads(text) if text.startswith('"') else text
        assert value == str(expected[name])[:1000]
