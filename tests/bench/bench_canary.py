"""What the canary costs: one fingerprint, and what it adds to a wake.

    .venv/bin/python tests/bench/bench_canary.py [--endpoint http://127.0.0.1:8001 | --endpoint unix:/path]

Against the simulator as a process of its own, behind the real core, effects, state directory and control client. Its
wake takes 100 ms. "nothing to compute" has an engine that answers at once: what is left is ours, and HTTP. "two cards"
has the prefill and decode times that were measured on two 32 GB cards. With --endpoint: one fingerprint of that engine.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine_control"))

from supervised import supervised

from supervisord.core.readings import EngineState
from supervisord.engine.vllm import VllmEngine

WAKE = 0.1
ENGINES = {
    "nothing to compute": ["--sim-ttft-rate", "1e9", "--sim-tpot-base", "0", "--sim-tpot-per-seq", "0"],
    "two cards": [],
}
LONG = 60.0


def figures(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"p50 {1000 * cuts[49]:7.2f} ms   p95 {1000 * cuts[94]:7.2f} ms   (n={len(seconds)})"


@asynccontextmanager
async def simulator(folder: Path, words: list[str]) -> AsyncIterator[str]:
    """The endpoint of a running one."""
    endpoint = f"unix:{folder}/engine.sock"
    command = [sys.executable, "-m", "supervisord.simulator.main", "serve", "m", "--uds", f"{folder}/engine.sock"]
    command += ["--enable-sleep-mode", "--disable-uvicorn-access-log", "--sim-sleep", "0", "--sim-wake1", str(WAKE)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *words,
        env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    engine = VllmEngine(endpoint)
    try:
        while (await engine.probe(LONG)).state is not EngineState.AWAKE:
            assert process.returncode is None, f"the simulator exited with {process.returncode}"
            await asyncio.sleep(0.05)
        yield endpoint
    finally:
        await engine.close()
        process.terminate()
        await process.wait()


async def fingerprints(endpoint: str, count: int) -> list[float]:
    """Seconds of each, one after the other."""
    engine = VllmEngine(endpoint)
    took = []
    await engine.probe(LONG)
    try:
        for _ in range(count):
            began = time.perf_counter()
            assert await engine.fingerprint(LONG) is not None
            took.append(time.perf_counter() - began)
    finally:
        await engine.close()
    return took


async def wakes(endpoint: str, state_dir: Path, count: int, *, canary: bool) -> list[float]:
    """Seconds from a request's arrival at a sleeper to its leave to go on."""
    took = []
    async with supervised(endpoint, state_dir, canary=canary) as daemon:
        await daemon.lease()
        for _ in range(count):
            await daemon.sleep(1)
            began = time.perf_counter()
            await daemon.lease()
            took.append(time.perf_counter() - began)
    return took


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint")
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    if options.endpoint:
        print(f"one fingerprint of {options.endpoint}: {figures(await fingerprints(options.endpoint, options.count))}")
        return
    for name, words in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            async with simulator(Path(folder), words) as endpoint:
                print(f"{name}: one fingerprint        {figures(await fingerprints(endpoint, options.count))}")
                for canary in (False, True):
                    seconds = await wakes(endpoint, Path(folder, "state"), options.count, canary=canary)
                    print(f"{name}: wake, canary {'on ' if canary else 'off'}       {figures(seconds)}")


if __name__ == "__main__":
    asyncio.run(main())
