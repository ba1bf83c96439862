"""Client libraries as people use them, against a simulated engine behind the proxy, and asleep before it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from openai import AsyncOpenAI
from pki import pair
from proxyrig import PATIENCE, Rig
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from proxy.credentials import Credentials
from supervisord.core.admission import Ending, RefusalCode, Refuse
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

SECOND = base64.b64encode(b"\0\1" * 16_000).decode()
UPDATE = {"type": "session.update", "model": "m"}
UTTERANCE = (
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.append", "audio": SECOND},
    {"type": "input_audio_buffer.append", "audio": SECOND},
    {"type": "input_audio_buffer.commit", "final": True},
)


@pytest.fixture
async def simulator(rig: Rig) -> AsyncIterator[Simulator]:
    """The engine of replica ``a``, which knows the model as ``sim``."""
    words = ["sim", "--host", "127.0.0.1", "--port", "0", "--sim-clock-factor", "0.01", "--enable-sleep-mode"]
    async with Simulator(parse(words, {"VLLM_SERVER_DEV_MODE": "1"})) as simulator:
        rig.admission.endpoints["a"] = simulator.endpoint
        rig.admission.served_names = ("sim",)
        yield simulator
        for client in rig.clients:
            await client.close()
        await rig.until(lambda: not rig.admission.open)


def url(rig: Rig, query: str = "") -> str:
    return f"ws://127.0.0.1:{rig.port}/v1/realtime{query}"


@pytest.mark.parametrize("query", ["", "?model=alias"])
async def test_websockets_transcribes(rig: Rig, simulator: Simulator, query: str):
    async with connect(url(rig, query), proxy=None) as socket:  # offers compression, which is not taken
        assert json.loads(await socket.recv())["type"] == "session.created"
        await socket.send(json.dumps(UPDATE))
        text, done = "", {}
        for event in UTTERANCE:
            await socket.send(json.dumps(event))
        while not done:
            event = json.loads(await asyncio.wait_for(socket.recv(), PATIENCE))
            assert event["type"] in ("transcription.delta", "transcription.done"), event
            text += event.get("delta", "")
            done = event if event["type"] == "transcription.done" else {}
        assert done["text"] == text
        await (await socket.ping())
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])


async def test_websockets_sends_fragments(rig: Rig, simulator: Simulator):
    async with connect(url(rig), proxy=None) as socket:
        await socket.recv()
        raw = json.dumps(UPDATE)
        await socket.send(raw[at : at + 5] for at in range(0, len(raw), 5))
        await socket.send(json.dumps({"type": "session.update", "model": "nobody"}))
        assert json.loads(await socket.recv())["code"] == "model_not_found"  # the first one was understood


async def test_aiohttp_transcribes_while_the_model_wakes(rig: Rig, simulator: Simulator):
    rig.admission.asleep = {"a"}
    async with aiohttp.ClientSession() as session, session.ws_connect(url(rig), heartbeat=0.05) as socket:
        for event in (UPDATE, *UTTERANCE):
            await socket.send_json(event)
        await rig.until(lambda: bool(rig.admission.waiting))
        rig.admission.wake("a")
        kinds = []
        while "transcription.done" not in kinds:
            kinds.append((await socket.receive_json(timeout=PATIENCE))["type"])
    assert kinds[0] == "session.created"
    assert kinds.count("transcription.delta") == 24


async def test_openai_s_client_names_the_model_in_the_query(rig: Rig, simulator: Simulator):
    async with (
        AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="none") as client,
        client.realtime.connect(model="alias") as connection,
    ):
        assert (await connection.recv()).type == "session.created"
        for event in (UPDATE, *UTTERANCE):
            await connection.send(event)
        while (event := await asyncio.wait_for(connection.recv(), PATIENCE)).type != "transcription.done":
            assert event.type == "transcription.delta"
    assert rig.admission.admitted == ["alias"]


async def test_refusals_reach_each_library_as_its_own_exceptions(rig: Rig):
    rig.admission.refusal = Refuse(RefusalCode.QUEUE_FULL, "full", 3.0)
    with pytest.raises(InvalidStatus) as refused:
        await connect(url(rig, "?model=m"), proxy=None)
    assert refused.value.response.status_code == 503
    assert refused.value.response.headers["retry-after"] == "3"
    async with connect(url(rig), proxy=None) as socket:
        await socket.recv()
        await socket.send(json.dumps(UPDATE))
        assert json.loads(await socket.recv())["code"] == "queue_full"
        with pytest.raises(ConnectionClosedError) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "full")


async def test_an_engine_that_is_stopped_says_goodbye_itself(rig: Rig, simulator: Simulator):
    async with connect(url(rig), proxy=None) as socket:
        await socket.recv()
        await socket.send(json.dumps(UPDATE))
        await rig.until(lambda: bool(rig.admission.open))
        await socket.send(json.dumps({"type": "x"}))
        await socket.recv()
        simulator.terminate()
        with pytest.raises(ConnectionClosedError) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012


async def test_a_client_that_leaves_ends_the_work_in_the_engine(rig: Rig, simulator: Simulator):
    async with connect(url(rig), proxy=None) as socket:
        for event in (UPDATE, UTTERANCE[0], *[UTTERANCE[1]] * 50):
            await socket.send(json.dumps(event))
        while json.loads(await socket.recv())["type"] != "transcription.delta":
            pass
        socket.transport.abort()
    await simulator.engine.until(lambda: simulator.engine.counters.disconnect_aborts == 1)
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])


async def test_a_browser_s_handshake_is_taken_from_pages_that_may(rig: Rig, simulator: Simulator):
    rig.reconfigure(cors_origins=("http://localhost:3000",))
    async with connect(
        url(rig, "?model=m"), proxy=None, origin="http://localhost:3000", subprotocols=["realtime"]
    ) as socket:
        assert socket.subprotocol == "realtime"
    with pytest.raises(InvalidStatus) as refused:
        await connect(url(rig, "?model=m"), proxy=None, origin="http://elsewhere.test")
    assert refused.value.response.status_code == 403


async def test_a_session_over_tls(rig: Rig, simulator: Simulator):
    certificate = pair("first")
    rig.proxy.guard(Credentials(tls=certificate.server()))
    address = f"wss://localhost:{rig.port}/v1/realtime"
    async with connect(address, proxy=None, ssl=certificate.client(), host="127.0.0.1") as socket:
        assert json.loads(await socket.recv())["type"] == "session.created"
        for event in (UPDATE, *UTTERANCE):
            await socket.send(json.dumps(event))
        while json.loads(await asyncio.wait_for(socket.recv(), PATIENCE))["type"] != "transcription.done":
            pass
    assert socket.close_code == 1000
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])


async def test_a_refusal_over_tls_is_read_to_its_end(rig: Rig):
    certificate = pair("first")
    rig.proxy.guard(Credentials(tls=certificate.server()))
    rig.admission.refusal = Refuse(RefusalCode.QUEUE_FULL, "full", 3.0)
    address = f"wss://localhost:{rig.port}/v1/realtime"
    async with connect(address, proxy=None, ssl=certificate.client(), host="127.0.0.1") as socket:
        await socket.recv()
        await socket.send(json.dumps(UPDATE))
        assert json.loads(await socket.recv())["code"] == "queue_full"
        with pytest.raises(ConnectionClosedError) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1013
