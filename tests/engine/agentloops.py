"""Agents in loops against one port: each sends its whole context again every turn, the last answer and something new.

What they ask is made from a seed alone, but for the answers that they send again.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

#: Metrics of the engine that count tokens: looked up in the prefix cache, found there; and sequences thrown out of it.
COUNTED = ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total")


@dataclass(frozen=True, slots=True)
class Loops:
    """So many agents of so many turns. Tokens and seconds; pairs are ranges."""

    agents: int
    turns: int
    context: tuple[int, int]
    #: What is new in every turn but the first, and what is written in each.
    result: tuple[int, int]
    output: int
    #: Between two turns: the mean of an exponential distribution. First turns come within ``within``.
    pause: float
    within: float
    #: What all of them begin with.
    instructions: int
    #: Bytes of text that the engine makes a token of; the tiny model's tokenizer takes each for one.
    bytes: int = 1

    @property
    def largest(self) -> int:
        """Tokens that one can come to: what it says, its answers (8 bytes a word at most) and the template's marks."""
        return self.context[1] + self.turns * (self.result[1] + 8 * self.output + 64)


@dataclass(slots=True)
class Turn:
    """One turn as its client saw it. Seconds since it was sent; ``cached``: tokens, as usage told."""

    agent: int
    first: float
    done: float
    prompt: int
    cached: int
    route: str


@dataclass(slots=True)
class Played:
    """All turns, the seconds until the last answer was whole, and what was no whole answer."""

    turns: list[Turn]
    makespan: float
    errors: list[str]


async def play(http: aiohttp.ClientSession, loops: Loops, seed: int, model: str = "tiny") -> Played:
    """Returns when every agent is done."""
    chance = random.Random(seed)
    agents = [_Agent(http, loops, model, number, seed, chance.random()) for number in range(loops.agents)]
    began = time.monotonic()
    await asyncio.gather(*(agent.loop() for agent in agents))
    turns = [turn for agent in agents for turn in agent.turns]
    return Played(turns, time.monotonic() - began, [error for agent in agents for error in agent.errors])


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """What the engine counted meanwhile, and the prompt tokens that it had to compute."""
    found = {name.removesuffix("_total"): round(after[name] - before[name]) for name in COUNTED}
    return found | {"computed": found["prefix_cache_queries"] - found["prefix_cache_hits"]}


class _Agent:
    def __init__(
        self, http: aiohttp.ClientSession, loops: Loops, model: str, number: int, seed: int, chance: float
    ) -> None:
        self.turns: list[Turn] = []
        self.errors: list[str] = []
        self._http, self._loops, self._model, self._number = http, loops, model, number
        self._random = random.Random(chance)
        instructions = _text(random.Random(seed), loops.bytes * loops.instructions)
        context = _text(self._random, loops.bytes * (self._random.randint(*loops.context) - loops.instructions))
        self._messages = [{"role": "system", "content": instructions}, {"role": "user", "content": context}]

    async def loop(self) -> None:
        # Everything by chance is drawn first: the pauses do not depend on what is answered.
        pauses = [self._random.expovariate(1 / self._loops.pause) for _ in range(self._loops.turns)]
        sizes = [self._loops.bytes * self._random.randint(*self._loops.result) for _ in pauses]
        results = [_text(self._random, size) for size in sizes]
        await asyncio.sleep(self._random.uniform(0, self._loops.within))
        for at in range(self._loops.turns):
            try:
                said = await self._ask()
            except (OSError, aiohttp.ClientError, ValueError) as error:
                self.errors.append(f"agent {self._number}, turn {at}: {type(error).__name__}: {error}")
                return
            self._messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results[at]}]
            if at + 1 < self._loops.turns:
                await asyncio.sleep(pauses[at])

    async def _ask(self) -> str:
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._loops.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent, first, said, usage = time.monotonic(), 0.0, [], {}
        async with self._http.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {await response.text()}")
            route = response.headers.get("x-vllmctl-route", "")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(str(event["error"]))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    # The event with the role only comes before anything was computed.
                    if choice["delta"].get("content") or choice.get("finish_reason"):
                        first = first or time.monotonic() - sent
                        said.append(choice["delta"].get("content") or "")
        if not usage:
            raise ValueError("a stream that broke")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.turns.append(Turn(self._number, first, time.monotonic() - sent, usage["prompt_tokens"], cached, route))
        return "".join(said)


_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def _text(chance: random.Random, size: int) -> str:
    return "".join(chance.choices(_LETTERS, k=size))


def held(turns: Sequence[Turn]) -> int:
    """Turns that waited for a seat."""
    return sum(turn.route.startswith("held ") for turn in turns)
