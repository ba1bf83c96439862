"""Simulators inside the test's own loop, and a client for them."""

from __future__ import annotations

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
BASE = ["model", "--host", "127.0.0.1", "--port", "0", "--served-model-name", "big", "big-alias", "--enable-sleep-mode"]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """``await start("--option", ...)``: a running simulator, a hundred times faster than life, and its client."""
    async with AsyncExitStack() as stack:

        async def run(*words: str, dev: bool = True, factor: float = 0.01, listen: bool = True) -> Client:
            options = parse([*BASE, "--sim-clock-factor", str(factor), *words], DEV_MODE if dev else {})
            simulator = Simulator(options)
            if listen:
                await stack.enter_async_context(simulator)
            uds = options.uds
            connector = aiohttp.UnixConnector(uds) if uds else aiohttp.TCPConnector(force_close=False)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            return Client(simulator, session)

        yield run
