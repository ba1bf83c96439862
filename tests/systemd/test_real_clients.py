"""The libraries and programs that people call the port with, unchanged, against the running product.

Engines are simulators; with a real engine: tests/engine/test_product_on_vllm.py.
"""

import asyncio
import base64
import io
import json
import math
import wave
from collections.abc import AsyncIterator

import agents
import anthropic
import openai
import pytest
from product import model, run

CONFIG = (
    model("chat", "chat-a", "chat-b", top={"aliases": ["gpt"]}, wake={"max_waiting": 50})
    + model("embed", runner="pooling")
    + model("held-one")
)
QUESTION = [{"role": "user", "content": "What is a replica?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = [{"role": "user", "content": 'Use get_weather with {"city": "Ulm"}.'}]


@pytest.fixture
async def client(product, fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client as its users make it, but for its retries: what goes wrong shall be seen."""
    base = f"http://127.0.0.1:{product.port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
async def claude(product, fleet) -> AsyncIterator[anthropic.AsyncAnthropic]:
    base = f"http://127.0.0.1:{product.port}"
    async with anthropic.AsyncAnthropic(base_url=base, api_key="unused", max_retries=0) as made:
        yield made


def sound(seconds: float = 1.0) -> bytes:
    """A WAV file of silence."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(b"\0\0" * round(16_000 * seconds))
    return data.getvalue()


# OpenAI's client


async def test_openai_lists_the_models_with_their_states_and_finds_one(client):
    models = {each.id: each async for each in client.models.list()}
    assert {"chat", "gpt", "embed", "held-one"} <= set(models)
    assert (await client.models.retrieve("chat")).id == "chat"


async def test_openai_chats_with_a_model_that_must_first_be_started(client):
    answer = await client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_openai_streams_the_same_words_and_the_usage(client):
    whole = await client.chat.completions.create(model="gpt", messages=QUESTION, max_tokens=8)
    stream = await client.chat.completions.create(
        model="gpt", messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


async def test_openai_calls_a_tool_and_goes_on_with_its_result(client):
    answer = await client.chat.completions.create(model="chat", messages=CALL, tools=[WEATHER], max_tokens=64)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Ulm"})
    asked = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = await client.chat.completions.create(
        model="chat", messages=[*CALL, asked, result], tools=[WEATHER], max_tokens=8
    )
    assert after.choices[0].message.content


async def test_openai_puts_a_streamed_tool_call_together(client):
    async with client.chat.completions.stream(model="chat", messages=CALL, tools=[WEATHER], max_tokens=64) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Ulm"}


async def test_openai_embeds_in_floats_and_in_the_base64_that_it_asks_for_itself(client):
    texts = ["one text", "another text"]
    packed = await client.embeddings.create(model="embed", input=texts)  # it asks for base64 and unpacks it
    plain = await client.embeddings.create(model="embed", input=texts, encoding_format="float")
    assert [len(each.embedding) for each in packed.data] == [len(each.embedding) for each in plain.data]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-3)


async def test_openai_uploads_audio_small_and_too_large_for_memory(client):
    for seconds in (0.5, 60):  # the second is spooled to disk
        text = await client.audio.transcriptions.create(model="chat", file=("a.wav", sound(seconds), "audio/wav"))
        assert f"{len(sound(seconds))} bytes of audio" in text.text


async def test_openai_responds_and_streams_responses(client):
    answer = await client.responses.create(model="chat", input="What is a replica?", max_output_tokens=8)
    assert answer.output_text
    async with client.responses.stream(model="chat", input="What is a replica?", max_output_tokens=8) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final.output_text == answer.output_text


async def test_openai_raises_its_own_exceptions_with_the_codes_of_ours(client, product):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nobody", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    await product.vllmctl("down", "held-one")
    with pytest.raises(openai.InternalServerError) as held:
        await client.chat.completions.create(model="held-one", messages=QUESTION)
    assert (held.value.status_code, held.value.code) == (503, "model_held")
    assert int(held.value.response.headers["retry-after"]) > 0
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="chat", messages=[], max_tokens=8)
    assert "messages" in wrong.value.message


async def test_openai_that_leaves_a_stream_frees_the_engine(client, fleet):
    stream = await client.chat.completions.create(
        model="chat", messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await fleet.until(lambda: sum(r.in_flight for r in fleet.now().replicas) == 0, "the request is over")


def test_openais_client_without_asyncio_does_the_same(product, fleet):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{product.port}/v1", api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


async def test_openai_transcribes_as_it_is_spoken_by_a_model_that_must_first_be_started(client):
    events = (
        {"type": "session.update", "model": "gpt"},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.append", "audio": base64.b64encode(b"\0\1" * 16_000).decode()},
        {"type": "input_audio_buffer.commit", "final": True},
    )
    async with client.realtime.connect(model="gpt") as session:
        assert (await session.recv()).type == "session.created"
        for event in events:
            await session.send(event)
        kinds = []
        while "transcription.done" not in kinds:
            kinds.append((await asyncio.wait_for(session.recv(), 60)).type)
    assert kinds.count("transcription.delta") == 12
    assert set(kinds) == {"transcription.delta", "transcription.done"}


# Anthropic's client


async def test_anthropic_sends_messages_and_counts_tokens(claude):
    answer = await claude.messages.create(model="chat", messages=QUESTION, max_tokens=8, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens > 0
    counted = await claude.messages.count_tokens(model="chat", messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens


async def test_anthropic_streams_the_same_words(claude):
    whole = await claude.messages.create(model="chat", messages=QUESTION, max_tokens=8)
    async with claude.messages.stream(model="chat", messages=QUESTION, max_tokens=8) as stream:
        said = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert said == whole.content[0].text
    assert final.stop_reason == whole.stop_reason


async def test_anthropic_raises_its_own_exceptions(claude, product):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(model="nobody", messages=QUESTION, max_tokens=8)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    await product.vllmctl("down", "held-one")
    with pytest.raises(anthropic.APIStatusError) as held:
        await claude.messages.create(model="held-one", messages=QUESTION, max_tokens=8)
    assert held.value.status_code == 503
    assert "held down" in str(held.value)


# an agent


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


async def test_an_agent_runs_its_loop_over_tools(client):
    agents.set_tracing_disabled(True)
    talker = agents.OpenAIChatCompletionsModel(model="chat", openai_client=client)
    agent = agents.Agent("guide", tools=[get_weather], model=talker)
    result = await agents.Runner.run(agent, CALL[0]["content"], max_turns=4)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["rain in Ulm"]
    assert result.final_output


async def test_many_agents_at_once_are_all_answered(client):
    agents.set_tracing_disabled(True)
    talker = agents.OpenAIChatCompletionsModel(model="chat", openai_client=client)
    team = [agents.Agent(f"guide {number}", tools=[get_weather], model=talker) for number in range(12)]
    results = await asyncio.gather(*(agents.Runner.run(agent, CALL[0]["content"], max_turns=4) for agent in team))
    assert all(result.final_output for result in results)


# curl


async def curl(product, *args: str) -> str:
    status, out, err = await run("curl", "--silent", "--show-error", "--max-time", "60", *args)
    assert status == 0, err
    return out


async def test_curl_streams_uploads_and_speaks_http_1_0(product, fleet, tmp_path):
    url = f"http://127.0.0.1:{product.port}/v1"
    body = json.dumps({"model": "chat", "messages": QUESTION, "max_tokens": 8, "stream": True})
    json_type = ("-H", "content-type: application/json")
    streamed = await curl(product, "-N", *json_type, "-d", body, f"{url}/chat/completions")
    assert streamed.endswith("data: [DONE]")
    old = await curl(product, "--http1.0", *json_type, "-d", body, f"{url}/chat/completions")
    assert old.endswith("data: [DONE]")
    file = tmp_path / "long.wav"
    file.write_bytes(sound(60))
    # Over a megabyte curl asks first (Expect: 100-continue).
    said = await curl(product, "-F", "model=chat", "-F", f"file=@{file}", f"{url}/audio/transcriptions")
    assert "bytes of audio" in json.loads(said)["text"]
    long = tmp_path / "long.json"
    long.write_text(json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x " * 20_000}]}))
    packed = await run("gzip", "--keep", str(long))
    assert packed[0] == 0
    answer = await curl(
        product, *json_type, "-H", "content-encoding: gzip", "--data-binary", f"@{long}.gz", f"{url}/chat/completions"
    )
    assert json.loads(answer)["usage"]["prompt_tokens"] > 5000
