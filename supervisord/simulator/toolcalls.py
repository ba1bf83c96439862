"""Tool calls in /v1/chat/completions: the simulated model calls a tool that the last message of a user names.

What it passes is the first JSON object in that message. A real model decides for itself; what clients see is the same.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from supervisord.simulator.api import Api, Body
from supervisord.simulator.generation import Generation, Output
from supervisord.simulator.openai_frames import ChatFrames
from supervisord.simulator.tokens import content_text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str

    def as_body(self) -> Body:
        """As the dialect has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tool_call(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    """The call that answers this request; None where it is answered with text."""
    names = [str((tool.get("function") or {}).get("name", "")) for tool in body.get("tools") or ()]
    choice = body.get("tool_choice", "auto")
    if not names or choice == "none":
        return None
    text = content_text(messages[-1].get("content")) if messages[-1].get("role") == "user" else ""
    named = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    mentioned = next((name for name in names if name and name in text), None)
    name = named or mentioned or (names[0] if choice == "required" else None)
    return ToolCall(f"chatcmpl-tool-{uuid.uuid4().hex}", str(name), _arguments(text)) if name else None


def _arguments(text: str) -> str:
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            return json.dumps(decoder.raw_decode(text, at)[0])
        except ValueError:
            at = text.find("{", at + 1)
    return "{}"


class ToolCallFrames(ChatFrames):
    """A stream that calls a tool: its name with the first token, its arguments with the last."""

    def __init__(self, api: Api, body: Body, generation: Generation, model: str, call: ToolCall) -> None:
        super().__init__(api, body, generation, model)
        self._call = call
        self._named = False

    def piece(self, output: Output) -> Iterable[str]:
        if not self._named:
            self._named = True
            function = {"name": self._call.name, "arguments": ""}
            yield self._delta({"id": self._call.id, "type": "function", "index": 0, "function": function})
        if output.finish is None:
            return
        yield self._delta({"index": 0, "function": {"arguments": self._call.arguments}})
        finish = output.finish if output.finish == "abort" else "tool_calls"
        yield self.chunk({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish, "stop_reason": None})

    def _delta(self, call: Body) -> str:
        return self.chunk({"index": 0, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None})
