"""/v1/messages and /v1/messages/count_tokens: Anthropic's dialect as vLLM translates it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, Body, event, required
from supervisord.simulator.generation import Generation, Output, Work
from supervisord.simulator.openai import messages_of
from supervisord.simulator.tokens import content_text, count, render_chat

#: vLLM translates only these; an aborted request has a null stop_reason.
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def routes(api: Api) -> list[web.RouteDef]:
    handlers = Anthropic(api)
    return [
        web.post("/v1/messages", handlers.messages),
        web.post("/v1/messages/count_tokens", handlers.count_tokens),
    ]


def _turns(body: Body) -> list[dict[str, Any]]:
    """The conversation with its system text in front, as vLLM hands it to the chat template."""
    messages = messages_of(body)
    system = content_text(body.get("system"))
    return [{"role": "system", "content": system}, *messages] if system else messages


class Anthropic:
    """The Anthropic dialect."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await self._api.json_body(request)
        turns = _turns(body)
        required(body, "max_tokens")
        model = self._api.model_of(body)
        prompt = render_chat(turns, body.get("tools"))
        work = Work(
            prompt=prompt,
            limit=self._api.limit(prompt, body["max_tokens"]),
            last_text=content_text(turns[-1].get("content")) if turns else "",
            stop=tuple(body.get("stop_sequences") or ()),
        )
        request_id = self._api.request_id(request, "chatcmpl")
        async with self._api.generating(request_id, work) as generation:
            frames = MessageFrames(generation, model)
            if body.get("stream"):
                return await self._api.stream(request, generation, frames)
            reason = await self._api.collect(generation)
            answer = frames.message([{"type": "text", "text": generation.text}], STOP_REASONS.get(reason))
            return web.json_response(answer)

    async def count_tokens(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        turns = _turns(body)
        self._api.model_of(body)
        return web.json_response({"input_tokens": count(render_chat(turns, body.get("tools")))})


class MessageFrames:
    """Anthropic's events; there is no [DONE]."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation, self._model = generation, model
        self._reason: str | None = None

    def message(self, content: list[Body], stop_reason: str | None) -> Body:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> Body:
        seq = self._generation.seq
        return {
            "input_tokens": seq.prompt_tokens,
            "output_tokens": seq.produced,
            "cache_read_input_tokens": seq.cached,
        }

    def open(self) -> Iterable[str]:
        start = self.message([], None)
        start["usage"]["output_tokens"] = 0
        yield event({"type": "message_start", "message": start}, "message_start")
        block = {"type": "text", "text": ""}
        yield event({"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start")

    def piece(self, output: Output) -> Iterable[str]:
        self._reason = output.finish
        if output.text:
            delta = {"type": "text_delta", "text": output.text}
            yield event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")

    def close(self) -> Iterable[str]:
        yield event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        delta = {"stop_reason": STOP_REASONS.get(self._reason or "stop"), "stop_sequence": None}
        yield event({"type": "message_delta", "delta": delta, "usage": self._usage()}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def failed(self, message: str) -> Iterable[str]:
        yield event({"type": "error", "error": {"type": "internal_error", "message": message}}, "error")
