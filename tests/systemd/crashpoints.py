"""Every point at which the supervisor can be killed in what it does to a replica: before and after every step.

The steps of sleeps and wakes are the core's own sequences. (`resume_steps`, for an engine that was slept again in the
middle of its wake, are a wake from level 2 once more, with the same intent on disk.) Those of the other operations are
named here, and `test_an_undisturbed_operation_has_no_step_but_the_listed` holds all of them against what the daemon
does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from product import ROOT, Product, until

from supervisord.core.sequences import CallStep, PersistStep, Step, VerifyStep, sleep_steps, wake_steps


def _words(step: Step) -> str:
    match step:
        case PersistStep(phase, level):
            return f"record {phase} {level}"
        case CallStep(call, level, tags):
            return f"{call} {','.join(tags) or level or ''}".rstrip()
        case VerifyStep():
            return "verify"
    return step.words


def _numbered(steps: Iterable[str]) -> tuple[str, ...]:
    """A step that comes again gets its number, as the stopping daemon counts."""
    times: Counter[str] = Counter()
    found = []
    for step in steps:
        times[step] += 1
        found.append(step if times[step] == 1 else f"{step} {times[step]}")
    return tuple(found)


def _sequence(*steps: Step, then: Iterable[str] = ()) -> tuple[str, ...]:
    return _numbered([*map(_words, steps), *then])


#: What is done to a replica in each operation, in this order.
STEPS: Mapping[str, tuple[str, ...]] = {
    "sleep 1": _sequence(*sleep_steps(1)),
    "sleep 2": _sequence(*sleep_steps(2)),
    "wake 1": _sequence(*wake_steps(1, canary=True), then=["remove the record"]),
    "wake 2": _sequence(*wake_steps(2, canary=True), then=["remove the record"]),
    "start": ("start the unit", "canary", "keep the fingerprint"),
    "stop": ("record settled 0, held down", "stop the unit", "record settled 0, held down 2"),
    "restart": ("restart the unit", "canary", "keep the fingerprint"),
    "reload, its command changed": ("restart the unit", "canary", "keep the fingerprint"),
    "reload, it is gone": ("stop the unit",),
}
#: What a reload does before any replica is touched.
RELOAD = (
    "say that it reloads",
    "read the files",
    "read the files 2",
    "read the keys",
    "take the configuration",
    "watch the units",
    "tell the proxy",
    "take the keys",
    "say that it is ready",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of one operation."""

    operation: str
    moment: str
    step: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.moment} '{self.step}'"

    def reached(self, step: str) -> bool:
        """``step`` is done at this point."""
        steps = STEPS[self.operation]
        return steps.index(step) < steps.index(self.step) + (self.moment == "after")


def points(*operations: str) -> list[Point]:
    """Before and after every step of ``operations``."""
    return [
        Point(name, moment, step)
        for name in operations
        for step in (RELOAD if name == "reload" else STEPS[name])
        for moment in ("before", "after")
    ]


class Stops:
    """Where the daemon shall stand still (stopping_points.py)."""

    def __init__(self, product: Product) -> None:
        self._folder = product.folder / "points"
        self._folder.mkdir()
        self._product = product

    @property
    def drop_in(self) -> str:
        """Settings of the supervisor's unit that make it the daemon that can stand still."""
        program = f"{ROOT}/.venv/bin/python {ROOT}/tests/systemd/stopping_points.py {self._folder}"
        return f"[Service]\nExecStart=\nExecStart={program}\nRestartSec=50ms\n"

    def lay(self, plan: Mapping[str, Point]) -> None:
        """From now on each of these replicas (or the daemon) comes as far as its point."""
        (self._folder / "stopped").unlink(missing_ok=True)
        file = self._folder / "plan.new"
        file.write_text(json.dumps({who: [point.moment, point.step] for who, point in plan.items()}))
        file.rename(self._folder / "plan.json")

    async def strike(self, plan: Mapping[str, Point]) -> None:
        """Kill the daemon when everybody is at its point."""
        await until(lambda: set(plan) <= self._stopped(), f"all are at their points: {plan}")
        (self._folder / "plan.json").unlink()
        self._product.kill()

    def let_go(self) -> None:
        """After a failure: nobody is left standing still."""
        if (self._folder / "plan.json").exists():
            (self._folder / "plan.json").unlink()
            self._product.kill()

    def _stopped(self) -> set[str]:
        file = self._folder / "stopped"
        return set(file.read_text().split()) if file.exists() else set()

    def clear(self) -> None:
        """Nobody stops anywhere, and what is done is counted anew."""
        (self._folder / "done").unlink(missing_ok=True)
        self.lay({})

    def done(self, who: str) -> tuple[str, ...]:
        """The steps that were begun since ``clear``."""
        file = self._folder / "done"
        lines = file.read_text().splitlines() if file.exists() else []
        return tuple(step for name, _, step in (line.partition(": ") for line in lines) if name == who)
