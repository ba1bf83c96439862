"""One replica under the real core, effects, state directory and control client; only systemd is not there.

Its unit counts as running all the time. A restart of it ends nothing: it is only noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from supervisord.core.actions import Answer, Note
from supervisord.core.admission import Candidate, Choice, Ending, Lease, Wait
from supervisord.core.events import Configured, UnitChanged
from supervisord.core.readings import UnitStatus
from supervisord.core.spec import IdleLadder, ModelSpec, ReplicaSpec, SupervisorSpec, WakeLimits
from supervisord.core.verbs import Verb
from supervisord.effects import Effects
from supervisord.engine.vllm import VllmEngine
from supervisord.loop import Dispatcher
from supervisord.statedir import StateDir

INVOCATION = "0123456789abcdef0123456789abcdef"
UNIT = "engine.service"
NEVER_IDLE = IdleLadder()


class RunningUnit:
    """Implements ``ports.ServiceManager`` for one unit."""

    def __init__(self) -> None:
        self.jobs: list[str] = []

    async def start(self, unit: str) -> str:
        self.jobs.append("start")
        return "done"

    async def stop(self, unit: str) -> str:
        self.jobs.append("stop")
        return "done"

    async def restart(self, unit: str) -> str:
        self.jobs.append("restart")
        return "done"

    async def reset_failed(self, unit: str) -> None:
        pass

    async def kill(self, unit: str, signal: int) -> None:
        pass

    async def status(self, units: Sequence[str]) -> list[UnitStatus]:
        return [UnitStatus(unit, "loaded", "active", "running", INVOCATION) for unit in units]

    def watch(self, units: Sequence[str], on_change: Callable[[UnitStatus], None]) -> None:
        pass

    async def last_lines(self, unit: str, count: int = 20) -> list[str]:
        return []


class Unknown:
    """Implements ``MemoryMeter`` and ``OwnerCheck``: nothing is known."""

    async def gpu_bytes(self, spec: ReplicaSpec, engine: object, *, simulated: bool) -> int | None:
        return None

    async def stranger(self, spec: ReplicaSpec) -> str:
        return ""


class Supervised:
    """What a daemon is to its one replica."""

    def __init__(self, dispatcher: Dispatcher, unit: RunningUnit, notes: list[Note]) -> None:
        self.unit, self.notes = unit, notes
        self.dispatcher = dispatcher

    async def lease(self) -> Lease:
        """What a client's request waits for; it is given back at once."""
        answer = self.dispatcher.admit("m", self._first)
        if isinstance(answer, Wait):
            answer = await answer.outcome
        assert isinstance(answer, Lease), answer
        self.dispatcher.finish(answer, Ending.COMPLETED)
        return answer

    async def sleep(self, level: int) -> Answer:
        return await self.dispatcher.command("r", Verb.SLEEP, level)

    @staticmethod
    def _first(candidates: Sequence[Candidate]) -> Choice:
        return Choice(candidates[0].name, "only")


@asynccontextmanager
async def supervised(
    endpoint: str, state_dir: Path, *, canary: bool, idle: IdleLadder = NEVER_IDLE
) -> AsyncIterator[Supervised]:
    """A daemon's life, from its reading of the state directory to its end."""
    unit, notes = RunningUnit(), []
    state = StateDir.open(state_dir)
    effects = Effects(unit, state, lambda model, spec: VllmEngine(spec.endpoint), Unknown(), Unknown())
    dispatcher = Dispatcher(effects.perform, notes.append)
    effects.report_to(dispatcher.dispatch)
    adopted = asyncio.Event()
    dispatcher.subscribe(lambda: adopted.set() if dispatcher.adopted() else None)
    try:
        replica = ReplicaSpec("r", "m", UNIT, endpoint)
        models = (ModelSpec("m", (replica,), idle=idle, wake=WakeLimits(canary=canary)),)
        effects.configure(models)
        kept = (tuple(state.load().items()), tuple(state.load_fingerprints({"r"})))
        dispatcher.dispatch(Configured(models, SupervisorSpec(), *kept))
        (status,) = await unit.status([UNIT])
        dispatcher.dispatch(UnitChanged("r", status))
        await adopted.wait()
        yield Supervised(dispatcher, unit, notes)
    finally:
        dispatcher.close()
        await effects.close()
        state.close()
