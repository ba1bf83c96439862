"""A fixed set of random histories, in virtual time: every invariant holds in each. ``make chaos`` runs any others."""

import pytest
from sim_run import run
from sim_shrink import shrink

#: Of every size; together some seconds.
SEEDS = range(1, 41)


@pytest.mark.parametrize("first", SEEDS[::10])
def test_random_histories_keep_every_invariant(first):
    for seed in range(first, first + 10):
        result = run(seed)
        assert result.violation is None, f"make chaos SEED={seed}\n{shrink(result)}"


def test_a_seed_is_one_history():
    runs = [run(7) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].steps > 100
