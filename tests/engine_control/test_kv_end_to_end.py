"""Admission by KV, from clients to a simulated engine's cache: somebody is held, and everybody is answered."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from supervised import UNIT, supervised

from proxy.server import PublicProxy
from supervisord.core.spec import ModelSpec, ProxySpec, ReplicaSpec
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

#: 72 000 tokens: not quite three of these conversations, and five want to live there.
BLOCKS, AGENTS, TURNS = 4500, 5, 6
ENGINE = [
    *("model", "--host", "127.0.0.1", "--port", "0", "--served-model-name", "m"),
    *("--max-model-len", "40000", "--num-gpu-blocks-override", str(BLOCKS)),
    *("--sim-ttft-rate", "400000", "--sim-tpot-base", "0.001"),
]


async def converse(http: aiohttp.ClientSession, number: int, routes: list[str]) -> None:
    """One agent, which sends all of it again with every turn and does not pause."""
    messages = [{"role": "user", "content": f"{number} is my number. " * 6000}]
    for turn in range(TURNS):
        body = {"model": "m", "messages": messages, "max_tokens": 2}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            routes.append(response.headers["x-vllmctl-route"])
            answer = (await response.json())["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": f"and {turn}?"}]


async def test_agents_that_do_not_all_fit_take_turns_and_all_are_answered(tmp_path: Path) -> None:
    async with (
        Simulator(parse(ENGINE, {})) as simulator,
        supervised(simulator.endpoint, tmp_path, canary=False) as daemon,
    ):
        await daemon.lease()
        model = ModelSpec("m", (ReplicaSpec("r", "m", UNIT, simulator.endpoint),))
        proxy = PublicProxy(daemon.dispatcher, ProxySpec(), [model], lambda failover: None)
        listener = socket.create_server(("127.0.0.1", 0))
        await proxy.start([listener])
        routes: list[str] = []
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as http:
                await asyncio.gather(*(converse(http, number, routes) for number in range(AGENTS)))
        finally:
            await proxy.stop()
        assert len(routes) == AGENTS * TURNS
        held = [route for route in routes if route.startswith("held ")]
        assert held, routes
        assert any("continuation of r, stays" in route for route in routes)
        (seen,) = daemon.dispatcher.view().models
        assert (seen.in_flight, seen.waiting, seen.waiting_for_kv) == (0, 0, 0)
