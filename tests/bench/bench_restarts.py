"""What clients see of twenty restarts of each kind, under load: nothing, if all is well.

    packaging/private-manager .venv/bin/python tests/bench/bench_restarts.py [--times 20]

Two simulated replicas of one model, eight clients that ask again and again (half of them for streams), each on a new
connection. Counted are answers that are not a whole 200. Then: how long after the death of a replica under load nobody
is sent there any more, and how long until it is ready again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "systemd")]

import product as rig  # noqa: E402
from product import SERVICE, Product, codes, model, run  # noqa: E402

UNIT = "vllm@a.service"
CONFIG = model("m", "a", "b", **{"sim-tpot-base": 0.005})


async def restarts(product: Product, what: str, times: int, command: list[str]) -> None:
    async with (
        product.clients() as clients,
        clients.load("m", 4) as plain,
        clients.load("m", 4, stream=True) as streams,
    ):
        await plain.more(8)
        began = time.monotonic()
        for _ in range(times):
            status, out, err = await run(*command)
            assert status == 0, out + err
            await plain.more(4)
            await streams.more(4)
    answers = [*plain.answers, *streams.answers]
    failures = [*plain.failures, *streams.failures]
    seconds = time.monotonic() - began
    print(
        f"{what}: {times} in {seconds:.0f} s, {len(answers)} answers, {len(failures)} errors {codes(failures)}",
        flush=True,
    )


async def deaths(product: Product, times: int) -> None:
    demoted, back = [], []
    async with product.clients() as clients, product.fleet() as fleet, clients.load("m", 8) as load:
        for _ in range(times):
            await load.more(8)
            killed = product.main_pid(UNIT)
            product.kill(UNIT)
            died = time.monotonic()
            await fleet.until(lambda: fleet["a"].health != "ok" or fleet["a"].state != "ready", "a is demoted")
            demoted.append(time.monotonic() - died)
            await rig.until(lambda killed=killed: product.main_pid(UNIT) not in (0, killed), "a is started again")
            await fleet.becomes("a", "ready")
            back.append(time.monotonic() - died)
    print(
        f"killed replica: {times} times, {len(load.answers)} answers, {len(load.failures)} errors;"
        f" demotion seen after {1000 * sorted(demoted)[times // 2]:.0f} ms (median, over D-Bus),"
        f" ready again after {sorted(back)[times // 2]:.1f} s (median)",
        flush=True,
    )


async def main(times: int) -> None:
    rig.SUPERVISOR = ""
    with tempfile.TemporaryDirectory(prefix="bench-restarts-") as folder:
        product = Product(Path(folder), CONFIG)
        product.start()
        try:
            vllmctl = str(rig.PROGRAMS / "vllmctl")
            await run(vllmctl, "up", "m")
            await restarts(
                product, "systemctl restart of the supervisor", times, ["systemctl", "--user", "restart", SERVICE]
            )
            await restarts(product, "vllmctl restart of the model", times, [vllmctl, "restart", "m", "--quiet"])
            await restarts(product, "vllmctl reload", times, [vllmctl, "reload", "--quiet"])
            await deaths(product, times)
        finally:
            print("\n".join(product.remove()), end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    asyncio.run(main(parser.parse_args().times))
