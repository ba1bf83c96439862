"""From a fault to the demotion of the replica, to the restart of its unit and back, and what clients see of it.

    packaging/private-manager .venv/bin/python tests/bench/bench_faults.py [--times 5] [--defaults]

Two simulated replicas of one model, six clients that ask again and again; one replica gets the fault. Times are those
at which D-Bus tells, seconds after the fault. Everything is as in the default configuration, but that patience with a
hung engine is short (probe_interval and probe_timeout 1 s, hung_after 3 s, hung_idle_after 2 s); with --defaults it is
not, and a hang takes minutes to be measured. The engines are ready after half a second.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "systemd")]

import product as rig  # noqa: E402
from product import Clients, Engine, Fleet, Product, codes, model, run  # noqa: E402

VICTIM = "vllm@a.service"
SHORT = """\
[supervisor]
probe_interval = "1s"
probe_timeout = "1s"
hung_after = "3s"
hung_idle_after = "2s"
"""
CONFIG = model("m", "a", "b", **{"sim-load-time": 0.5, "sim-tpot-base": 0.005})
Fault = Callable[[Product, Engine], Awaitable[None]]


@dataclass
class Seen:
    """What one kind of fault led to, each time."""

    demoted: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    answers: int = 0
    #: Streams that had begun in the engine that died: they end with an error event, and nobody can go on with them.
    cut: int = 0
    errors: dict[str, int] = field(default_factory=dict)


async def killed(product: Product, engine: Engine) -> None:
    product.kill(VICTIM)


async def stands_still(product: Product, engine: Engine) -> None:
    product.kill(VICTIM, signal.SIGSTOP)


async def core_hangs(product: Product, engine: Engine) -> None:
    await engine.arm("hang", count=None)


async def refuses(product: Product, engine: Engine) -> None:
    await engine.arm("refuse", "0", count=None)


async def answers_500(product: Product, engine: Engine) -> None:
    await engine.arm("500", count=20)


async def shuts_down(product: Product, engine: Engine) -> None:
    product.kill(VICTIM, signal.SIGTERM)


@dataclass(frozen=True)
class Case:
    name: str
    fault: Fault
    busy: bool = True
    demotes: bool = True
    restarts: bool = True


CASES = (
    Case("kill -9", killed),
    Case("SIGSTOP, idle", stands_still, busy=False),
    Case("SIGSTOP, busy", stands_still),
    Case("core hangs, idle", core_hangs, busy=False),
    Case("core hangs, busy", core_hangs),
    Case("refuses connections", refuses),
    Case("answers 500", answers_500, demotes=False, restarts=False),
    Case("shuts down (SIGTERM)", shuts_down),
)


async def engine_is_well(product: Product) -> None:
    """What is left of a fault is taken away."""
    async with product.engine("a") as engine:
        await engine.arm("500", count=0)


async def once(case: Case, product: Product, clients: Clients, fleet: Fleet, seen: Seen) -> None:
    """One fault, from the moment at which both replicas are well to the same moment after it."""
    both_well = "both are well"
    await fleet.until(lambda: all((r.state, r.health) == ("ready", "ok") for r in fleet.now().replicas), both_well)
    async with product.engine("a") as engine:
        before = engine.run()
        began = 0.0

        async def strike() -> None:
            nonlocal began
            began = time.monotonic()
            await case.fault(product, engine)
            if case.demotes:
                await fleet.until(lambda: (fleet["a"].state, fleet["a"].health) != ("ready", "ok"), "it is demoted")
                seen.demoted.append(time.monotonic() - began)
            if case.restarts:
                await fleet.until(lambda: fleet["a"].state != "ready", "its unit restarts")
                seen.restarted.append(time.monotonic() - began)
                await rig.until(lambda: engine.run()[0] not in ("", before[0]), "another run of its unit")
            if case.demotes:
                await fleet.until(lambda: (fleet["a"].state, fleet["a"].health) == ("ready", "ok"), "it is well again")
                seen.ready.append(time.monotonic() - began)

        if not case.busy:
            await strike()
        else:
            async with clients.load("m", 3) as plain, clients.load("m", 3, stream=True) as streams:
                await asyncio.gather(plain.more(6), streams.more(6))
                await strike()
                await asyncio.gather(plain.more(6), streams.more(6))
            answers, failures = [*plain.answers, *streams.answers], [*plain.failures, *streams.failures]
            seen.answers += len(answers)
            seen.cut += sum(failure.status == 200 for failure in failures)
            for word, count in codes([failure for failure in failures if failure.status != 200]).items():
                seen.errors[word] = seen.errors.get(word, 0) + count
            await engine_is_well(product)
        assert case.restarts or engine.run() == before, "it was restarted"


def row(case: Case, seen: Seen) -> str:
    def times(found: list[float]) -> str:
        return f"{sorted(found)[len(found) // 2]:6.2f} {max(found):6.2f}" if found else "     -      -"

    errors = sum(seen.errors.values())
    columns = f"{times(seen.demoted)} | {times(seen.restarted)} | {times(seen.ready)}"
    words = ", ".join(f"{count} of {word[:60]}" for word, count in seen.errors.items())
    return f"{case.name:22} | {columns} | {seen.answers:7} {seen.cut:11} {errors:6} {words}"


async def main(times: int, supervisor: str, names: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder:
        product = Product(Path(folder), CONFIG, supervisor)
        product.start()
        try:
            await run(str(rig.PROGRAMS / "vllmctl"), "up", "m")
            headings = ("demoted", "unit restarts", "ready again")
            print(f"{'fault':22} | {' | '.join(f'{word:13}' for word in headings)} | answers cut streams errors")
            print(f"{'':22} | {'p50    max':>13} | {'p50    max':>13} | {'p50    max':>13} |")
            async with product.clients() as clients, product.fleet() as fleet:
                for case in CASES:
                    if names and case.name not in names:
                        continue
                    seen = Seen()
                    for _ in range(times):
                        await once(case, product, clients, fleet, seen)
                    print(row(case, seen), flush=True)
        finally:
            print("\n".join(product.remove()), end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--defaults", action="store_true", help="the default patience with hung engines")
    parser.add_argument("fault", nargs="*", help="only these rows of the table, by name")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.times, "" if arguments.defaults else SHORT, arguments.fault))
