"""What the tests say to a simulator, and what they look for in its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from supervisord.simulator.server import Simulator


class Client:
    """What a test says to one simulator."""

    def __init__(self, simulator: Simulator, session: aiohttp.ClientSession) -> None:
        self.simulator, self.engine, self.session = simulator, simulator.engine, session
        self.base = simulator.endpoint if simulator.endpoint.startswith("http") else "http://engine"

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.base + path) as response:
            return response.status, await self._body(response)

    async def post(self, path: str, json: Any = None, **more: Any) -> tuple[int, Any]:
        async with self.session.post(self.base + path, json=json, **more) as response:
            return response.status, await self._body(response)

    async def chat(self, text: str = "hello", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", chat_body(text, **fields))

    async def text(self, text: str = "hello", **fields: Any) -> str:
        status, body = await self.chat(text, **fields)
        assert status == 200, body
        return str(body["choices"][0]["message"]["content"])

    def stream(self, text: str = "hello", **fields: Any) -> Any:
        """The response of a streaming chat, as soon as its headers are here."""
        return self.session.post(f"{self.base}/v1/chat/completions", json=chat_body(text, stream=True, **fields))

    async def fault(self, name: str, arg: Any = None, count: int | None = 1) -> None:
        status, body = await self.post("/sim/fault", {"name": name, "arg": arg, "count": count})
        assert status == 200, body

    async def state(self) -> Any:
        return (await self.get("/sim/state"))[1]

    @staticmethod
    async def _body(response: aiohttp.ClientResponse) -> Any:
        return await response.json() if response.content_type == "application/json" else await response.text()


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "big", "messages": [{"role": "user", "content": text}], **fields}


#: A request that runs until something ends it.
ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}

Start = Callable[..., Awaitable[Client]]


async def events(response: aiohttp.ClientResponse) -> list[str]:
    """The data of every server-sent event until the stream ends."""
    text = (await response.read()).decode()
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
