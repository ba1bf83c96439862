"""What a probe makes of an engine, and that the control calls are vLLM's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.readings import EngineState, Probe
from supervisord.engine.kvcache import tokens_of
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import EngineError

LONG = 30.0
KV_PAGE = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4000"} 1.0\n'
Fake = Any  # conftest's FakeVllm


async def test_an_awake_engine_tells_its_names_and_context(vllm: Fake, engine: VllmEngine) -> None:
    expected = Probe(EngineState.AWAKE, "", ("tiny", "tiny-alias"), 2048, kv_tokens=0, adapters=("adapter",))
    assert await engine.probe(LONG) == expected


async def test_a_probe_only_reads(vllm: Fake, engine: VllmEngine) -> None:
    await engine.probe(LONG)
    assert vllm.asked == ["GET /health", "GET /v1/models", "GET /is_sleeping", "GET /metrics"]


async def test_the_kv_cache_is_asked_for_once_and_again_when_the_engine_was_away(
    vllm: Fake, engine: VllmEngine
) -> None:
    vllm.faults["/metrics"] = (200, KV_PAGE)
    assert [(await engine.probe(LONG)).kv_tokens for _ in range(3)] == [64_000] * 3
    assert vllm.asked.count("GET /metrics") == 1
    await engine.sleep(1, LONG)
    assert (await engine.probe(LONG)).kv_tokens is None
    await engine.wake_up((), LONG)
    vllm.faults["/metrics"] = (200, KV_PAGE.replace("4000", "5000"))
    assert (await engine.probe(LONG)).kv_tokens == 80_000


async def test_metrics_that_do_not_come_are_no_fault_of_the_engines_and_asked_for_again(
    vllm: Fake, engine: VllmEngine
) -> None:
    vllm.late.add("/metrics")
    probe = await engine.probe(LONG)
    assert (probe.state, probe.kv_tokens) == (EngineState.AWAKE, None)
    vllm.late.clear()
    vllm.faults["/metrics"] = (200, KV_PAGE)
    assert (await engine.probe(LONG)).kv_tokens == 64_000


@pytest.mark.parametrize(
    ("labels", "max_model_len", "tokens"),
    [
        ('block_size="16",num_gpu_blocks="4000",num_gpu_blocks_override="None"', 32_768, 64_000),
        ('mamba_block_size="1024",block_size="16",num_gpu_blocks="4000"', 32_768, 64_000),
        # Blocks that layers of several kinds share: the product is no count of tokens.
        ('block_size="8",num_gpu_blocks="320"', 32_768, 0),
        ('block_size="8",kv_cache_size_tokens="463459",num_gpu_blocks="320"', 262_144, 463_459),
        ('block_size="16",num_gpu_blocks="None"', 32_768, 0),
        ('block_size="16",num_gpu_blocks="None",kv_cache_size_tokens="None"', None, 0),
    ],
)
def test_what_a_kv_cache_holds_is_read_from_its_labels(labels: str, max_model_len: int | None, tokens: int) -> None:
    assert tokens_of(f'# TYPE x gauge\nvllm:cache_config_info{{{labels},engine="0"}} 1.0\n', max_model_len) == tokens


def test_the_caches_of_several_engine_cores_are_added() -> None:
    two = KV_PAGE + KV_PAGE.replace('engine="0"', 'engine="1"')
    assert tokens_of(two, 32_768) == 128_000
    assert tokens_of("", 32_768) == 0


async def test_the_end_of_a_sequence_asks_the_core_and_nothing_else(vllm: Fake, engine: VllmEngine) -> None:
    await engine.sleep(1, LONG)
    vllm.asked.clear()
    assert (await engine.verify(LONG)).state is EngineState.ASLEEP
    assert vllm.asked == ["GET /is_sleeping"]
    await engine.wake_up((), LONG)
    assert (await engine.verify(LONG)).state is EngineState.AWAKE
    await vllm.stop()
    assert (await engine.verify(LONG)).state is EngineState.UNREACHABLE


async def test_an_asleep_engine_is_seen_as_asleep(vllm: Fake, engine: VllmEngine) -> None:
    await engine.sleep(1, LONG)
    assert (await engine.probe(LONG)).state is EngineState.ASLEEP


async def test_without_dev_mode_the_engine_is_awake_and_cannot_sleep(vllm: Fake, engine: VllmEngine) -> None:
    vllm.dev_mode = False
    probe = await engine.probe(LONG)
    assert (probe.state, probe.can_sleep) == (EngineState.AWAKE, False)
    with pytest.raises(EngineError, match=r"^cannot sleep: POST /sleep\?level=1&mode=wait: 404: .*DEV_MODE"):
        await engine.sleep(1, LONG)


async def test_a_simulated_engine_says_so(vllm: Fake, engine: VllmEngine) -> None:
    vllm.headers = {"x-simulated": "true"}
    assert (await engine.probe(LONG)).simulated


async def test_an_engine_that_is_gone_is_unreachable(vllm: Fake, engine: VllmEngine) -> None:
    assert (await engine.probe(LONG)).state is EngineState.AWAKE
    await vllm.stop()
    probe = await engine.probe(LONG)
    assert probe.state is EngineState.UNREACHABLE
    with pytest.raises(EngineError, match=r"^cannot wake up: POST /wake_up: .*(refused|No such file)"):
        await engine.wake_up((), LONG)


async def test_a_stale_socket_file_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    engine = VllmEngine(f"unix:{path}")
    assert await engine.probe(LONG) == Probe(
        EngineState.UNREACHABLE, f"GET /health: cannot connect to unix:{path}: Connection refused"
    )
    await engine.close()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/is_sleeping"])
async def test_no_answer_in_time_is_hung_and_says_to_what(vllm: Fake, engine: VllmEngine, path: str) -> None:
    vllm.late.add(path)
    probe = await engine.probe(LONG)
    assert probe.state is EngineState.HUNG
    assert probe.detail == f"GET {path}: no answer in 30 s"
    # What was seen before the silence is still told.
    assert probe.served_names == (("tiny", "tiny-alias") if path == "/is_sleeping" else ())


async def test_a_process_that_accepts_no_more_connections_is_hung(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        path = tmp_path / "engine.sock"
        server.bind(str(path))
        server.listen(0)
        clients = []
        try:
            while True:  # fill its accept queue: it is stopped, and never takes one
                client = socket.socket(socket.AF_UNIX)
                clients.append(client)
                client.setblocking(False)
                client.connect(str(path))
        except BlockingIOError:
            pass
        engine = VllmEngine(f"unix:{path}")
        assert (await engine.probe(0.05)).state is EngineState.HUNG
        await engine.close()
        for client in clients:
            client.close()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/is_sleeping"])
async def test_a_5xx_is_broken_and_quotes_the_engine(vllm: Fake, engine: VllmEngine, path: str) -> None:
    vllm.faults[path] = (500, {"error": {"message": "EngineDeadError\n  trace", "type": "InternalServerError"}})
    probe = await engine.probe(LONG)
    assert probe.state is EngineState.BROKEN
    assert probe.detail == f"GET {path}: 500: EngineDeadError trace"


async def test_a_connection_closed_without_an_answer_is_broken(vllm: Fake, engine: VllmEngine) -> None:
    vllm.faults["/is_sleeping"] = (0, None)
    probe = await engine.probe(LONG)
    assert probe.state is EngineState.BROKEN
    assert probe.detail == "GET /is_sleeping: the connection was closed without an answer"


async def test_another_model_on_the_endpoint_is_the_wrong_one(vllm: Fake, engine: VllmEngine) -> None:
    assert (await engine.probe(LONG)).state is EngineState.AWAKE
    # The process is replaced between two probes; the next one notices.
    vllm.models = {"data": [{"id": "ocr", "max_model_len": 64}]}
    assert await engine.probe(LONG) == Probe(
        EngineState.WRONG_MODEL, "GET /v1/models: it serves ocr, not other-name-of-it or tiny", ("ocr",), 64
    )


async def test_without_expectations_any_model_will_do(vllm: Fake) -> None:
    engine = VllmEngine(vllm.endpoint)
    assert (await engine.probe(LONG)).state is EngineState.AWAKE
    await engine.close()


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/health", (404, "not here")),
        ("/health", (302, "elsewhere")),
        ("/v1/models", (404, "not here")),
        ("/v1/models", (200, "<html>")),
        ("/v1/models", (200, [])),
        ("/v1/models", (200, {"data": []})),
        ("/v1/models", (200, {"data": [{"id": 7}, None]})),
    ],
)
async def test_another_program_on_the_endpoint_is_the_wrong_one(
    vllm: Fake, engine: VllmEngine, path: str, answer: tuple[int, object]
) -> None:
    vllm.faults[path] = answer
    probe = await engine.probe(LONG)
    assert probe.state is EngineState.WRONG_MODEL
    assert probe.detail.startswith(f"GET {path}: ")


async def test_a_server_that_does_not_speak_http_is_the_wrong_one() -> None:
    async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(banner, "127.0.0.1", 0) as server:
        engine = VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        probe = await engine.probe(LONG)
        await engine.close()
    assert probe.state is EngineState.WRONG_MODEL
    assert "not HTTP" in probe.detail


@pytest.mark.parametrize("answer", [(200, {"is_sleeping": "yes"}), (200, "no"), (401, {"error": "Unauthorized"})])
async def test_an_unclear_answer_about_sleep_is_not_taken_for_awake(
    vllm: Fake, engine: VllmEngine, answer: tuple[int, object]
) -> None:
    vllm.faults["/is_sleeping"] = answer
    assert (await engine.probe(LONG)).state is EngineState.BROKEN


async def test_an_engine_with_an_api_key(vllm: Fake, engine: VllmEngine) -> None:
    vllm.api_key = "secret"
    keyless = await engine.probe(LONG)
    assert (keyless.state, keyless.served_names) == (EngineState.AWAKE, ())
    assert "API key" in keyless.detail
    with_key = VllmEngine(vllm.endpoint, ["tiny"], api_key="secret")
    probe = await with_key.probe(LONG)
    assert (probe.served_names, probe.adapters) == (("tiny", "tiny-alias"), ("adapter",))
    await with_key.close()


async def test_the_calls_of_both_levels_are_vllms(vllm: Fake, engine: VllmEngine) -> None:
    await engine.sleep(2, LONG)
    await engine.wake_up(["weights"], LONG)
    assert (await engine.probe(LONG)).state is EngineState.ASLEEP
    await engine.reload_weights(LONG)
    await engine.wake_up(["kv_cache"], LONG)
    await engine.reset_prefix_cache(LONG)
    assert (await engine.probe(LONG)).state is EngineState.AWAKE
    await engine.sleep(1, LONG)
    await engine.wake_up([], LONG)
    await engine.wake_up(["weights", "kv_cache"], LONG)
    assert [call for call in vllm.asked if call.startswith("POST")] == [
        "POST /sleep?level=2&mode=wait",
        "POST /wake_up?tags=weights",
        "POST /collective_rpc",
        "POST /wake_up?tags=kv_cache",
        "POST /reset_prefix_cache",
        "POST /sleep?level=1&mode=wait",
        "POST /wake_up",
        "POST /wake_up?tags=weights&tags=kv_cache",
    ]
    assert vllm.bodies == [{"method": "reload_weights"}]


CALLS: list[tuple[str, str, Callable[[VllmEngine, float], Awaitable[None]]]] = [
    ("/sleep", "cannot sleep: POST /sleep?level=1&mode=wait", lambda engine, limit: engine.sleep(1, limit)),
    (
        "/wake_up",
        "cannot wake up: POST /wake_up?tags=weights",
        lambda engine, limit: engine.wake_up(["weights"], limit),
    ),
    ("/collective_rpc", "cannot reload the weights: POST /collective_rpc", VllmEngine.reload_weights),
    ("/reset_prefix_cache", "cannot reset the prefix cache: POST /reset_prefix_cache", VllmEngine.reset_prefix_cache),
]


@pytest.mark.parametrize(("path", "words", "call"), CALLS)
async def test_a_failed_call_says_which_and_what_the_engine_answered(
    vllm: Fake, engine: VllmEngine, path: str, words: str, call: Callable[[VllmEngine, float], Awaitable[None]]
) -> None:
    vllm.faults[path] = (500, {"error": {"message": "CUDA error: " + "x" * 5000}})
    with pytest.raises(EngineError) as failed:
        await call(engine, LONG)
    assert str(failed.value).startswith(f"{words}: 500: CUDA error: xxx")
    assert len(str(failed.value)) < 500

    vllm.faults[path] = (0, None)
    with pytest.raises(EngineError) as cut:
        await call(engine, LONG)
    assert str(cut.value) == f"{words}: the connection was closed without an answer"

    del vllm.faults[path]
    vllm.late.add(path)
    with pytest.raises(EngineError) as late:
        await call(engine, LONG)
    assert str(late.value) == f"{words}: no answer in 30 s"


async def test_a_call_is_sent_once_even_when_the_connection_dies(vllm: Fake, engine: VllmEngine) -> None:
    vllm.faults["/sleep"] = (0, None)
    with pytest.raises(EngineError):
        await engine.sleep(1, LONG)
    assert vllm.asked == ["POST /sleep?level=1&mode=wait"]


async def test_no_connection_is_kept_for_the_engine_to_close(vllm: Fake, engine: VllmEngine) -> None:
    await engine.probe(LONG)
    await engine.sleep(1, LONG)
    assert len(vllm.connections) == 5


async def test_a_hung_call_does_not_delay_a_probe(vllm: Fake, engine: VllmEngine) -> None:
    vllm.hangs.add("/collective_rpc")
    call = asyncio.create_task(engine.reload_weights(LONG))
    assert (await engine.probe(LONG)).state is EngineState.AWAKE
    assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_an_endless_answer_is_not_swallowed_whole() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while not writer.is_closing():
                writer.write(b" " * 65536)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
        engine = VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert "longer than" in (await engine.probe(LONG)).detail
        await engine.close()
