"""Bodies, streams and errors of every dialect, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from typing import Any

import aiohttp
import pytest
from simclient import Start, chat_body, events


async def test_models_lists_every_served_name_with_the_context_length_and_says_simulated(start: Start) -> None:
    client = await start("--max-model-len", "4096")
    status, body = await client.get("/v1/models")
    assert status == 200
    assert [card["id"] for card in body["data"]] == ["big", "big-alias"]
    assert {card["max_model_len"] for card in body["data"]} == {4096}
    assert all(card["simulated"] and "simulated" in card["owned_by"] for card in body["data"])


async def test_adapters_are_listed_with_their_parent_and_answer_by_their_names(start: Start) -> None:
    client = await start("--lora-modules", "sql=/adapters/sql", '{"name": "org/math", "path": "/adapters/math"}')
    _, body = await client.get("/v1/models")
    cards = {card["id"]: (card["root"], card["parent"]) for card in body["data"][2:]}
    assert cards == {"sql": ("/adapters/sql", "big"), "org/math": ("/adapters/math", "big")}
    for name, expected in (("org/math", 200), ("nobody", 404)):
        status, body = await client.post("/v1/chat/completions", {**chat_body("hi", max_tokens=1), "model": name})
        assert status == expected


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models", "/metrics"])
async def test_every_answer_says_that_it_is_simulated(start: Start, path: str) -> None:
    client = await start()
    async with client.session.get(client.base + path) as response:
        assert response.headers["x-simulated"] == "1"
        assert "simulated" in response.headers["Server"]
    assert "simulated" in (await client.get("/version"))[1]["version"]


async def test_chat_completion_body(start: Start) -> None:
    client = await start()
    status, body = await client.chat("tell me", max_tokens=5)
    assert status == 200
    choice = body["choices"][0]
    assert (body["object"], body["model"], choice["finish_reason"]) == ("chat.completion", "big", "length")
    assert choice["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5


def with_tool(text: str, **more: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    return {**chat_body(text, max_tokens=64), "tools": [tool], **more}


async def test_a_tool_that_the_user_names_is_called_with_the_object_that_the_user_gives(start: Start) -> None:
    client = await start()
    _, body = await client.post("/v1/chat/completions", with_tool('call get_weather with {"city": "Ulm"} {or not'))
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("get_weather", {"city": "Ulm"})


@pytest.mark.parametrize(
    ("text", "choice", "called"),
    [
        ("what is it like?", "auto", False),
        ("call get_weather", "none", False),
        ("what is it like?", "required", True),
        ("what is it like?", {"type": "function", "function": {"name": "get_weather"}}, True),
    ],
)
async def test_the_tool_choice_decides(start: Start, text: str, choice: object, called: bool) -> None:
    client = await start()
    _, body = await client.post("/v1/chat/completions", with_tool(text, tool_choice=choice))
    assert bool(body["choices"][0]["message"]["tool_calls"]) is called


async def test_a_missing_model_is_the_first_served_name_and_an_alias_is_echoed(start: Start) -> None:
    client = await start()
    body = chat_body("hi")
    del body["model"]
    assert (await client.post("/v1/chat/completions", body))[1]["model"] == "big"
    assert (await client.post("/v1/chat/completions", {**body, "model": "big-alias"}))[1]["model"] == "big-alias"


async def test_answers_tell_prompts_apart_and_name_their_last_words(start: Start) -> None:
    client = await start()
    one, other = await client.text("first question"), await client.text("second question")
    assert one != other
    assert "first question" in one
    assert one == await client.text("first question")


async def test_chat_stream_is_role_then_deltas_then_finish_then_usage_then_done(start: Start) -> None:
    client = await start()
    async with client.stream("hello", max_tokens=3, stream_options={"include_usage": True}) as response:
        assert response.content_type == "text/event-stream"
        *chunks, last, done = await events(response)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed] == [None, None, None, "length"]
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in parsed)
    usage = json.loads(last)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert "".join(delta["content"] for delta in deltas) == await client.text("hello", max_tokens=3)


async def test_no_usage_chunk_unless_asked_for(start: Start) -> None:
    client = await start()
    async with client.stream("hello", max_tokens=1) as response:
        assert "usage" not in await response.text()


async def test_the_second_turn_hits_the_prefix_cache_in_usage_and_metrics(start: Start) -> None:
    client = await start()
    context = "a long shared context " * 50
    status, first = await client.chat(context)
    answer = first["choices"][0]["message"]["content"]
    turns = [
        {"role": "user", "content": context},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and now?"},
    ]
    status, second = await client.post("/v1/chat/completions", {"model": "big", "messages": turns})
    assert status == 200
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The answer of the first turn is cached too.
    assert cached > first["usage"]["prompt_tokens"]
    metrics = (await client.get("/metrics"))[1]
    assert f'vllm:prefix_cache_hits_total{{engine="0",model_name="big"}} {float(cached)}' in metrics
    queries = first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]
    assert f'vllm:prefix_cache_queries_total{{engine="0",model_name="big"}} {float(queries)}' in metrics
    assert "vllm:time_to_first_token_seconds_count" in metrics


async def test_completions_take_text_or_token_ids(start: Start) -> None:
    client = await start()
    ids = (await client.post("/tokenize", {"model": "big", "prompt": "some words"}))[1]["tokens"]
    texts = []
    for prompt in ("some words", ids, ["some words"]):
        status, body = await client.post("/v1/completions", {"model": "big", "prompt": prompt})
        assert status == 200
        texts.append(body["choices"][0]["text"])
    assert texts[0] == texts[1] == texts[2]
    assert (await client.post("/detokenize", {"tokens": ids}))[1] == {"prompt": "some words"}


@pytest.mark.parametrize(("tokens", "found"), [(1, 0), (2, 16)])
async def test_the_last_token_of_an_answer_is_not_in_the_cache(start: Start, tokens: int, found: int) -> None:
    client = await start()
    prompt = "p" * 52  # with the twelve letters of the answer's first token it is one block
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    said = (await client.post("/v1/completions", body))[1]["choices"][0]["text"]
    _, again = await client.post("/v1/completions", {"prompt": f"{prompt}{said} and so on", "max_tokens": 1})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == found


async def test_metrics_count_a_preempted_request_once(start: Start) -> None:
    client = await start("--sim-kv-tokens", "1280")
    asked = [{"prompt": f"{n}" * 1024, "max_tokens": 256, "ignore_eos": True} for n in range(4)]
    answers = await asyncio.gather(*(client.post("/v1/completions", body) for body in asked))
    assert [body["usage"]["completion_tokens"] for _, body in answers] == [256] * 4
    assert [body["usage"]["prompt_tokens_details"]["cached_tokens"] for _, body in answers] == [0] * 4
    assert client.engine.metrics.preemptions > 0
    assert client.engine.metrics.prefix_queries == 4 * 256
    assert client.engine.metrics.prefix_hits == 0


async def test_a_chat_is_rendered_to_tokens_that_begin_as_those_of_its_earlier_turn(start: Start) -> None:
    client = await start()
    turn = [{"role": "user", "content": "some words, and ünusual öñes"}]
    later = [*turn, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    rendered = []
    for messages in (turn, later):
        status, body = await client.post("/v1/chat/completions/render", {"model": "big", "messages": messages})
        assert status == 200, body
        rendered.append(body["token_ids"])
    _, answer = await client.post("/v1/chat/completions", {"model": "big", "messages": turn})
    assert len(rendered[0]) == answer["usage"]["prompt_tokens"]
    assert all(0 <= token < 2**31 for token in rendered[1])
    # Where the turn ends it asks for an answer, which the later one goes on from: a chat's template.
    same = rendered[0][:-1]
    assert rendered[1][: len(same)] == same
    assert (await client.post("/v1/chat/completions/render", {"model": "other", "messages": turn}))[0] == 404


async def test_completion_stream(start: Start) -> None:
    client = await start()
    body = {"prompt": "x", "stream": True, "max_tokens": 2}
    async with client.session.post(f"{client.base}/v1/completions", json=body) as response:
        *chunks, done = await events(response)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]
    assert all(choice["text"] for choice in choices)


async def test_a_stop_word_ends_the_answer_before_it(start: Start) -> None:
    client = await start()
    _, body = await client.chat("hello", stop=["answers"])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "answers" not in body["choices"][0]["message"]["content"]


async def test_a_request_id_becomes_the_ids_suffix(start: Start) -> None:
    client = await start("--enable-request-id-headers")
    headers = {"X-Request-Id": "mine-1"}
    async with client.session.post(
        f"{client.base}/v1/chat/completions", json=chat_body("x"), headers=headers
    ) as response:
        assert (await response.json())["id"] == "chatcmpl-mine-1"
        assert response.headers["X-Request-Id"] == "mine-1"


async def test_anthropic_message(start: Start) -> None:
    client = await start()
    body = {"model": "big", "max_tokens": 3, "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    status, message = await client.post("/v1/messages", body)
    assert status == 200
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert message["usage"]["output_tokens"] == 3
    status, counted = await client.post("/v1/messages/count_tokens", body)
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}


async def test_anthropic_stream_events_in_order(start: Start) -> None:
    client = await start()
    body = {"model": "big", "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with client.session.post(f"{client.base}/v1/messages", json=body) as response:
        parsed = [json.loads(data) for data in await events(response)]
    assert [event["type"] for event in parsed] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert parsed[-2]["delta"]["stop_reason"] == "max_tokens"
    assert parsed[-2]["usage"]["output_tokens"] == 2


async def test_responses_stream_events_are_numbered(start: Start) -> None:
    client = await start()
    body = {"model": "big", "input": "hi", "stream": True, "max_output_tokens": 2}
    async with client.session.post(f"{client.base}/v1/responses", json=body) as response:
        parsed = [json.loads(data) for data in await events(response)]
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    assert parsed[0]["type"] == "response.created"
    assert parsed[-1]["type"] == "response.completed"
    assert parsed[-1]["response"]["usage"]["output_tokens"] == 2


async def test_embeddings_as_floats_and_base64(start: Start) -> None:
    client = await start()
    status, body = await client.post("/v1/embeddings", {"model": "big", "input": ["a", "b", "a"], "dimensions": 8})
    assert status == 200
    vectors = [item["embedding"] for item in body["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert len(vectors[0]) == 8
    _, body = await client.post("/v1/embeddings", {"input": "a", "dimensions": 8, "encoding_format": "base64"})
    packed = struct.unpack("<8f", base64.b64decode(body["data"][0]["embedding"]))
    assert packed == pytest.approx(vectors[0], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_puts_the_query_itself_first(start: Start, path: str) -> None:
    client = await start()
    status, body = await client.post(path, {"query": "q", "documents": ["x", "q", "y"], "top_n": 2})
    assert status == 200
    assert len(body["results"]) == 2
    assert body["results"][0]["index"] == 1
    assert body["results"][0]["relevance_score"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/score", {"text_1": "a", "text_2": ["a", "b"]}, "score"),
        ("/v1/score", {"queries": "a", "documents": ["a", "b"]}, "score"),
        ("/pooling", {"input": ["a", "b"]}, "data"),
        ("/classify", {"input": ["a", "b"]}, "probs"),
    ],
)
async def test_other_pooling_routes(start: Start, path: str, body: dict[str, Any], field: str) -> None:
    client = await start()
    status, answer = await client.post(path, body)
    assert status == 200
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert all(field in item for item in answer["data"])


@pytest.mark.parametrize("task", ["transcriptions", "translations"])
async def test_audio_takes_a_form_of_several_megabytes(start: Start, task: str) -> None:
    client = await start()
    form = aiohttp.FormData({"model": "big"})
    form.add_field("file", io.BytesIO(bytes(3_000_000)), filename="a.wav")
    status, body = await client.post(f"/v1/audio/{task}", data=form)
    assert status == 200
    assert "3000000" in body["text"]


async def test_audio_without_a_file_is_a_400(start: Start) -> None:
    client = await start()
    status, body = await client.post("/v1/audio/transcriptions", data=aiohttp.FormData({"model": "big"}))
    assert status == 400
    status, body = await client.post("/v1/audio/transcriptions", {"model": "big"})
    assert (status, body["error"]["param"]) == (400, "file")


async def test_an_unknown_model_is_a_404_in_each_dialects_shape(start: Start) -> None:
    client = await start()
    status, body = await client.chat("x", model="other")
    message = "The model `other` does not exist."
    error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
    assert (status, body) == (404, {"error": error})
    body = {"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    status, body = await client.post("/v1/messages", body)
    assert (status, body) == (404, {"type": "error", "error": {"type": "NotFoundError", "message": message}})


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 200}])
async def test_what_does_not_fit_the_context_is_a_bad_request(start: Start, fields: dict[str, int]) -> None:
    client = await start("--max-model-len", "100")
    status, body = await client.chat("x" * (400 if not fields else 4), **fields)
    assert status == 400
    assert body["error"]["type"] == "BadRequestError"
    assert "maximum context length is 100 tokens" in body["error"]["message"]


@pytest.mark.parametrize("body", [b"{not json", b"[1]", b"\xff", b"", b'{"model": "big"}', b'{"messages": "x"}'])
async def test_a_bad_body_is_a_400_in_the_openai_shape_on_every_route(start: Start, body: bytes) -> None:
    client = await start()
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/messages"):
        status, answer = await client.post(path, data=body, headers=headers)
        assert status == 400
        assert answer["error"]["code"] == 400


async def test_a_compressed_body_is_not_decoded(start: Start) -> None:
    client = await start()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    data = b"\x1f\x8b\x08whatever"
    assert (await client.post("/v1/chat/completions", data=data, headers=headers))[0] == 400


async def test_unknown_routes_and_methods(start: Start) -> None:
    client = await start()
    assert (await client.get("/nope"))[1]["error"]["code"] == 404
    assert (await client.get("/v1/chat/completions"))[0] == 405


async def test_the_api_key_guards_v1_and_nothing_else(start: Start) -> None:
    client = await start("--api-key", "secret")
    assert await client.get("/v1/models") == (401, {"error": "Unauthorized"})
    assert (await client.get("/health"))[0] == 200
    assert (await client.post("/rerank", {"query": "a", "documents": ["b"]}))[0] == 200
    assert (await client.post("/sleep"))[0] == 200
    async with client.session.get(f"{client.base}/v1/models", headers={"Authorization": "Bearer secret"}) as response:
        assert response.status == 200


async def test_requests_are_recorded_as_they_arrived(start: Start) -> None:
    client = await start()
    await client.post("/v1/chat/completions", chat_body("x"), headers={"X-Custom": "kept"})
    seen = (await client.get("/sim/requests"))[1]["requests"][-1]
    assert (seen["method"], seen["path"]) == ("POST", "/v1/chat/completions")
    assert ["X-Custom", "kept"] in seen["headers"]
    assert (await client.state())["requests"]["POST /v1/chat/completions"] == 1


async def test_completions_tell_the_log_probability_of_every_token(start: Start) -> None:
    client = await start()
    asked = {"model": "big", "prompt": "once upon a time", "max_tokens": 3, "logprobs": 0}
    status, body = await client.post("/v1/completions", asked)
    assert status == 200
    (choice,) = body["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [0, len(told["tokens"][0]), len(told["tokens"][0] + told["tokens"][1])]
    assert all(-1.0 < value <= 0.0 for value in told["token_logprobs"])
    pairs = zip(told["tokens"], told["token_logprobs"], strict=True)
    assert told["top_logprobs"] == [{token: value} for token, value in pairs]

    async with client.session.post(f"{client.base}/v1/completions", json={**asked, "stream": True}) as response:
        parts = [json.loads(data)["choices"][0]["logprobs"] for data in (await events(response))[:-1]]
    for key in told:
        assert [part[key][0] for part in parts] == told[key]


async def test_an_echo_tells_the_log_probability_of_the_prompts_tokens_too(start: Start) -> None:
    client = await start()
    asked = {"model": "big", "prompt": "once upon a time", "max_tokens": 2, "logprobs": 0, "echo": True}
    (choice,) = (await client.post("/v1/completions", asked))[1]["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert choice["text"].startswith("once upon a time")
    assert told["tokens"][:4] == ["once", " upo", "n a ", "time"]
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert all(-1.0 < value <= 0.0 for value in told["token_logprobs"][1:])


async def test_no_log_probabilities_unless_asked_for_and_no_more_than_the_engine_gives(start: Start) -> None:
    client = await start()
    asked = {"model": "big", "prompt": "once upon a time", "max_tokens": 3}
    assert (await client.post("/v1/completions", asked))[1]["choices"][0]["logprobs"] is None
    status, body = await client.post("/v1/completions", {**asked, "logprobs": 21})
    assert (status, body["error"]["type"]) == (400, "BadRequestError")


async def test_a_pooling_model_has_no_routes_that_generate(start: Start) -> None:
    client = await start("--runner", "pooling")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert (await client.post(path, {"model": "big", "prompt": "hi"}))[0] == 404
    assert (await client.post("/v1/embeddings", {"model": "big", "input": "hi"}))[0] == 200
