"""This product beside other routers and nginx: the same loads on the same simulated engines over real HTTP, in one run.

    packaging/private-manager .venv/bin/python tests/bench/bench_peers.py [--full] [--out results.json]

Four engines as in bench_routing.py, each a process; in front of them by turns the whole product (its daemon under
systemd), sglang-router, vllm-router and nginx, from where tests/bench/install-peers put them. Every peer plays a load
before the next load begins, and each begins with fresh engines. One table per load, as bench_routing.py has them; times
are simulated seconds, ``--factor`` real ones each. Without ``--full`` it is a short play of some loads on some peers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pwd
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
import uvloop
from bench_routing import ENGINE, REPLICAS, summary, table
from enginefleet import EngineFleet, answers
from peers import OURS, PEERS, Setting, Supervisor, cpu_seconds, installed
from realfleet import RealFleet
from virtualfleet import Shape
from workloads import WORKLOADS

from supervisord.simulator.scheduler import CostModel

#: Of a replica that was killed; real seconds of its process's start come on top.
LOAD_SECONDS = 30.0
#: Simulated seconds for one load; what takes longer is told as not ended.
LIMIT = 2000.0
QUICK_PEERS = (OURS, "sglang-router cache_aware", "vllm-router consistent_hash", "nginx least_conn")
QUICK_WORKLOADS = ("agents that fit", "agents over KV", "cold burst", "skewed system prompt")


@dataclass(frozen=True, slots=True)
class Cell:
    """One play of one load through one peer."""

    workload: str
    peer: str
    seed: int


async def measure(cell: Cell, engines: EngineFleet, options: argparse.Namespace) -> dict[str, object]:
    """Everything new, one play, everything gone."""
    load, slower = WORKLOADS[cell.workload]
    shapes = [_slower(ENGINE, slower), *[ENGINE] * (REPLICAS - 1)]
    await engines.start(shapes, options.factor, LOAD_SECONDS if cell.workload == "a replica restarts" else 0.0)
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        setting = Setting(options.cache, Path(folder) / "peer", engines.urls, engines.units, options.factor)
        checkout = options.checkouts.get(cell.peer)
        peer = Supervisor(setting, checkout) if checkout else PEERS[cell.peer](setting)
        peer.start()
        try:
            url = f"http://127.0.0.1:{peer.port}"
            async with aiohttp.ClientSession() as http:
                hello = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
                await answers(http, f"{url}/v1/chat/completions", json=hello)
            fleet = RealFleet(url, options.factor, options.turns, lambda number, _seconds: engines.kill(number))
            before, began = (engines.cpu(), cpu_seconds(peer.processes()), _own_cpu()), time.monotonic()
            ended = True
            try:
                await fleet.play(load, cell.seed, LIMIT)
            except TimeoutError:
                ended = False
            after, took = (engines.cpu(), cpu_seconds(peer.processes()), _own_cpu()), time.monotonic() - began
            counted = await engines.counters()
        finally:
            peer.stop()
            engines.stop()
    names = ("engines", "peer", "load")
    return {
        "workload": cell.workload,
        "policy": cell.peer,
        "seed": cell.seed,
        "factor": options.factor,
        "turns": options.turns,
        "ended": ended,
        **summary(fleet.finished),
        "hit_rate": counted["prefix_cache_hits"] / max(1.0, counted["prefix_cache_queries"]),
        "preemptions": counted["num_preemptions"],
        "troubles": fleet.troubles[:20],
        # Of one core. An engine that was killed took its count with it.
        "cpu": {name: round((a - b) / took, 3) for name, a, b in zip(names, after, before, strict=True)},
        "machine_load": os.getloadavg()[0],
        "real_seconds": round(took, 1),
    }


def _slower(shape: Shape, times: float) -> Shape:
    costs = shape.costs
    slow = CostModel(
        costs.prefill_rate / times,
        costs.step_base * times,
        costs.step_per_seq * times,
        costs.per_pair * times,
        costs.prefill_base * times,
    )
    return replace(shape, costs=slow)


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def run(options: argparse.Namespace) -> list[dict]:
    """Every cell; what is measured is kept even if a later one fails."""
    results: list[dict] = []
    engines = EngineFleet(REPLICAS)
    try:
        for seed in options.seeds:
            for workload in options.workloads:
                for peer in options.peers:
                    result = await measure(Cell(workload, peer, seed), engines, options)
                    results.append(result)
                    _tell(result)
                    if options.out:
                        options.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        engines.remove()
    return results


def _tell(result: dict) -> None:
    cpu = ", ".join(f"{name} {100 * share:.0f}%" for name, share in result["cpu"].items())
    print(
        f"{result['workload']:22} {result['policy']:32} seed {result['seed']}: makespan {result['makespan']:6.1f} s,"
        f" mean TTFT {result['mean_ttft']:6.2f} s, hits {100 * result['hit_rate']:.0f}%, errors {result['errors']},"
        f" {'' if result['ended'] else 'NOT ENDED, '}took {result['real_seconds']} s;"
        f" CPU of one core: {cpu}; machine's load {result['machine_load']:.1f}",
        file=sys.stderr,
        flush=True,
    )


def verdict(results: Sequence[dict]) -> None:
    """Where this product stands: against the best of the others, by the means over the seeds."""
    print("\n| load | mean TTFT, the best other / ours | makespan, the best other / ours |\n|---|---|---|")
    for workload in dict.fromkeys(result["workload"] for result in results):
        cells = [workload]
        for measure_ in ("mean_ttft", "makespan"):
            means = {}
            for name in dict.fromkeys(result["policy"] for result in results):
                values = [r[measure_] for r in results if r["workload"] == workload and r["policy"] == name]
                if values:
                    means[name] = statistics.mean(values)
            ours = means.get(OURS)
            others = [name for name in means if not name.startswith(OURS)]
            if ours is None or not others:
                return
            best = min(others, key=means.__getitem__)
            cells.append(f"{means[best] / ours:.2f}x ({best})")
        print("| " + " | ".join(cells) + " |")


def plot(results: Sequence[dict], file: Path) -> None:
    """Mean TTFT and makespan of every peer against the best, for each load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(result["workload"] for result in results))
    peers = list(dict.fromkeys(result["policy"] for result in results))
    figure, axes = pyplot.subplots(2, 1, figsize=(12, 8), layout="constrained", sharex=True)
    width = 0.8 / len(peers)
    colours = pyplot.get_cmap("tab10")
    for axis, key, label in zip(axes, ("mean_ttft", "makespan"), ("mean TTFT", "makespan"), strict=True):
        for place, workload in enumerate(workloads):
            means = {}
            for peer in peers:
                values = [r[key] for r in results if r["workload"] == workload and r["policy"] == peer]
                if values:
                    means[peer] = statistics.mean(values)
            for at, peer in enumerate(peers):
                if peer in means:
                    height = means[peer] / min(means.values())
                    axis.bar(place + at * width, height, width, color=colours(at), label=None if place else peer)
        axis.axhline(1.0, color="black", linewidth=0.5)
        axis.set_yscale("log")
        axis.set_yticks([1, 1.5, 2, 3, 4, 5], labels=["1", "1.5", "2", "3", "4", "5"], minor=False)
        axis.tick_params(which="minor", left=False, labelleft=False)
        axis.set_ylabel(f"{label}, times the best")
    axes[1].set_xticks([x + 0.4 for x in range(len(workloads))], workloads, rotation=12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _home() -> Path:
    """The user's own; a private manager has another one."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all loads and peers, with longer conversations")
    parser.add_argument("--peers", help="some of them, with commas between")
    parser.add_argument("--workloads", help="some of them, with commas between")
    parser.add_argument("--seeds", default="1", help="with commas between; default %(default)s")
    parser.add_argument("--factor", type=float, default=0.2, help="real seconds per simulated one; default %(default)s")
    parser.add_argument("--turns", type=int, help="most turns of a conversation; default 3, with --full 6")
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=DIR", help="the daemon of another one")
    parser.add_argument("--cache", type=Path, default=_home() / ".cache/vllm-supervisord-bench")
    parser.add_argument("--out", type=Path, help="raw results, JSON")
    parser.add_argument("--read", type=Path, action="append", help="show these results, instead of running anything")
    parser.add_argument("--plot", type=Path, help="a PNG file; needs the bench extra")
    options = parser.parse_args()
    known = (("peers", tuple(PEERS), QUICK_PEERS), ("workloads", tuple(WORKLOADS), QUICK_WORKLOADS))
    for name, every, some in known:
        given = getattr(options, name)
        chosen = [each.strip() for each in given.split(",")] if given else list(every if options.full else some)
        if unknown := set(chosen) - set(every):
            parser.error(f"unknown {name}: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
        setattr(options, name, chosen)
    options.checkouts = {
        name: Path(folder).resolve() for name, _, folder in (c.partition("=") for c in options.checkout)
    }
    options.peers[1:1] = options.checkouts
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    options.turns = options.turns or (6 if options.full else 3)
    if not options.read and os.environ.get("PRIVATE_MANAGER") != "1":
        parser.exit(2, "run it as packaging/private-manager .venv/bin/python tests/bench/bench_peers.py\n")
    return options


def main() -> None:
    options = arguments()
    if options.read:
        results = [result for file in options.read for result in json.loads(file.read_text())]
    else:
        for name in [name for name in options.peers if name in PEERS and not installed(name, options.cache)]:
            print(f"skipped: {name} is not installed in {options.cache}")
            options.peers.remove(name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(run(options))
    seeds = sorted({result["seed"] for result in results})
    turns, factors = ({result[key] for result in results} for key in ("turns", "factor"))
    print(f"seeds {seeds}, {turns} turns, factor {factors}; {REPLICAS} engines of {ENGINE.kv_tokens} tokens of KV")
    for workload in dict.fromkeys(result["workload"] for result in results):
        table(workload, [result for result in results if result["workload"] == workload])
    verdict(results)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
