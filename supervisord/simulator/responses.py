"""/v1/responses: OpenAI's newer dialect. Finished responses stay in this process's memory, as vLLM's do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, ApiError, Body, bad_request, event, now, required
from supervisord.simulator.generation import Generation, Output, Work
from supervisord.simulator.tokens import content_text, render_chat

KEPT = 256


def routes(api: Api) -> list[web.RouteDef]:
    handlers = Responses(api)
    return [web.post("/v1/responses", handlers.create), web.get("/v1/responses/{id}", handlers.retrieve)]


class Responses:
    """The responses dialect."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stored: OrderedDict[str, Body] = OrderedDict()

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = await self._api.json_body(request)
        turns = self._turns(body)
        model = self._api.model_of(body)
        prompt = render_chat(turns, body.get("tools"))
        limit = self._api.limit(prompt, body.get("max_output_tokens"), "max_output_tokens")
        work = Work(prompt=prompt, limit=limit, last_text=content_text(turns[-1].get("content")) if turns else "")
        async with self._api.generating(self._api.request_id(request, "resp"), work) as generation:
            frames = ResponseFrames(self._api, generation, model)
            if body.get("stream"):
                answer = await self._api.stream(request, generation, frames)
            else:
                frames.reason = await self._api.collect(generation)
                answer = web.json_response(frames.response())
            if body.get("store", True):
                self._stored[generation.id] = frames.response()
                while len(self._stored) > KEPT:
                    self._stored.popitem(last=False)
            return answer

    async def retrieve(self, request: web.Request) -> web.Response:
        response_id = request.match_info["id"]
        if response_id not in self._stored:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, "invalid_request_error", message, "response_id")
        return web.json_response(self._stored[response_id])

    def _turns(self, body: Body) -> list[dict[str, Any]]:
        given = required(body, "input")
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        if body.get("instructions"):
            turns.insert(0, {"role": "system", "content": body["instructions"]})
        previous = body.get("previous_response_id")
        if previous is not None:
            if previous not in self._stored:
                message = f"Response with id '{previous}' not found."
                raise ApiError(404, "invalid_request_error", message, "previous_response_id")
            turns = [{"role": "assistant", "content": _text(self._stored[previous])}, *turns]
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

    def response(self) -> Body:
        """The response object as it stands."""
        usage = self._api.usage(self._generation)
        status = {"stop": "completed", None: "in_progress"}.get(self.reason, "incomplete")
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
