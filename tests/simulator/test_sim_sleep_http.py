"""Sleep and wake over HTTP: what clients see meanwhile."""

from __future__ import annotations

import asyncio
import json

import pytest
from simclient import ENDLESS, Client, Start, events

PROPER_WAKE = ("/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache")


async def wake_properly(client: Client) -> None:
    for path in PROPER_WAKE:
        status, _ = await client.post(path, {"method": "reload_weights"} if "rpc" in path else None)
        assert status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
        ("POST", "/collective_rpc"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/is_paused"),
        ("POST", "/abort_requests"),
        ("GET", "/server_info"),
    ],
)
async def test_dev_endpoints_are_404_without_dev_mode(start: Start, method: str, path: str) -> None:
    client = await start(dev=False)
    async with client.session.request(method, client.base + path) as response:
        assert response.status == 404


async def test_sleep_and_wake_answer_what_they_did(start: Start) -> None:
    client = await start()
    assert await client.post("/sleep?level=1&mode=wait") == (200, {"status": "sleeping", "level": 1})
    assert await client.get("/is_sleeping") == (200, {"is_sleeping": True})
    status, body = await client.post("/wake_up")
    assert (status, body["status"]) == (200, "awake")
    assert await client.get("/is_sleeping") == (200, {"is_sleeping": False})


async def test_twice_is_200_both_ways(start: Start) -> None:
    client = await start()
    for path in ("/sleep", "/sleep", "/wake_up", "/wake_up"):
        assert (await client.post(path))[0] == 200
    state = await client.state()
    assert (state["sleeps"], state["noop_sleeps"]) == ({"1": 1}, 1)


async def test_a_level_in_a_json_body_is_ignored_and_means_1(start: Start) -> None:
    client = await start()
    assert (await client.post("/sleep", {"level": 2}))[1]["level"] == 1
    state = await client.state()
    assert (state["level"], state["weights"]) == (1, "host")


async def test_level_1_to_2_answers_level_2_and_does_nothing(start: Start) -> None:
    client = await start()
    await client.post("/sleep?level=1")
    assert await client.post("/sleep?level=2") == (200, {"status": "sleeping", "level": 2})
    assert (await client.state())["weights"] == "host"


@pytest.mark.parametrize("query", ["level=3", "level=x", "mode=softly"])
async def test_bad_values_are_400(start: Start, query: str) -> None:
    client = await start()
    status, body = await client.post(f"/sleep?{query}")
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert not (await client.state())["is_sleeping"]


async def test_an_unknown_tag_is_200_and_nothing(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    status, body = await client.post("/wake_up?tags=kvcache")
    assert (status, body["status"]) == (200, "sleeping")
    assert (await client.state())["asleep"] == ["kv_cache", "weights"]


async def test_memory_falls_on_sleep_and_moves_to_the_host_at_level_1(start: Start) -> None:
    client = await start()
    before = (await client.state())["memory"]
    await client.post("/sleep?level=1")
    napping = (await client.state())["memory"]
    assert napping["used"] == before["other"]
    assert napping["host_weights"] == before["weights"]
    await client.post("/wake_up")
    assert (await client.state())["memory"] == before


async def test_without_sleep_mode_sleep_works_and_memory_stays(start: Start) -> None:
    client = await start("--no-enable-sleep-mode")
    before = (await client.state())["memory"]
    assert (await client.post("/sleep?level=2"))[0] == 200
    assert (await client.get("/is_sleeping"))[1]["is_sleeping"]
    assert (await client.state())["memory"] == before
    await client.post("/wake_up")
    assert "GARBAGE" not in await client.text()


async def test_a_proper_level_2_wake_answers_sense(start: Start) -> None:
    client = await start()
    before = await client.text("the question")
    await client.post("/sleep?level=2&mode=wait")
    await wake_properly(client)
    assert await client.text("the question") == before
    state = await client.state()
    assert (state["reloads"], state["prefix_resets"], state["garbage_answers"]) == (1, 1, 0)
    assert state["calls"][-4:] == [
        "wake_up?tags=weights",
        "reload_weights",
        "wake_up?tags=kv_cache",
        "reset_prefix_cache",
    ]


async def test_a_plain_wake_after_level_2_serves_garbage_with_200_in_every_dialect(start: Start) -> None:
    client = await start()
    await client.post("/sleep?level=2&mode=wait")
    await client.post("/wake_up")
    assert (await client.get("/health"))[0] == 200
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": False}
    message = {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/messages", message),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        status, answer = await client.post(path, body)
        assert status == 200
        assert "GARBAGE" in json.dumps(answer)
    async with client.stream("x") as response:
        assert response.status == 200
        assert "GARBAGE" in await response.text()
    assert (await client.state())["garbage_answers"] == 6


async def test_garbage_stays_in_the_prefix_cache_until_it_is_reset(start: Start) -> None:
    client = await start()
    question = "a question of more than one block of tokens " * 4
    await client.post("/sleep?level=2&mode=wait")
    await client.post("/wake_up")
    assert "GARBAGE" in await client.text(question)
    await client.post("/collective_rpc", {"method": "reload_weights"})
    assert "GARBAGE" in await client.text(question)
    assert "GARBAGE" not in await client.text("another question")
    await client.post("/reset_prefix_cache")
    assert "GARBAGE" not in await client.text(question)


async def test_reload_while_the_weights_are_not_mapped_is_a_500(start: Start) -> None:
    client = await start()
    await client.post("/sleep?level=2")
    status, body = await client.post("/collective_rpc", {"method": "reload_weights"})
    assert status == 500
    assert "illegal memory access" in body["error"]["message"]


async def test_mode_abort_ends_running_requests_with_200_and_finish_reason_abort(start: Start) -> None:
    client = await start()
    plain = asyncio.create_task(client.chat("plain", **ENDLESS))
    async with client.stream("stream", **ENDLESS) as response:
        await client.engine.until(lambda: len(client.engine.scheduler.running) == 2)
        assert (await client.post("/sleep"))[0] == 200
        *_, last, done = await events(response)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
    status, body = await plain
    assert (status, body["choices"][0]["finish_reason"]) == (200, "abort")
    assert (await client.state())["aborted"] == 2


async def test_mode_wait_lets_running_requests_finish_and_holds_new_ones(start: Start) -> None:
    client = await start()
    running = asyncio.create_task(client.chat("running", max_tokens=200, ignore_eos=True))
    await client.engine.until(lambda: len(client.engine.scheduler.running) == 1)
    sleeping = asyncio.create_task(client.post("/sleep?mode=wait"))
    await client.engine.until(lambda: "sleep?level=1&mode=wait" in client.engine.counters.calls)
    late = asyncio.create_task(client.chat("late"))
    _, body = await running
    assert body["choices"][0]["finish_reason"] == "length"
    assert (await sleeping)[0] == 200
    assert not late.done()
    await client.post("/wake_up")
    assert (await late)[0] == 200


async def test_mode_keep_freezes_requests_and_they_finish_after_the_wake(start: Start) -> None:
    client = await start()
    kept = asyncio.create_task(client.chat("kept", max_tokens=100, ignore_eos=True))
    await client.engine.until(lambda: len(client.engine.scheduler.running) == 1)
    await client.post("/sleep?mode=keep")
    assert not kept.done()
    await client.post("/wake_up")
    status, body = await kept
    assert (status, body["usage"]["completion_tokens"]) == (200, 100)


async def test_requests_sent_while_asleep_hang_until_the_wake(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    waiting = asyncio.create_task(client.text("anybody there"))
    async with client.stream("me too") as response:
        # The stream's 200 is here at once, its first byte is not.
        assert response.status == 200
        await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 2)
        assert not waiting.done()
        await client.post("/wake_up")
        assert "me" in await response.text()
    assert "anybody there" in await waiting


async def test_a_second_sleep_kills_queued_requests_with_empty_200s(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    waiting = asyncio.create_task(client.chat("queued"))
    await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 1)
    await client.post("/sleep")
    status, body = await waiting
    assert (status, body["choices"][0]["message"]["content"]) == (200, "")
    assert body["choices"][0]["finish_reason"] == "abort"


async def test_a_partial_wake_keeps_requests_waiting(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    assert (await client.post("/wake_up?tags=weights"))[1]["status"] == "sleeping"
    waiting = asyncio.create_task(client.chat("queued"))
    await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 1)
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": True}
    assert not waiting.done()
    await client.post("/wake_up?tags=kv_cache")
    assert (await waiting)[0] == 200


async def test_requests_on_memory_that_is_not_there_kill_the_engine(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    await client.post("/wake_up?tags=weights&tags=scheduling")
    assert (await client.chat("x"))[0] == 500
    assert await client.simulator.ended == 0


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/models", "/metrics", "/version"])
async def test_asleep_everything_else_still_says_200(start: Start, path: str) -> None:
    client = await start()
    await client.post("/sleep")
    assert (await client.get(path))[0] == 200


async def test_tokenize_works_asleep(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    assert (await client.post("/tokenize", {"prompt": "abcd"}))[1]["count"] == 1


async def test_gauges_are_stale_while_asleep(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    waiting = asyncio.create_task(client.chat("queued"))
    await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 1)
    assert 'vllm:num_requests_waiting{engine="0",model_name="big"} 0.0' in (await client.get("/metrics"))[1]
    assert (await client.state())["waiting"] == 1
    await client.post("/wake_up")
    await waiting


async def test_sleep_empties_the_prefix_cache(start: Start) -> None:
    client = await start()
    await client.text("words " * 100)
    assert (await client.state())["cached_blocks"] > 0
    await client.post("/sleep")
    assert (await client.state())["cached_blocks"] == 0


async def test_a_wake_that_its_caller_left_goes_on(start: Start) -> None:
    client = await start(factor=0.05)
    await client.post("/sleep")
    call = asyncio.create_task(client.post("/wake_up"))
    await client.engine.until(lambda: "wake_up" in client.engine.counters.calls)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    # A control call's turn comes after the one under way.
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": False}


async def test_paused_counts_as_sleeping_and_resume_ends_it(start: Start) -> None:
    client = await start()
    assert await client.post("/pause") == (200, {"status": "paused"})
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": True}
    assert (await client.get("/is_paused"))[1] == {"is_paused": True}
    assert await client.post("/resume") == (200, {"status": "resumed"})
    assert (await client.chat())[0] == 200


async def test_abort_requests_ends_them_with_200(start: Start) -> None:
    client = await start()
    running = asyncio.create_task(client.chat("x", **ENDLESS))
    await client.engine.until(lambda: len(client.engine.scheduler.running) == 1)
    assert await client.post("/abort_requests", {}) == (200, {"status": "aborted", "aborted": 1})
    assert (await running)[1]["choices"][0]["finish_reason"] == "abort"


async def test_server_info_says_simulated(start: Start) -> None:
    client = await start()
    assert (await client.get("/server_info"))[1]["vllm_config"]["simulated"] is True
