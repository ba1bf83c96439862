"""The chunks of OpenAI's streams, and the objects around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from supervisord.simulator.api import DONE, Api, ApiError, Body, event, now
from supervisord.simulator.generation import Generation, Output


def logprobs_of(tokens: Sequence[tuple[str, float | None]], offset: int = 0) -> Body:
    """The ``logprobs`` object of /v1/completions. ``offset``: characters of the answer before them.

    Of the likeliest tokens at each place it knows only the one that was taken.
    """
    offsets = []
    for text, _ in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob for _, logprob in tokens],
        "tokens": [text for text, _ in tokens],
        "top_logprobs": [None if logprob is None else {text: logprob} for text, logprob in tokens],
    }


class OpenAiFrames:
    """What the chunks of the OpenAI dialect have in common."""

    object = ""

    def __init__(self, api: Api, body: Body, generation: Generation, model: str) -> None:
        self._api, self._generation, self._model = api, generation, model
        options = body.get("stream_options") or {}
        self._usage = bool(options.get("include_usage"))
        self._running_usage = self._usage and bool(options.get("continuous_usage_stats"))
        self._created = now()

    def envelope(self, kind: str, choices: list[Body], usage: bool) -> Body:
        body: Body = {
            "id": self._generation.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._api.options.name,
            "choices": choices,
        }
        if usage:
            body["usage"] = self._api.usage(self._generation)
        return body

    def chunk(self, choice: Body) -> str:
        return event(self.envelope(self.object, [choice], self._running_usage))

    def close(self) -> Iterable[str]:
        if self._usage:
            yield event(self.envelope(self.object, [], usage=True))
        yield DONE

    def failed(self, message: str) -> Iterable[str]:
        """The engine died in mid-stream: vLLM says so and then, misleadingly, [DONE]."""
        yield event(ApiError(500, "InternalServerError", message).body())
        yield DONE


class ChatFrames(OpenAiFrames):
    object = "chat.completion.chunk"

    def open(self) -> Iterable[str]:
        delta = {"role": "assistant", "content": ""}
        yield self.chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})

    def piece(self, output: Output) -> Iterable[str]:
        choice: Body = {
            "index": 0,
            "delta": {"content": output.text},
            "logprobs": None,
            "finish_reason": output.finish,
        }
        if output.finish is not None:
            choice["stop_reason"] = None
        yield self.chunk(choice)


class CompletionFrames(OpenAiFrames):
    object = "text_completion"

    def __init__(self, api: Api, body: Body, generation: Generation, model: str) -> None:
        super().__init__(api, body, generation, model)
        self._sent = 0

    def open(self) -> Iterable[str]:
        return ()

    def piece(self, output: Output) -> Iterable[str]:
        logprobs = None
        if self._generation.work.logprobs and output.logprob is not None:
            logprobs = logprobs_of([(output.text, output.logprob)], self._sent)
        self._sent += len(output.text)
        yield self.chunk(
            {"index": 0, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish, "stop_reason": None}
        )
