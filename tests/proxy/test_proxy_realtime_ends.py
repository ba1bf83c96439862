"""How sessions end: by either side, by silence, by failure before and after the first byte, by our own shutdown."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from proxyrig import PATIENCE, Rig
from websockets.frames import Opcode
from wsrig import CREATED, UPDATE, Realtime, accepted, closing, frame, greeted, handshake, in_session, text

from supervisord.core.admission import Ending, RefusalCode, Refuse


@pytest.fixture
def pings_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent clients are pinged soon, and given up soon."""
    monkeypatch.setattr("proxy.realtime.session.PING_AFTER", 0.05)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is not waited for."""
    monkeypatch.setattr("proxy.realtime.session.CLOSE_PATIENCE", 0.05)
    monkeypatch.setattr("proxy.engines.enginesocket.PATIENCE", 0.1)


async def test_an_engine_s_close_reaches_the_client_as_it_is(rig: Rig):
    client, engine = await in_session(rig)
    raw = closing(1012, "service restart", mask=False)
    client.raw.clear()
    await engine.send(raw)
    assert await client.close_code() == 1012
    assert client.raw == raw
    await client.send(closing(1012, mask=True))
    assert await engine.close_code() == 1012
    await engine.gone()
    await client.gone()
    assert rig.admission.endings == [("a", Ending.COMPLETED)]


async def test_an_engine_that_dies_within_the_session_is_told_by_an_event_and_1011(rig: Rig):
    client, engine = await in_session(rig)
    engine.connection.reset()
    assert (await client.event())["code"] == "upstream_failed"
    assert await client.close_code() == 1011
    await client.gone()
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN)]
    assert not rig.failovers


async def test_who_is_talking_while_the_engine_dies_is_told_so(rig: Rig):
    realtime = Realtime()
    await rig.engine("a", realtime)
    for _ in range(5):
        client = await greeted(rig, "/v1/realtime?model=m")
        engine = await realtime.peer()
        answer = asyncio.create_task(client.event())
        engine.connection.reset()
        while not answer.done():
            client.connection.writer.write(text(UPDATE, mask=True))
            await asyncio.sleep(0)
        assert answer.result()["code"] == "upstream_failed"
        assert await client.close_code() == 1011
        await client.gone()


async def test_an_engine_that_dies_between_the_frames_of_a_message_is_told_by_1011_alone(rig: Rig):
    client, engine = await in_session(rig)
    await engine.send(text(b'{"type":', fin=False, mask=False))
    await client.read()
    engine.connection.reset()
    assert await client.close_code() == 1011


async def test_an_engine_that_dies_within_a_frame_cuts_the_client_too(rig: Rig):
    client, engine = await in_session(rig)
    await engine.send(text(b'{"type":"transcription.delta"}', mask=False)[:9])
    await client.connection.reader.readexactly(9)
    engine.connection.reset()
    assert await client.connection.closed() == b""


@pytest.mark.parametrize(
    "stage", ["connect", "handshake", "greeting", "half a greeting", "close", "silence", "nonsense"]
)
async def test_what_fails_before_the_first_byte_goes_to_another_replica(rig: Rig, stage: str, impatient: None):
    async def fails(request, connection):
        if stage == "handshake":
            connection.reset()
        elif stage == "nonsense":
            await connection.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        elif stage != "silence":
            await connection.send(accepted(request))
            if stage == "half a greeting":
                await connection.send(text(CREATED, mask=False)[:20])
            elif stage == "close":
                await connection.send(closing(1012, mask=False))
            connection.reset()
        await asyncio.Event().wait()

    failing = await rig.engine("a", fails)
    if stage == "connect":
        await failing.stop()
    realtime = Realtime()
    await rig.engine("b", realtime)
    client = await greeted(rig)
    raw = await client.say(UPDATE) + await client.say(b"{}")
    engine = await realtime.peer()
    await engine.read()
    await engine.read()
    assert engine.raw == raw
    assert [(f.source, f.target) for f in rig.failovers] == [("a", "b")]
    assert rig.admission.endings == [("a", Ending.CONNECT_FAILED)]


async def test_when_every_replica_fails_the_client_is_told(rig: Rig):
    engine = await rig.engine("a")
    await engine.stop()
    client = await greeted(rig)
    await client.say(UPDATE)
    assert (await client.event())["code"] == "upstream_failed"
    assert await client.close_code() == 1011
    answer = await (await rig.send(handshake("/v1/realtime?model=m"))).response()
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_failed")


async def test_an_engine_without_the_route_says_403_and_so_do_we(rig: Rig):
    async def refuses(request, connection):
        await connection.send(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    await rig.engine("a", refuses)
    await rig.engine("b", refuses)
    answer = await (await rig.send(handshake("/v1/realtime?model=m"))).response()
    assert (answer.status, answer.json()["error"]["code"]) == (403, "engine_refused")
    assert "realtime" in answer.json()["error"]["message"]
    client = await greeted(rig)
    await client.say(UPDATE)
    assert (await client.event())["code"] == "engine_refused"
    assert await client.close_code() == 1008
    assert [ending for _, ending in rig.admission.endings] == [Ending.COMPLETED] * 2  # an answer demotes nobody


async def test_a_wake_that_fails_is_told_to_who_waits(rig: Rig):
    rig.admission.asleep = {"a"}
    await rig.engine("a", Realtime())
    client = await greeted(rig)
    await client.say(UPDATE)
    await rig.until(lambda: bool(rig.admission.waiting))
    rig.admission.refuse_waiting(Refuse(RefusalCode.WAKE_FAILED, "it does not wake", 30.0))
    assert (await client.event()) == {
        "type": "error",
        "error": "it does not wake",
        "code": "wake_failed",
        "retry_after": 30,
    }
    assert await client.close_code() == 1013


@pytest.mark.parametrize("how", ["reset", "half-close", "close frame"])
@pytest.mark.parametrize("stage", ["greeted", "waiting", "handshake", "session"])
async def test_a_client_that_leaves_is_seen_at_every_stage(rig: Rig, stage: str, how: str, caplog):
    caplog.set_level("INFO", "proxy.access")
    arrived = asyncio.Event()

    class Silent(Realtime):
        async def __call__(self, request, connection):
            if stage == "session":
                await super().__call__(request, connection)
            arrived.set()
            assert await connection.reader.read() == b""

    realtime = Silent()
    engine = await rig.engine("a", realtime)
    if stage == "waiting":
        rig.admission.asleep = {"a"}
    client = await greeted(rig)
    if stage != "greeted":
        await client.say(UPDATE)
    if stage == "waiting":
        await rig.until(lambda: bool(rig.admission.waiting))
    elif stage == "handshake":
        await asyncio.wait_for(arrived.wait(), PATIENCE)
    elif stage == "session":
        peer = await realtime.peer()
        await peer.read()
    if how == "reset":
        client.connection.reset()
    elif how == "half-close":
        client.connection.writer.write_eof()
    else:
        await client.send(closing(1001, mask=True))
        if stage == "session":
            assert await peer.close_code() == 1001
            await peer.send(closing(1001, mask=False))
        assert await client.close_code() == 1001
    await client.gone()
    if stage == "session":
        await peer.gone()
    elif stage == "handshake":
        await asyncio.wait_for(engine.lost.wait(), PATIENCE)
    await rig.until(lambda: not rig.admission.open and not rig.admission.waiting)
    assert rig.admission.abandoned == (stage == "waiting")
    await rig.proxy.drain(PATIENCE)
    (record,) = [record for record in caplog.records if record.name == "proxy.access"]
    said = how == "close frame"
    assert (record.fields["status"], record.fields["close"]) == ((101, 1001) if said else (499, 1006))


async def test_a_client_that_says_goodbye_and_hangs_up_has_not_run_away(rig: Rig, caplog):
    caplog.set_level("INFO", "proxy.access")
    client, engine = await in_session(rig)
    await client.send(closing(1000, mask=True))
    client.connection.writer.close()
    await engine.close_code()
    await engine.gone()
    await rig.proxy.drain(PATIENCE)
    (record,) = [record for record in caplog.records if record.name == "proxy.access"]
    assert (record.fields["status"], record.fields["close"]) == (101, 1000)


async def test_an_engine_that_does_not_answer_a_close_is_not_waited_for(rig: Rig, impatient: None):
    client, engine = await in_session(rig)
    await client.send(closing(1000, mask=True))
    assert await client.close_code() == 1000
    await engine.close_code()
    await engine.gone()


async def test_a_client_that_does_not_answer_a_close_is_not_waited_for(rig: Rig, impatient: None):
    client, engine = await in_session(rig)
    await engine.send(closing(1011, "keepalive ping timeout", mask=False))
    assert await client.close_code() == 1011
    await engine.gone()
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])


async def test_an_engine_that_hangs_up_after_a_close_is_answered_for(rig: Rig):
    client, engine = await in_session(rig)
    await client.send(closing(1000, mask=True))
    await engine.close_code()
    engine.connection.reset()
    assert await client.close_code() == 1000


async def test_a_session_without_events_is_closed_and_pings_are_no_events(rig: Rig, pings_soon: None):
    rig.reconfigure(realtime_idle_timeout=0.3)
    client, engine = await in_session(rig)
    while (got := await client.read()).opcode is Opcode.PING:
        await client.send(frame(Opcode.PONG, got.data, mask=True))
        if not got.data:  # ours; the engine's own is relayed, and its answer too
            await engine.send(frame(Opcode.PING, b"e", mask=False))
            assert (await engine.read()).opcode is Opcode.PONG
    assert b'"code":"realtime_idle"' in got.data
    assert await client.close_code() == 1001
    await engine.gone()


@pytest.mark.parametrize("side", ["client", "engine"])
async def test_a_session_with_events_from_one_side_stays(rig: Rig, pings_soon: None, side: str):
    rig.reconfigure(realtime_idle_timeout=0.4)
    client, engine = await in_session(rig)
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 1.0:
        assert (await client.read()).opcode is Opcode.PING  # which is what takes the time here
        await client.send(frame(Opcode.PONG, mask=True))
        assert (await engine.read()).opcode is Opcode.PONG
        speaker, listener = (client, engine) if side == "client" else (engine, client)
        await speaker.say(b"{}")
        assert (await listener.read()).opcode is Opcode.TEXT
    assert rig.admission.open


async def test_a_client_that_names_no_model_is_not_kept_for_ever(rig: Rig):
    rig.reconfigure(realtime_idle_timeout=0.05)
    client = await greeted(rig)
    assert (await client.event())["code"] == "realtime_idle"
    assert await client.close_code() == 1001


async def test_a_long_wake_is_not_idleness_and_the_client_is_pinged_meanwhile(rig: Rig, pings_soon: None):
    rig.reconfigure(realtime_idle_timeout=0.1)
    rig.admission.asleep = {"a"}
    realtime = Realtime()
    await rig.engine("a", realtime)
    client = await greeted(rig)
    await client.say(UPDATE)
    for _ in range(5):
        assert (await client.read()).opcode is Opcode.PING
        await client.send(frame(Opcode.PONG, mask=True))
    rig.admission.wake("a")
    assert (await (await realtime.peer()).read()).data == UPDATE


async def test_a_client_that_answers_no_ping_is_gone(rig: Rig, pings_soon: None, caplog):
    caplog.set_level("INFO", "proxy.access")
    client, engine = await in_session(rig)
    assert (await client.read()).opcode is Opcode.PING
    await engine.gone()
    await client.gone()
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]
    await rig.proxy.drain(PATIENCE)
    assert [r.fields["status"] for r in caplog.records if r.name == "proxy.access"] == [499]


async def test_a_drain_waits_for_sessions_and_ends_them_with_1012(rig: Rig):
    client, engine = await in_session(rig)
    draining = asyncio.create_task(rig.proxy.drain(0.05))
    assert (await client.event())["code"] == "router_shutting_down"
    assert await client.close_code() == 1012
    await engine.gone()
    await draining
    assert rig.proxy.in_flight == 0


async def test_a_drain_does_not_wait_for_a_session_that_has_said_nothing_yet(rig: Rig):
    client = await greeted(rig)
    await asyncio.wait_for(rig.proxy.drain(60.0), PATIENCE)
    assert (await client.event())["code"] == "router_shutting_down"
    assert await client.close_code() == 1012


async def test_a_session_that_ends_within_the_drain_ends_it(rig: Rig):
    client, engine = await in_session(rig)
    draining = asyncio.create_task(rig.proxy.drain(PATIENCE))
    await client.send(closing(1000, mask=True))
    await engine.close_code()
    await engine.send(closing(1000, mask=False))
    assert await client.close_code() == 1000
    await asyncio.wait_for(draining, PATIENCE / 2)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (text(UPDATE, mask=False), 1002),
        (b"\xc1\x80abcd", 1002),  # a reserved bit: compressed, which was not agreed on
        (b"\x83\x80abcd", 1002),  # a reserved opcode
        (frame(Opcode.CONT, b"x", mask=True), 1002),
        (text(b"x", fin=False, mask=True) + text(b"x", mask=True), 1002),
        (b"\x09\x80abcd", 1002),  # half a ping
        (b"\x89\xfe\x00\x7eabcd", 1002),  # a ping of 126 bytes
        (b"\x88\x81abcdx", 1002),  # half a close code
        (frame(Opcode.BINARY, b"x", mask=True), 1003),
        (b"\x81\xff\x00\x00\x00\x00\x7f\xff\xff\xffabcd", 1009),
        (text(b"x" * (1024 * 1024 + 1), mask=True), 1009),
    ],
)
async def test_who_breaks_the_protocol_is_told_how(rig: Rig, raw: bytes, code: int):
    await rig.engine("a", Realtime())
    client = await greeted(rig)
    sending = asyncio.create_task(client.send(raw))
    assert await client.close_code() == code
    await client.gone()
    with contextlib.suppress(ConnectionError):
        await sending
    assert not rig.admission.admitted


async def test_a_key_that_the_engine_did_not_answer_is_no_session(rig: Rig):
    async def answers_another(request, connection):
        await connection.send(accepted(request).replace(b"Accept: ", b"Accept: x"))

    await rig.engine("a", answers_another)
    answer = await (await rig.send(handshake("/v1/realtime?model=m"))).response()
    assert answer.status == 502
    assert "Accept" in answer.json()["error"]["message"]


async def test_an_extension_that_the_engine_takes_unasked_is_no_session(rig: Rig):
    async def compresses(request, connection):
        await connection.send(accepted(request, "Sec-WebSocket-Extensions: permessage-deflate\r\n"))

    await rig.engine("a", compresses)
    answer = await (await rig.send(handshake("/v1/realtime?model=m"))).response()
    assert answer.status == 502


async def test_a_client_that_leaves_before_its_handshake_is_answered(rig: Rig):
    arrived = asyncio.Event()

    async def never(request, connection):
        arrived.set()
        assert await connection.reader.read() == b""

    engine = await rig.engine("a", never)
    client = await rig.send(handshake("/v1/realtime?model=m"))
    await asyncio.wait_for(arrived.wait(), PATIENCE)
    client.reset()
    await asyncio.wait_for(engine.lost.wait(), PATIENCE)
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])


async def test_an_open_session_does_not_hinder_the_stop(rig: Rig):
    client = await greeted(rig)
    await asyncio.wait_for(rig.proxy.stop(), PATIENCE)
    assert (await client.event())["code"] == "router_shutting_down"
    assert await client.close_code() == 1012
    await client.gone()
