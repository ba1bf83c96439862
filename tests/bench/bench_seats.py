"""What seats for long conversations do on a real engine: agents whose contexts are more than its KV cache holds.

    packaging/private-manager .venv/bin/python tests/bench/bench_seats.py --engine "$(tests/engine/install | tail -n 1)"

The whole product (daemon, port, unit) with one real vLLM on the CPU, which computes a tiny model of random weights and
has a small KV cache. The same agents are played with `admission = "kv"` and with "all", by turns; before each the
engine's prefix cache is emptied and the daemon is started anew, so that it has learned nothing. Tokens are counted by
the engine, and do not depend on how busy the machine is; times do, so they are shown against those of "all".
`--simulated` plays the same on a simulated engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from agentloops import Loops, Played, counted, held, play
from vllmproduct import SERVICE, Product, Replica, chat, free_port, systemctl, with_one_replica

HERE = Path(__file__).parent
ADMISSIONS = ("all", "kv")
#: What the real engine's speeds were when the simulator was compared with it, and what of its options both are told.
SPEEDS = HERE / "results/fidelity.json"
SHARED = ("max-model-len", "max-num-seqs", "block-size", "num-gpu-blocks-override", "enable-prompt-tokens-details")
#: Bytes of text that the simulator makes a token of.
SIMULATED_BYTES = 4


def simulated(model_config: str, slower: float) -> str:
    """The same with a simulated engine, so many times slower than bench_fidelity.py found the real one."""
    before, _, serve = model_config.partition("[models.tiny.serve]\n")
    kept = [line for line in serve.partition("\n[")[0].splitlines() if line.startswith(SHARED)]
    command = [sys.executable, "-m", "supervisord.simulator.main", "serve"]
    told = [f"command = {json.dumps(command)}", 'model = "simulated"', *kept]
    for word in json.loads(SPEEDS.read_text())["speeds"]:
        name, _, value = word.removeprefix("--").partition("=")
        told.append(f"{name} = {float(value) / slower if name.endswith('-rate') else float(value) * slower}")
    return f"{before}[models.tiny.serve]\n" + "\n".join(told) + "\n"


def configuration(engine: Path, model: Path, context: int, kv_tokens: int) -> str:
    """One replica of ``model`` with so many tokens of context and KV, the rest as in the engine's tests."""
    text = (HERE.parent / "engine/model.toml.in").read_text()
    changes = {
        'model = "@ENGINE@/tiny"': f'model = "{model}"',
        "max-model-len = 2048": f"max-model-len = {context}",
        "@ENGINE@": str(engine),
    }
    for old, new in changes.items():
        assert old in text, f"model.toml.in has no {old!r} any more"
        text = text.replace(old, new)
    return with_one_replica(text, kv_tokens)


async def measure(product: Product, loops: Loops, seed: int, admission: str) -> dict:
    """One play: an empty cache, a daemon that knows nothing yet."""
    product.configure("admission.toml", f'[models.tiny]\nadmission = "{admission}"\n')
    systemctl("restart", SERVICE)
    async with product.a.engine() as engine, engine.post("/reset_prefix_cache") as response:
        assert response.status == 200, await response.text()
    async with product.http() as http:
        await chat(http, "Hello.", tokens=1)
        before, cpu = await product.a.metrics(), cpu_seconds(product.a)
        played = await play(http, loops, seed)
        after, cpu = await product.a.metrics(), cpu_seconds(product.a) - cpu
    return {"seed": seed, "admission": admission, "cpu": cpu, **counted(before, after), **summary(played)}


def cpu_seconds(replica: Replica) -> float:
    """What all processes of the engine took so far."""
    group = Path("/sys/fs/cgroup", replica.shown("ControlGroup").lstrip("/"))
    usage = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(usage["usage_usec"]) / 1e6


def summary(played: Played) -> dict:
    """What the clients saw."""
    firsts = [turn.first for turn in played.turns]
    prompts = sum(turn.prompt for turn in played.turns)
    return {
        "turns": len(firsts),
        "asked": prompts,
        "told_cached": sum(turn.cached for turn in played.turns),
        "held": held(played.turns),
        "mean_ttft": statistics.mean(firsts),
        "p95_ttft": statistics.quantiles(firsts, n=20, method="inclusive")[-1],
        "longest": max(firsts),
        "makespan": played.makespan,
        "errors": len(played.errors),
        "said": played.errors[:5],
        "machine_load": os.getloadavg()[0],
        "computed_by_turn": by_turn(played),
    }


def by_turn(played: Played) -> list[int]:
    """Tokens that everybody's first turns, second turns, ... had to be computed, as usage told."""
    found: list[int] = []
    at: dict[int, int] = {}
    for turn in played.turns:
        number = at[turn.agent] = at.get(turn.agent, -1) + 1
        found += [0] * (number + 1 - len(found))
        found[number] += turn.prompt - turn.cached
    return found


def table(results: Sequence[dict]) -> None:
    """The means over the seeds."""
    rows = {name: [result for result in results if result["admission"] == name] for name in ADMISSIONS}

    def mean(admission: str, key: str) -> float:
        return statistics.mean([result[key] for result in rows[admission]])

    heads = ["admission", "prompt tokens computed", "of those sent, found (metrics / usage)", "preempted", "turns held"]
    heads += ["engine's CPU", "mean TTFT", "p95", "longest", "makespan", "errors"]
    print("\n| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for name in ADMISSIONS:
        found = mean(name, "prefix_cache_hits") / mean(name, "prefix_cache_queries")
        cells = [
            name,
            f"{mean(name, 'computed'):,.0f}",
            f"{found:.0%} / {mean(name, 'told_cached') / mean(name, 'asked'):.0%}",
        ]
        cells += [f"{mean(name, 'num_preemptions'):.0f}", f"{mean(name, 'held'):.0f} of {mean(name, 'turns'):.0f}"]
        for key in ("cpu", "mean_ttft", "p95_ttft", "longest", "makespan"):
            cells.append(f"{mean(name, key):.2f} s ({mean(name, key) / mean('all', key):.2f}x)")
        print("| " + " | ".join([*cells, f"{mean(name, 'errors'):.1f}"]) + " |")


def tell(result: dict) -> None:
    print(
        f"seed {result['seed']}, {result['admission']:3}: {result['computed']:8,} prompt tokens computed of"
        f" {result['asked']:,}, {result['held']} turns held, mean TTFT {result['mean_ttft']:.2f} s, makespan"
        f" {result['makespan']:.0f} s, {result['errors']} errors; machine's load {result['machine_load']:.1f}",
        flush=True,
    )


async def bench(options: argparse.Namespace) -> list[dict]:
    loops = Loops(
        agents=options.agents,
        turns=options.turns,
        context=tuple(options.context),
        result=tuple(options.result),
        output=options.output,
        pause=options.pause,
        within=options.within,
        instructions=options.instructions,
        bytes=SIMULATED_BYTES if options.simulated else 1,
    )
    results: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="bench-seats-") as name:
        folder = Path(name)
        model_config = configuration(options.engine, folder / "model", loops.largest, options.kv)
        if options.simulated:
            model_config = simulated(model_config, options.slower)
        else:
            make = [options.engine / "venv/bin/python", HERE.parent / "engine/make_tiny_model.py", folder / "model"]
            subprocess.run([*make, "--context", str(loops.largest)], check=True, capture_output=True)  # noqa: ASYNC221
        product = Product(folder / "product", free_port())
        try:
            product.install(model_config)
            product.vllmctl("up", "tiny")
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for admission in ADMISSIONS if seed % 2 else reversed(ADMISSIONS):
                    results.append(await measure(product, loops, seed, admission))
                    tell(results[-1])
                    if options.out:
                        options.out.write_text(json.dumps(results, indent=1) + "\n")
        finally:
            product.remove()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    default = Path(os.environ.get("VLLM_CPU_DIR") or cache / "vllm-supervisord/vllm-cpu")
    parser.add_argument("--engine", type=Path, default=default)
    parser.add_argument("--kv", type=int, default=10_240, metavar="TOKENS", help="KV cache (default %(default)s)")
    parser.add_argument("--agents", type=int, default=10)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--context", type=int, nargs=2, default=(2000, 2600), metavar="TOKENS", help="at first")
    parser.add_argument("--result", type=int, nargs=2, default=(20, 80), metavar="TOKENS", help="new in a turn")
    parser.add_argument("--output", type=int, default=8, metavar="TOKENS", help="of an answer")
    parser.add_argument("--pause", type=float, default=0.1, metavar="SECONDS", help="mean, between turns")
    parser.add_argument("--within", type=float, default=1.0, metavar="SECONDS", help="of first turns")
    parser.add_argument("--instructions", type=int, default=256, metavar="TOKENS", help="shared by all")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--simulated", action="store_true", help="a simulated engine instead of the real one")
    parser.add_argument("--slower", type=float, default=1.0, help="how much slower the simulated one is than measured")
    parser.add_argument("--out", type=Path, help="raw results, JSON")
    parser.add_argument("--read", type=Path, help="raw results to show, instead of running anything")
    options = parser.parse_args()
    if options.read:
        table(json.loads(options.read.read_text()))
        return
    if not options.simulated and not (options.engine / ".ready").exists():
        print(f"skipped: no CPU engine in {options.engine}; run tests/engine/install")
        return
    table(asyncio.run(bench(options)))


if __name__ == "__main__":
    main()
