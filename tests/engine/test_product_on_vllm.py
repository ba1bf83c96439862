"""The whole product on the real engine: two replicas under a real user manager, from cold start to idle stop.

The tests share one installation and go through its life in order; between them engines start four times in all.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from vllmproduct import (
    BLOCK,
    PATIENCE,
    Product,
    Replica,
    chat,
    chat_body,
    free_port,
    in_own_manager,
    run,
    running,
    until,
    with_logged_requests,
)

pytestmark = pytest.mark.vllm

#: Its tokenizer makes a token of a byte, so this is 32 of its blocks, and no other conversation begins like it.
OPENING = "conversation {}: " + "once upon a time there was a cache, " * 28
#: Every wake ends with the canary, which is the only one to ask for plain completions here.
CANARY = "/v1/completions"
WAKE1 = ["/wake_up", CANARY]
WAKE2 = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache", CANARY]
CHAT = "/v1/chat/completions"


def sleep_call(level: int) -> str:
    return f"/sleep?level={level}&mode=wait"


@pytest.fixture(scope="module")
def product(model_config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    in_own_manager()
    product = Product(tmp_path_factory.mktemp("product"), free_port())
    try:
        product.install(f"{with_logged_requests(model_config)}\n[models.tiny.wake]\ncanary = true\n")
        yield product
    finally:
        product.remove()


@pytest.fixture(autouse=True)
def what_the_logs_said(product: Product, request: pytest.FixtureRequest) -> Iterator[None]:
    """The end of every log, which pytest shows when the test failed."""
    yield
    for log in (product.log, *(replica.log for replica in product.replicas)):
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()
            shown = [line for line in lines if '"GET ' not in line]
            print(f"--- {log.name} at the end of {request.node.name}", *shown[-25:], sep="\n")


async def test_listing_and_status_start_no_engine(product: Product) -> None:
    listed = await product.listed()
    assert {name: (entry["root"], entry["state"]) for name, entry in listed.items()} == {
        "tiny": ("tiny", "stopped"),
        "tiny-alias": ("tiny", "stopped"),
    }
    status = product.status()
    assert [(replica["state"], replica["simulated"]) for replica in status["replicas"]] == [("stopped", False)] * 2
    assert [replica.shown("ActiveState") for replica in product.replicas] == ["inactive"] * 2


async def test_a_request_starts_an_engine_and_streams_its_answer(product: Product) -> None:
    tokens = 400
    body = chat_body("Say something.", tokens=tokens, model="tiny-alias", stream=True)
    async with product.http() as http, http.post(CHAT, json=body) as response:
        assert response.status == 200
        events: list[str] = []
        running_at_first = None
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            events.append(line.removeprefix(b"data: ").decode().strip())
            if running_at_first is None and _content(events[-1]):
                # Chunks come one by one: the first is here, and the engine still works on the rest.
                running_at_first = (await product.a.metrics())["num_requests_running"]
    assert running_at_first == 1
    assert events[-1] == "[DONE]"
    contents = [text for event in events[:-1] if (text := _content(event))]
    assert len(contents) > tokens / 2  # a token a chunk, but for bytes that only together make a character
    # One was enough for one request; the other replica costs nothing yet.
    assert [replica.shown("ActiveState") for replica in product.replicas] == ["active", "inactive"]


def _content(event: str) -> str:
    choices = json.loads(event)["choices"] if event != "[DONE]" else []
    return str(choices[0]["delta"].get("content") or "") if choices else ""


async def test_the_listing_tells_the_engines_real_context(product: Product) -> None:
    listed = await product.listed()
    assert {(entry["max_model_len"], entry["state"]) for entry in listed.values()} == {(2048, "ready")}


async def test_up_starts_the_other_replica_and_answers_when_it_is_ready(product: Product) -> None:
    product.vllmctl("up", "tiny")
    assert [replica.shown("ActiveState") for replica in product.replicas] == ["active"] * 2
    assert [replica["state"] for replica in product.status()["replicas"]] == ["ready"] * 2
    assert {(await product.ask("Hello."))[0] for _ in range(2)} == {"tiny-a", "tiny-b"}


async def test_the_next_turn_goes_where_its_prefix_is_cached(product: Product) -> None:
    used = set()
    for number in range(4):
        opening = OPENING.format(number)
        replica, said = await product.ask(opening)
        before = {other.name: await other.metrics() for other in product.replicas}
        again, _ = await product.ask(opening, said, "and then?")
        after = {other.name: await other.metrics() for other in product.replicas}
        assert again == replica
        hits = {
            name: after[name]["prefix_cache_hits_total"] - before[name]["prefix_cache_hits_total"] for name in after
        }
        assert hits[replica] >= len(opening) // BLOCK * BLOCK
        assert [hits[name] for name in hits if name != replica] == [0]
        used.add(replica)
    assert used == {"tiny-a", "tiny-b"}  # first turns are spread


async def test_openais_client_gets_the_same_answer_whole_and_in_pieces(product: Product) -> None:
    messages = [{"role": "user", "content": "Tell me of the cache."}]
    base = f"http://127.0.0.1:{product.port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0, timeout=PATIENCE) as client:
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert said == whole.choices[0].message.content
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(model="tiny", messages=messages, max_tokens=100_000)
        assert "100000" in too_long.value.message


async def test_vllms_own_benchmark_runs_over_the_port_without_a_failure(product: Product, engine_dir: Path) -> None:
    result = product.directory / "bench.json"
    command = (
        *(str(engine_dir / "venv/bin/vllm"), "bench", "serve", "--backend", "openai-chat"),
        *("--base-url", f"http://127.0.0.1:{product.port}", "--endpoint", "/v1/chat/completions"),
        *("--model", "tiny", "--tokenizer", str(engine_dir / "tiny"), "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", "8", "--num-prompts", "16", "--max-concurrency", "8"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name, "--ignore-eos"),
    )
    await asyncio.to_thread(run, "env", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", *command)
    told = json.loads(result.read_text())
    assert (told["completed"], told["failed"]) == (16, 0)
    assert told["total_output_tokens"] == 16 * 8


async def test_vllmctl_sleeps_and_a_request_wakes_from_level_1(product: Product) -> None:
    marks = {replica.name: replica.mark() for replica in product.replicas}
    product.vllmctl("sleep", "tiny", "--level", "1")
    assert [await replica.is_sleeping() for replica in product.replicas] == [True, True]
    assert {entry["state"] for entry in (await product.listed()).values()} == {"asleep"}
    assert [replica["sleep_level"] for replica in product.status()["replicas"]] == [1, 1]
    name, _ = await product.ask("Good morning.")
    woken, other = _woken_and_other(product, name)
    # /v1/models and status were asked in between: they woke nobody.
    assert woken.calls(marks[woken.name]) == [sleep_call(1), *WAKE1, CHAT]
    assert other.calls(marks[other.name]) == [sleep_call(1)]
    assert await other.is_sleeping()


async def test_vllmctl_wakes(product: Product) -> None:
    product.vllmctl("wake", "tiny")
    assert [await replica.is_sleeping() for replica in product.replicas] == [False, False]
    assert [replica.told("SleepLevel") for replica in product.replicas] == ["0", "0"]


async def test_busctl_sleeps_and_a_request_wakes_from_level_2(product: Product) -> None:
    answer = (await product.ask("Say it again."))[1]
    marks = {replica.name: replica.mark() for replica in product.replicas}
    product.model("Sleep", "u", "2")
    assert [await replica.is_sleeping() for replica in product.replicas] == [True, True]
    assert [replica.told("SleepLevel") for replica in product.replicas] == ["2", "2"]
    name, again = await product.ask("Say it again.")
    woken, other = _woken_and_other(product, name)
    assert woken.calls(marks[woken.name]) == [sleep_call(2), *WAKE2, CHAT]
    assert other.calls(marks[other.name]) == [sleep_call(2)]
    assert again == answer


async def test_busctl_wakes(product: Product) -> None:
    product.model("Wake")
    assert [await replica.is_sleeping() for replica in product.replicas] == [False, False]
    assert [replica.told("WakeUSec") != "0" for replica in product.replicas] == [True, True]


async def test_a_deeper_sleep_wakes_first_because_the_engine_would_only_say_that_it_sleeps_deeper(
    product: Product,
) -> None:
    mark = product.b.mark()
    product.vllmctl("sleep", "tiny-b")
    product.vllmctl("sleep", "tiny-b", "--level", "2")
    product.vllmctl("wake", "tiny-b")
    assert product.b.calls(mark) == [sleep_call(1), *WAKE1, sleep_call(2), *WAKE2]


async def test_an_engine_slept_behind_our_back_is_made_whole_before_it_answers(product: Product) -> None:
    product.vllmctl("sleep", "tiny-a")
    mark = product.b.mark()
    async with product.b.engine() as http, http.post("/sleep?level=2&mode=wait") as response:
        assert response.status == 200
    await until("the supervisor sees it", lambda: product.b.told("State") == "asleep")
    assert product.b.told("SleepLevel") == "2"  # nobody told the level: the wake from 2 is right from both
    product.vllmctl("wake", "tiny-b")
    assert product.b.calls(mark) == [sleep_call(2), *WAKE2]


async def test_a_killed_supervisor_is_back_with_the_same_engines(product: Product) -> None:
    product.vllmctl("wake", "tiny-a")
    product.model("Sleep", "u", "2")
    product.vllmctl("wake", "tiny-a")
    killed, engines = product.pid, [replica.pid for replica in product.replicas]
    assert all(engines)
    marks = {replica.name: replica.mark() for replica in product.replicas}
    os.kill(killed, signal.SIGKILL)
    # The port is systemd's: this client connects to nobody and is answered by the next supervisor.
    assert (await product.ask("Are you there?"))[0] == "tiny-a"
    assert product.pid not in (0, killed)
    assert [replica.pid for replica in product.replicas] == engines
    assert [(replica.told("State"), replica.told("SleepLevel")) for replica in product.replicas] == [
        ("ready", "0"),
        ("asleep", "2"),
    ]
    assert product.b.calls(marks["tiny-b"]) == []
    assert {entry["max_model_len"] for entry in (await product.listed()).values()} == {2048}
    # It knows from the disk how deep the other one sleeps.
    product.vllmctl("wake", "tiny-b")
    assert product.b.calls(marks["tiny-b"]) == WAKE2


async def test_a_killed_engine_costs_no_client_an_answer_and_comes_back(product: Product) -> None:
    victim = product.a
    pid, restarts, mark, since = victim.pid, int(victim.shown("NRestarts")), product.log.stat().st_size, victim.mark()
    async with product.http() as http:

        async def client(number: int) -> list[str]:
            return [(await chat(http, f"Client {number}, request {n}.", tokens=64))[0] for n in range(24)]

        clients = [asyncio.create_task(client(number)) for number in range(8)]

        def victim_has_work() -> bool:
            received, answered = victim.received(since), len(victim.calls(since))
            seen = f"tiny-a has received {received} requests and answered {answered}"
            assert not any(task.done() for task in clients), f"a client was through before the victim had work: {seen}"
            return received > answered

        # The blow must fall on requests in flight: on the victim, past the door and before their answers. Its log tells
        # of them at once, its metrics after a step. Where engines starve each other that is late: on two busy cores
        # one of six bursts had requests that were in the log after 0.1 s, and answered after 4.
        await until("tiny-a has work", victim_has_work)
        os.kill(pid, signal.SIGKILL)
        answers = [replica for done in await asyncio.gather(*clients) for replica in done]
    assert len(answers) == 8 * 24
    assert "tiny-b" in answers
    await until("tiny-a is ready again", lambda: victim.pid not in (0, pid) and victim.is_ready())
    assert int(victim.shown("NRestarts")) == restarts + 1  # by systemd, not by a command of ours
    with product.log.open() as log:
        log.seek(mark)
        said = log.read()
    assert re.search(
        r"^WARNING failover: tiny-a -> tiny-b: .* event=failover model=tiny replica=tiny-a target=tiny-b", said, re.M
    )
    assert "event=demoted model=tiny replica=tiny-a" in said
    assert (await product.ask("Hello."))[0] in ("tiny-a", "tiny-b")


async def test_idle_engines_are_stopped_and_a_request_starts_one_again(product: Product) -> None:
    engines = [replica.pid for replica in product.replicas]
    product.configure("stop.toml", '[models.tiny.idle]\nstop = "3s"\n')
    groups = [Path("/sys/fs/cgroup", replica.shown("ControlGroup").lstrip("/")) for replica in product.replicas]
    assert all(group.is_dir() for group in groups)
    product.vllmctl("reload")
    await until(
        "both are stopped", lambda: {replica["state"] for replica in product.status()["replicas"]} == {"stopped"}
    )
    assert [replica.shown("ActiveState") for replica in product.replicas] == ["inactive"] * 2
    assert [replica.shown("Result") for replica in product.replicas] == ["success"] * 2
    assert not any(running(pid) for pid in engines)
    assert not any(group.exists() for group in groups)  # nothing of them is left
    # Nobody asks for long enough that a listing could have started something; and what was learned is not forgotten.
    listed = await product.listed()
    assert {(entry["max_model_len"], entry["state"]) for entry in listed.values()} == {(2048, "stopped")}
    assert {replica.pid for replica in product.replicas} == {0}
    assert (await product.ask("Good morning."))[1]
    assert product.status()["models"][0]["waiting"] == 0


def _woken_and_other(product: Product, name: str) -> tuple[Replica, Replica]:
    first, second = product.replicas
    return (first, second) if first.name == name else (second, first)


async def test_a_pooling_model_beside_it_gives_openais_client_its_vectors(product: Product, model_config: str) -> None:
    served = model_config.replace("models.tiny", "models.vectors").replace('aliases = ["tiny-alias"]', "")
    served = served.replace("replicas.tiny-a]", "replicas.vectors-a]").replace("[models.vectors.replicas.tiny-b]", "")
    product.configure("vectors.toml", served.replace("dtype =", 'runner = "pooling"\ndtype ='))
    product.vllmctl("reload")
    base = f"http://127.0.0.1:{product.port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0, timeout=PATIENCE) as client:
        packed = await client.embeddings.create(model="vectors", input=["one text", "another"])
        plain = await client.embeddings.create(model="vectors", input="one text", encoding_format="float")
    one, other = (each.embedding for each in packed.data)
    assert one == pytest.approx(plain.data[0].embedding, abs=0.02)  # two batches of bfloat16
    assert one != other
    product.vllmctl("down", "vectors")
