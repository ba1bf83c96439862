"""/v1/models, /v1/chat/completions (and its /render), /v1/completions, /tokenize, /detokenize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, ApiError, Body, bad_request, now, required
from supervisord.simulator.generation import Generation, Work
from supervisord.simulator.openai_frames import ChatFrames, CompletionFrames, logprobs_of
from supervisord.simulator.tokens import (
    BYTES_PER_TOKEN,
    content_text,
    count,
    decode,
    encode,
    ids_to_bytes,
    render_chat,
    small_ids,
)
from supervisord.simulator.toolcalls import ToolCallFrames, tool_call

#: vLLM's default of --max-logprobs.
MAX_LOGPROBS = 20


def routes(api: Api) -> list[web.RouteDef]:
    handlers = OpenAi(api)
    generating = [
        web.post("/v1/chat/completions", handlers.chat),
        web.post("/v1/completions", handlers.completions),
        web.post("/v1/chat/completions/render", handlers.render),
    ]
    return [
        web.get("/v1/models", handlers.models),
        *(generating if api.options.generates else ()),
        web.post("/tokenize", handlers.tokenize),
        web.post("/detokenize", handlers.detokenize),
    ]


def messages_of(body: Body) -> list[dict[str, Any]]:
    messages = required(body, "messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, "Bad Request", "Input should be a valid list of messages", "messages", in_validation=True)
    return messages


def stop_words(body: Body) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def prompt_tokens(generation: Generation) -> list[tuple[str, float | None]]:
    """The tokens of the prompt, and how likely each was after those before it (of the first nothing is known)."""
    prompt, garbage = generation.work.prompt, generation.garbage
    pieces = [
        prompt[at : at + BYTES_PER_TOKEN].decode(errors="replace") for at in range(0, len(prompt), BYTES_PER_TOKEN)
    ]
    likely = [generation.answer.logprob(place, garbage) for place in range(len(pieces))]
    return [
        (piece, logprob if place else None) for place, (piece, logprob) in enumerate(zip(pieces, likely, strict=True))
    ]


class OpenAi:
    """The OpenAI dialect."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._created = now()

    async def models(self, _request: web.Request) -> web.Response:
        options = self._api.options
        names: list[tuple[str, str, str | None]] = [(name, options.model, None) for name in options.served_names]
        names += [(name, path, options.served_names[0]) for name, path in options.adapters]
        cards: list[Body] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm (simulated)",
                "root": root,
                "parent": parent,
                "max_model_len": options.max_model_len if parent is None else None,
                "permission": [],
                "simulated": True,
            }
            for name, root, parent in names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._api.json_body(request)
        messages = messages_of(body)
        model = self._api.model_of(body)
        if not messages:
            raise bad_request("messages must not be empty", "messages")
        prompt = render_chat(messages, body.get("tools"))
        work = self._work(body, prompt, content_text(messages[-1].get("content")))
        call = tool_call(body, messages)
        if call is not None:
            work = replace(work, limit=min(work.limit, 1 + count(call.arguments.encode())))
        request_id = self._api.request_id(request, "chatcmpl")
        async with self._api.generating(request_id, work) as generation:
            frames = (
                ToolCallFrames(self._api, body, generation, model, call)
                if call
                else ChatFrames(self._api, body, generation, model)
            )
            if body.get("stream"):
                return await self._api.stream(request, generation, frames)
            reason = await self._api.collect(generation)
            message: Body = {"role": "assistant", "content": generation.text, "refusal": None, "tool_calls": []}
            if call is not None and reason != "abort":
                message |= {"content": None, "tool_calls": [call.as_body()]}
                reason = "tool_calls"
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            return web.json_response(frames.envelope("chat.completion", [choice], usage=True))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._api.json_body(request)
        raw = required(body, "prompt")
        model = self._api.model_of(body)
        if isinstance(raw, list) and len(raw) == 1 and not isinstance(raw[0], int):
            raw = raw[0]
        if isinstance(raw, str):
            prompt = raw.encode()
        elif isinstance(raw, list) and raw and all(isinstance(token, int) for token in raw):
            prompt = ids_to_bytes(raw)
        else:
            raise bad_request("the simulator takes one prompt per request: a string or a list of token ids", "prompt")
        body.setdefault("max_tokens", 16)  # the dialect's own default
        wanted = body.get("logprobs")
        if wanted is not None and (type(wanted) is not int or not 0 <= wanted <= MAX_LOGPROBS):
            raise bad_request(f"`logprobs` must be from 0 to {MAX_LOGPROBS}, got {wanted}.", "logprobs")
        work = replace(self._work(body, prompt, prompt.decode(errors="replace")), logprobs=wanted is not None)
        request_id = self._api.request_id(request, "cmpl")
        async with self._api.generating(request_id, work) as generation:
            frames = CompletionFrames(self._api, body, generation, model)
            if body.get("stream"):
                return await self._api.stream(request, generation, frames)
            reason = await self._api.collect(generation)
            tokens: list[tuple[str, float | None]] = [*generation.tokens]
            if body.get("echo"):
                tokens = [*prompt_tokens(generation), *tokens]
            choice = {
                "index": 0,
                "text": prompt.decode(errors="replace") + generation.text if body.get("echo") else generation.text,
                "logprobs": logprobs_of(tokens) if work.logprobs else None,
                "finish_reason": reason,
                "stop_reason": None,
            }
            return web.json_response(frames.envelope("text_completion", [choice], usage=True))

    async def render(self, request: web.Request) -> web.Response:
        """What the engine would compute for a chat, without computing it: routers ask for the tokens of a prompt."""
        body = await self._api.json_body(request)
        model = self._api.model_of(body)
        prompt = render_chat(messages_of(body), body.get("tools"))
        work = self._work(body, prompt, "")
        return web.json_response(
            {
                "request_id": self._api.request_id(request, "chatcmpl"),
                "token_ids": small_ids(prompt),
                "token_offsets": None,
                "features": None,
                "sampling_params": {"max_tokens": work.limit, "ignore_eos": work.ignore_eos, "stop": [*work.stop]},
                "model": model,
                "stream": bool(body.get("stream")),
                "cache_salt": work.salt or None,
            }
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        self._api.model_of(body)
        prompt = render_chat(messages_of(body)) if "messages" in body else str(required(body, "prompt")).encode()
        tokens = encode(prompt.decode(errors="replace"))
        most = self._api.options.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": None})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        self._api.model_of(body)
        return web.json_response({"prompt": decode(required(body, "tokens"))})

    def _work(self, body: Body, prompt: bytes, last_text: str) -> Work:
        if body.get("n") not in (None, 1):
            raise bad_request("the simulator makes one answer per request: n must be 1", "n")
        param = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        return Work(
            prompt=prompt,
            limit=self._api.limit(prompt, body.get(param), param),
            last_text=last_text,
            ignore_eos=bool(body.get("ignore_eos")),
            min_tokens=int(body.get("min_tokens") or 0),
            stop=stop_words(body),
            salt=str(body.get("cache_salt") or ""),
        )


def token_count(text: str) -> int:
    return count(text.encode())
