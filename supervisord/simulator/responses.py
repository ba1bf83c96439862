"""/v1/responses: OpenAI's newer dialect.

As with vLLM, responses stay in this process's memory where VLLM_ENABLE_RESPONSES_API_STORE is set, and only there are
they computed in the background; otherwise ``store`` is silently ignored.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, ApiError, Body, bad_request, event, now, required
from supervisord.simulator.generation import Generation, Output, Work
from supervisord.simulator.tokens import content_text, render_chat

#: vLLM keeps every one, for ever.
KEPT = 256


def routes(api: Api) -> list[web.RouteDef]:
    handlers = Responses(api)
    return [
        web.post("/v1/responses", handlers.create),
        web.get("/v1/responses/{id}", handlers.retrieve, allow_head=False),
        web.post("/v1/responses/{id}/cancel", handlers.cancel),
    ]


class Kept:
    """A response in memory."""

    def __init__(self, frames: ResponseFrames, *, streams: bool = False) -> None:
        self.frames = frames
        #: The events of one that is computed in the background as a stream; None where there are none.
        self.events: list[str] | None = [] if streams else None
        self.changed = asyncio.Event()
        self.done = True
        self.task: asyncio.Task[None] | None = None

    def add(self, event: str) -> None:
        """One more event, or none where they are not kept."""
        if self.events is not None:
            self.events.append(event)
        self.changed.set()


class Responses:
    """The responses dialect."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = await self._api.json_body(request)
        stores = bool(body.get("store", True))
        if body.get("background"):
            self._check_background(stores)
        turns = self._turns(body)
        model = self._api.model_of(body)
        prompt = render_chat(turns, body.get("tools"))
        limit = self._api.limit(prompt, body.get("max_output_tokens"), "max_output_tokens")
        work = Work(prompt=prompt, limit=limit, last_text=content_text(turns[-1].get("content")) if turns else "")
        response_id = str(body.get("request_id") or f"resp_{uuid.uuid4().hex}")
        generating = self._api.generating(response_id, work)
        if body.get("background"):
            kept = await self._in_background(AsyncExitStack(), generating, model, streams=bool(body.get("stream")))
            if body.get("stream"):
                return await self._events(request, kept, 0)
            return web.json_response(kept.frames.response())
        async with generating as generation:
            frames = ResponseFrames(self._api, generation, model)
            if body.get("stream"):
                answer = await self._api.stream(request, generation, frames)
            else:
                frames.reason = await self._api.collect(generation)
                answer = web.json_response(frames.response())
        if stores and self._api.options.stores_responses:
            self._keep(Kept(frames))
        return answer

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        kept = self._find(request.match_info["id"])
        if request.query.get("stream", "").lower() not in ("true", "1"):
            return web.json_response(kept.frames.response())
        if kept.events is None:
            raise bad_request(f"Unknown response_id: {request.match_info['id']}", "response_id")
        after = request.query.get("starting_after")
        return await self._events(request, kept, int(after) + 1 if after else 0)

    async def cancel(self, request: web.Request) -> web.Response:
        kept = self._find(request.match_info["id"])
        if kept.done:
            raise ApiError(400, "invalid_request_error", "Cannot cancel a synchronous response.", "response_id")
        kept.frames.cancelled = True
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.wait([kept.task])
        return web.json_response(kept.frames.response())

    def _find(self, response_id: str) -> Kept:
        kept = self._kept.get(response_id)
        if kept is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, "invalid_request_error", message, "response_id")
        return kept

    def _keep(self, kept: Kept) -> None:
        self._kept[kept.frames.id] = kept
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _check_background(self, stores: bool) -> None:
        if not stores:
            raise bad_request("background can only be used when `store` is true", "background")
        if not self._api.options.stores_responses:
            message = (
                "This vLLM engine does not support `store=True` and therefore does not support the background mode. "
                "To enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when "
                "launching the vLLM server."
            )
            raise ApiError(400, "invalid_request_error", message, "background")

    async def _in_background(
        self, stack: AsyncExitStack, generating: AbstractAsyncContextManager[Generation], model: str, *, streams: bool
    ) -> Kept:
        generation = await stack.enter_async_context(generating)
        kept = Kept(ResponseFrames(self._api, generation, model), streams=streams)
        kept.done, kept.frames.queued = False, True
        self._keep(kept)
        kept.task = self._api.engine.spawn(self._compute(stack, generation, kept))
        return kept

    async def _compute(self, stack: AsyncExitStack, generation: Generation, kept: Kept) -> None:
        try:
            async with stack:
                async for frame in self._api.events(generation, kept.frames):
                    kept.add(frame)
        finally:
            kept.done = True
            kept.frames.queued = False
            kept.changed.set()

    async def _events(self, request: web.Request, kept: Kept, start: int) -> web.StreamResponse:
        """What has been said from the event of that number on, and what is still to come."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        with suppress(ConnectionError):
            at, events = start, kept.events
            assert events is not None
            while at < len(events) or not kept.done:
                kept.changed.clear()
                if at < len(events):
                    await response.write(events[at].encode())
                    at += 1
                else:
                    await kept.changed.wait()
            await response.write_eof()
        return response

    def _turns(self, body: Body) -> list[dict[str, Any]]:
        given = required(body, "input")
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        if body.get("instructions"):
            turns.insert(0, {"role": "system", "content": body["instructions"]})
        previous = body.get("previous_response_id")
        if previous is not None:
            earlier = self._find(str(previous)).frames.response()
            turns = [{"role": "assistant", "content": _text(earlier)}, *turns]
        if not all(isinstance(turn, dict) for turn in turns):
            raise bad_request("input must be a string or a list of items", "input")
        return turns


def _text(response: Body) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


class ResponseFrames:
    """The events of one response, numbered; there is no [DONE]."""

    def __init__(self, api: Api, generation: Generation, model: str) -> None:
        self._api, self._generation, self._model = api, generation, model
        self._created = now()
        self._number = 0
        self.reason: str | None = None
        #: How one in the background stands that has not come to its end.
        self.queued = self.cancelled = self.failure = False

    @property
    def id(self) -> str:
        return self._generation.id

    def response(self) -> Body:
        """The response object as it stands."""
        usage = self._api.usage(self._generation)
        status = {"stop": "completed", None: "in_progress"}.get(self.reason, "incomplete")
        if self.cancelled:
            status = "cancelled"
        elif self.queued and self.reason is None:
            status = "queued" if not self._number else "in_progress"
        elif self.failure:
            status = "failed"
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if self.reason == "length" else None,
            "output": [self._item("completed", [self._part(self._generation.text)])] if self.reason else [],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] or {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            },
        }

    def open(self) -> Iterable[str]:
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", **self._place(), part=self._part(""))

    def piece(self, output: Output) -> Iterable[str]:
        self.reason = output.finish
        if output.text:
            yield self._event("response.output_text.delta", **self._place(), delta=output.text, logprobs=[])

    def close(self) -> Iterable[str]:
        text = self._generation.text
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=self._part(text))
        item = self._item("completed", [self._part(text)])
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event("response.completed", response=self.response())

    def failed(self, message: str) -> Iterable[str]:
        self.failure = True
        yield event(ApiError(500, "InternalServerError", message).body())

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(data, kind)

    def _place(self) -> Body:
        return {"item_id": self._item_id(), "output_index": 0, "content_index": 0}

    def _item_id(self) -> str:
        return f"msg_{self._generation.id}"

    def _item(self, status: str, content: list[Body]) -> Body:
        return {"id": self._item_id(), "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> Body:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
