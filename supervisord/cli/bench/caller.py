"""One streaming chat completion over the public port, and what it took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

#: Which policy this one request is routed by, instead of the model's own.
ROUTING_HEADER = "x-vllmctl-routing"
#: A connection is there or not; an answer may take as long as a wake and a long prefill do.
_LIMITS = aiohttp.ClientTimeout(total=None, connect=30, sock_read=1800)

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answered:
    """One request's end. Seconds since it was sent; ``error`` is empty where all went well."""

    first_token: float
    seconds: float
    text: str = ""
    prompt_tokens: int = 0
    #: Tokens of the prompt that came from the engine's cache; None where the engine does not tell.
    cached_tokens: int | None = None
    replica: str = ""
    error: str = ""


class Caller:
    """Calls one model. Made by ``calling``."""

    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http = http
        self._model = model

    async def chat(self, messages: Sequence[Message], output: int, routing: str = "") -> Answered:
        """Ask, and read the answer to its end; never raises for what the other side did."""
        loop = asyncio.get_running_loop()
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = loop.time()
        seen = _Seen()
        try:
            headers = {ROUTING_HEADER: routing} if routing else {}
            async with self._http.post("/v1/chat/completions", json=body, headers=headers) as response:
                seen.replica = response.headers.get("x-vllmctl-replica", "")
                if response.status != 200:
                    seen.error = _error_text(response.status, await response.text())
                else:
                    async for line in response.content:
                        seen.line(line, loop.time() - began)
                    if not seen.done:
                        seen.error = seen.error or "the answer ended too early"
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            seen.error = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
        return seen.answered(loop.time() - began)


class _Seen:
    """What has been seen of one answer."""

    def __init__(self) -> None:
        self.first_token: float | None = None
        self.text: list[str] = []
        self.usage: Mapping[str, Any] = {}
        self.replica = self.error = ""
        self.done = False

    def line(self, line: bytes, at: float) -> None:
        """One line of the event stream."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = "an event is no JSON"
            return
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]) if event["error"] else "error")
            return
        for choice in event.get("choices") or ():
            if self.first_token is None:
                self.first_token = at
            self.text.append((choice.get("delta") or {}).get("content") or "")
        self.usage = event.get("usage") or self.usage

    def answered(self, seconds: float) -> Answered:
        """The whole of it."""
        details = self.usage.get("prompt_tokens_details")
        return Answered(
            first_token=seconds if self.first_token is None else self.first_token,
            seconds=seconds,
            text="".join(self.text),
            prompt_tokens=int(self.usage.get("prompt_tokens") or 0),
            cached_tokens=None if details is None else int(details.get("cached_tokens") or 0),
            replica=self.replica,
            error=self.error,
        )


def _error_text(status: int, body: str) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200]}"


@asynccontextmanager
async def calling(url: str, model: str, api_key: str) -> AsyncIterator[Caller]:
    """A caller of ``model`` at ``url`` (``http://HOST:PORT``, ``https://...`` or ``unix:/PATH``)."""
    connector: aiohttp.BaseConnector
    if url.startswith("unix:"):
        connector, base = aiohttp.UnixConnector(url.removeprefix("unix:"), limit=0), "http://localhost"
    else:
        connector, base = aiohttp.TCPConnector(limit=0), url
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(base, connector=connector, headers=headers, timeout=_LIMITS) as http:
        yield Caller(http, model)
