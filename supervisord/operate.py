"""The control face: operators' commands carried to the dispatcher, their ends turned into answers or errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from supervisord.control import ControlError, ErrorCode, Failover, Verb
from supervisord.core.actions import CommandFailure
from supervisord.core.admission import Explanation
from supervisord.core.states import Hold, Life
from supervisord.core.view import FleetView, ModelView
from supervisord.loop import Dispatcher

_CODES = {
    CommandFailure.SUPERSEDED: ErrorCode.SUPERSEDED,
    CommandFailure.HELD: ErrorCode.HELD,
    CommandFailure.SLEEP_UNSUPPORTED: ErrorCode.SLEEP_UNSUPPORTED,
    CommandFailure.SLEEP_FAILED: ErrorCode.SLEEP_FAILED,
    CommandFailure.WAKE_FAILED: ErrorCode.WAKE_FAILED,
    CommandFailure.START_FAILED: ErrorCode.START_FAILED,
    CommandFailure.STOP_FAILED: ErrorCode.STOP_FAILED,
    CommandFailure.UNIT_MISSING: ErrorCode.UNIT_MISSING,
    CommandFailure.SHUTTING_DOWN: ErrorCode.SHUTTING_DOWN,
    CommandFailure.INSUFFICIENT_MEMORY: ErrorCode.START_FAILED,
    CommandFailure.GONE: ErrorCode.NO_SUCH_REPLICA,
}


class Operator:
    """Implements ``Control``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        reload: Callable[[], Awaitable[Sequence[str]]],
        explain: Callable[[str, str, bytes], Explanation],
    ) -> None:
        """``explain``: what a request of a model, at a path, with a body, would be told (see ``Control``)."""
        self._dispatcher = dispatcher
        self._reload = reload
        self._explain = explain
        self._failover_listeners: list[Callable[[Failover], None]] = []

    def view(self) -> FleetView:
        return self._dispatcher.view()

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        return self._dispatcher.subscribe(on_change)

    def subscribe_failovers(self, on_failover: Callable[[Failover], None]) -> Callable[[], None]:
        self._failover_listeners.append(on_failover)
        return lambda: self._failover_listeners.remove(on_failover)

    def failed_over(self, failover: Failover) -> None:
        """The proxy moved a request to another replica."""
        for listener in self._failover_listeners:
            listener(failover)

    async def command_replica(self, replica: str, verb: Verb, level: int = 0) -> None:
        if replica not in {r.name for r in self.view().replicas}:
            raise ControlError(ErrorCode.NO_SUCH_REPLICA, f"there is no replica named {replica}")
        _check_level(verb, level)
        answer = await self._dispatcher.command(replica, verb, level)
        if answer.failure is not None:
            raise ControlError(_CODES[answer.failure], answer.message)

    async def command_model(self, model: str, verb: Verb, level: int = 0) -> None:
        """Every replica of the model at once; a restart goes one by one, so that the others answer meanwhile."""
        found = self._find(model)
        _check_level(verb, level)
        if verb is Verb.RESTART:
            await self._restart_one_by_one(found)
            return
        targets = self._resting_left_alone(found, verb)
        results = await asyncio.gather(
            *(self.command_replica(replica, verb, level) for replica in targets), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) == 1 or any(not isinstance(error, ControlError) for error in errors):
            raise next((e for e in errors if not isinstance(e, ControlError)), errors[0])
        if errors:
            first = errors[0]
            assert isinstance(first, ControlError)
            raise ControlError(first.code, "; ".join(str(error) for error in errors))

    def explain_route(self, model: str, route: str, body: bytes) -> Explanation:
        return self._explain(self._find(model).name, route, body)

    async def reload(self) -> Sequence[str]:
        return await self._reload()

    def _find(self, name: str) -> ModelView:
        for model in self.view().models:
            if name == model.name or name in model.aliases:
                return model
        raise ControlError(ErrorCode.NO_SUCH_MODEL, f"there is no model named {name}")

    async def _restart_one_by_one(self, model: ModelView) -> None:
        by_name = {r.name: r for r in self.view().replicas}
        up = [n for n in model.replicas if by_name[n].state not in (Life.STOPPED,) and by_name[n].hold is not Hold.DOWN]
        if not up:
            held = any(by_name[n].hold is Hold.DOWN for n in model.replicas)
            code, why = (ErrorCode.HELD, "is held down") if held else (ErrorCode.START_FAILED, "is stopped")
            raise ControlError(code, f"model {model.name} {why}: there is nothing to restart ('up' starts it)")
        for done, name in enumerate(up):
            try:
                await self.command_replica(name, Verb.RESTART)
            except ControlError as error:
                rest = ", ".join(up[done + 1 :])
                left = f"; not restarted: {rest}" if rest else ""
                raise ControlError(error.code, f"{error}{left}") from None

    def _resting_left_alone(self, model: ModelView, verb: Verb) -> list[str]:
        """A model's sleep is for the replicas that are up: a stopped one has given back more already."""
        by_name = {r.name: r for r in self.view().replicas}
        if verb is not Verb.SLEEP:
            return list(model.replicas)
        up = [n for n in model.replicas if by_name[n].state not in (Life.STOPPED, Life.FAILED, Life.STOPPING)]
        return up or list(model.replicas)


def _check_level(verb: Verb, level: int) -> None:
    if verb is Verb.SLEEP and level not in (1, 2):
        raise ControlError(ErrorCode.INVALID_ARGUMENT, f"the sleep level must be 1 or 2, not {level}")
