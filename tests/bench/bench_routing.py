"""Routing policies against the same simulated replicas and loads, on virtual time.

    .venv/bin/python tests/bench/bench_routing.py [--seeds 3] [--only "mixed"] [--policy prefill] [--out results.json]

Four replicas of 600k tokens of KV each, 16k tokens/s of prefill. One table per workload: makespan and mean time to
first token against the best (± the standard error over the seeds), TTFT by kind of request, the share of prompt tokens
found in the cache, fairness between sessions (Jain's index of their mean TTFT: 1 is equal) and errors. Pictures
(``--plots``) need matplotlib (the ``bench`` extra).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from baselines import BoundedHash, CacheAware, LeastInFlight, NewTokensTimesLoad, SessionHash
from virtualfleet import Fleet, Request, Shape
from workloads import WORKLOADS

from proxy.policies.prefill import Prefill
from proxy.routing import POLICIES
from supervisord.simulator.scheduler import CostModel

REPLICAS = 4
#: A 90k prompt takes 5.6 s, and 1.2 s more for attention.
ENGINE = Shape(CostModel(16_000, 0.012, 0.0008, 3e-10, 0.004), kv_tokens=600_000, token_budget=8192, block=256)

EVERY = {
    **POLICIES,
    "prefill, all admitted": lambda clock: Prefill(clock, longest_hold=0),
    "least in flight": lambda clock: LeastInFlight(),
    "session hash": lambda clock: SessionHash(),
    "bounded hash": lambda clock: BoundedHash(),
    "cache_aware": lambda clock: CacheAware(),
    "new tokens x load": lambda clock: NewTokensTimesLoad(),
}


def run(job: tuple[str, str, int, int]) -> dict[str, object]:
    """One policy under one workload with one seed, and conversations of at most so many turns."""
    workload, policy, seed, turns = job
    load, slower = WORKLOADS[workload]
    costs = ENGINE.costs
    slow = CostModel(
        costs.prefill_rate / slower,
        costs.step_base * slower,
        costs.step_per_seq * slower,
        costs.per_pair * slower,
        costs.prefill_base * slower,
    )
    fleet = Fleet([replace(ENGINE, costs=slow), *[ENGINE] * (REPLICAS - 1)], EVERY[policy])
    fleet.most_turns = turns
    fleet.salt = str(seed)  # the conversations of all seeds have the same names
    load(fleet, random.Random(seed))
    fleet.run()
    done = fleet.finished
    return {
        "workload": workload,
        "policy": policy,
        "seed": seed,
        "turns": turns,
        **summary(done),
        "hit_rate": sum(r.cached for r in done) / sum(r.tokens for r in done),
        "retried": sum(request.tries - 1 - request.errors for request in done),
        "preemptions": sum(replica.scheduler.preemptions for replica in fleet.replicas),
    }


def summary(done: Sequence[Request]) -> dict[str, object]:
    """What the clients saw. Simulated seconds; ``fairness`` is Jain's index of the sessions' mean TTFT."""
    by_kind = defaultdict(list)
    by_session = defaultdict(list)
    for request in done:
        by_kind[request.kind].append(request.ttft)
        by_session[request.session].append(request.ttft)
    means = [statistics.mean(values) for values in by_session.values()]
    return {
        "requests": len(done),
        "makespan": max(request.done for request in done),
        "mean_ttft": statistics.mean(request.ttft for request in done),
        "ttft": {kind: percentiles(values) for kind, values in by_kind.items()},
        "ideal_hit_rate": ideal_hits(done) / sum(r.tokens for r in done),
        "worst_mean": max(means),
        "longest": max(request.ttft for request in done),
        "fairness": sum(means) ** 2 / (len(means) * sum(mean**2 for mean in means)),
        "errors": sum(request.errors for request in done),
    }


def ideal_hits(requests: Sequence[Request]) -> int:
    """Prompt tokens that somebody had sent, or the engine had written, before: with one cache that forgets nothing."""
    seen: set[tuple[str, ...]] = set()
    hits = 0
    for request in sorted(requests, key=lambda request: request.sent):
        names = tuple(part.name for part in request.parts)
        known = max((n for n in range(len(names) + 1) if names[:n] in seen), default=0)
        hits += sum(part.tokens for part in request.parts[:known])
        reply = f"reply {request.session} {names[-1]}"
        seen.update((*names, reply)[:n] for n in range(1, len(names) + 2))
    return hits


def percentiles(values: Sequence[float]) -> list[float]:
    """p50, p95, p99."""
    if len(values) == 1:
        return [values[0]] * 3
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return [cuts[49], cuts[94], cuts[98]]


def table(workload: str, results: Sequence[dict]) -> None:
    """The mean over the seeds, the best policy first."""
    rows = defaultdict(list)
    for result in results:
        if result["workload"] == workload:
            rows[result["policy"]].append(result)

    def mean(policy: str, *path: str | int) -> float:
        values = []
        for result in rows[policy]:
            value = result
            for key in path:
                value = value[key]
            values.append(value)
        return statistics.mean(values)

    def against_best(policy: str, key: str) -> str:
        """Times the best, and the standard error of that: seeds differ by much, and are compared seed by seed."""
        best = min(rows, key=lambda name: mean(name, key))
        theirs = {result["seed"]: result[key] for result in rows[best]}
        ratios = [result[key] / theirs[result["seed"]] for result in rows[policy] if result["seed"] in theirs]
        error = f" ±{statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}" if len(ratios) > 2 and policy != best else ""
        return f"{mean(policy, key) / mean(best, key):.2f}x{error}"

    best_span = min(mean(policy, "makespan") for policy in rows)
    best_ttft = min(mean(policy, "mean_ttft") for policy in rows)
    kinds = sorted({kind for result in next(iter(rows.values())) for kind in result["ttft"]})
    print(f"\n### {workload}\n")
    heads = ["policy", f"makespan ({best_span:.0f} s)", f"mean TTFT ({best_ttft:.2f} s)"]
    heads += [f"{kind} p50 / p95 / p99 s" for kind in kinds] + ["hits", "fairness", "errors"]
    unluckiest = all("longest" in result for results_of in rows.values() for result in results_of)
    heads += ["unluckiest session's mean / longest s"] * unluckiest
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for policy in sorted(rows, key=lambda policy: mean(policy, "mean_ttft")):
        cells = [policy, against_best(policy, "makespan"), against_best(policy, "mean_ttft")]
        cells += [" / ".join(f"{mean(policy, 'ttft', kind, at):.2f}" for at in range(3)) for kind in kinds]
        cells += [f"{100 * mean(policy, 'hit_rate'):.0f}%", f"{mean(policy, 'fairness'):.2f}"]
        cells.append(f"{mean(policy, 'errors'):.1f}")
        if unluckiest:
            cells.append(f"{mean(policy, 'worst_mean'):.1f} / {mean(policy, 'longest'):.1f}")
        print("| " + " | ".join(cells) + " |")


def plot(results: Sequence[dict], folder: Path) -> None:
    """One picture: mean TTFT of every policy against the best, for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(result["workload"] for result in results))
    policies = list(dict.fromkeys(result["policy"] for result in results))
    figure, axes = pyplot.subplots(figsize=(12, 5), layout="constrained")
    width = 0.8 / len(policies)
    for at, policy in enumerate(policies):
        heights = []
        for workload in workloads:
            means = {
                name: statistics.mean(
                    r["mean_ttft"] for r in results if r["workload"] == workload and r["policy"] == name
                )
                for name in policies
            }
            heights.append(means[policy] / min(means.values()))
        axes.bar([x + at * width for x in range(len(workloads))], heights, width, label=policy)
    axes.set_yscale("log")
    axes.set_ylabel("mean TTFT, times the best")
    axes.set_xticks([x + 0.4 for x in range(len(workloads))], workloads, rotation=15)
    axes.legend(ncols=3, fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "routing-ttft.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1000, help="most turns of a conversation, as in bench_peers.py")
    parser.add_argument("--only", action="append", choices=list(WORKLOADS))
    parser.add_argument("--policy", action="append", choices=list(EVERY))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="raw results, JSON")
    parser.add_argument("--read", type=Path, action="append", help="raw results to show, instead of running anything")
    parser.add_argument("--plots", type=Path, help="a folder for pictures")
    options = parser.parse_args()
    workloads = options.only or list(WORKLOADS)
    if options.read:
        results = [result for file in options.read for result in json.loads(file.read_text())]
        seeds = sorted({result["seed"] for result in results})
    else:
        seeds = list(range(options.first_seed, options.first_seed + options.seeds))
        jobs = [(w, p, s, options.turns) for w in workloads for p in options.policy or EVERY for s in seeds]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            results = pool.map(run, jobs, chunksize=1)
    print(f"seeds {', '.join(map(str, seeds))}; {REPLICAS} replicas of {ENGINE.kv_tokens} tokens of KV")
    for workload in [name for name in workloads if any(result["workload"] == name for result in results)]:
        table(workload, results)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.plots:
        plot(results, options.plots)


if __name__ == "__main__":
    main()
