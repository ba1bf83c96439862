"""Plays a load in real time against one port: an HTTP client that streams, keeps conversations and measures.

The same loads as on the virtual fleet (``workloads.py``), made from the same seeds. Times are simulated seconds: one of
them takes ``factor`` real ones, here as in the simulators.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from functools import lru_cache

import aiohttp
from virtualfleet import ASKS_AGAIN, BYTES_PER_TOKEN, Part, Request

#: The name that the engines serve.
MODEL = "m"
_WORDS = ("able", "bring", "cargo", "dune", "ember", "fable", "grain", "hazel", "ivory", "joint", "kernel", "lemon")


class Broken(Exception):
    """An answer that is not a whole 200; its client asks again."""


class RealFleet:
    """``restart``: kill a replica, by its number; it is to come back after so many simulated seconds by itself."""

    def __init__(self, url: str, factor: float, most_turns: int, restart: Callable[[int, float], Awaitable[None]]):
        self.most_turns = most_turns
        self.finished: list[Request] = []
        #: Why answers were not whole.
        self.troubles: list[str] = []
        self._url, self._factor, self._restart = url, factor, restart
        self._loop = asyncio.get_running_loop()
        self._began, self._seed = self._loop.time(), 0
        #: What the engine wrote, by the name of the part: the next turn sends it again.
        self._replies: dict[str, str] = {}
        self._timers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def now(self) -> float:
        return (self._loop.time() - self._began) / self._factor

    def at(self, when: float, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        def due() -> None:
            self._timers -= 1
            self._spawn(act())

        self._timers += 1
        self._loop.call_at(self._began + when * self._factor, due)

    def send(self, request: Request, then: Callable[[Request], None] | None = None) -> None:
        request.sent = self.now
        self._spawn(self._answer(request, then))

    def restart(self, number: int, seconds: float) -> None:
        self._spawn(self._restart(number, seconds))

    async def play(self, load: Callable[[RealFleet, random.Random], None], seed: int, limit: float) -> None:
        """Returns when every request is answered; raises TimeoutError after ``limit`` simulated seconds."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as self._http:
            self._began, self._seed = self._loop.time(), seed
            load(self, random.Random(seed))
            try:
                async with asyncio.timeout(limit * self._factor):
                    await self._ended
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # The load is wrong, not the peer: nothing that was measured counts.
            if not self._ended.done():
                self._ended.set_exception(task.exception())
        elif not self._timers and not self._tasks and not self._ended.done():
            self._ended.set_result(None)

    async def _answer(self, request: Request, then: Callable[[Request], None] | None) -> None:
        while True:
            request.tries += 1
            try:
                await (self._embed(request) if request.kind == "embed" else self._chat(request))
                break
            except (Broken, aiohttp.ClientError, ConnectionError) as trouble:
                request.errors += 1
                request.first = 0.0
                self.troubles.append(f"{type(trouble).__name__}: {trouble}"[:200])
                await asyncio.sleep(ASKS_AGAIN * self._factor)
        request.done = self.now
        self.finished.append(request)
        if then is not None:
            then(request)

    async def _embed(self, request: Request) -> None:
        body = f'{{"model": "{MODEL}", "input": {json.dumps(text(request.parts[0]))}}}'
        async with self._post("/v1/embeddings", body, request) as response:
            if response.status != 200:
                raise Broken(f"{response.status} {(await response.text())[:100]}")
            await response.read()
        request.first = self.now

    async def _chat(self, request: Request) -> None:
        messages = ", ".join(self._message(at, part, request) for at, part in enumerate(request.parts))
        body = (
            f'{{"model": "{MODEL}", "messages": [{messages}], "stream": true, "max_tokens": {request.output},'
            f' "ignore_eos": true}}'
        )
        events = []
        async with self._post("/v1/chat/completions", body, request) as response:
            if response.status != 200:
                raise Broken(f"{response.status} {(await response.text())[:100]}")
            async for piece in response.content.iter_any():
                if not request.first and b"data:" in piece:
                    request.first = self.now
                events.append(piece)
        answer = b"".join(events)
        if not answer.rstrip().endswith(b"data: [DONE]") or b'data: {"error"' in answer:
            raise Broken(f"a stream that broke: {answer[-100:]!r}")
        self._replies[f"reply {request.session} {request.parts[-1].name}"] = _written(answer)

    def _post(self, path: str, body: str, request: Request):
        # What some routers need to tell sessions apart; all get it. Where a hash puts one is drawn anew with each seed.
        session = f"{self._seed}-{request.session.replace(' ', '-')}"
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        return self._http.post(self._url + path, data=body.encode(), headers=headers)

    def _message(self, at: int, part: Part, request: Request) -> str:
        if part.name in self._replies:
            return json.dumps({"role": "assistant", "content": self._replies[part.name]})
        role = "system" if at < request.instructions else "user"
        return f'{{"role": "{role}", "content": {json.dumps(text(part))}}}'


@lru_cache(maxsize=256)
def text(part: Part) -> str:
    """So many tokens of text; texts of different names differ from their first word on."""
    own = random.Random(part.name)
    phrase = " ".join(own.choice(_WORDS) for _ in range(64))
    size = part.tokens * BYTES_PER_TOKEN
    head = f"{part.name}: {own.getrandbits(64):x} "
    return (head + f"{phrase} " * (size // len(phrase) + 1))[:size]


def _written(answer: bytes) -> str:
    """The text of a stream's events."""
    written = []
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                written.append(choice["delta"].get("content") or "")
    return "".join(written)
