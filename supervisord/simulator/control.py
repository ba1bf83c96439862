"""/sim/...: what a test may do to the simulator and read from it. Answers whatever state the engine is in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from aiohttp import web

from supervisord.simulator.api import Api, bad_request, parse_json
from supervisord.simulator.faults import KNOWN, UnknownFault

#: Arms a fault: name, argument, count (None: until disarmed; 0: disarm).
Arm = Callable[[str, str, int | None], None]


def routes(api: Api, arm: Arm) -> list[web.RouteDef]:
    handlers = Control(api, arm)
    return [
        web.post("/sim/fault", handlers.fault),
        web.get("/sim/faults", handlers.faults),
        web.get("/sim/state", handlers.state),
        web.get("/sim/requests", handlers.requests),
    ]


class Control:
    """The simulator's own endpoints."""

    def __init__(self, api: Api, arm: Arm) -> None:
        self._api, self._arm = api, arm

    async def fault(self, request: web.Request) -> web.Response:
        """``{"name": ..., "arg": ..., "count": n}``: count defaults to 1, null means until disarmed, 0 disarms."""
        body = parse_json(await request.read())
        count = body.get("count", 1)
        if count is not None and not isinstance(count, int):
            raise bad_request("count must be a whole number or null", "count")
        arg = body.get("arg")
        try:
            self._arm(str(body.get("name")), "" if arg is None else str(arg), count)
        except UnknownFault as error:
            raise bad_request(str(error), "name") from None
        return web.json_response({"armed": self._api.faults.listing()})

    async def faults(self, _request: web.Request) -> web.Response:
        return web.json_response({"known": KNOWN, "armed": self._api.faults.listing()})

    async def requests(self, _request: web.Request) -> web.Response:
        return web.json_response({"requests": list(self._api.engine.counters.seen)})

    async def state(self, _request: web.Request) -> web.Response:
        return web.json_response(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Counts of everything, true at this moment (unlike /metrics)."""
        engine = self._api.engine
        counters, state = engine.counters, engine.state
        return {
            "simulated": True,
            "name": self._api.options.name,
            "pid": os.getpid(),
            "requests": dict(counters.requests),
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "finished": counters.finished,
            "aborted": counters.aborted,
            "disconnect_aborts": counters.disconnect_aborts,
            "garbage_answers": counters.garbage_answers,
            "sleeps": {str(level): n for level, n in counters.sleeps.items()},
            "noop_sleeps": counters.noop_sleeps,
            "wakes": dict(counters.wakes),
            "reloads": counters.reloads,
            "prefix_resets": counters.prefix_resets,
            "calls": list(counters.calls),
            "level": state.level,
            "is_sleeping": state.is_sleeping,
            "asleep": sorted(state.asleep),
            "weights": str(state.weights),
            "weights_whole": state.whole,
            "pause": str(state.pause),
            "dead": engine.dead,
            "cached_blocks": len(engine.cache),
            "memory": engine.memory(),
            "faults": self._api.faults.listing(),
        }
