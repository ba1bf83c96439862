"""One request in the engine: what it asks for, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from supervisord.simulator.scheduler import Seq
from supervisord.simulator.tokens import Answer


class EngineDead(Exception):
    """The core is gone; vLLM's own words."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class ShutDown(Exception):
    """The front end goes down and takes no more requests (only with --shutdown-timeout)."""

    def __init__(self) -> None:
        super().__init__("cannot schedule new futures after shutdown")


@dataclass(frozen=True, slots=True)
class Output:
    """What one engine step gave one request. ``finish``: stop, length or abort with the last one."""

    text: str
    finish: str | None = None
    #: Log probability of the token; None where it gave none.
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for. ``limit``: most tokens of the answer; 0: pooling (only the prompt is computed)."""

    prompt: bytes
    limit: int
    last_text: str = ""
    #: Go on to ``limit`` instead of ending where the answer ends.
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    salt: str = ""
    #: Keep the log probability of each token.
    logprobs: bool = False


@dataclass(eq=False, slots=True)
class Generation:
    """A request in the engine, as the API server holds it."""

    id: str
    work: Work
    answer: Answer
    seq: Seq
    keys: list[int]
    submitted: float
    outputs: asyncio.Queue[Output | EngineDead] = field(default_factory=asyncio.Queue)
    text: str = ""
    #: The text without its newest token, whose keys and values are computed with the next.
    looked_at: str = ""
    #: Text and log probability of each token so far, where they were asked for.
    tokens: list[tuple[str, float]] = field(default_factory=list)
    garbage: bool = False
    last_token: float = 0.0

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Output]:
        while True:
            output = await self.outputs.get()
            if isinstance(output, EngineDead):
                raise output
            yield output
            if output.finish is not None:
                return
