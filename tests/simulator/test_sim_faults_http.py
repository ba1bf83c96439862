"""Faults on demand and connections that end in odd ways, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import aiohttp
import pytest
from simclient import ENDLESS, Client, Start, chat_body, events


async def open_raw(client: Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = client.base.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def raw_request(path: str, body: bytes = b"", method: str = "POST") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def running(client: Client, count: int = 1) -> asyncio.Future[None]:
    """Until that many requests run."""
    return asyncio.ensure_future(client.engine.until(lambda: len(client.engine.scheduler.running) == count))


async def listening(client: Client) -> None:
    """Until it accepts connections (nothing signals that to a client, so ask again)."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.get("/health")
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.001)
            else:
                return


async def refused(client: Client) -> None:
    """Until it does not; a connection that was kept may still answer."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.get("/health")
            except aiohttp.ClientConnectorError:
                return
            except aiohttp.ClientError:
                continue  # a kept connection, closed under the request


async def read_into(received: bytearray, reader: asyncio.StreamReader) -> None:
    while piece := await reader.read(65536):
        received += piece


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(start: Start, stream: bool) -> None:
    client = await start()
    _, writer = await open_raw(client)
    body = json.dumps(chat_body("x", stream=stream, **ENDLESS)).encode()
    writer.write(raw_request("/v1/chat/completions", body))
    await running(client)
    writer.close()
    await client.engine.until(lambda: client.engine.counters.disconnect_aborts == 1)
    assert not client.engine.scheduler.running


async def test_a_half_close_aborts_too(start: Start) -> None:
    client = await start()
    _, writer = await open_raw(client)
    body = json.dumps(chat_body("x", stream=False, **ENDLESS)).encode()
    writer.write(raw_request("/v1/chat/completions", body))
    await running(client)
    writer.write_eof()
    await client.engine.until(lambda: client.engine.counters.disconnect_aborts == 1)
    writer.close()


async def test_a_client_that_leaves_while_queued_asleep_is_forgotten(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    _, writer = await open_raw(client)
    writer.write(raw_request("/v1/chat/completions", json.dumps(chat_body("x")).encode()))
    await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 1)
    writer.close()
    await client.engine.until(lambda: not client.engine.scheduler.waiting)
    assert (await client.state())["disconnect_aborts"] == 1


async def test_an_idle_kept_connection_is_closed_by_the_server(start: Start) -> None:
    client = await start("--sim-keepalive", "0.05")
    reader, writer = await open_raw(client)
    writer.write(raw_request("/health", method="GET"))
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    # Ends only because the server closes.
    await reader.read()
    writer.close()


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_an_unknown_fault_is_a_400_that_lists_the_known_ones(start: Start) -> None:
    client = await start()
    status, body = await client.post("/sim/fault", {"name": "explode"})
    assert status == 400
    assert "wake-fails" in body["error"]["message"]
    assert "wake-fails" in (await client.get("/sim/faults"))[1]["known"]


async def test_die_ends_streams_with_an_error_event_and_done_and_the_process_exits_0(start: Start) -> None:
    client = await start(factor=2.0)  # a second to look at the dead
    plain = asyncio.create_task(client.chat("plain", **ENDLESS))
    async with client.stream("stream", **ENDLESS) as response:
        await running(client, 2)
        await client.fault("die")
        *_, error, done = await events(response)
    assert done == "[DONE]"
    assert "EngineCore encountered an issue" in json.loads(error)["error"]["message"]
    assert (await plain)[0] == 500
    assert (await client.get("/health"))[0] == 503
    assert (await client.get("/is_sleeping"))[0] == 500
    assert (await client.chat("late"))[0] == 500
    assert await client.simulator.ended == 0
    await refused(client)


async def test_lie_health_says_200_when_dead_and_the_process_stays(start: Start) -> None:
    client = await start()
    await client.fault("lie-health", count=None)
    await client.fault("die")
    assert (await client.get("/health"))[0] == 200
    assert (await client.chat())[0] == 500
    assert not client.simulator.ended.done()


@pytest.mark.parametrize("moment", ["sleep", "wake_up", "reload_weights", "reset_prefix_cache"])
async def test_die_strikes_at_a_step_of_the_wake(start: Start, moment: str) -> None:
    client = await start()
    await client.fault("die", moment)
    assert (await client.chat())[0] == 200
    statuses = []
    for path in (
        "/sleep?level=2",
        "/wake_up?tags=weights",
        "/collective_rpc",
        "/wake_up?tags=kv_cache",
        "/reset_prefix_cache",
    ):
        status, _ = await client.post(path, {"method": "reload_weights"} if "rpc" in path else None)
        statuses.append(status)
        if status != 200:
            break
    expected = {"sleep": 1, "wake_up": 2, "reload_weights": 3, "reset_prefix_cache": 5}
    assert (len(statuses), statuses[-1]) == (expected[moment], 500)
    assert await client.simulator.ended == 0


async def test_die_strikes_after_a_chunk_of_a_stream(start: Start) -> None:
    client = await start()
    await client.fault("die", "chunk:3")
    async with client.stream("x", **ENDLESS) as response:
        *chunks, error, _ = await events(response)
    assert len(chunks) >= 3
    assert "error" in json.loads(error)


async def test_die_strikes_after_its_seconds(start: Start) -> None:
    client = await start()
    await client.fault("die", 0.5)
    assert await client.simulator.ended == 0


async def test_crash_tears_every_connection_down(start: Start) -> None:
    client = await start()
    async with client.stream("x", **ENDLESS) as response:
        await running(client)
        await client.fault("crash", "request")
        with pytest.raises(aiohttp.ClientError):
            await client.chat("the last straw")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert await client.simulator.ended == -9
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get("/health")


async def test_hang_says_200_on_health_and_never_answers_an_engine_call(start: Start) -> None:
    client = await start()
    await client.fault("hang")
    asked = [asyncio.create_task(client.get("/is_sleeping")), asyncio.create_task(client.chat())]
    for path in ("/health", "/ping", "/v1/models", "/metrics"):
        assert (await client.get(path))[0] == 200
    assert not any(task.done() for task in asked)
    await client.fault("hang", count=0)
    assert [(await task)[0] for task in asked] == [200, 200]


async def test_lie_sleep_stays_awake(start: Start) -> None:
    client = await start()
    await client.fault("lie-sleep")
    assert await client.post("/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": False}
    await client.post("/sleep")
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": True}


async def test_lie_sleep_memory_sleeps_and_frees_nothing(start: Start) -> None:
    client = await start()
    before = (await client.state())["memory"]["used"]
    await client.fault("lie-sleep", "memory")
    await client.post("/sleep")
    assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": True}
    assert (await client.state())["memory"]["used"] == before
    await client.post("/wake_up")
    await client.post("/sleep")
    assert (await client.state())["memory"]["used"] < before


async def test_sleep_fails_and_the_engine_stays_awake(start: Start) -> None:
    client = await start()
    await client.fault("sleep-fails")
    assert (await client.post("/sleep"))[0] == 500
    assert not (await client.state())["is_sleeping"]


async def test_wake_fails_with_the_allocators_error_as_often_as_armed(start: Start) -> None:
    client = await start()
    await client.post("/sleep")
    await client.fault("wake-fails", count=2)
    for _ in range(2):
        status, body = await client.post("/wake_up")
        assert status == 500
        assert "CUDA Error: out of memory at" in body["error"]["message"]
        assert "cumem_allocator.cpp" in body["error"]["message"]
        assert (await client.state())["is_sleeping"]
    assert (await client.post("/wake_up"))[0] == 200


async def test_wake_fails_for_one_tag_only(start: Start) -> None:
    client = await start()
    await client.post("/sleep?level=2")
    await client.fault("wake-fails", "kv_cache")
    assert (await client.post("/wake_up?tags=weights"))[0] == 200
    assert (await client.post("/wake_up?tags=kv_cache"))[0] == 500


async def test_reload_fails_and_answers_stay_garbage(start: Start) -> None:
    client = await start()
    await client.post("/sleep?level=2")
    await client.post("/wake_up")
    await client.fault("reload-fails")
    assert (await client.post("/collective_rpc", {"method": "reload_weights"}))[0] == 500
    assert "GARBAGE" in await client.text()


async def test_garbage_on_demand(start: Start) -> None:
    client = await start()
    await client.fault("garbage", count=None)
    assert "GARBAGE" in await client.text("one")
    await client.fault("garbage", count=0)
    assert "GARBAGE" not in await client.text("other")


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_errors_on_demand(start: Start, status: int) -> None:
    client = await start()
    await client.fault(str(status), "7")
    async with client.session.post(f"{client.base}/v1/chat/completions", json=chat_body("x")) as response:
        assert response.status == status
        assert response.headers["Retry-After"] == "7"
        assert (await response.json())["error"]["code"] == status
    assert (await client.chat())[0] == 200


async def test_reset_mid_stream_is_a_tcp_reset_after_that_many_chunks(start: Start) -> None:
    client = await start()
    await client.fault("reset-mid-stream", 2)
    reader, writer = await open_raw(client)
    writer.write(raw_request("/v1/chat/completions", json.dumps(chat_body("x", stream=True)).encode()))
    received = bytearray()
    with pytest.raises(ConnectionResetError):
        await read_into(received, reader)
    assert received.count(b"data: ") == 2
    assert b"[DONE]" not in received
    writer.close()
    await client.engine.until(lambda: not client.engine.scheduler.running)


async def test_reset_before_the_status_line(start: Start) -> None:
    client = await start()
    await client.fault("reset-mid-stream", 0)
    reader, writer = await open_raw(client)
    writer.write(raw_request("/v1/chat/completions", json.dumps(chat_body("x")).encode()))
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


async def test_slow_headers_hold_the_answer_back(start: Start) -> None:
    client = await start()
    await client.fault("slow-headers", 5)
    slow = asyncio.create_task(client.chat("slow"))
    assert (await client.chat("first one takes the fault"))[0] == 200
    assert (await slow)[0] == 200
    assert not (await client.get("/sim/faults"))[1]["armed"]


async def test_slow_looks_hold_nothing_back_but_the_deep_probe(start: Start) -> None:
    client = await start()
    await client.fault("slow-looks", 5)
    slow = asyncio.create_task(client.get("/is_sleeping"))
    while client.engine.faults.armed("slow-looks"):  # until it has struck; every look is a turn for the other
        await client.get("/health")
    assert (await client.chat("a request goes on"))[0] == 200
    assert (await client.get("/is_sleeping")) == (200, {"is_sleeping": False})
    assert await slow == (200, {"is_sleeping": False})


@pytest.mark.parametrize("transport", ["tcp", "uds"])
async def test_refuse_closes_the_listener_until_disarmed(start: Start, tmp_path: Path, transport: str) -> None:
    words = ["--uds", str(tmp_path / "engine.sock")] if transport == "uds" else []
    client = await start(*words)
    assert (await client.get("/health"))[0] == 200
    await client.fault("refuse", 0)
    await refused(client)
    client.simulator.arm("refuse", "", 0)
    await listening(client)


async def test_refuse_ends_by_itself(start: Start) -> None:
    client = await start()
    await client.fault("refuse", 2)
    await listening(client)
    assert (await client.chat())[0] == 200


async def test_streams_go_on_while_new_connections_are_refused(start: Start) -> None:
    client = await start()
    async with client.stream("x", max_tokens=50, ignore_eos=True) as response:
        client.simulator.arm("refuse", "", 1)
        assert (await events(response))[-1] == "[DONE]"


# --- load and stop ----------------------------------------------------------------------------------------------------


async def test_while_loading_the_port_is_taken_and_connections_are_refused(start: Start) -> None:
    client = await start(listen=False)
    simulator = client.simulator
    simulator.bind()
    try:
        with socket.socket() as probe:
            host, _, port = simulator.endpoint.removeprefix("http://").partition(":")
            assert probe.connect_ex((host, int(port))) != 0
        await simulator.load()
        await simulator.listen()
        assert (await Client(simulator, client.session).get("/health"))[0] == 200
    finally:
        await simulator.close()


async def test_sigterm_closes_the_listener_and_aborts_requests_with_200(start: Start) -> None:
    client = await start()
    async with client.stream("x", **ENDLESS) as response:
        await running(client)
        client.simulator.terminate()
        *_, last, _ = await events(response)
        assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
    await refused(client)
    assert await client.simulator.ended == 0


async def test_with_a_shutdown_timeout_health_stays_200_new_requests_get_500_and_streams_finish(start: Start) -> None:
    client = await start("--shutdown-timeout", "1000")
    async with client.stream("x", max_tokens=300, ignore_eos=True) as response:
        await running(client)
        client.simulator.terminate()
        await asyncio.sleep(0)
        assert (await client.get("/health"))[0] == 200
        status, body = await client.chat("late")
        assert status == 500
        assert "cannot schedule new futures" in body["error"]["message"]
        last = json.loads((await events(response))[-2])
    assert last["choices"][0]["finish_reason"] == "length"
    assert await client.simulator.ended == 0


async def test_past_the_shutdown_timeout_streams_hang_until_the_client_leaves(start: Start) -> None:
    client = await start("--shutdown-timeout", "10")
    async with client.stream("x", **ENDLESS) as response:
        await running(client)
        client.simulator.terminate()
        await client.engine.frozen()
        assert not client.simulator.ended.done()
        response.close()
    assert await client.simulator.ended == 0


async def test_ignore_sigterm(start: Start) -> None:
    client = await start()
    await client.fault("ignore-sigterm", count=None)
    client.simulator.terminate()
    await client.fault("ignore-sigterm", count=0)
    assert (await client.chat())[0] == 200
    client.simulator.terminate()
    assert await client.simulator.ended == 0


async def test_hundreds_of_requests_while_asleep_are_all_answered_after_one_wake(start: Start) -> None:
    client = await start(factor=0.0)
    await client.post("/sleep")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        many = Client(client.simulator, session)
        tasks = [asyncio.create_task(many.text(f"number {n}", max_tokens=6)) for n in range(300)]
        await client.engine.until(lambda: len(client.engine.scheduler.waiting) == 300)
        await client.post("/wake_up")
        texts = await asyncio.gather(*tasks)
    assert all(f"number {n}" in text for n, text in enumerate(texts))
    assert (await client.state())["wakes"] == {"all": 1}
