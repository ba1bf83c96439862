"""Simulators inside the test's own loop, and a client for them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

sys.path.insert(0, str(Path(__file__).parent))  # for simclient, here and in the tests

from simclient import Client, Start

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
BASE = ["model", "--host", "127.0.0.1", "--port", "0", "--served-model-name", "big", "big-alias", "--enable-sleep-mode"]


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """``await start("--option", ...)``: a running simulator, a hundred times faster than life, and its client.

    At the end nothing may be left: no task, no file descriptor.
    """
    tasks, files = asyncio.all_tasks(), open_files()
    async with AsyncExitStack() as stack:

        async def run(
            *words: str, dev: bool = True, store: bool = False, factor: float = 0.01, listen: bool = True
        ) -> Client:
            environ = (DEV_MODE if dev else {}) | (STORE if store else {})
            options = parse([*BASE, "--sim-clock-factor", str(factor), *words], environ)
            simulator = Simulator(options)
            if listen:
                await stack.enter_async_context(simulator)
            uds = options.uds
            connector = aiohttp.UnixConnector(uds) if uds else aiohttp.TCPConnector(force_close=False)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            return Client(simulator, session)

        yield run
    await asyncio.sleep(0)  # transports closed just now close their sockets in the next turn of the loop
    assert asyncio.all_tasks() - tasks == {asyncio.current_task()}  # the one that runs this
    assert open_files() <= files
