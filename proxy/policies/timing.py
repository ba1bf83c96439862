"""How long an engine takes to prefill: learned from what it took, for one model and for each replica's speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
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
#: What each of the three coefficients is counted in, so that the prior means the same for all; and, of the four columns
#: of the fit, the one that is to be met, and those two of which the products are summed up.
_SCALE = (0.1, 1 / 4000, 1e-8)
_TARGET = 3
_PAIRS = [(i, j) for i in range(_TARGET) for j in range(i, _TARGET + 1)]


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
        #: Of each sample what it adds to the sums of the fit: multiplied when it comes, which spares the next fit 64
        #: times as much.
        self._products = {pair: deque[float](maxlen=SAMPLES) for pair in _PAIRS}
        self._seen = self._since_fit = 0

    def seconds(self, new: float, length: float) -> float:
        """Predicted seconds for ``new`` uncached tokens of a prompt of ``length`` tokens."""
        return self._a + self._b * new + self._c * new * (length - new / 2)

    def add(self, sample: Sample) -> None:
        """Learn. The first few samples count at once, later ones every ``REFIT``."""
        weight = 1 / (sample.seconds + 0.1)
        pairs = sample.new * (sample.length - sample.new / 2)
        row = (weight * _SCALE[0], weight * sample.new * _SCALE[1], weight * pairs * _SCALE[2], weight * sample.seconds)
        for (i, j), products in self._products.items():
            products.append(row[i] * row[j])
        self._seen += 1
        self._since_fit += 1
        if self._seen < REFIT or self._since_fit >= REFIT:
            self._since_fit = 0
            self._fit()

    def _fit(self) -> None:
        """Least squares of the relative errors, none of the three below zero."""
        sums = {pair: sum(products) for pair, products in self._products.items()}
        active = [0, 1, 2]
        while True:
            found = _solve(sums, active)
            negative = [i for i, value in zip(active, found, strict=True) if value < 0]
            if not negative:
                break
            active.remove(max(negative))
        theta = [0.0, 0.0, 0.0]
        for i, value in zip(active, found, strict=True):
            theta[i] = value * _SCALE[i]
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


def _solve(sums: Mapping[tuple[int, int], float], active: Sequence[int]) -> list[float]:
    """The least-squares solution over the ``active`` columns, drawn to the first guess."""
    size = len(active)
    matrix = [[sums[min(i, j), max(i, j)] for j in active] for i in active]
    target = [sums[i, _TARGET] for i in active]
    for at, i in enumerate(active):
        matrix[at][at] += _PRIOR
        target[at] += _PRIOR * (FIRST_GUESS[i] / _SCALE[i])
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
