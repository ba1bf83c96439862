"""An engine that gives requests up ends them with a 200, as if that were an answer: no client gets it for one."""

import asyncio

import pytest
from proxyrig import STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from supervisord.core.admission import Ending

TOKEN = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null,"stop_reason":null}]}\n\n'
ABORT = b'data: {"choices":[{"delta":{"content":""},"finish_reason":"abort","stop_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"type":"message","stop_reason":null}}\n\n'
)
MESSAGE_ABORT = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null}}\n\n'
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
#: What a model may say, and a client may ask for a log probability of.
OWN_WORDS = b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"abort\\""},"finish_reason":"stop"}]}\n\n'


def streams(*pieces: bytes, first: asyncio.Event | None = None):
    """An engine that sends these pieces; ``first``: when the client has the first one, the others."""

    async def stream(request, connection):
        await connection.send(event_stream_head() + pieces[0])
        if first is not None:
            await first.wait()
        for piece in pieces[1:]:
            await connection.send(piece)
        await connection.send(b"0\r\n\r\n")

    return stream


async def received(rig, path: str, *pieces: bytes) -> tuple[bytes, bytes]:
    """What a client gets of the first piece, and after that."""
    first = asyncio.Event()
    await rig.engine("a", streams(*pieces, first=first))
    client = await rig.send(request_bytes({**STREAM, "max_tokens": 9}, path))
    await client.head()
    begun = await client.chunk()
    first.set()
    rest = b""
    while data := await client.chunk():
        rest += data
    return begun, rest


@pytest.mark.parametrize(
    ("path", "sent", "kept"),
    [
        ("/v1/chat/completions", [TOKEN, ABORT, DONE], TOKEN),
        ("/v1/chat/completions", [TOKEN, ABORT.replace(b'":"', b'": "'), DONE], TOKEN),
        ("/v1/messages", [MESSAGE_START, MESSAGE_ABORT, MESSAGE_STOP], MESSAGE_START),
    ],
)
async def test_a_stream_that_its_engine_gives_up_ends_with_an_error_and_not_as_if_it_were_whole(rig, path, sent, kept):
    other = await rig.engine("b")
    begun, rest = await received(rig, path, *map(chunk, sent))
    assert begun == kept
    assert b'"error"' in rest
    assert b"the engine aborted the request" in rest
    assert not any(words in rest for words in (b"[DONE]", b"message_stop", b'"finish_reason"'))
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN)]
    assert other.requests == []


@pytest.mark.parametrize("cut", range(20, ABORT.index(b'abort"') + 8, 6))
async def test_wherever_its_last_event_is_cut_in_two(rig, cut):
    whole = chunk(TOKEN) + chunk(ABORT)
    cut += len(chunk(TOKEN))
    _, rest = await received(rig, "/v1/chat/completions", whole[:cut], whole[cut:], chunk(DONE))
    assert b"the engine aborted the request" in rest
    assert not any(words in rest for words in (b"[DONE]", b'"abort"'))


async def test_a_stream_that_is_given_up_before_its_first_event_costs_the_client_nothing(rig):
    await rig.engine("a", streams(chunk(ABORT) + chunk(DONE)))
    await rig.engine("b", streams(chunk(TOKEN), chunk(DONE)))
    answer = await rig.post(STREAM)
    assert (answer.header("x-vllmctl-replica"), answer.body) == ("b", TOKEN + DONE)


async def test_a_plain_answer_in_anthropics_dialect_that_is_given_up_costs_the_client_nothing(rig):
    async def gives_up(request, connection):
        await connection.send(reply_bytes(b'{"type":"message","content":[],"stop_reason":null}'))

    async def answers(request, connection):
        await connection.send(reply_bytes(b'{"type":"message","content":[],"stop_reason":"end_turn"}'))

    await rig.engine("a", gives_up)
    await rig.engine("b", answers)
    answer = await rig.post({"model": "m", "max_tokens": 9}, "/v1/messages")
    assert answer.header("x-vllmctl-replica") == "b"


async def test_what_a_model_says_is_no_sign_of_it(rig):
    await rig.engine("a", streams(chunk(TOKEN), chunk(OWN_WORDS), chunk(DONE)))
    answer = await rig.post(STREAM)
    assert answer.body == TOKEN + OWN_WORDS + DONE
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])


@pytest.mark.parametrize(
    "said",
    [
        b'{"type":"message","content":[{"type":"tool_use","input":{"finish_reason":"abort"}}],"stop_reason":"tool_use"}',
        b'{"type":"message","content":[{"type":"tool_use","input":{"stop_reason":null}}],"stop_reason":"tool_use"}',
        b'{"object":"response","tools":[{"parameters":{"finish_reason":"abort"}}]}',
    ],
)
async def test_neither_is_what_a_tool_is_called_with(rig, said):
    async def answers(request, connection):
        await connection.send(reply_bytes(said))

    await rig.engine("a", answers)
    other = await rig.engine("b")
    assert (await rig.post({"model": "m", "max_tokens": 9}, "/v1/messages")).body == said
    assert other.requests == []
