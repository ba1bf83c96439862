"""/v1/realtime between a client and an engine: who names the model, who greets, and that bytes cross as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from proxyrig import Rig, listed
from websockets.frames import Opcode
from wsrig import CREATED, UPDATE, Realtime, closing, frame, greeted, in_session, opened, text

from supervisord.core.admission import Ending


async def test_the_first_event_names_the_model_and_reaches_its_engine_as_it_came(rig: Rig):
    client, engine = await in_session(rig)
    assert rig.admission.admitted == ["m"]
    await engine.send(text({"type": "transcription.delta", "delta": "hé"}, mask=False))
    assert await client.event() == {"type": "transcription.delta", "delta": "hé"}


async def test_a_client_that_speaks_first_is_understood_as_well(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await opened(rig)
    await client.say(UPDATE)
    assert (await client.event())["type"] == "session.created"
    assert (await (await realtime.peer()).read()).data == UPDATE


async def test_the_client_is_greeted_once(rig: Rig):
    client, engine = await in_session(rig)
    await engine.send(text(b'{"type":"next"}', mask=False))
    assert (await client.event()) == {"type": "next"}


async def test_an_engine_that_opens_with_something_else_is_heard(rig: Rig):
    error = b'{"type":"error","error":"no","code":"x"}'
    client, _ = await in_session(rig, behaviour=Realtime(greeting=error))
    assert (await client.read()).data == error


async def test_a_model_in_the_query_is_connected_at_once_and_greeted_by_its_engine(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await opened(rig, "/v1/realtime?intent=transcription&model=m")
    assert (await client.read()).data == CREATED
    engine = await realtime.peer()
    assert engine.head.first_line == "GET /v1/realtime?intent=transcription&model=m HTTP/1.1"
    assert client.head.header("x-vllmctl-replica") == "a"
    raw = await client.say(b'{"type":"session.update","session":{}}')
    await engine.read()
    assert engine.raw == raw


async def test_a_session_without_a_model_gets_the_only_one(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    await client.say(b'{"type":"input_audio_buffer.append","audio":""}')
    assert (await (await realtime.peer()).read()).data == b'{"type":"input_audio_buffer.append","audio":""}'


async def test_a_session_without_a_model_is_told_so_where_there_are_several(rig: Rig):
    await rig.engine("a", Realtime())
    rig.admission.models = (listed("m"), listed("n"))
    client = await greeted(rig)
    await client.say(b'{"type":"input_audio_buffer.append","audio":""}')
    error = await client.event()
    assert (error["type"], error["code"]) == ("error", "invalid_event")
    assert "model" in error["error"]
    assert await client.close_code() == 1008
    assert not rig.admission.admitted


@pytest.mark.parametrize("said", [b"nonsense", b"[]", b'{"model":1}', b'{"model":"m"', b'\xff"'])
async def test_a_first_event_that_cannot_be_read_is_told_so(rig: Rig, said: bytes):
    await rig.engine("a", Realtime())
    client = await greeted(rig)
    await client.say(said)
    assert (await client.event())["type"] == "error"
    assert await client.close_code() == 1008


async def test_the_engine_gets_the_request_with_a_handshake_of_our_own(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    extra = (
        "Authorization: Bearer k\r\nX-Request-Id: id-1\r\nSec-WebSocket-Extensions: permessage-deflate\r\n"
        "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.k\r\nX-Other: 1\r\n"
    )
    client = await opened(rig, "/v1/realtime?model=m", extra)
    head = (await realtime.peer()).head
    assert head.header("authorization") == "Bearer k"
    assert head.header("x-request-id") == "id-1"
    assert head.header("x-other") == "1"
    assert head.header("sec-websocket-key") != "dGhlIHNhbXBsZSBub25jZQ=="
    assert head.header("sec-websocket-extensions") is None
    assert head.header("sec-websocket-protocol") is None
    assert client.head.header("x-request-id") == "id-1"
    assert client.head.header("sec-websocket-protocol") == "realtime"
    assert client.head.header("sec-websocket-extensions") is None


async def test_a_replica_that_knows_the_model_by_another_name_is_asked_for_that(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    rig.admission.served_names = ("org/model é",)
    client = await greeted(rig)
    await client.send(text(b'{ "model" : "alias", "x":[1]}', mask=True) + text(b'{"model":"alias"}', mask=True))
    engine = await realtime.peer()
    assert (await engine.read()).data == b'{ "model" : "org/model \\u00e9", "x":[1]}'
    assert (await engine.read()).data == b'{"model":"alias"}'  # only the first that names one


async def test_a_model_in_the_query_is_renamed_there_and_in_the_first_event_that_names_it(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    rig.admission.served_names = ("org/model",)
    client = await opened(rig, "/v1/realtime?model=alias&x=%20")
    engine = await realtime.peer()
    assert engine.head.first_line == "GET /v1/realtime?model=org%2Fmodel&x=%20 HTTP/1.1"
    append = await client.say(b'{"type":"input_audio_buffer.append"}')
    ping = frame(Opcode.PING, b"p", mask=True)
    await client.send(ping + text(b'{"model":', fin=False, mask=True))
    assert (await engine.read()).data == b'{"type":"input_audio_buffer.append"}'
    assert (await engine.read()).data == b"p"
    assert engine.raw == append + ping
    await client.send(frame(Opcode.CONT, b'"m"}', mask=True) + text(b'{"model":"m"}', mask=True))
    assert (await engine.read()).data == b'{"model":"org/model"}'
    assert (await engine.read()).data == b'{"model":"m"}'


async def test_another_model_than_the_leased_one_is_not_renamed(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    rig.admission.served_names = ("org/model",)
    client = await opened(rig, "/v1/realtime?model=m")
    raw = await client.say(b'{"type":"session.update","model":"other"}')
    engine = await realtime.peer()
    await engine.read()
    assert engine.raw == raw


async def test_fragments_over_frames_and_segments_arrive_as_they_came(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    half = len(UPDATE) // 2
    raw = (
        text(UPDATE[:half], fin=False, mask=True)
        + frame(Opcode.PING, b"are you there?", mask=True)
        + frame(Opcode.CONT, UPDATE[half:], mask=True)
        + text(b"{}", mask=True)
    )
    for at in range(len(raw)):
        await client.send(raw[at : at + 1])
        await asyncio.sleep(0)
    pong = await client.read()
    assert (pong.opcode, pong.data) == (Opcode.PONG, b"are you there?")
    engine = await realtime.peer()
    for _ in range(3):
        await engine.read()
    assert engine.raw == raw.replace(raw[raw.index(b"\x89") : raw.index(b"\x89") + 20], b"")


async def test_messages_of_megabytes_cross_both_ways_byte_by_byte(rig: Rig):
    client, engine = await in_session(rig)
    up = text(b'"' + b"a" * 5_000_000 + b'"', mask=True) + frame(Opcode.BINARY, b"\0" * 70_000, mask=True)
    down = text(b'"' + b"b" * 3_000_000 + b'"', fin=False, mask=False) + frame(Opcode.CONT, b"c" * 300, mask=False)
    sending = [asyncio.create_task(client.send(up)), asyncio.create_task(engine.send(down))]
    engine.raw.clear()
    client.raw.clear()
    for _ in range(2):
        await engine.read()
        await client.read()
    assert engine.raw == up
    assert client.raw == down
    await asyncio.gather(*sending)


async def test_a_long_message_right_behind_the_first_event_is_not_measured_by_it(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    long = text(b'"' + b"a" * 3_000_000 + b'"', mask=True)
    sending = asyncio.create_task(client.send(text(UPDATE, mask=True) + long))
    engine = await realtime.peer()
    assert (await engine.read()).data == UPDATE
    engine.raw.clear()
    await engine.read()
    assert engine.raw == long
    await sending


async def test_pings_of_either_end_are_answered_by_the_other(rig: Rig):
    client, engine = await in_session(rig)
    await engine.send(frame(Opcode.PING, b"e", mask=False))
    assert (await client.read()).data == b"e"
    await client.send(frame(Opcode.PONG, b"e", mask=True) + frame(Opcode.PING, b"c", mask=True))
    assert [(await engine.read()).opcode, (await engine.read()).opcode] == [Opcode.PONG, Opcode.PING]


async def test_what_is_said_early_waits_for_the_engine(rig: Rig):
    rig.admission.asleep = {"a"}
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    raw = await client.say(UPDATE)
    raw += await client.say(b'{"type":"input_audio_buffer.append","audio":"AAAA"}')
    await client.send(frame(Opcode.PING, b"still?", mask=True))
    assert (await client.read()).data == b"still?"
    await rig.until(lambda: bool(rig.admission.waiting))
    rig.admission.wake("a")
    engine = await realtime.peer()
    await engine.read()
    await engine.read()
    assert engine.raw == raw


async def test_a_model_in_the_query_that_sleeps_is_woken_behind_an_open_session(rig: Rig):
    rig.admission.asleep = {"a"}
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await opened(rig, "/v1/realtime?model=m")  # a client's handshake has seconds, a wake may take minutes
    await rig.until(lambda: bool(rig.admission.waiting))
    rig.admission.wake("a")
    assert (await client.read()).data == CREATED


async def test_an_engine_behind_a_unix_socket(rig: Rig, tmp_path: Path):
    realtime = Realtime()
    await rig.engine("a", realtime, str(tmp_path / "engine.sock"))
    client = await opened(rig, "/v1/realtime?model=m")
    assert (await client.read()).data == CREATED


async def test_the_lease_lasts_as_long_as_the_session(rig: Rig):
    client, engine = await in_session(rig)
    assert len(rig.admission.open) == 1
    await client.send(closing(1000, "done", mask=True))
    assert await engine.close_code() == 1000
    assert len(rig.admission.open) == 1
    await engine.send(closing(1000, mask=False))
    assert await client.close_code() == 1000
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])
    await client.gone()


async def test_one_line_tells_of_the_session(rig: Rig, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "proxy.access")
    client, engine = await in_session(rig)
    await client.send(closing(1000, mask=True))
    await engine.close_code()
    await engine.send(closing(1000, mask=False))
    await client.gone()
    await rig.until(lambda: bool(rig.admission.finished))
    await asyncio.sleep(0)
    (record,) = [record for record in caplog.records if record.name == "proxy.access"]
    fields = record.fields
    assert (fields["route"], fields["model"], fields["replica"]) == ("/v1/realtime", "m", "a")
    assert (fields["status"], fields["close"], fields["stream"]) == (101, 1000, "yes")
    assert fields["bytes_in"] == len(text(UPDATE, mask=True)) + len(closing(1000, mask=True))
    assert fields["bytes"] > len(CREATED)
    assert fields["duration"] >= fields["ttfb"] > 0
    assert "code" not in record.getMessage()


def test_the_greeting_is_shaped_as_the_engine_s_own():
    from proxy.realtime.events import session_created

    ours, theirs = session_created(), json.loads(CREATED)
    assert ours.keys() == theirs.keys()
    assert {name: type(value) for name, value in ours.items()} == {name: type(v) for name, v in theirs.items()}
