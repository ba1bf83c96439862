"""The supervisor's own cost, measured on the whole product under a real user manager, with simulated engines.

    packaging/private-manager .venv/bin/python tests/bench/bench_product.py [wake] [burst] [idle] [waiters]

wake     what a wake on request takes above the engine's own 100 ms: p50 and p99, without and with the canary. The
         same request to the awake engine, just after, is the baseline and is taken off.
burst    1,000 simultaneous requests to a sleeping model: wakes and answers counted.
idle     memory and CPU of the daemon, with two sleeping-when-idle replicas, over a minute without a request; and its
         memory after 64 requests of 400 kB at once.
waiters  memory of the daemon per connection while 10,000 wait for a wake.
"""

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "systemd")]

import product as rig  # noqa: E402
from product import Product, busctl, model, until  # noqa: E402

WAKE = 0.1
ROUNDS = 100
QUICK = {"sim-wake1": WAKE, "sim-sleep": 0.0, "sim-ttft-rate": 1e9, "sim-tpot-base": 0.0}
CONFIG = "\n".join(
    [
        "[proxy]\nmax_connections = 20000",
        model("plain", wake={"canary": False}, **QUICK),
        model("canary", wake={"canary": True}, **QUICK),
        model("crowd", wake={"canary": False, "max_waiting": 20000}, **{**QUICK, "sim-wake1": 1.0}),
        model("slow", wake={"canary": False, "max_waiting": 20000}, **{**QUICK, "sim-wake1": 20.0}),
    ]
)


async def sleep(name: str) -> None:
    path = f"/io/github/vllmctl1/models/{name}"
    status, _, said = await busctl("call", "io.github.vllmctl1", path, "io.github.vllmctl1.Model", "Sleep", "u", "1")
    assert status == 0, said


async def timed(work: Callable) -> float:
    began = time.perf_counter()
    answer = await work()
    assert answer.status == 200, answer
    return time.perf_counter() - began


async def wake(product: Product) -> None:
    async with product.clients() as clients:
        for name in ("plain", "canary"):
            added = []
            await clients.ask(name, tokens=1)
            for _ in range(ROUNDS):
                await sleep(name)
                woken = await timed(lambda name=name: clients.ask(name, tokens=1))
                awake = await timed(lambda name=name: clients.ask(name, tokens=1))
                added.append((woken - awake - WAKE) * 1000)
            cuts = statistics.quantiles(added, n=100, method="inclusive")
            print(
                f"wake, {name}: added above the engine's {WAKE * 1000:.0f} ms:"
                f" p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, n={ROUNDS}",
                flush=True,
            )


async def burst(product: Product) -> None:
    async with product.clients() as clients, product.engine("crowd") as engine:
        await clients.ask("crowd", tokens=1)
        await sleep("crowd")
        before = sum((await engine.state())["wakes"].values())
        answers = await clients.many(1000, "crowd")
        wakes = sum((await engine.state())["wakes"].values()) - before
        print(f"burst: 1000 requests at once: wakes {wakes}, answers 200: {sum(a.status == 200 for a in answers)}")


def usage(pid: int) -> tuple[float, int, int]:
    """CPU seconds, RSS and PSS in bytes, of the process and its children."""
    stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = int(stat[11]) + int(stat[12])
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in rollup.splitlines()[1:] if line[0].isupper()}
    return ticks / os.sysconf("SC_CLK_TCK"), sizes["Rss"], sizes["Pss"]


async def idle(product: Product) -> None:
    async with product.clients() as clients:
        for name in ("plain", "canary"):
            await clients.ask(name, tokens=1)
    pid = product.main_pid()
    # systemd's command worker is ended after a minute without a command: a quiet hour has none.
    await until(lambda: not _children(pid), "the command worker ends by itself", limit=120)
    before, began = usage(pid)[0], time.monotonic()
    await asyncio.sleep(60)
    cpu, rss, pss = usage(pid)
    share = 100 * (cpu - before) / (time.monotonic() - began)
    print(f"idle: RSS {rss / 1e6:.1f} MB, PSS {pss / 1e6:.1f} MB, CPU {share:.2f} % of one core over 60 s", flush=True)
    async with product.clients() as clients:
        answers = await asyncio.gather(*(clients.ask("plain", "word " * 80_000, tokens=1) for _ in range(64)))
        assert all(a.status == 200 for a in answers), Counter(a.status for a in answers)
    await until(lambda: not _children(pid), "the command worker ends by itself", limit=120)
    print(f"idle: RSS {usage(pid)[1] / 1e6:.1f} MB after 64 requests of 400 kB at once", flush=True)


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


async def waiters(product: Product) -> None:
    count = int(os.environ.get("WAITERS", "10000"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with product.clients() as clients:
        await clients.ask("slow", tokens=1)
        await sleep("slow")
        pid = product.main_pid()
        before = usage(pid)[1]
        seen: list[int] = []
        asking = [asyncio.create_task(clients.ask("slow", f"Request {n}", tokens=1)) for n in range(count)]

        async def waiting() -> bool:
            status, out, said = await busctl(
                "get-property",
                "io.github.vllmctl1",
                "/io/github/vllmctl1/models/slow",
                "io.github.vllmctl1.Model",
                "Waiting",
            )
            if status:  # the bus daemon gives up on a caller who waits for long
                print(f"waiters: {said}", flush=True)
                return False
            seen.append(int(out.split()[1]))
            return seen[-1] == count

        await until(waiting, f"{count} wait", limit=60)
        grown = usage(pid)[1] - before
        print(
            f"waiters: {count} wait: RSS grew by {grown / 1e6:.0f} MB, {grown / count / 1000:.1f} kB each", flush=True
        )
        answers = await asyncio.gather(*asking)
        kinds = Counter((a.status, a.code if a.status > 200 else a.error[:60]) for a in answers)
        print(f"waiters: answers {dict(kinds)}")


async def main(names: list[str]) -> None:
    # The test rig looks at engines all the time; here it is as often as for everybody.
    rig.SUPERVISOR = ""
    # A fresh daemon for each: what one leaves in the allocator is not the next one's.
    for name in names or ["idle", "wake", "burst", "waiters"]:
        with tempfile.TemporaryDirectory(prefix="bench-product-") as folder:
            product = Product(Path(folder), CONFIG)
            product.start()
            try:
                await {"wake": wake, "burst": burst, "idle": idle, "waiters": waiters}[name](product)
            finally:
                print("\n".join(product.remove()), end="")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
