"""The HTTP application: every route, and what happens to every request and answer."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from supervisord.simulator import anthropic, audio, control, dev, openai, pooling, realtime, responses
from supervisord.simulator.api import Api, ApiError
from supervisord.simulator.log import EngineLog

VERSION = "0.33.0+simulated"
#: vLLM bounds no body (aiohttp would, at 1 MiB).
NO_LIMIT = 1 << 50
#: What --api-key guards; nothing else is.
GUARDED = ("/v1", "/v2", "/inference", "/cohere")


def build(api: Api, log: EngineLog, arm: control.Arm) -> web.Application:
    """``arm``: how /sim/fault arms a fault."""
    application = web.Application(middlewares=[_counting(api), _errors(log), _api_key(api)], client_max_size=NO_LIMIT)
    application.add_routes(_basic(api))
    for dialect in (openai, pooling, *((anthropic, responses, audio, realtime) if api.options.generates else ())):
        application.add_routes(dialect.routes(api))
    if api.options.dev_mode:
        application.add_routes(dev.routes(api))
    application.add_routes(control.routes(api, arm))
    application.on_response_prepare.append(_signature(api, log))
    return application


def _basic(api: Api) -> list[web.RouteDef]:
    options, engine = api.options, api.engine

    async def health(_request: web.Request) -> web.Response:
        """200 whatever the engine does (asleep, hung) as long as it is not known to be dead."""
        dead = engine.dead and api.faults.armed("lie-health") is None
        return web.Response(status=503 if dead else 200)

    async def version(_request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def metrics(_request: web.Request) -> web.Response:
        blocks = max(1, options.kv_tokens // options.block_size)
        page = engine.metrics.render(options.served_names[0], engine.state.level, blocks, options.block_size)
        return web.Response(text=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return [
        web.get("/health", health),
        web.route("GET", "/ping", health),
        web.post("/ping", health),
        web.get("/version", version),
        web.get("/metrics", metrics),
    ]


def _counting(api: Api) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        api.engine.counters.requests[f"{request.method} {request.path}"] += 1
        api.handling += 1
        api.quiet.clear()
        try:
            return await handler(request)
        finally:
            api.handling -= 1
            if not api.handling:
                api.quiet.set()

    return middleware


def _errors(log: EngineLog) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return _answer(request, error)
        except web.HTTPException as error:
            if error.status == HTTPStatus.NOT_FOUND and request.headers.get("Upgrade", "").lower() == "websocket":
                return web.Response(status=HTTPStatus.FORBIDDEN)  # what a WebSocket without a route is answered
            phrase = HTTPStatus(error.status).phrase
            body = {"error": {"message": phrase, "type": phrase, "param": None, "code": error.status}}
            return web.json_response(body, status=error.status)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # A body of the right outline with something odd inside; the real engine's validation says 400 too.
            log.error("serving.py", f"cannot make sense of {request.method} {request.path}: {error!r}")
            return _answer(request, ApiError(400, "Bad Request", f"invalid request: {error!r}", in_validation=True))

    return middleware


def _answer(request: web.Request, error: ApiError) -> web.Response:
    body = error.body()
    if request.path.startswith("/v1/messages") and not error.in_validation:
        body = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
    headers = {"Retry-After": error.retry_after} if error.retry_after else None
    return web.json_response(body, status=error.status, headers=headers)


def _api_key(api: Api) -> Middleware:
    keys = api.options.api_keys

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys and request.method != "OPTIONS" and request.path.startswith(GUARDED):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not any(secrets.compare_digest(token.encode(), k.encode()) for k in keys):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return middleware


def _signature(api: Api, log: EngineLog) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Every answer says that it is simulated, and leaves uvicorn's line in the log."""

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "vllm-simulator (simulated)"
        response.headers["x-simulated"] = "1"
        if api.options.request_id_headers:
            response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        if api.options.access_log:
            peer = request.transport.get_extra_info("peername") if request.transport else None
            where = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
            phrase = HTTPStatus(response.status).phrase
            log.uvicorn(f'{where} - "{request.method} {request.path_qs} HTTP/1.1" {response.status} {phrase}')

    return prepare
