"""The development endpoints, there only with VLLM_SERVER_DEV_MODE=1. They take query parameters; bodies are ignored."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, ApiError, bad_request, internal_error, parse_json
from supervisord.simulator.engine import MODES, CallFailed
from supervisord.simulator.generation import EngineDead
from supervisord.simulator.sleep import Pause


def routes(api: Api) -> list[web.RouteDef]:
    handlers = Dev(api)
    return [
        web.post("/sleep", handlers.sleep),
        web.post("/wake_up", handlers.wake_up),
        web.get("/is_sleeping", handlers.is_sleeping),
        web.post("/collective_rpc", handlers.collective_rpc),
        web.post("/reset_prefix_cache", handlers.reset_prefix_cache),
        web.post("/pause", handlers.pause),
        web.post("/resume", handlers.resume),
        web.get("/is_paused", handlers.is_paused),
        web.post("/abort_requests", handlers.abort_requests),
        web.get("/server_info", handlers.server_info),
    ]


def _mode(request: web.Request) -> str:
    mode = request.query.get("mode", "abort")
    if mode not in MODES:
        raise bad_request(f"Invalid mode '{mode}': must be one of {', '.join(MODES)}", "mode")
    return mode


class Dev:
    """Control of the engine core."""

    def __init__(self, api: Api) -> None:
        self._api, self._engine = api, api.engine

    async def sleep(self, request: web.Request) -> web.Response:
        """Answers with the level that was asked for, even where nothing happened."""
        raw = request.query.get("level", "1")
        if raw not in ("0", "1", "2"):
            raise bad_request(f"Invalid level '{raw}': must be 0, 1 or 2", "level")
        mode = _mode(request)
        try:
            await self._engine.sleep(int(raw), mode)
        except (CallFailed, EngineDead) as error:
            raise internal_error(error) from None
        return web.json_response({"status": "sleeping", "level": int(raw)})

    async def wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", [])
        try:
            still = await self._engine.wake_up(tags or None)
        except (CallFailed, EngineDead) as error:
            raise internal_error(error) from None
        return web.json_response({"status": "sleeping" if still else "awake", "tags": tags or None})

    async def is_sleeping(self, _request: web.Request) -> web.Response:
        if slow := self._api.faults.take("slow-looks"):
            await self._api.clock.sleep(float(slow.arg or 1.0))
        try:
            return web.json_response({"is_sleeping": await self._engine.is_sleeping()})
        except EngineDead as error:
            raise internal_error(error) from None

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = parse_json(await request.read())
        method = body.get("method")
        if method is None:
            raise ApiError(400, "Bad Request", "Missing 'method' in request body")
        try:
            if method != "reload_weights":
                raise CallFailed(f"Call to {method} method failed: the simulator has no worker method '{method}'")
            await self._engine.reload_weights()
        except (CallFailed, EngineDead) as error:
            raise internal_error(error) from None
        return web.json_response({"results": [None]})

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        try:
            await self._engine.reset_prefix_cache()
        except EngineDead as error:
            raise internal_error(error) from None
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = _mode(request)
        clear = request.query.get("clear_cache", "true").lower() not in ("false", "0")
        try:
            await self._engine.pause(mode, clear)
        except EngineDead as error:
            raise internal_error(error) from None
        return web.json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        try:
            await self._engine.resume()
        except EngineDead as error:
            raise internal_error(error) from None
        return web.json_response({"status": "resumed"})

    async def is_paused(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._engine.state.pause is not Pause.NONE})

    async def abort_requests(self, request: web.Request) -> web.Response:
        ids = parse_json(await request.read()).get("request_ids")
        return web.json_response({"status": "aborted", "aborted": self._engine.abort(ids or None)})

    async def server_info(self, _request: web.Request) -> web.Response:
        options = self._api.options
        config: dict[str, Any] = {
            "model": options.model,
            "served_model_name": list(options.served_names),
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "enable_sleep_mode": options.sleep_mode,
            "simulated": True,
        }
        return web.json_response({"vllm_config": config})
