"""Doing what the core wants done: each action becomes one bounded task whose result is an event again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from supervisord.core.actions import (
    Action,
    Call,
    CallEngine,
    Persist,
    ProbeEngine,
    ReadLastLines,
    RunUnitJob,
    SaveFingerprint,
    TakeFingerprint,
    UnitVerb,
)
from supervisord.core.canary import Fingerprint
from supervisord.core.events import EngineAnswered, Event, Fingerprinted, LastLines, Persisted, Probed, UnitJobDone
from supervisord.core.readings import EngineState, Probe, UnitStatus
from supervisord.core.record import Record
from supervisord.core.spec import ModelSpec, ReplicaSpec
from supervisord.ports import Engine, EngineError, ServiceManager, UnitError
from supervisord.statedir import StateError

log = logging.getLogger(__name__)

_GONE = "the replica is no longer configured"
#: More than that of a unit's log is no explanation any more.
LAST_LINES = 20
#: Seconds for what a job's end is explained with: who waits for it must not wait for a bus that is away as well.
AFTERWARDS = 10.0


class RecordStore(Protocol):
    """Where records go."""

    async def save(self, name: str, record: Record | None) -> None: ...

    async def save_fingerprint(self, name: str, invocation: str, fingerprint: Fingerprint) -> None: ...


class MemoryMeter(Protocol):
    """How much GPU memory a replica holds, where that can be known."""

    async def gpu_bytes(self, spec: ReplicaSpec, engine: Engine, *, simulated: bool) -> int | None: ...


class OwnerCheck(Protocol):
    """Whether the process that listens on a replica's endpoint belongs to its unit."""

    async def stranger(self, spec: ReplicaSpec) -> str | None:
        """Who listens instead, in words; empty when nobody is known to, None when systemd cannot be asked now."""
        ...


class Effects:
    """Runs actions. Owns the tasks it starts and the engine clients, nothing else."""

    def __init__(
        self,
        manager: ServiceManager,
        store: RecordStore,
        engine_for: Callable[[ModelSpec, ReplicaSpec], Engine],
        memory: MemoryMeter,
        owner: OwnerCheck,
    ) -> None:
        self._manager, self._store, self._memory, self._owner = manager, store, memory, owner
        self._engine_for = engine_for
        self._engines: dict[str, tuple[ReplicaSpec, Engine]] = {}
        self._models: dict[str, ModelSpec] = {}
        #: What is under way, and the engine client that it uses.
        self._tasks: dict[asyncio.Task[None], Engine | None] = {}
        #: The last call of each replica.
        self._calls: dict[str, asyncio.Task[None]] = {}
        #: Clients that are closed when what they are used for is over.
        self._retired: list[Engine] = []
        self._report: Callable[[Event], None] = lambda event: None
        #: Replicas whose endpoint was seen to belong to their unit since its last start.
        self._known_owner: set[str] = set()
        self._simulated: set[str] = set()

    def report_to(self, dispatch: Callable[[Event], None]) -> None:
        """Where results go. Set once, before the first action."""
        self._report = dispatch

    def configure(self, models: Sequence[ModelSpec]) -> None:
        """One engine client per replica; those whose replica is gone or is asked otherwise now end with their calls."""
        replicas = replicas_of(models)
        before, self._models = self._models, {model.name: model for model in models}
        for name, (old, engine) in list(self._engines.items()):
            new = replicas.get(name)
            if new != old:
                self._known_owner.discard(name)
            if new is None or _asked(before, old) != _asked(self._models, new):
                del self._engines[name]
                self._retired.append(engine)
                self._spawn(self._retire(engine))
        for name, spec in replicas.items():
            kept = self._engines.get(name)
            self._engines[name] = (spec, kept[1] if kept else self._engine_for(self._models[spec.model], spec))

    def perform(self, action: Action) -> None:
        """Set one action going; returns at once."""
        match action:
            case RunUnitJob():
                self._spawn(self._unit_job(action))
            case CallEngine():
                # Nobody waits any more for the one before, which was of an operation that was given up.
                before = self._calls.get(action.replica)
                if before is not None and before is not asyncio.current_task():
                    before.cancel()
                self._calls[action.replica] = self._spawn(self._call(action), action.replica)
            case ProbeEngine():
                self._spawn(self._probe(action), action.replica)
            case Persist():
                self._spawn(self._persist(action))
            case TakeFingerprint():
                self._spawn(self._fingerprint(action), action.replica)
            case SaveFingerprint():
                self._spawn(self._save_fingerprint(action))
            case ReadLastLines():
                self._spawn(self._last_lines(action))
            case _:
                raise TypeError(f"not an effect: {action!r}")

    async def close(self) -> None:
        """Cancel what is under way and close the engine clients. Intents on disk tell the next daemon the rest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in (*self._retired, *(engine for _, engine in self._engines.values())):
            await engine.close()
        self._retired.clear()
        self._engines.clear()

    async def _retire(self, engine: Engine) -> None:
        """A call that is cut looks like an engine that failed, and would cost its unit a restart."""
        calls = [task for task, used in self._tasks.items() if used is engine]
        if calls:
            await asyncio.wait(calls)
        await engine.close()
        self._retired.remove(engine)

    def _spawn(self, work: Coroutine[Any, Any, None], replica: str = "") -> asyncio.Task[None]:
        """The one place where tasks begin: none is forgotten, and a defect in one is logged with its traceback."""
        task = asyncio.create_task(work)
        _, self._tasks[task] = self._engines.get(replica, (None, None))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            log.error("an effect failed in a way that nobody foresaw", exc_info=task.exception())

    # --- units ---

    async def _unit_job(self, action: RunUnitJob) -> None:
        self._known_owner.discard(action.replica)
        result, detail = "error", ""
        lines: tuple[str, ...] = ()
        try:
            async with asyncio.timeout(action.timeout):
                result = await self._run(action.unit, action.verb, counted=action.counted)
        except TimeoutError:
            result, detail = "timeout", f"no result after {action.timeout:g} s"
        except UnitError as error:
            detail = str(error)
        status = await self._status(action.unit)
        if result != "done":
            if not detail and status is not None:
                detail = _why(status, result)
            with suppress(TimeoutError):
                async with asyncio.timeout(AFTERWARDS):
                    lines = tuple(await self._manager.last_lines(action.unit, LAST_LINES))
        if action.op:
            self._report(UnitJobDone(action.replica, action.op, result, status, detail, lines))

    async def _run(self, unit: str, verb: UnitVerb, *, counted: bool) -> str:
        if verb is UnitVerb.STOP:
            return await self._manager.stop(unit)
        if not counted:
            # A unit over its start limit refuses every start until it is reset, and systemd counts those that went
            # well, too: an engine that is stopped whenever it is idle would be refused in the end.
            await self._manager.reset_failed(unit)
        return await (self._manager.start(unit) if verb is UnitVerb.START else self._manager.restart(unit))

    async def _status(self, unit: str) -> UnitStatus | None:
        try:
            async with asyncio.timeout(AFTERWARDS):
                (status,) = await self._manager.status([unit])
        except (UnitError, TimeoutError) as error:
            log.warning("cannot read %s: %s", unit, str(error) or f"no answer in {AFTERWARDS:g} s")
            return None
        return status

    async def _last_lines(self, action: ReadLastLines) -> None:
        lines = await self._manager.last_lines(action.unit, LAST_LINES)
        self._report(LastLines(action.replica, tuple(lines)))

    # --- engines ---

    async def _call(self, action: CallEngine) -> None:
        if action.replica not in self._engines:
            self._report(EngineAnswered(action.replica, action.op, _GONE))
            return
        spec, engine = self._engines[action.replica]
        simulated = action.replica in self._simulated
        before = after = None
        error = ""
        try:
            match action.call:
                case Call.SLEEP:
                    # Whatever the measuring takes: nobody must fall asleep when the core does not wait for it any more.
                    until = asyncio.get_running_loop().time() + action.timeout
                    before = await self._memory.gpu_bytes(spec, engine, simulated=simulated)
                    left = until - asyncio.get_running_loop().time()
                    if left <= 0:
                        raise EngineError("cannot sleep: measuring its memory took all the time that there was")
                    await engine.sleep(action.level, left)
                    after = await self._memory.gpu_bytes(spec, engine, simulated=simulated)
                case Call.WAKE_UP:
                    await engine.wake_up(action.tags, action.timeout)
                case Call.RELOAD_WEIGHTS:
                    await engine.reload_weights(action.timeout)
                case Call.RESET_PREFIX_CACHE:
                    await engine.reset_prefix_cache(action.timeout)
        except EngineError as failure:
            error = str(failure)
        self._report(EngineAnswered(action.replica, action.op, error, before, after))

    async def _probe(self, action: ProbeEngine) -> None:
        if action.replica not in self._engines:
            if action.verify:  # a sequence waits for it; other looks would take it for a fault
                self._report(Probed(action.replica, action.op, Probe(EngineState.UNREACHABLE, _GONE)))
            return
        spec, engine = self._engines[action.replica]
        if action.verify:
            self._report(Probed(action.replica, action.op, await engine.verify(action.timeout)))
            return
        probe = await engine.probe(action.timeout)
        if probe.state in (EngineState.AWAKE, EngineState.ASLEEP):
            if probe.simulated:
                self._simulated.add(action.replica)
            else:
                self._simulated.discard(action.replica)
            if action.replica not in self._known_owner:
                stranger = await self._owner.stranger(spec)
                if stranger:
                    probe = Probe(EngineState.WRONG_MODEL, stranger)
                elif stranger is not None:
                    self._known_owner.add(action.replica)
        else:
            self._known_owner.discard(action.replica)
        self._report(Probed(action.replica, action.op, probe))

    async def _fingerprint(self, action: TakeFingerprint) -> None:
        if action.replica not in self._engines:
            self._report(Fingerprinted(action.replica, action.op, None, _GONE))
            return
        _, engine = self._engines[action.replica]
        seen, error = None, ""
        try:
            seen = await engine.fingerprint(action.timeout)
        except EngineError as failure:
            error = str(failure)
        self._report(Fingerprinted(action.replica, action.op, seen, error))

    # --- disk ---

    async def _save_fingerprint(self, action: SaveFingerprint) -> None:
        try:
            await self._store.save_fingerprint(action.replica, action.invocation, action.fingerprint)
        except StateError as failure:
            # Without it the daemon after us takes a new one, as at a first readiness.
            log.warning("the fingerprint of %s is not kept: %s", action.replica, failure)

    async def _persist(self, action: Persist) -> None:
        error = ""
        try:
            await self._store.save(action.replica, action.record)
        except StateError as failure:
            error = str(failure)
        self._report(Persisted(action.replica, action.op, error))


def _why(status: UnitStatus, result: str) -> str:
    """What systemd knows about a job that did not end well, in words."""
    if status.load_state in ("not-found", "masked", "bad-setting", "error"):
        return f"the unit is {status.load_state}"
    text = f"systemd says '{result}'"
    if status.result != "success":
        text += f", the unit ended with '{status.result}'"
    if status.exec_main_status:
        text += f", status {status.exec_main_status}"
    if status.status_text:
        text += f" ({status.status_text})"
    return text


def _asked(models: Mapping[str, ModelSpec], spec: ReplicaSpec) -> tuple[object, ...]:
    """All that a replica's client is made of."""
    model = models.get(spec.model)
    return spec.endpoint, spec.bundled, spec.model, model.serve if model is not None else None


def replicas_of(models: Iterable[ModelSpec]) -> dict[str, ReplicaSpec]:
    """Every replica of ``models`` by name."""
    return {replica.name: replica for model in models for replica in model.replicas}
