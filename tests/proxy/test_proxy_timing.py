"""How long a prefill takes, as it is learned for a model, and how fast a replica is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.timing import PrefillTime, Sample, Speed


def test_the_prefill_time_is_learned_whatever_its_shape():
    for a, b, c in ((0.02, 1 / 2800, 0.0), (0.2, 1 / 16_000, 2e-9), (0.5, 1 / 900, 1e-8)):
        model = PrefillTime()
        for n in range(64):
            new, length = 200 + 997 * n % 30_000, 30_000 + 1009 * n % 60_000
            model.add(Sample(new, length, a + b * new + c * new * (length - new / 2)))
        for new, length in ((500, 60_000), (10_000, 40_000), (30_000, 30_000)):
            assert model.seconds(new, length) == pytest.approx(a + b * new + c * new * (length - new / 2), rel=0.15)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e6), st.floats(0, 1e4)), max_size=70))
def test_a_prediction_is_never_negative_and_grows_with_the_work(samples):
    model = PrefillTime()
    for new, more, seconds in samples:
        model.add(Sample(new, new + more, seconds))
    times = [model.seconds(new, 100_000) for new in (1, 100, 10_000, 100_000)]
    assert times[0] >= 0
    assert times == sorted(times)


def test_one_odd_observation_does_not_make_a_replica_slow():
    speed = Speed()
    speed.add(10.0)
    assert speed.factor == 1.0
    for _ in range(8):
        speed.add(3.0)
    assert speed.factor == 3.0
