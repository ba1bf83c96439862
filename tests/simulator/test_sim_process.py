"""The simulator as a process: start, exit codes, signals, log."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from simclient import chat_body

ROOT = Path(__file__).resolve().parents[2]
Process = asyncio.subprocess.Process
Launch = Callable[..., Awaitable[Process]]


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """``await launch("--option", ...)``: the process, its log on stderr; killed at the end if it is still there."""
    processes: list[Process] = []

    async def run(*words: str, model: str = "model") -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "supervisord.simulator.main", "serve", model, *words,
            cwd=ROOT, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.returncode is None:
            process.kill()
        assert process.stderr
        await process.stderr.read()
        await process.wait()


async def log_until(process: Process, pattern: str) -> re.Match[str]:
    """Read the log up to a line with ``pattern``."""
    assert process.stderr
    lines = []
    while line := (await process.stderr.readline()).decode():
        lines.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"the log ended without {pattern!r}:\n{''.join(lines)}")


async def ready(process: Process) -> str:
    """Its address, once it listens."""
    return (await log_until(process, r"Uvicorn running on (\S+)"))[1]


async def rest_of(process: Process) -> tuple[int, str]:
    """Exit code and the rest of the log."""
    assert process.stderr
    log = (await process.stderr.read()).decode()
    return await process.wait(), log


TCP = ("--host", "127.0.0.1", "--port", "0", "--sim-clock-factor", "0.01")


async def test_it_logs_like_vllm_says_simulated_and_exits_0_on_sigterm(launch: Launch) -> None:
    process = await launch(*TCP)
    url = await ready(process)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        assert response.status == 200
    process.terminate()
    code, log = await rest_of(process)
    assert code == 0
    assert '"GET /health HTTP/1.1" 200 OK' in log
    assert all("simulated" in line for line in log.splitlines())


async def test_on_a_unix_socket_the_file_stays_and_a_stale_one_means_exit_1(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    words = ("--uds", str(path), "--sim-clock-factor", "0.01")
    process = await launch(*words)
    assert await ready(process) == f"unix:{path}"
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://engine/health") as response:
        assert response.status == 200
    process.terminate()
    assert (await rest_of(process))[0] == 0
    assert path.exists()
    code, log = await rest_of(await launch(*words))
    assert code == 1
    assert "Address already in use" in log
    path.unlink()
    await ready(await launch(*words))


async def test_a_busy_port_exits_1(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, log = await rest_of(await launch("--host", "127.0.0.1", "--port", str(taken.getsockname()[1])))
    assert code == 1
    assert "Address already in use" in log


async def test_a_bad_option_exits_2_and_a_missing_model_exits_1(launch: Launch) -> None:
    code, log = await rest_of(await launch("--no-such-option"))
    assert code == 2
    assert "unrecognized arguments: --no-such-option" in log
    assert (await rest_of(await launch(model="/no/such/model")))[0] == 1


@pytest.mark.parametrize(("fault", "expected"), [("die", 0), ("crash", -signal.SIGKILL)])
async def test_exit_codes_of_the_engines_deaths(launch: Launch, fault: str, expected: int) -> None:
    process = await launch(*TCP, "--sim-fault", f"{fault}=request")
    url = await ready(process)
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(f"{url}/v1/chat/completions", json=chat_body("x", model="model")) as response:
                assert response.status == 500
        except aiohttp.ClientError:
            assert fault == "crash"
    assert (await rest_of(process))[0] == expected


async def test_starts_that_fail_exit_1_with_a_traceback_as_often_as_the_file_says(
    launch: Launch, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    left.write_text("1")
    words = (*TCP, "--sim-fault", f"start-fails={left}")
    code, log = await rest_of(await launch(*words))
    assert code == 1
    assert "Traceback" in log
    assert "CUDA out of memory" in log
    await ready(await launch(*words))


async def test_sigterm_can_be_ignored(launch: Launch) -> None:
    process = await launch(*TCP, "--sim-fault", "ignore-sigterm")
    await ready(process)
    process.terminate()
    await log_until(process, "fault ignore-sigterm: ignored")
    assert process.returncode is None


async def test_sigterm_while_loading_can_be_ignored_until_it_listens(launch: Launch) -> None:
    process = await launch(*TCP, "--sim-load-time", "20", "--sim-fault", "ignore-sigterm=loading")
    await log_until(process, "Starting to load model")
    process.terminate()
    await ready(process)
    process.terminate()
    assert (await rest_of(process))[0] == 0


async def test_dev_endpoints_follow_the_environment(launch: Launch) -> None:
    url = await ready(await launch(*TCP))
    async with aiohttp.ClientSession() as session, session.get(f"{url}/is_sleeping") as response:
        assert await response.json() == {"is_sleeping": False}
