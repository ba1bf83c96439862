"""Simulated engines as units of this user manager, at ports that stay theirs."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from peers import cpu_seconds, free_port, show, systemctl, tree
from virtualfleet import Shape

_ROOT = Path(__file__).parents[2]
#: Longer than any conversation here.
_CONTEXT = 262_144
_COUNTED = re.compile(r"(?m)^vllm:(prefix_cache_queries|prefix_cache_hits|num_preemptions)_total\{.*\} (\S+)$")
#: Seconds until a process answers.
_LIMIT = 60.0


class EngineFleet:
    """``shapes``: one engine each; ``factor``: real seconds of a simulated one; ``loads``: what a start takes."""

    def __init__(self, count: int) -> None:
        self.units = [f"bench-engine-{'abcdefgh'[n]}.service" for n in range(count)]
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
        self._folder = Path(os.environ["XDG_RUNTIME_DIR"], "systemd/user")
        self._lost: dict[str, float] = {}

    async def start(self, shapes: Sequence[Shape], factor: float, load_seconds: float = 0.0) -> None:
        """Fresh ones, which answer."""
        self._lost = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for unit, url, shape in zip(self.units, self.urls, shapes, strict=True):
            (self._folder / unit).write_text(_unit(url, shape, factor, load_seconds))
        systemctl("daemon-reload")
        systemctl("start", *self.units)
        async with aiohttp.ClientSession() as http:
            for url in self.urls:
                await answers(http, f"{url}/health")

    async def kill(self, number: int) -> None:
        """As a crash does; systemd starts it again at once."""
        counted = await self._counted(self.urls[number])
        self._lost = {name: self._lost.get(name, 0) + value for name, value in counted.items()}
        command = ["systemctl", "--user", "kill", "--signal=KILL", self.units[number]]
        await (await asyncio.create_subprocess_exec(*command)).wait()

    async def counters(self) -> dict[str, float]:
        """Tokens looked up in the caches and found, and preemptions, of all together since the start."""
        total = dict(self._lost)
        for url in self.urls:
            for name, value in (await self._counted(url)).items():
                total[name] = total.get(name, 0) + value
        return total

    def cpu(self) -> float:
        return sum(cpu_seconds(tree(int(show(unit, "MainPID")["MainPID"]))) for unit in self.units)

    def stop(self) -> None:
        systemctl("kill", "--signal=KILL", *self.units, check=False)
        systemctl("stop", *self.units)
        systemctl("reset-failed", check=False)

    def remove(self) -> None:
        for unit in self.units:
            (self._folder / unit).unlink(missing_ok=True)
        systemctl("daemon-reload")

    async def _counted(self, url: str) -> dict[str, float]:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
                return {name: float(value) for name, value in _COUNTED.findall(await response.text())}
        except aiohttp.ClientError:  # it was killed, and is not back yet
            return {}


async def answers(http: aiohttp.ClientSession, url: str, **how: object) -> None:
    """Ask until the answer is 200; no event tells."""
    async with asyncio.timeout(_LIMIT):
        while True:
            try:
                async with http.request("POST" if how else "GET", url, **how) as response:
                    if response.status == 200:
                        await response.read()
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


def _unit(url: str, shape: Shape, factor: float, load_seconds: float) -> str:
    costs = shape.costs
    options = {
        "host": "127.0.0.1",
        "port": url.rpartition(":")[2],
        "served-model-name": "m",
        "max-model-len": _CONTEXT,
        "max-num-seqs": shape.max_seqs,
        "max-num-batched-tokens": shape.token_budget,
        "block-size": shape.block,
        "sim-kv-tokens": shape.kv_tokens,
        "sim-clock-factor": factor,
        "sim-load-time": load_seconds,
        "sim-ttft-rate": costs.prefill_rate,
        "sim-prefill-base": costs.prefill_base,
        "sim-prefill-pair": costs.per_pair,
        "sim-tpot-base": costs.step_base,
        "sim-tpot-per-seq": costs.step_per_seq,
    }
    words = " ".join(f"--{name}={value}" for name, value in options.items())
    # As vLLM is by default: usage does not tell how many tokens were cached.
    words += " --no-enable-prompt-tokens-details --disable-uvicorn-access-log"
    return (
        f"[Service]\nEnvironment=PYTHONPATH={_ROOT} PYTHONDONTWRITEBYTECODE=1 VLLM_SERVER_DEV_MODE=1\n"
        f"ExecStart={sys.executable} -m supervisord.simulator.main serve simulated {words}\n"
        "Restart=always\nRestartSec=0\nStandardOutput=null\nStandardError=null\n"
        "[Unit]\nStartLimitIntervalSec=0\n"
    )
