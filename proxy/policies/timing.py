"""How long an engine takes to prefill: learned from what it took, for one model and for each replica's speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: Before anything was seen: 50 ms, and 4000 tokens a second.
FIRST_GUESS = (0.05, 1 / 4000, 0.0)
#: Samples that the model is fitted to, and how many new ones there are between two fits.
SAMPLES, REFIT = 64, 8
#: Samples of one replica from which its speed against the model is taken.
SPEEDS = 15
#: How much the first guess weighs against a sample; it keeps few samples of one length from deciding everything.
_PRIOR = 0.002


@dataclass(frozen=True, slots=True)
class Sample:
    """``seconds`` it took to compute ``new`` tokens of a prompt of ``length``."""

    new: float
    length: float
    seconds: float


class PrefillTime:
    """``a + b*n + c*n*(L - n/2)``: a fixed part, one by new tokens, one by the pairs that attention looks at."""

    def __init__(self) -> None:
        self._a, self._b, self._c = FIRST_GUESS
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._since_fit = 0

    def seconds(self, new: float, length: float) -> float:
        """Predicted seconds for ``new`` uncached tokens of a prompt of ``length`` tokens."""
        return self._a + self._b * new + self._c * new * (length - new / 2)

    def add(self, sample: Sample) -> None:
        """Learn. The first few samples count at once, later ones every ``REFIT``."""
        self._samples.append(sample)
        self._since_fit += 1
        if len(self._samples) < REFIT or self._since_fit >= REFIT:
            self._since_fit = 0
            self._fit()

    def _fit(self) -> None:
        """Least squares of the relative errors, none of the three below zero."""
        scale = (0.1, 1 / 4000, 1e-8)  # what each coefficient is counted in, so that the prior means the same for all
        rows: list[tuple[float, float, float, float]] = []
        for s in self._samples:
            weight = 1 / (s.seconds + 0.1)
            pairs = s.new * (s.length - s.new / 2)
            rows.append((weight * scale[0], weight * s.new * scale[1], weight * pairs * scale[2], weight * s.seconds))
        active = [0, 1, 2]
        while True:
            found = _solve(rows, active, [FIRST_GUESS[i] / scale[i] for i in active])
            negative = [i for i, value in zip(active, found, strict=True) if value < 0]
            if not negative:
                break
            active.remove(max(negative))
        theta = [0.0, 0.0, 0.0]
        for i, value in zip(active, found, strict=True):
            theta[i] = value * scale[i]
        self._a, self._b, self._c = theta


class Speed:
    """One replica's seconds against the model's: 1.0 is as predicted, 2.0 takes twice as long."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=SPEEDS)
        self.factor = 1.0

    def add(self, ratio: float) -> None:
        """Learn from observed seconds over predicted ones; a single one that is off does not count."""
        self._ratios.append(min(max(ratio, 0.1), 10.0))
        # Counted with two that were as predicted: a replica is not slow because of its first request.
        self.factor = median([*self._ratios, 1.0, 1.0])


def _solve(
    rows: Sequence[tuple[float, float, float, float]], active: Sequence[int], prior: Sequence[float]
) -> list[float]:
    """The least-squares solution over the ``active`` columns, drawn to ``prior``; the last column is the target."""
    size = len(active)
    matrix = [[sum(row[i] * row[j] for row in rows) for j in active] for i in active]
    target = [sum(row[i] * row[3] for row in rows) for i in active]
    for i in range(size):
        matrix[i][i] += _PRIOR
        target[i] += _PRIOR * prior[i]
    for i in range(size):  # Gauss without pivoting: the matrix is symmetric and positive definite
        for k in range(i + 1, size):
            share = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= share * matrix[i][j]
            target[k] -= share * target[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (target[i] - sum(matrix[i][j] * solution[j] for j in range(i + 1, size))) / matrix[i][i]
    return solution
