"""How a fingerprint is asked for, and what is made of every answer; what a hung engine's counters tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from supervisord.core.canary import Fingerprint, difference
from supervisord.core.readings import EngineState
from supervisord.engine.fingerprint import DIMENSIONS, TOKENS, progress_of, read
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import EngineError

LONG = 30.0
Fake = Any  # conftest's FakeVllm
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
NOT_THERE = (404, {"detail": "Not Found"})


def completion(tokens: list[str], values: list[float | None], finish: str = "length") -> dict[str, object]:
    """vLLM's answer with logprobs=0."""
    logprobs = {"text_offset": [0] * len(tokens), "token_logprobs": values, "tokens": tokens, "top_logprobs": []}
    choice = {"index": 0, "text": "".join(tokens), "logprobs": logprobs, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def embedding(vector: list[float]) -> dict[str, object]:
    return {"object": "list", "data": [{"index": 0, "object": "embedding", "embedding": vector}]}


async def test_it_is_asked_greedily_by_name_and_never_from_the_cache(vllm: Fake, engine: VllmEngine) -> None:
    vllm.faults[COMPLETIONS] = (200, completion([" a", " b"], [-0.25, -1.5]))
    await engine.probe(LONG)
    for _ in range(2):
        assert await engine.fingerprint(LONG) == Fingerprint((" a", " b"), (-0.25, -1.5))
    one, other = vllm.bodies
    assert (one["model"], one["temperature"], one["max_tokens"], one["ignore_eos"]) == ("tiny", 0, TOKENS, True)
    assert one["cache_salt"]
    assert one.pop("cache_salt") != other.pop("cache_salt")
    assert one == other


async def test_it_tells_how_likely_the_tokens_of_the_prompt_were(vllm: Fake, engine: VllmEngine) -> None:
    vllm.faults[COMPLETIONS] = (200, completion(["The", " light", " a"], [None, -4.0, -0.25]))
    assert await engine.fingerprint(LONG) == Fingerprint((" light", " a"), (-4.0, -0.25))
    assert vllm.bodies[0]["echo"] is True


async def test_an_engine_that_cannot_tell_of_the_prompt_tells_of_its_own_tokens(vllm: Fake, engine: VllmEngine) -> None:
    def answer(body: dict[str, object]) -> tuple[int, object]:
        refused = (400, {"error": {"message": "prompt_logprobs is not supported"}})
        return refused if body["echo"] else (200, completion([" a"], [-0.25]))

    vllm.answers[COMPLETIONS] = answer
    assert await engine.fingerprint(LONG) == Fingerprint((" a",), (-0.25,))


async def test_an_engine_whose_names_are_not_known_is_asked_without_one(vllm: Fake, engine: VllmEngine) -> None:
    vllm.faults[COMPLETIONS] = (200, completion([" a"], [-0.25]))
    await engine.fingerprint(LONG)
    assert "model" not in vllm.bodies[0]


async def test_a_pooling_model_is_asked_for_a_vector_of_which_a_part_is_kept(vllm: Fake, engine: VllmEngine) -> None:
    vector = [place / 1000 for place in range(1024)]
    vllm.faults[EMBEDDINGS] = (200, embedding(vector))
    seen = await engine.fingerprint(LONG)
    assert seen == Fingerprint((), tuple(vector[::16]))
    assert len(seen.values) == DIMENSIONS
    assert vllm.asked == [f"POST {COMPLETIONS}", f"POST {EMBEDDINGS}"]
    assert vllm.bodies[-1]["encoding_format"] == "float"


@pytest.mark.parametrize(
    "answers",
    [
        {},  # both 404
        {COMPLETIONS: (400, {"error": {"message": "The model does not support Completions API"}})},
        {COMPLETIONS: (501, {"detail": "not here"}), EMBEDDINGS: (400, {"error": {"message": "no"}})},
        {COMPLETIONS: (401, {"error": "Unauthorized"}), EMBEDDINGS: (401, {"error": "Unauthorized"})},
        {COMPLETIONS: (200, {"choices": [{"text": "hi", "logprobs": None, "finish_reason": "length"}]})},
        {COMPLETIONS: (200, {"choices": []})},
        {COMPLETIONS: (200, "<html>")},
        {COMPLETIONS: (200, completion([" a", " b"], [-0.25]))},
        {COMPLETIONS: (200, completion([" a", " b"], [-0.25, None]))},
        {COMPLETIONS: NOT_THERE, EMBEDDINGS: (200, {"data": [{"embedding": "AACAPw=="}]})},
    ],
)
async def test_an_engine_that_offers_none_has_none(vllm: Fake, engine: VllmEngine, answers: dict[str, Any]) -> None:
    vllm.faults |= answers
    assert await engine.fingerprint(LONG) is None


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({COMPLETIONS: (500, {"error": {"message": "EngineDeadError"}})}, "/v1/completions: 500: EngineDeadError"),
        ({COMPLETIONS: (0, None)}, "/v1/completions: the connection was closed without an answer"),
        ({COMPLETIONS: NOT_THERE, EMBEDDINGS: (503, "busy")}, "/v1/embeddings: 503: busy"),
        ({COMPLETIONS: (200, completion([" a"], [-0.1], "abort"))}, "/v1/completions: it was aborted"),
        ({COMPLETIONS: (200, completion([], []))}, "/v1/completions: not one token"),
        ({COMPLETIONS: (200, completion(["The"], [None]))}, "/v1/completions: not one token"),
        ({EMBEDDINGS: (200, embedding([]))}, "/v1/embeddings: an empty vector"),
    ],
)
async def test_an_engine_that_fails_at_it_is_an_error(
    vllm: Fake, engine: VllmEngine, answers: dict[str, Any], words: str
) -> None:
    vllm.faults |= answers
    with pytest.raises(EngineError) as failed:
        await engine.fingerprint(LONG)
    assert str(failed.value) == f"cannot take a fingerprint: POST {words}"


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
async def test_no_answer_in_time_is_an_error(vllm: Fake, engine: VllmEngine, path: str) -> None:
    vllm.late.add(path)
    with pytest.raises(EngineError, match=f"^cannot take a fingerprint: POST {path}: no answer in 30 s$"):
        await engine.fingerprint(LONG)


async def test_an_engine_that_is_gone_is_an_error(vllm: Fake, engine: VllmEngine) -> None:
    await vllm.stop()
    with pytest.raises(EngineError, match=r"^cannot take a fingerprint: POST /v1/completions: cannot connect"):
        await engine.fingerprint(LONG)


@pytest.mark.parametrize("word", ["NaN", "-Infinity"])
def test_a_number_that_is_none_never_compares_as_equal(word: str) -> None:
    answer = json.loads(json.dumps(completion([" a"], [-0.25])).replace("-0.25", word))
    garbage = read(COMPLETIONS, answer)
    assert garbage is not None
    assert difference(Fingerprint((" a",), (-0.25,)), garbage)
    vector = read(EMBEDDINGS, embedding([float("nan")] * 8))
    assert vector is not None
    assert difference(Fingerprint((), (0.5,) * 8), vector)


# --- progress -----------------------------------------------------------------------------------------------------

PAGE = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a b} c"} 1500.0
vllm:prompt_tokens_total{engine="1",model_name="a b} c"} 1.5e+03
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="a b} c"} 70.0
vllm:request_generation_tokens_total{engine="0"} 5.0
"""


def test_progress_is_the_tokens_of_all_engine_cores() -> None:
    assert progress_of(PAGE) == 3070


@pytest.mark.parametrize(
    "page", ["", "<html>", PAGE.replace("generation_tokens_total", "gone"), PAGE.replace("1500.0", "many")]
)
def test_progress_that_is_not_told_is_none(page: str) -> None:
    assert progress_of(page) is None


async def test_the_counters_of_a_hung_core_are_told_and_only_then(vllm: Fake, engine: VllmEngine) -> None:
    vllm.faults["/metrics"] = (200, PAGE)
    assert (await engine.probe(LONG)).progress is None
    vllm.late.add("/is_sleeping")
    probe = await engine.probe(LONG)
    assert (probe.state, probe.progress) == (EngineState.HUNG, 3070)


@pytest.mark.parametrize("metrics", ["late", (500, "no"), (0, None), (200, "none of it")])
async def test_counters_that_cannot_be_read_are_no_trouble(vllm: Fake, engine: VllmEngine, metrics: Any) -> None:
    if metrics == "late":
        vllm.late.add("/metrics")
    else:
        vllm.faults["/metrics"] = metrics
    vllm.late.add("/is_sleeping")
    probe = await engine.probe(LONG)
    assert (probe.state, probe.progress) == (EngineState.HUNG, None)


async def test_a_server_that_answers_nothing_at_all_is_not_asked_further(vllm: Fake, engine: VllmEngine) -> None:
    vllm.late.add("/health")
    assert (await engine.probe(LONG)).state is EngineState.HUNG
    assert vllm.asked == ["GET /health"]
