"""/v1/realtime as vLLM 0.32 was seen to answer it."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from simclient import Client, Start

SECOND = base64.b64encode(b"\0\1" * 16_000).decode()
UPDATE = {"type": "session.update", "model": "big"}
APPEND = {"type": "input_audio_buffer.append", "audio": SECOND}
COMMIT = {"type": "input_audio_buffer.commit"}
FINAL = {**COMMIT, "final": True}


@asynccontextmanager
async def session(client: Client) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A session that was greeted."""
    async with client.session.ws_connect(f"{client.base}/v1/realtime") as socket:
        created = await socket.receive_json()
        assert created["type"] == "session.created"
        assert created["id"].startswith("sess-")
        assert isinstance(created["created"], int)
        yield socket


async def test_audio_in_pieces_becomes_text_in_pieces(start: Start) -> None:
    client = await start()
    async with session(client) as socket:
        for event in (UPDATE, COMMIT, APPEND, APPEND, FINAL):
            await socket.send_json(event)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "transcription.done":
            events.append(await socket.receive_json())
    text = "".join(event["delta"] for event in events[:-1])
    assert events[-1]["text"] == text
    assert len(events) - 1 == events[-1]["usage"]["completion_tokens"] == 24  # two seconds, 80 ms each
    assert {event["type"] for event in events[:-1]} == {"transcription.delta"}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("nonsense", "invalid_json"),
        ("[1]", "processing_error"),
        ('{"type":"x"}', "unknown_event"),
        ('{"type":["x"]}', "unknown_event"),
        ('{"type":"session.update"}', "invalid_event"),
        ('{"type":"session.update","session":{"model":"big"}}', "invalid_event"),
        ('{"type":"session.update","model":"q"}', "model_not_found"),
        ('{"type":"input_audio_buffer.commit"}', "model_not_validated"),
        ('{"type":"input_audio_buffer.append","audio":"!"}', "invalid_audio"),
        ('{"type":"input_audio_buffer.append"}', "processing_error"),
    ],
)
async def test_a_mistake_is_told_and_the_session_goes_on(start: Start, said: str, code: str) -> None:
    client = await start()
    async with session(client) as socket:
        for _ in range(2):
            await socket.send_str(said)
            error = await socket.receive_json()
            assert (error["type"], error["code"]) == ("error", code)
            assert isinstance(error["error"], str)


async def test_a_binary_message_ends_the_session(start: Start) -> None:
    client = await start()
    async with session(client) as socket:
        await socket.send_bytes(b"\0\1")
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_a_client_that_leaves_ends_its_transcription(start: Start) -> None:
    client = await start(factor=1.0)
    async with session(client) as socket:
        for event in (UPDATE, COMMIT, APPEND):
            await socket.send_json(event)
        await socket.receive_json()
    await client.engine.until(lambda: client.engine.counters.disconnect_aborts == 1)


async def test_a_sleeper_says_nothing_until_it_wakes(start: Start) -> None:
    client = await start()
    async with session(client) as socket:
        await client.post("/sleep?level=1&mode=wait")
        for event in (UPDATE, COMMIT, APPEND, FINAL):
            await socket.send_json(event)
        await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 1)
        await client.post("/wake_up")
        while (event := json.loads(await socket.receive_str()))["type"] != "transcription.done":
            assert event["type"] == "transcription.delta"


async def test_an_engine_that_is_stopped_says_goodbye(start: Start) -> None:
    client = await start()
    async with session(client) as socket:
        client.simulator.terminate()
        message = await socket.receive()
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1012)
    assert await client.simulator.ended == 0


async def test_no_route_without_a_websocket_nor_for_a_model_that_only_pools(start: Start) -> None:
    client = await start()
    assert (await client.get("/v1/realtime"))[0] == 404
    pooling = await start("--runner", "pooling")
    with pytest.raises(aiohttp.WSServerHandshakeError) as error:
        await pooling.session.ws_connect(f"{pooling.base}/v1/realtime")
    assert error.value.status == 403
