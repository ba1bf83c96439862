"""Does the simulator behave as the real engine does? A real vLLM on the CPU and the simulator, asked the same.

    .venv/bin/python tests/bench/bench_fidelity.py [--engine DIR] [--out results.json]

Needs what tests/engine/install installs; takes about six minutes. The real one computes a tiny model of random weights.
First the simulator is given the real one's speeds (fitted to its times to first token and between tokens), then both
answer the same questions, and one table shows both. Times are the least of several, as others use the machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp

ROOT = Path(__file__).parents[2]
BLOCK = 32
#: Of the first engine: tokens of context, KV and step. The second has little KV and small steps.
CONTEXT, KV_TOKENS, BUDGET = 16_384, 65_536, 2048
SMALL_CONTEXT, SMALL_KV, SMALL_BUDGET = 1024, 1280, 256
LENGTHS = (256, 1024, 2048, 4096, 8192, 16_000)
BATCHES = (1, 2, 4, 8, 16)
TIMES = 5
ITL = "inter_token_latency_seconds"
#: Seconds until an engine answers.
READY = 400.0


@dataclass(slots=True)
class Answer:
    """One streamed answer. Seconds since the request."""

    first: float = 0.0
    #: Between events; one may carry several tokens.
    gaps: list[float] = field(default_factory=list)
    done: float = 0.0
    usage: dict = field(default_factory=dict)
    finish: str = ""
    #: Each event as the names of what it carries, equal neighbours once.
    shape: list[str] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Client:
    """What is asked of one engine. Prompts are token ids, so that both count alike."""

    def __init__(self, http: aiohttp.ClientSession, real: bool) -> None:
        self._http, self._real = http, real
        self._random = random.Random(1)

    def ids(self, count: int) -> list[int]:
        """A new text. Both engines have each of these numbers as one token."""
        return [self._random.randrange(10, 250) for _ in range(count)]

    async def stream(self, prompt: Sequence[int], tokens: int, path: str = "/v1/completions", **more: object) -> Answer:
        body = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **({"prompt": list(prompt)} if prompt else {}), **more}
        answer, began, last = Answer(), time.perf_counter(), 0.0
        async with self._http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                chunk = {} if line.startswith(b"data: [DONE]") else json.loads(line[6:])
                for choice in chunk.get("choices", ()):
                    if "text" in choice or "content" in choice.get("delta", {}):
                        if answer.first:
                            answer.gaps.append(now - last)
                        else:
                            answer.first = now - began
                        last = now
                    answer.finish = choice.get("finish_reason") or answer.finish
                answer.usage = chunk.get("usage") or answer.usage
                shape = _shape(chunk) if chunk else "[DONE]"
                if answer.shape[-1:] != [shape]:
                    answer.shape.append(shape)
        answer.done = time.perf_counter() - began
        return answer

    async def whole(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The tokens of an answer that is not streamed."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        async with self._http.post("/v1/completions", json=body | {"return_token_ids": True}) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        choice = answer["choices"][0]
        if self._real:
            return choice["token_ids"]
        async with self._http.post("/tokenize", json={"model": "m", "prompt": choice["text"]}) as response:
            return (await response.json())["tokens"]

    async def metrics(self) -> dict[str, float]:
        """By name, without ``vllm:``; series of one name are added up."""
        found: dict[str, float] = {}
        async with self._http.get("/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith("vllm:"):
                    series, _, value = line.rpartition(" ")
                    name = series.partition("{")[0].removeprefix("vllm:")
                    found[name] = found.get(name, 0.0) + float(value)
        return found


def _shape(chunk: dict) -> str:
    """What an event carries that a client looks at."""
    said = []
    for choice in chunk.get("choices", ()):
        said += sorted(name for name, value in choice.get("delta", {}).items() if value or name == "content")
        said += ["text"] * bool(choice.get("text"))
        said += [str(choice["finish_reason"])] if choice.get("finish_reason") else []
    return "+".join([*said, *(["usage"] if chunk.get("usage") else [])])


# what is asked

Rows = dict[str, object]


async def times_to_first_token(client: Client) -> dict[int, float]:
    """Seconds by the length of a new prompt."""
    found: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(TIMES):
        for length in LENGTHS:
            found[length].append((await client.stream(client.ids(length), 1)).first)
    return {length: min(values) for length, values in found.items()}


async def times_per_token(client: Client) -> dict[int, float]:
    """Seconds by the number of requests in the batch, as the engine counts them: a slow reader gets several at once."""
    found: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for _ in range(TIMES):
        for batch in BATCHES:
            before = await client.metrics()
            await asyncio.gather(*(client.stream(client.ids(32), 128) for _ in range(batch)))
            after = await client.metrics()
            seconds, count = (after[name] - before[name] for name in (f"{ITL}_sum", f"{ITL}_count"))
            found[batch].append(seconds / count)
    return {batch: min(values) for batch, values in found.items()}


async def prefix_hits(client: Client) -> Rows:
    """What is found of a prompt that was there before, and of the answer to it."""
    rows: Rows = {}
    before = await client.metrics()
    text = client.ids(1000)
    said = await client.whole(text, 64)
    second = await client.stream([*text, *said[:64], *client.ids(100)], 1)
    after = await client.metrics()
    found = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    rows["second turn: of 1000 + 64 tokens, cached (usage / metrics)"] = f"{second.cached} / {found:.0f}"
    output = 16
    while (len(text) + len(said)) % BLOCK:  # an answer that ends with a block; the simulator's tokens are not its steps
        output += 1
        text = client.ids(1000)
        said = await client.whole(text, output)
    second = await client.stream([*text, *said, *client.ids(100)], 1)
    last = len(text) + len(said) - BLOCK
    rows["where the answer ends with a block, tokens of that block cached"] = max(0, second.cached - last)
    text = client.ids(1024)
    await client.stream(text, 1)
    rows["the same 1024 tokens again, cached"] = (await client.stream(text, 1)).cached
    return rows


async def burst(client: Client) -> Rows:
    """Eight with one prefix at the same moment: who computes it, and how long the others wait."""
    best: list[Answer] = []
    for _ in range(TIMES):
        prefix = client.ids(4096)
        answers = await asyncio.gather(*(client.stream([*prefix, *client.ids(64)], 1) for _ in range(8)))
        if not best or max(a.first for a in answers) < max(a.first for a in best):
            best = list(answers)
    alone = min([(await client.stream(client.ids(4160), 1)).first for _ in range(TIMES)])
    return {
        "burst of 8 x (4096 shared + 64), cached": ", ".join(str(n) for n in sorted(answer.cached for answer in best)),
        "burst: first token of the first, times one alone": f"{min(answer.first for answer in best) / alone:.2f}",
        "burst: first token of the last, times one alone": f"{max(answer.first for answer in best) / alone:.2f}",
    }


async def beside_a_prefill(client: Client) -> Rows:
    """A running answer while a long prompt is computed: it goes on with every step of that."""
    found = []
    for _ in range(TIMES):
        talk = asyncio.create_task(client.stream(client.ids(32), 400))
        await client.stream(client.ids(32), 20)  # the other one is under way by then
        prompt = await client.stream(client.ids(8192), 1)
        gaps = (await talk).gaps
        # Attention makes each step longer than the one before: the first has 1/16 of the work of four.
        longer = [gap for gap in gaps if gap > max(gaps) / 4]
        found.append((prompt.first, len(longer), max(gaps) / prompt.first))
    _, steps, share = min(found)
    return {
        "beside a prompt of 8192 in steps of 2048, long gaps of a stream (of the last three)": steps,
        "longest such gap, share of that prompt's time": f"{share:.2f}",
    }


async def forms(client: Client) -> Rows:
    """What a client and the supervisor read."""
    talk = [{"role": "user", "content": "hello"}]
    chat = await client.stream((), 4, "/v1/chat/completions", messages=talk)
    text = await client.stream(client.ids(64), 4)
    names = await client.metrics()
    read = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "request_success_total"),
    )
    return {
        "events of a chat": ", ".join(chat.shape),
        "events of a completion": ", ".join(text.shape),
        "finish reason at max_tokens": chat.finish,
        "fields of usage": ", ".join(sorted(name for name, value in text.usage.items() if value is not None)),
        "metrics missing": ", ".join(name for name in read if name not in names) or "none",
    }


async def short_of_kv(client: Client) -> Rows:
    """Four that fit at first and grow beyond the cache; and a long prompt beside one that runs."""
    before = await client.metrics()
    order: list[int] = []

    async def one(number: int) -> Answer:
        answer = await client.stream(client.ids(256), 256)
        order.append(number)
        return answer

    answers = await asyncio.gather(*(one(number) for number in range(4)))
    after = await client.metrics()
    whole = sum(answer.usage["completion_tokens"] == 256 for answer in answers)
    rows: Rows = {
        "4 x (256 + 256) in 1280 tokens of KV: whole answers": whole,
        "preempted": f"{after['num_preemptions_total'] - before['num_preemptions_total']:.0f}",
        "who ends first is who came first": order[0] == 0,
        "tokens that metrics say were looked up": after["prefix_cache_queries_total"]
        - before["prefix_cache_queries_total"],
        "cached, told in usage": ", ".join(str(answer.cached) for answer in answers),
    }
    before = after
    began = time.perf_counter()
    talk = asyncio.create_task(client.stream(client.ids(600), 200))
    await client.stream(client.ids(8), 4)
    sent = time.perf_counter() - began
    late = await client.stream(client.ids(900), 1)
    ended = (await talk).done
    after = await client.metrics()
    rows["900 tokens beside 600 + 200: the first token waits for the other's end"] = sent + late.first > ended
    rows["and preempts"] = f"{after['num_preemptions_total'] - before['num_preemptions_total']:.0f}"
    return rows


# the engines


@asynccontextmanager
async def engine(command: Sequence[str], env: dict[str, str], folder: Path, real: bool) -> AsyncIterator[Client]:
    """Start one on a Unix socket; when the block ends all of it is ended."""
    path, log = folder / "engine.sock", folder / "log"
    path.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
            [*command, "--uds", str(path), "--served-model-name", "m"],
            env={**os.environ, **env},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        timeout = aiohttp.ClientTimeout(READY)
        connector = aiohttp.UnixConnector(str(path), limit=0, force_close=True)  # they close idle ones
        async with aiohttp.ClientSession("http://engine", connector=connector, timeout=timeout) as http:
            async with asyncio.timeout(READY):
                while not await _healthy(http):
                    if process.poll() is not None:
                        raise RuntimeError(log.read_text()[-3000:])
                    await asyncio.sleep(0.5)
            yield Client(http, real)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _healthy(http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def options(context: int, kv_tokens: int, budget: int) -> Iterator[str]:
    """What both engines are told."""
    told = {
        "max-model-len": context,
        "num-gpu-blocks-override": kv_tokens // BLOCK,
        "max-num-batched-tokens": budget,
        "max-num-seqs": 32,
        "block-size": BLOCK,
    }
    yield from (f"--{name}={value}" for name, value in told.items())
    yield "--enable-prompt-tokens-details"


def fitted(first: dict[int, float], gaps: dict[int, float]) -> list[str]:
    """The simulator's options that give the real engine's times."""
    base, linear, square = _least_squares([(-(-n // BUDGET), n, n * n) for n in first], list(first.values()))
    step, each = _least_squares([(1.0, n) for n in gaps], list(gaps.values()))
    return [
        f"--sim-ttft-rate={1 / max(linear, 1e-9)}",
        f"--sim-prefill-base={max(base, 0.0)}",
        f"--sim-prefill-pair={2 * max(square, 0.0)}",
        f"--sim-tpot-base={max(step, 0.0)}",
        f"--sim-tpot-per-seq={max(each, 0.0)}",
    ]


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The factors of each column, with errors counted as shares of the values (Gauss on the normal equations)."""
    scaled = [[cell / value for cell in row] for row, value in zip(rows, values, strict=True)]
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    matrix = [[*row, sum(given[i] for given in scaled)] for i, row in enumerate(matrix)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for row in range(size):
            if row != at:
                factor = matrix[row][at] / matrix[at][at]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[at][size] / matrix[at][at] for at in range(size)]


async def ask(client: Client) -> tuple[Rows, dict[int, float], dict[int, float]]:
    """Everything that is asked of an engine with enough KV."""
    await client.stream(client.ids(256), 8)  # what is made at the first use is made
    first, gaps = await times_to_first_token(client), await times_per_token(client)
    rows: Rows = {f"first token of {n} tokens, ms": f"{1000 * seconds:.1f}" for n, seconds in first.items()}
    rows |= {f"per token in a batch of {n}, ms": f"{1000 * seconds:.2f}" for n, seconds in gaps.items()}
    for question in (prefix_hits, burst, beside_a_prefill, forms):
        rows |= await question(client)
    return rows, first, gaps


async def real_answers(directory: Path) -> tuple[Rows, list[str]]:
    """What the engine answers that was installed into ``directory``; and the simulator's options for its speeds."""
    serve = tomllib.loads((ROOT / "tests/engine/model.toml.in").read_text().replace("@ENGINE@", str(directory)))
    env = serve["models"]["tiny"]["serve"]["env"]
    with tempfile.TemporaryDirectory(prefix="bench-fidelity-") as name:
        folder = Path(name)
        make = [directory / "venv/bin/python", ROOT / "tests/engine/make_tiny_model.py", folder / "tiny"]
        subprocess.run([*make, "--context", str(CONTEXT)], check=True, capture_output=True)  # noqa: ASYNC221
        vllm = [str(directory / "venv/bin/vllm"), "serve", str(folder / "tiny"), "--dtype=bfloat16", "--enforce-eager"]
        rows, first, gaps = await answers(vllm, env, folder, True)
    return rows, fitted(first, gaps)


async def simulated_answers(speeds: Sequence[str]) -> Rows:
    """What the simulator answers with these speeds."""
    simulator = [sys.executable, "-m", "supervisord.simulator.main", "serve", "simulated", *speeds]
    with tempfile.TemporaryDirectory(prefix="bench-fidelity-") as name:
        rows, _, _ = await answers(simulator, {"PYTHONPATH": str(ROOT)}, Path(name), False)
    return rows


async def answers(
    command: Sequence[str], env: dict[str, str], folder: Path, real: bool
) -> tuple[Rows, dict[int, float], dict[int, float]]:
    """Of one kind of engine: with enough KV and with little. Rows, times to first token, times per token."""
    async with engine([*command, *options(CONTEXT, KV_TOKENS, BUDGET)], env, folder, real) as client:
        rows, first, gaps = await ask(client)
    async with engine([*command, *options(SMALL_CONTEXT, SMALL_KV, SMALL_BUDGET)], env, folder, real) as client:
        await client.stream(client.ids(256), 8)
        rows |= await short_of_kv(client)
    return rows, first, gaps


def differs(one: object, other: object) -> str:
    """Nothing, or by how much."""
    if str(one) == str(other):
        return ""
    try:
        return f"{100 * (float(str(other)) / float(str(one)) - 1):+.0f}%"
    except (ValueError, ZeroDivisionError):
        return "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--engine", type=Path, default=cache / "vllm-supervisord/vllm-cpu")
    parser.add_argument("--again", type=Path, help="take the real engine's answers from these results")
    parser.add_argument("--out", type=Path, help="raw results, JSON")
    given = parser.parse_args()
    if given.again:
        kept = json.loads(given.again.read_text())
        real, speeds = kept["real"], kept["speeds"]
    elif (given.engine / ".ready").exists():
        real, speeds = asyncio.run(real_answers(given.engine))
    else:
        print(f"skipped: no CPU engine in {given.engine}; run tests/engine/install")
        return
    print("the simulator is told:", " ".join(speeds), flush=True)
    simulated = asyncio.run(simulated_answers(speeds))
    print("\n| | real | simulated | differs |\n|---|---|---|---|")
    for name, value in real.items():
        print(f"| {name} | {value} | {simulated[name]} | {differs(value, simulated[name])} |")
    if given.out:
        results = {"speeds": speeds, "real": real, "simulated": simulated}
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
