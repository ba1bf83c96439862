"""More time for a start is asked for while the engine works, and only up to the limit."""

import pytest

from supervisord.launcher.processes import Work
from supervisord.launcher.watcher import Pace, Patience

PACE = Pace(report=10.0, extension=60.0, stall=120.0)


def test_a_start_that_computes_gets_more_time_up_to_the_limit() -> None:
    patience = Patience(1000.0, 300.0, PACE)
    asked = [patience.extension(1000.0 + t, Work(cpu_seconds=t * 0.5)) for t in range(0, 320, 10)]
    assert asked[:25] == [60.0] * 25
    assert asked[25:] == [50.0, 40.0, 30.0, 20.0, 10.0, 0.0, 0.0]


def test_reading_is_progress_too() -> None:
    patience = Patience(0.0, 1800.0, PACE)
    assert all(patience.extension(float(t), Work(read_bytes=t << 20)) == 60.0 for t in range(0, 1000, 10))


@pytest.mark.parametrize("idle_cpu", [0.0, 0.01])
def test_a_start_that_only_waits_gets_none_after_the_stall(idle_cpu: float) -> None:
    patience = Patience(0.0, 1800.0, PACE)
    asked = [patience.extension(float(t), Work(cpu_seconds=t * idle_cpu)) for t in range(0, 200, 10)]
    assert asked == [60.0] * 12 + [0.0] * 8


def test_work_after_a_stall_counts_again() -> None:
    patience = Patience(0.0, 1800.0, PACE)
    assert patience.extension(150.0, Work()) == 0.0
    assert patience.extension(160.0, Work(cpu_seconds=1.0)) == 60.0


def test_a_helper_that_ended_is_no_stall() -> None:
    """Its CPU time leaves the sum; what comes after is measured from there."""
    patience = Patience(0.0, 1800.0, PACE)
    patience.extension(10.0, Work(cpu_seconds=100.0))
    patience.extension(20.0, Work(cpu_seconds=1.0))
    assert patience.extension(139.0, Work(cpu_seconds=9.0)) == 60.0
