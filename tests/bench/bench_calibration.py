"""Does the simulator reproduce what was measured on deployment F? On virtual time; takes a second.

.venv/bin/python tests/bench/bench_calibration.py
"""

from __future__ import annotations

import statistics
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from virtualfleet import Fleet, Part, Request, Shape

from proxy.policies.policy import Clock, Policy
from proxy.routing import POLICIES
from supervisord.simulator.scheduler import CostModel

FILE = Path(__file__).with_name("calibration_f.toml")


class Figures:
    """The figures of one calibration file, measured and simulated."""

    def __init__(self, file: Path = FILE) -> None:
        self.given = tomllib.loads(file.read_text())
        engine = self.given["engine"]
        costs = CostModel(engine["prefill_rate"], engine["step_base"], engine["step_per_seq"], engine["per_pair"])
        self._shape = Shape(costs, engine["kv_tokens"], engine["token_budget"], block=16)

    def rows(self) -> list[tuple[str, float, float]]:
        """Name, measured, simulated."""
        burst, warm, load, prefill = (self.given[name] for name in ("burst", "warm", "throughput", "prefill"))
        rows = [
            ("burst of 16, pinned to one card, s", burst["pinned_seconds"], self._burst(POLICIES["affinity"])),
            ("burst of 16, spread, s", burst["spread_seconds"], self._burst(POLICIES["roundrobin"])),
            ("burst of 16, adaptive, s", burst["adaptive_seconds"], self._burst(POLICIES["adaptive"])),
            ("warm turn, alternating, ms", warm["alternating_ms"], self._warm(POLICIES["roundrobin"])),
            ("warm turn, at home, ms", warm["home_ms"], self._warm(POLICIES["adaptive"])),
        ]
        tpots = []
        for concurrency, measured in zip(load["concurrency"], load["tokens_per_second"], strict=True):
            rate, tpot = self._load(concurrency)
            tpots.append(tpot)
            rows.append((f"concurrency {concurrency}, tok/s", measured, rate))
        rows.append(("TPOT p50 alone, ms", load["tpot_ms"][0], tpots[0]))
        rows.append(("TPOT p50 at concurrency 8, ms", load["tpot_ms"][1], tpots[-1]))
        rows.append((f"prefill of {prefill['prompt']}, tok/s", prefill["tokens_per_second"], self._prefill()))
        return rows

    def _fleet(self, policy: Callable[[Clock], Policy]) -> Fleet:
        return Fleet([self._shape] * 2, policy)

    def _burst(self, policy: Callable[[Clock], Policy]) -> float:
        """Seconds until the last answer."""
        given, fleet = self.given["burst"], self._fleet(policy)
        for n in range(given["requests"]):
            # The shared text is the first message, as in a conversation that many go on from.
            parts = (Part("shared", given["prefix"]), Part(f"own {n}", given["own"]))
            fleet.send(Request("burst", f"{n}", parts, given["output"]))
        fleet.run()
        return max(request.done for request in fleet.finished)

    def _warm(self, policy: Callable[[Clock], Policy]) -> float:
        """Mean milliseconds to the first token of the turns after the second, when both cards have seen the context."""
        given, fleet = self.given["warm"], self._fleet(policy)

        def ask(turn: int, parts: tuple[Part, ...]) -> None:
            request = Request("warm", "talk", (*parts, Part(f"question {turn}", given["question"])), given["output"])
            fleet.send(request, lambda done: answered(turn, done) if turn + 1 < given["turns"] else None)

        def answered(turn: int, done: Request) -> None:
            ask(turn + 1, (*done.parts, Part(f"reply talk {done.parts[-1].name}", done.output)))

        context = given["context"] - given["turns"] * (given["question"] + given["output"]) // 2
        ask(0, (Part("context", context),))
        fleet.run()
        return 1000 * statistics.mean(request.ttft for request in fleet.finished[2:])

    def _load(self, concurrency: int) -> tuple[float, float]:
        """Output tokens a second, and the median milliseconds per output token, in a closed loop."""
        given, fleet = self.given["throughput"], self._fleet(POLICIES["roundrobin"])

        def ask(client: int, round_: int) -> None:
            request = Request("load", f"{client}", (Part(f"{client}.{round_}", given["prompt"]),), given["output"])
            fleet.send(request, lambda done: ask(client, round_ + 1) if round_ + 1 < given["rounds"] else None)

        for client in range(concurrency):
            ask(client, 0)
        fleet.run()
        tpot = statistics.median((r.done - r.first) / (r.output - 1) for r in fleet.finished)
        return sum(r.output for r in fleet.finished) / fleet.now, 1000 * tpot

    def _prefill(self) -> float:
        fleet = self._fleet(POLICIES["roundrobin"])
        request = Request("prefill", "x", (Part("x", self.given["prefill"]["prompt"]),), 1)
        fleet.send(request)
        fleet.run()
        return request.tokens / request.ttft


if __name__ == "__main__":
    print(f"{'':40} {'measured':>10} {'simulated':>10} {'off by':>8}")
    for name, measured, simulated in Figures().rows():
        print(f"{name:40} {measured:10.1f} {simulated:10.1f} {100 * (simulated / measured - 1):+7.1f}%")
