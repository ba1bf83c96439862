"""The allow-list: the only paths that leave this process, matched byte by byte on the raw request target.

Nothing is decoded, normalised or case-folded before the look-up, so no spelling of a dev endpoint can pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import unquote

from proxy.errors import Dialect, ProxyError
from proxy.owners import ID


class Handler(StrEnum):
    """Who answers a route."""

    ENGINE_JSON = "engine_json"  # forwarded; the model is in a JSON body
    ENGINE_FORM = "engine_form"  # forwarded; the model is a field of a multipart form
    REALTIME = "realtime"  # forwarded; a WebSocket, the model is in its first event or the query
    HEALTH = "health"
    MODELS = "models"
    MODEL = "model"
    STORED = "stored"  # forwarded to the replica that made a response and keeps it
    SERVER = "server"  # OPTIONS * and nothing else


class Prompt(StrEnum):
    """Where a JSON body has what the engine's prefix cache sees."""

    CHAT = "chat"  # messages
    COMPLETION = "completion"  # prompt
    RESPONSES = "responses"  # instructions, input
    MESSAGES = "messages"  # system, messages
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the allow-list."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    dialect: Dialect = Dialect.OPENAI
    prompt: Prompt = Prompt.NONE

    @property
    def allow(self) -> str:
        """The value of its Allow field."""
        return ", ".join(dict.fromkeys((*self.methods, "OPTIONS")))


@dataclass(frozen=True, slots=True)
class Match:
    """A request target that is on the list. ``argument`` is the {id} of its path.

    ``options``: only what the route allows is asked for.
    """

    route: Route
    argument: str = ""
    options: bool = False


def _engine(path: str, prompt: Prompt = Prompt.NONE, dialect: Dialect = Dialect.OPENAI) -> Route:
    return Route(path, ("POST",), Handler.ENGINE_JSON, dialect, prompt)


def _stored(suffix: str, *methods: str) -> Route:
    return Route(f"/v1/responses/{{id}}{suffix}", methods, Handler.STORED, Dialect.RESPONSES)


_MODEL = Route("/v1/models/{id}", ("GET", "HEAD"), Handler.MODEL)
_RESPONSE_PATH = re.compile(f"/v1/responses/({ID})(/cancel|/input_items)?")

ROUTES: tuple[Route, ...] = (
    _engine("/v1/chat/completions", Prompt.CHAT),
    _engine("/v1/completions", Prompt.COMPLETION),
    _engine("/v1/responses", Prompt.RESPONSES, Dialect.RESPONSES),
    _engine("/v1/messages", Prompt.MESSAGES, Dialect.ANTHROPIC),
    _engine("/v1/messages/count_tokens", dialect=Dialect.ANTHROPIC),
    _engine("/v1/embeddings"),
    _engine("/pooling"),
    _engine("/classify"),
    _engine("/score"),
    _engine("/v1/score"),
    _engine("/rerank"),
    _engine("/v1/rerank"),
    _engine("/v2/rerank"),
    _engine("/v2/embed"),
    _engine("/tokenize"),
    _engine("/detokenize"),
    Route("/v1/audio/transcriptions", ("POST",), Handler.ENGINE_FORM),
    Route("/v1/audio/translations", ("POST",), Handler.ENGINE_FORM),
    Route("/health", ("GET", "HEAD"), Handler.HEALTH),
    Route("/v1/models", ("GET", "HEAD"), Handler.MODELS),
    _MODEL,
    Route("/v1/realtime", ("GET",), Handler.REALTIME),
    _stored("", "GET", "DELETE"),
    _stored("/cancel", "POST"),
    _stored("/input_items", "GET"),
)

#: The target ``*``, which means the server and no resource of it; what it allows is what any route does.
_SERVER = Route("*", tuple(sorted({method for row in ROUTES for method in row.methods})), Handler.SERVER)

_EXACT: Mapping[str, Match] = MappingProxyType({row.path: Match(row) for row in ROUTES if "{" not in row.path})

_STORED = {row.path.partition("{id}")[2]: row for row in ROUTES if row.handler is Handler.STORED}


def match(method: str, target: str) -> Match:
    """Find the route of a raw request target (path and query as they came); raises ``ProxyError`` 404 or 405."""
    found = _EXACT.get(target)
    if found is not None and method in found.route.methods:
        return found
    if target == "*":
        return Match(_SERVER, options=True)
    path = target.partition("?")[0]
    found = _EXACT.get(path) or _with_argument(path)
    # A fragment or a non-ASCII byte does not belong in a request target, and would not be forwarded as it came.
    if found is None or "#" in target or not target.isascii():
        raise ProxyError(404, "unknown_url", f"Unknown request URL: {method} {path[:200]}")
    if method not in found.route.methods:
        if method == "OPTIONS":
            return Match(found.route, options=True)
        allow = found.route.allow
        message = f"{method} is not allowed on {found.route.path}, only {allow}"
        raise ProxyError(405, "method_not_allowed", message, headers=(("Allow", allow),))
    return found


def _with_argument(path: str) -> Match | None:
    if stored := _RESPONSE_PATH.fullmatch(path):
        return Match(_STORED[stored[2] or ""], stored[1])
    if path.startswith("/v1/models/") and len(path) > len("/v1/models/"):
        # Never forwarded, so decoding is safe: the id is only compared with the configured names.
        return Match(_MODEL, unquote(path[len("/v1/models/") :]))
    return None
