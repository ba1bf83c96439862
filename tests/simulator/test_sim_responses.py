"""Responses in the simulator's memory, as vLLM 0.32 keeps them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from simclient import Client, Start, events

PATH = "/v1/responses"


async def make(client: Client, **fields: Any) -> tuple[int, Any]:
    return await client.post(PATH, {"model": "big", "input": "hi", **fields})


async def settled(client: Client, response: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            _, body = await client.get(f"{PATH}/{response}")
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0)


async def test_responses_are_kept_in_this_process(start: Start) -> None:
    client = await start(store=True)
    status, made = await make(client)
    assert (status, made["object"], made["status"]) == (200, "response", "completed")
    assert made["id"].startswith("resp_")
    assert await client.get(f"{PATH}/{made['id']}") == (200, made)
    status, again = await make(client, previous_response_id=made["id"])
    assert (status, again["status"]) == (200, "completed")


async def test_what_is_not_there_is_a_404_in_vllms_words(start: Start) -> None:
    client = await start(store=True)
    expected = {
        "error": {
            "message": "Response with id 'resp_lost' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        }
    }
    assert await client.get(f"{PATH}/resp_lost") == (404, expected)
    assert await client.post(f"{PATH}/resp_lost/cancel") == (404, expected)
    assert await make(client, previous_response_id="resp_lost") == (404, expected)


@pytest.mark.parametrize(("store", "wanted"), [(False, True), (True, False)])
async def test_nothing_is_kept_where_the_store_is_off_or_not_wanted(start: Start, store: bool, wanted: bool) -> None:
    client = await start(store=store)
    status, made = await make(client, store=wanted)
    assert status == 200
    assert (await client.get(f"{PATH}/{made['id']}"))[0] == 404
    status, refused = await make(client, store=wanted, background=True)
    assert (status, refused["error"]["param"]) == (400, "background")


@pytest.mark.parametrize("method", ["DELETE", "HEAD"])
async def test_vllm_has_no_such_method(start: Start, method: str) -> None:
    client = await start(store=True)
    _, made = await make(client)
    async with client.session.request(method, f"{client.base}{PATH}/{made['id']}") as response:
        assert response.status == 405


async def test_one_in_the_background_is_queued_and_then_completed(start: Start) -> None:
    client = await start(store=True)
    status, made = await make(client, background=True)
    assert (status, made["status"], made["output"]) == (200, "queued", [])
    done = await settled(client, made["id"])
    assert done["status"] == "completed"
    assert done["output"][0]["content"][0]["text"].startswith("sim-")
    assert (await client.post(f"{PATH}/{made['id']}/cancel"))[0] == 400


async def test_one_in_the_background_can_be_cancelled(start: Start) -> None:
    client = await start(store=True, factor=1.0)
    _, made = await make(client, background=True, max_output_tokens=100_000)
    status, cancelled = await client.post(f"{PATH}/{made['id']}/cancel")
    assert (status, cancelled["status"]) == (200, "cancelled")
    assert (await client.get(f"{PATH}/{made['id']}"))[1]["status"] == "cancelled"


async def test_a_stream_in_the_background_can_be_read_again_from_any_event(start: Start) -> None:
    client = await start(store=True)
    body = {"model": "big", "input": "hi", "background": True, "stream": True, "max_output_tokens": 5}
    async with client.session.post(f"{client.base}{PATH}", json=body) as response:
        first = [json.loads(data) for data in await events(response)]
    assert first[-1]["type"] == "response.completed"
    where = f"{client.base}{PATH}/{first[0]['response']['id']}?stream=true"
    async with client.session.get(where) as response:
        assert [json.loads(data) for data in await events(response)] == first
    async with client.session.get(f"{where}&starting_after=2") as response:
        assert [json.loads(data) for data in await events(response)] == first[3:]


async def test_only_what_was_streamed_in_the_background_has_events(start: Start) -> None:
    client = await start(store=True)
    _, made = await make(client)
    status, body = await client.get(f"{PATH}/{made['id']}?stream=true")
    assert (status, body["error"]["param"]) == (400, "response_id")
