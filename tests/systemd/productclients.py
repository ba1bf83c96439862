"""HTTP clients of the product's port: what they ask, and what they got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

#: Seconds that anything may take before the test counts as failed; nothing is asserted about how long it took.
LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. ``status`` 0: no answer at all, ``error`` says why."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def code(self) -> str:
        """The code of an error answer."""
        return str(json.loads(self.body)["error"]["code"])

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])

    @property
    def replica(self) -> str:
        """Who answered."""
        return self.headers.get("x-vllmctl-replica", "")

    @property
    def whole(self) -> bool:
        """A 200 that is complete and no garbage."""
        if self.status != 200 or self.error or "GARBAGE" in self.body:
            return False
        if self.headers.get("Content-Type", "").startswith("text/event-stream"):
            return '"error"' not in self.body and self.body.rstrip().endswith("data: [DONE]")
        return bool(json.loads(self.body)["choices"][0]["message"]["content"])


class Stream:
    """A streamed answer under way."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._body = b""

    async def first_token(self) -> None:
        """Returns when the first piece of text has arrived."""
        while self._body.count(b"data: ") < 2:  # the first event only says the role
            piece = await self._response.content.readany()
            assert piece, f"the stream ended early: {self._body!r}"
            self._body += piece

    async def rest(self) -> Answer:
        """The answer as it came in the end."""
        error = ""
        try:
            while piece := await self._response.content.readany():
                self._body += piece
        except aiohttp.ClientError as failure:
            error = repr(failure)
        return Answer(self._response.status, self._body.decode(), self._response.headers, error)


class Clients:
    """HTTP clients of the port; every request has a connection of its own."""

    def __init__(self, port: int, session: aiohttp.ClientSession, scheme: str = "http") -> None:
        self.url = f"{scheme}://127.0.0.1:{port}"
        self._session = session

    async def ask(self, name: str, content: str = "Hello", *, tokens: int = 4, stream: bool = False) -> Answer:
        """One chat completion, to its end. A connection that fails is an answer with status 0."""
        try:
            async with self._post(name, content, tokens, stream) as response:
                return await Stream(response).rest()
        except (aiohttp.ClientError, OSError) as failure:
            return Answer(0, error=repr(failure))

    async def many(self, count: int, name: str) -> list[Answer]:
        """That many requests at once."""
        return await asyncio.gather(*(self.ask(name, f"Request {number}") for number in range(count)))

    @asynccontextmanager
    async def stream(self, name: str, *, tokens: int) -> AsyncIterator[Stream]:
        """A streamed chat completion of exactly ``tokens`` tokens, for the time of the block."""
        async with self._post(name, "Tell me a story", tokens, True) as response:
            assert response.status == 200, await response.text()
            yield Stream(response)

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as response:
            return await response.json()

    async def request(self, method: str, path: str, body: object = None) -> Answer:
        """One request of any route, to its end."""
        async with self._session.request(method, self.url + path, json=body) as response:
            return Answer(response.status, await response.text(), response.headers)

    async def states(self) -> dict[str, str]:
        """Each model's state as `/v1/models` says it."""
        return {entry["id"]: entry["state"] for entry in (await self.get("/v1/models"))["data"]}

    def _post(self, name: str, content: str, tokens: int, stream: bool) -> Any:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        return self._session.post(f"{self.url}/v1/chat/completions", json=body)

    @asynccontextmanager
    async def load(self, name: str, clients: int, **kind: Any) -> AsyncIterator[Load]:
        """``clients`` that ask again and again for the time of the block; at its end they finish what they began."""
        load = Load()

        async def client(number: int) -> None:
            while not load.over:
                answer = await self.ask(name, f"Client {number} asks", **kind)
                load.answers.append(answer)
                load.answered.set()

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(number))
            try:
                yield load
            finally:
                load.over = True


class Load:
    """Clients at work, and what they got so far."""

    def __init__(self) -> None:
        self.over = False
        self.answers: list[Answer] = []
        self.answered = asyncio.Event()

    async def more(self, count: int) -> None:
        """Returns when ``count`` more answers have come."""
        wanted = len(self.answers) + count
        async with asyncio.timeout(LIMIT):
            while len(self.answers) < wanted:
                self.answered.clear()
                await self.answered.wait()

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.whole]
