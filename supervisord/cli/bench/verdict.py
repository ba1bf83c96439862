"""Which policy to choose, from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from supervisord.cli.bench.loads import Measured

#: Policies whose scores differ by less are equal: runs of one policy differ by as much.
EQUAL = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """``policy`` is empty where nothing can be said."""

    policy: str
    why: str
    #: Each policy's cost against the best at each load: the geometric mean of the two ratios, 1 is best at both.
    scores: dict[str, float]


def judge(measured: Sequence[Measured], configured: str) -> Verdict:
    """The policy with the least cost over both loads; ``configured`` where it is as good as that."""
    sound = [each for each in measured if not each.errors and each.bursts and each.warm_first]
    if not sound:
        return Verdict("", "no policy answered everything without an error", {})
    least_burst = min(fmean(each.bursts) for each in sound)
    least_warm = min(fmean(each.warm_first) for each in sound)
    scores = {
        each.policy: sqrt((fmean(each.bursts) / least_burst) * (fmean(each.warm_first) / least_warm)) for each in sound
    }
    best = min(scores, key=lambda policy: scores[policy])
    level = [policy for policy in scores if scores[policy] <= scores[best] * (1 + EQUAL)]
    if configured in level:
        others = [policy for policy in level if policy != configured]
        beside = f", level with {', '.join(others)}" if others else ""
        return Verdict(configured, f"{configured} is what is configured, and nothing here is better{beside}", scores)
    by = scores[configured] / scores[best] - 1 if configured in scores else None
    cost = f"; {configured}, which is configured, costs {by:.0%} more" if by is not None else ""
    return Verdict(best, f"{best} costs least over the burst and the later turns together{cost}", scores)
