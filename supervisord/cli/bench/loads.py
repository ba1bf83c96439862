"""The two loads that tell routing policies apart: a cold burst of one text, and conversations that go on.

A policy that gathers everything loses a card on the burst; one that spreads everything loses the cache on every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from supervisord.cli.bench.caller import Answered, Caller, Message
from supervisord.cli.bench.texts import Writer

#: Tokens that a turn of a conversation adds, besides the model's answer.
TURN_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked, of every policy the same. Tokens are about so many."""

    #: Tokens of the text that a burst shares, and of a conversation's first turn.
    context: int
    #: Requests of the burst.
    burst: int
    #: Conversations at a time, and turns of each.
    conversations: int
    turns: int
    #: Tokens of every answer.
    output: int

    @property
    def requests(self) -> int:
        """How many requests a policy gets."""
        return self.burst + self.conversations * self.turns

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        return self.context + self.turns * (TURN_TOKENS + self.output) + TURN_TOKENS


@dataclass(slots=True)
class Measured:
    """What one policy made of the load, over all rounds. Seconds."""

    policy: str
    #: From the first request of a burst to the end of its last answer, one per round.
    bursts: list[float] = field(default_factory=list)
    #: First tokens of the burst's requests; of first turns; of the turns after them.
    burst_first: list[float] = field(default_factory=list)
    cold_first: list[float] = field(default_factory=list)
    warm_first: list[float] = field(default_factory=list)
    #: Of the turns after the first: tokens of the prompts, and those that came from a cache (None: not told).
    warm_tokens: int = 0
    warm_cached: int | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def cached_share(self) -> float | None:
        """How much of the later turns' prompts came from a cache."""
        return None if self.warm_cached is None or not self.warm_tokens else self.warm_cached / self.warm_tokens


async def run_burst(caller: Caller, writer: Writer, load: Load, name: str, measured: Measured) -> None:
    """Ask ``load.burst`` questions about one new text, all at once."""
    loop = asyncio.get_running_loop()
    text = writer.text(name, load.context)
    began = loop.time()
    questions = [[_user(f"{text}\nQuestion {number}: which word is this?")] for number in range(load.burst)]
    asked = (caller.chat(question, load.output, measured.policy) for question in questions)
    answers = await asyncio.gather(*asked)
    measured.bursts.append(loop.time() - began)
    measured.errors += [answer.error for answer in answers if answer.error]
    measured.burst_first += [answer.first_token for answer in answers if not answer.error]


async def run_conversations(caller: Caller, writer: Writer, load: Load, name: str, measured: Measured) -> None:
    """Hold ``load.conversations`` at a time, each of which sends all of itself again with every turn."""
    names = [f"{name} {number}" for number in range(load.conversations)]
    await asyncio.gather(*(_converse(caller, writer, load, each, measured) for each in names))


async def _converse(caller: Caller, writer: Writer, load: Load, name: str, measured: Measured) -> None:
    messages: list[Message] = [_user(writer.text(name, load.context))]
    for turn in range(load.turns):
        answer = await caller.chat(messages, load.output, measured.policy)
        if answer.error:
            measured.errors.append(answer.error)
            return
        _note(measured, turn, answer)
        messages.append({"role": "assistant", "content": answer.text or "..."})
        messages.append(_user(writer.text(f"{name} turn {turn}", TURN_TOKENS)))


def _note(measured: Measured, turn: int, answer: Answered) -> None:
    if turn == 0:
        measured.cold_first.append(answer.first_token)
        return
    measured.warm_first.append(answer.first_token)
    measured.warm_tokens += answer.prompt_tokens
    if answer.cached_tokens is not None:
        measured.warm_cached = (measured.warm_cached or 0) + answer.cached_tokens


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of ``values`` are (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
