"""The real engine with a pooling model: it has no route that generates, and its fingerprint is a vector."""

from __future__ import annotations

from typing import Any

import pytest

from supervisord.core.canary import difference
from supervisord.core.readings import EngineState
from supervisord.engine.fingerprint import DIMENSIONS
from supervisord.engine.vllm import VllmEngine

pytestmark = pytest.mark.vllm
LONG = 60.0


async def test_the_fingerprint_of_a_pooling_model_is_the_same_after_a_sleep(start_engine: Any) -> None:
    real = start_engine("uds", "--runner", "pooling")
    engine = VllmEngine(real.endpoint, expected_names=["tiny"])
    try:
        await real.until(engine, EngineState.AWAKE)
        first = await engine.fingerprint(LONG)
        assert first is not None
        assert (first.tokens, len(first.values)) == ((), DIMENSIONS)
        await engine.sleep(1, LONG)
        await engine.wake_up([], LONG)
        again = await engine.fingerprint(LONG)
        assert again is not None
        assert difference(first, again) == ""
    finally:
        await engine.close()
