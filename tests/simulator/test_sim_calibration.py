"""The simulator, given deployment F's speeds, gives the figures that were measured there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from bench_calibration import Figures


@pytest.mark.parametrize(("name", "measured", "simulated"), Figures().rows())
def test_a_figure_of_deployment_f_is_reproduced_within_a_tenth(name: str, measured: float, simulated: float) -> None:
    assert simulated == pytest.approx(measured, rel=0.1)
