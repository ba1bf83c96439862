"""How long the event loop stands still while units are started, stopped, read and reloaded.

    packaging/private-manager .venv/bin/python tests/bench/bench_stall.py

Two ways to make the same calls: in the loop's own process ("inline"), and through the worker process ("worker").
Meanwhile a ticker, which stands for a stream being relayed, wants to run every millisecond; how late it comes is the
stall. In both, somebody else reloads systemd now and then, as package managers do. "noise" is the same ticker with
nothing to do beside it but those reloads: what the machine adds by itself. "busy" is the most that the loop's thread
itself computed between two ticks, whatever else the machine had to do.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from supervisord.ports import UnitError
from supervisord.sd.commands import CommandFailed, Commands
from supervisord.sd.manager import SystemdManager
from supervisord.sd.worker import CallFailed, Systemd

TICK = 0.001
UNIT = "[Service]\nExecStart=/bin/sleep infinity\n"


class Inline:
    """Stands for ``Commands``, without the worker: each call blocks the loop for as long as systemd takes."""

    def __init__(self) -> None:
        os.environ["SYSTEMD_BUS_TIMEOUT"] = "2s"
        self._systemd = Systemd()

    async def call(self, name: str, *args: str | int) -> Any:
        await asyncio.sleep(0)  # a stall is one call, not several in a row
        try:
            return getattr(self._systemd, name)(*args)
        except CallFailed as failure:
            raise CommandFailed(failure.name, str(failure)) from None

    def release(self) -> None:
        pass

    async def close(self) -> None:
        self._systemd.close()


async def tick(stalls: list[float], busy: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, computed = loop.time() + TICK, time.thread_time()
        await asyncio.sleep(TICK)
        stalls.append(max(0.0, loop.time() - due))
        busy.append(time.thread_time() - computed)


@contextlib.contextmanager
def reloads_by_others() -> Iterator[None]:
    """Somebody else's daemon-reload, with 200 ms between two."""
    script = "while :; do systemctl --user daemon-reload; sleep 0.2; done"
    process = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def work(manager: SystemdManager, operations: int, reloads: int) -> None:
    units = [f"bench@{number}.service" for number in range(4)]
    manager.watch(units, lambda status: None)
    verbs: list[Callable[[str], Awaitable[Any]]] = [
        manager.start,
        lambda unit: manager.status([unit]),
        manager.restart,
        manager.reset_failed,
        manager.stop,
    ]
    for number in range(operations):
        await verbs[number // len(units) % len(verbs)](units[number % len(units)])
        if reloads and number % (operations // reloads) == 0:
            await manager._commands.call("daemon_reload")
    for unit in units:
        try:
            await manager.stop(unit)
        except UnitError as error:
            print(error)


async def measure(name: str, job: Callable[[], Awaitable[None]]) -> None:
    stalls: list[float] = []
    busy: list[float] = []
    with reloads_by_others():
        ticker = asyncio.create_task(tick(stalls, busy))
        began = time.monotonic()
        await job()
        took = time.monotonic() - began
        ticker.cancel()
        await asyncio.wait([ticker])
    cuts = statistics.quantiles(stalls, n=1000, method="inclusive")
    p50, p99, p999 = (1000 * cuts[at - 1] for at in (500, 990, 999))
    print(
        f"{name:8} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   p99.9 {p999:6.2f} ms   max {1000 * max(stalls):7.2f} ms"
        f"   busy {1000 * max(busy):6.2f} ms   ({len(stalls)} ticks, {took:.1f} s)"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=100)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--ballast", type=int, default=300, help="other unit files that a reload has to read")
    options = parser.parse_args()
    if os.environ.get("PRIVATE_MANAGER") != "1":
        parser.exit(2, "run it as packaging/private-manager .venv/bin/python tests/bench/bench_stall.py\n")

    folder = Path(os.environ["XDG_RUNTIME_DIR"], "systemd/user")
    wants = folder / "default.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (folder / "bench@.service").write_text(UNIT)
    for number in range(options.ballast):
        unit = folder / f"ballast-{number}.service"
        unit.write_text(UNIT)
        (wants / unit.name).symlink_to(unit)  # so that it is loaded, and loaded again by each reload

    await measure("noise", lambda: asyncio.sleep(5))
    for name in ("inline", "worker"):
        commands: Any = Inline() if name == "inline" else None
        manager = SystemdManager(commands=commands)

        async def job(manager: SystemdManager = manager) -> None:
            await manager.open()
            await work(manager, options.operations, options.reloads)

        await measure(name, job)
        if name == "worker":
            assert isinstance(manager._commands, Commands)
            report_memory(manager._commands.worker_pid)
        await manager.close()


def report_memory(pid: int | None) -> None:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    pss = next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    print(f"worker process: {int(pss) / 1024:.1f} MB (PSS)")


if __name__ == "__main__":
    asyncio.run(main())
