"""The shortest failing history that can be found: leave out what was injected, in ever smaller pieces."""

from __future__ import annotations

from sim_plan import plan
from sim_run import Result, run

#: Runs that are spent on it.
BUDGET = 400


def shrink(failed: Result) -> str:
    """Which of the injected things, and of the planned ones, are enough for the same violation; in words."""
    assert failed.violation is not None
    wanted = failed.violation.invariant
    planned = [item.name for item in plan(failed.seed).items]
    injected = [name for _, name, _ in failed.injected]
    needed = list(dict.fromkeys([*planned, *injected]))
    shortest, runs = failed, 0
    size = max(1, len(needed) // 2)
    while size and runs < BUDGET:
        start, removed = 0, False
        while start < len(needed) and runs < BUDGET:
            rest = needed[:start] + needed[start + size :]
            result = run(failed.seed, frozenset(rest))
            runs += 1
            if result.violation is not None and result.violation.invariant == wanted:
                needed, shortest, removed = rest, result, True
            else:
                start += size
        if not (removed and size == 1):
            size //= 2
    return describe(shortest, needed)


def describe(result: Result, needed: list[str]) -> str:
    """The history, in the order in which it happens."""
    kinds = {item.name: (item.at, item.kind) for item in plan(result.seed).items}
    rows = {(at, f"{kind} [{name}]") for name, (at, kind) in kinds.items() if name in needed}
    rows |= {(at, f"{what} [{name}]") for at, name, what in result.injected if name not in kinds}
    lines = [f"  {at:14.6f}  {text}" for at, text in sorted(rows)]
    return "\n".join([f"the shortest history found, {len(lines)} things:", *lines, f"  {result.violation}"])
