"""The command line: run seeds, add the figures up, and shorten what fails."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

from sim_run import Result, run
from sim_shrink import shrink


class Sum:
    """The figures of many histories."""

    def __init__(self) -> None:
        self.seeds = self.steps = self.requests = self.kills = self.starts = self.failovers = 0
        self.seconds = 0.0
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.jobs: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.steps += result.steps
        self.requests += result.requests
        self.kills += result.kills
        self.starts += result.starts
        self.failovers += result.failovers
        self.seconds += result.seconds
        self.faults += result.faults
        self.outcomes += result.outcomes
        self.answers += result.answers
        self.jobs += result.jobs

    def table(self, took: float) -> str:
        rows = [
            f"seeds                {self.seeds}",
            f"steps of the core    {self.steps}  ({self.steps / max(took, 1e-9):.0f} a second)",
            f"virtual hours        {self.seconds / 3600:.0f}",
            f"requests             {self.requests}  (moved to another replica: {self.failovers})",
            f"supervisors          {self.starts}  (killed: {self.kills})",
        ]
        for title, counter in (
            ("requests by outcome", self.outcomes),
            ("commands by outcome", self.answers),
            ("unit jobs asked for", self.jobs),
            ("injected", self.faults),
        ):
            rows.append(f"{title}: {sum(counter.values())}")
            rows += [f"    {count:9d}  {what}" for what, count in sorted(counter.items(), key=lambda i: (-i[1], i[0]))]
        return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="Random histories of the supervisor, in virtual time.")
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--steps", type=int, default=0, help="go on until the core took so many steps")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a shorter history")
    options = parser.parse_args(arguments)

    total, began, failed = Sum(), time.monotonic(), []
    seed = options.seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    while total.seeds < options.seeds or total.steps < options.steps:
        try:
            result = run(seed, trace=print if options.trace else None)
        except KeyboardInterrupt:
            print(f"interrupted in seed {seed}")
            break
        total.add(result)
        if result.violation is not None:
            failed.append(seed)
            print(f"seed {seed}: {result.violation}", flush=True)
            if not options.no_shrink:
                print(shrink(result), flush=True)
            if not options.keep_going:
                break
        seed += 1
        if total.seeds % 500 == 0:
            print(f"... {total.seeds} seeds, {total.steps} steps", file=sys.stderr, flush=True)
    print(total.table(time.monotonic() - began))
    print(f"violations           {len(failed)}" + (f": seeds {failed}" if failed else ""))
    return 1 if failed else 0
