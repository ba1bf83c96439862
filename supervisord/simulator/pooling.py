"""/v1/embeddings, /pooling, /classify, /score, /rerank and their other spellings.

Numbers come from a hash of the text: the same text has the same vector, and a text is most similar to itself.
While the weights are not whole every number is wrong and ``simulated`` says GARBAGE.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, Body, bad_request, now, required
from supervisord.simulator.generation import Work
from supervisord.simulator.tokens import Answer, content_text, count, decode

DIMENSIONS = 32


def routes(api: Api) -> list[web.RouteDef]:
    handlers = Pooling(api)
    return [
        web.post("/v1/embeddings", handlers.embeddings),
        web.post("/v2/embed", handlers.embed),
        web.post("/pooling", handlers.pooling),
        web.post("/classify", handlers.classify),
        *(web.post(path, handlers.score) for path in ("/score", "/v1/score")),
        *(web.post(path, handlers.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ]


class Computed:
    """The texts of one request after the engine had them."""

    def __init__(self, request_id: str, model: str, garbage: bool, tokens: int) -> None:
        self._id, self._model, self._garbage, self._tokens = request_id, model, garbage, tokens

    def vector(self, text: str, size: int = DIMENSIONS) -> list[float]:
        """A unit vector."""
        if self._garbage:
            return [0.0] * size
        raw = hashlib.shake_128(text.encode()).digest(size * 2)
        numbers = [value / 32768 for (value,) in struct.iter_unpack(">h", raw)]
        length = math.sqrt(sum(number * number for number in numbers)) or 1.0
        return [number / length for number in numbers]

    def similarity(self, one: str, other: str) -> float:
        pairs = zip(self.vector(one), self.vector(other), strict=True)
        return (1.0 + sum(a * b for a, b in pairs)) / 2

    def answer(self, data_name: str, data: Any, **more: Any) -> web.Response:
        body: Body = {
            "id": self._id,
            "created": now(),
            "model": self._model,
            data_name: data,
            "usage": {"prompt_tokens": self._tokens, "total_tokens": self._tokens, "completion_tokens": 0},
            "simulated": Answer.GARBAGE if self._garbage else True,
            **more,
        }
        return web.json_response(body)


def _texts(given: Any, param: str) -> list[str]:
    """One text or a list of them; token ids count as the text they spell."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        return [decode(given)]
    if isinstance(given, list) and given:
        return [decode(item) if isinstance(item, list) and item and isinstance(item[0], int) else content_text(item)
                for item in given]  # fmt: skip
    raise bad_request(f"{param} must be a text, a list of token ids, or a list of those", param)


class Pooling:
    """The pooling routes."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def _compute(self, request: web.Request, body: Body, prefix: str, texts: Sequence[str]) -> Computed:
        model = self._api.model_of(body)
        prompt = "\0".join(texts).encode()
        for text in texts:
            self._api.limit(text.encode(), None)
        request_id = self._api.request_id(request, prefix)
        work = Work(prompt=prompt, limit=0, salt=str(body.get("cache_salt") or ""))
        async with self._api.generating(request_id, work) as generation:
            await self._api.collect(generation)
            return Computed(generation.id, model, generation.garbage, count(prompt))

    async def embeddings(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        given = body.get("messages") or required(body, "input")
        texts = [content_text(m.get("content")) for m in given] if "messages" in body else _texts(given, "input")
        done = await self._compute(request, body, "embd", texts)
        size = int(body.get("dimensions") or DIMENSIONS)
        vectors: list[Any] = [done.vector(text, size) for text in texts]
        if body.get("encoding_format") == "base64":
            vectors = [base64.b64encode(struct.pack(f"<{size}f", *vector)).decode() for vector in vectors]
        data = [{"index": i, "object": "embedding", "embedding": vector} for i, vector in enumerate(vectors)]
        return done.answer("data", data, object="list")

    async def embed(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        texts = _texts(required(body, "texts"), "texts")
        done = await self._compute(request, body, "embd", texts)
        return done.answer("embeddings", {"float": [done.vector(text) for text in texts]}, texts=texts)

    async def pooling(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        texts = _texts(body.get("messages") or required(body, "input"), "input")
        done = await self._compute(request, body, "pool", texts)
        data = [{"index": i, "object": "pooling", "data": done.vector(text)} for i, text in enumerate(texts)]
        return done.answer("data", data, object="list")

    async def classify(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        texts = _texts(body.get("messages") or required(body, "input"), "input")
        done = await self._compute(request, body, "classify", texts)
        data = []
        for index, text in enumerate(texts):
            yes = done.similarity(text, "positive")
            label = "positive" if yes >= 0.5 else "negative"
            data.append({"index": index, "label": label, "probs": [1.0 - yes, yes], "num_classes": 2})
        return done.answer("data", data, object="list")

    async def score(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        one, other = next(
            (
                pair
                for pair in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
                if pair[0] in body
            ),
            ("text_1", "text_2"),
        )
        left, right = _texts(required(body, one), one), _texts(required(body, other), other)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise bad_request("Input lengths must be either 1:1, 1:N or N:N", other)
        done = await self._compute(request, body, "embd", [*left, *right])
        pairs = enumerate(zip(left, right, strict=True))
        data = [{"index": i, "object": "score", "score": done.similarity(a, b)} for i, (a, b) in pairs]
        return done.answer("data", data, object="list")

    async def rerank(self, request: web.Request) -> web.Response:
        body = await self._api.json_body(request)
        query = content_text(required(body, "query"))
        documents = _texts(required(body, "documents"), "documents")
        done = await self._compute(request, body, "rerank", [query, *documents])
        results = [
            {
                "index": i,
                "document": {"text": text, "multi_modal": None},
                "relevance_score": done.similarity(query, text),
            }
            for i, text in enumerate(documents)
        ]
        results.sort(key=lambda result: float(result["relevance_score"]), reverse=True)  # type: ignore[arg-type]
        return done.answer("results", results[: int(body.get("top_n") or len(results))])
