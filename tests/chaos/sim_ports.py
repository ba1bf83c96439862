"""The engine as one supervisor process sees it: ``ports.Engine``, the memory meter and the owner check."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim_engine import CALL_FAULTS, Request
from sim_loop import Process
from sim_systemd import Unit

from proxy.exchange import ConnectFailed, LocalFault, NoFirstByte, UpstreamBroken
from proxy.http.headers import own_head
from supervisord.core.actions import Call
from supervisord.core.canary import Fingerprint
from supervisord.core.readings import EngineState, Probe
from supervisord.core.spec import ReplicaSpec
from supervisord.ports import EngineError, UnitError

if TYPE_CHECKING:
    from sim_world import World

PROBE_FAULTS = ("slow", "hung", "refused", "broken", "says awake", "says asleep", "other model")
REQUEST_FAULTS = ("refused", "reset", "broken", "no descriptors", "slow")
#: What every KV cache holds: three long conversations at their first turn, and fewer later.
KV_TOKENS = 100_000
#: Bytes of GPU memory, awake and asleep.
AWAKE_BYTES, ASLEEP_BYTES = 30 << 30, 1 << 30
_STATES = {"refused": EngineState.UNREACHABLE, "broken": EngineState.BROKEN, "other model": EngineState.WRONG_MODEL}


class EnginePort:
    """Implements ``ports.Engine`` for ``process``."""

    def __init__(self, unit: Unit, process: Process) -> None:
        self.unit, self._process = unit, process
        self._world = unit.world
        self._calls = 0

    async def probe(self, timeout: float) -> Probe:
        unit, world = self.unit, self._world
        fault = world.choices.fault(unit.name, "probe", PROBE_FAULTS)
        latency = world.choices.latency(f"{unit.name} probe", 0.002, 0.05)
        engine = unit.engine
        if engine is not None and len(engine.requests) > 30:
            latency *= 40.0  # a busy engine answers late
        if fault == "slow":
            latency = timeout * 0.99
        if fault == "hung" or latency >= timeout:
            return await self._too_late(timeout)
        await asyncio.sleep(latency)
        if fault in _STATES:
            return self._said(Probe(_STATES[fault], fault))
        engine = unit.engine
        if engine is None or engine.dead or not engine.listening:
            return self._said(Probe(EngineState.UNREACHABLE, "connection refused"))
        if engine.hung:
            return await self._too_late(timeout - latency)
        asleep = {"says awake": False, "says asleep": True}.get(fault, engine.asleep)
        state = EngineState.ASLEEP if asleep else EngineState.AWAKE
        probe = Probe(state, "", (unit.names[-1],), 4096, KV_TOKENS, can_sleep=unit.can_sleep, simulated=True)
        return self._said(probe)

    async def verify(self, timeout: float) -> Probe:
        return await self.probe(timeout)

    async def _too_late(self, timeout: float) -> Probe:
        await asyncio.sleep(timeout)
        return self._said(Probe(EngineState.HUNG, f"no answer in {timeout:g} s"))

    def _said(self, probe: Probe) -> Probe:
        self.unit.said_before, self.unit.said = self.unit.said, probe.state
        return probe

    async def sleep(self, level: int, timeout: float) -> None:
        await self._call(Call.SLEEP, timeout, level=level)

    async def wake_up(self, tags: Sequence[str], timeout: float) -> None:
        await self._call(Call.WAKE_UP, timeout, tags=tuple(tags))

    async def reload_weights(self, timeout: float) -> None:
        await self._call(Call.RELOAD_WEIGHTS, timeout)

    async def reset_prefix_cache(self, timeout: float) -> None:
        await self._call(Call.RESET_PREFIX_CACHE, timeout)

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        """A request of the supervisor's own: what it answers is compared, never shown to anybody."""
        unit, world = self.unit, self._world
        fault = world.choices.fault(unit.name, "canary", ("error", "no answer", "slow"))
        await asyncio.sleep(
            world.choices.latency(f"{unit.name} canary", 0.01, 0.5) * (50.0 if fault == "slow" else 1.0)
        )
        engine = unit.engine
        if fault == "error" or engine is None or engine.dead or not engine.listening:
            raise EngineError("fingerprint: connection refused")
        if fault == "no answer" or engine.blocked:
            await asyncio.sleep(timeout)
            raise EngineError(f"fingerprint: no answer in {timeout:g} s")
        return Fingerprint(("whole" if engine.whole else "garbage",), (-0.1,)) if unit.answers_canary else None

    async def close(self) -> None:
        if self._calls and self._process.alive:
            self._world.fail("12", f"a call to {self.unit.name} is cut by a reload")

    async def _call(self, call: Call, timeout: float, *, level: int = 0, tags: tuple[str, ...] = ()) -> None:
        unit, world = self.unit, self._world
        fault = world.choices.fault(unit.name, str(call), CALL_FAULTS)
        if not self._process.alive:
            world.fail("13", f"a killed supervisor calls {call} of {unit.name}")
        if self._calls:
            world.fail("1", f"{call} of {unit.name} while another call is under way")
        world.at("call asked")
        travel = world.choices.latency(f"{unit.name} call", 0.001, 0.02)
        if fault == "refused":
            await asyncio.sleep(travel)
            raise EngineError("connection refused")
        takes = world.choices.latency(f"{unit.name} {call}", unit.call_seconds / 4, unit.call_seconds)
        if fault == "late":
            takes += timeout * 1.2
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def reply(error: str | None) -> None:
            if error is not None and not done.done():
                done.set_result(error)
                world.at("call done")

        world.later(travel, self._arrive, call, level, tags, fault, takes, reply)
        self._calls += 1
        try:
            async with asyncio.timeout(timeout):
                error = await done
        except TimeoutError:
            error = f"no answer in {timeout:g} s"
        finally:
            self._calls -= 1
        world.at("answer")
        if error:
            raise EngineError(f"{call}: {error}")

    def _arrive(self, call: Call, level: int, tags: tuple[str, ...], fault: str, takes: float, reply) -> None:
        self._world.at("call arrives")
        engine = self.unit.engine
        if engine is None:
            reply("connection refused")
        else:
            engine.check_call(self._process, call, level)
            engine.call(call, level, tags, fault, takes, reply)


class Meter:
    """Memory as nvidia-smi tells it, when it tells it; and who listens, as /proc tells it."""

    def __init__(self, world: World, manager) -> None:
        self._world, self._manager = world, manager

    async def gpu_bytes(self, spec: ReplicaSpec, engine: EnginePort, *, simulated: bool) -> int | None:
        unit = engine.unit
        fault = self._world.choices.fault(unit.name, "memory", ("unknown", "too much", "slow"))
        await asyncio.sleep(3.0 if fault == "slow" else 0.003)
        if fault == "unknown" or unit.engine is None or not unit.measured:
            return None
        small = unit.engine.asleep and not unit.engine.memory_kept and fault != "too much"
        return ASLEEP_BYTES if small else AWAKE_BYTES

    async def stranger(self, spec: ReplicaSpec) -> str:
        try:
            await self._manager.status([spec.unit])
        except UnitError:
            return ""
        return self._world.choices.fault(spec.unit, "owner", ("somebody else listens",))


class UpstreamPort:
    """The proxy's way to the engines."""

    def __init__(self, world: World, process: Process, first_byte_timeout: float) -> None:
        self._world, self._process, self._first_byte_timeout = world, process, first_byte_timeout

    async def send(self, lease, exchange) -> AnswerPort:
        world = self._world
        unit = world.unit_at(lease.endpoint)
        fault = world.choices.fault(unit.name, "request", REQUEST_FAULTS)
        await asyncio.sleep(world.choices.latency(f"{unit.name} connect", 0.0002, 0.005))
        if fault and unit.engine is not None:
            unit.engine.judge(fault=True)
        if fault == "no descriptors":
            raise LocalFault("too many open files")
        engine = unit.engine
        if fault == "refused" or engine is None or engine.dead or not engine.listening:
            raise ConnectFailed("connection refused")
        loop = asyncio.get_running_loop()
        first: asyncio.Future[str] = loop.create_future()
        end: asyncio.Future[str] = loop.create_future()

        def tell(future: asyncio.Future[str]):
            return lambda error: None if future.done() else future.set_result(error)

        client = exchange.client
        first_after = client.first_after * (100.0 if fault == "slow" else 1.0)
        request = Request(self._process, first_after, client.length, tell(first), tell(end))
        if fault in ("reset", "broken"):
            world.later(client.length * 0.5, engine.reset, request)
        engine.take(request)
        answer = AnswerPort(engine, request, first, end, stream=client.stream)
        if client.stream:
            return answer  # vLLM sends the head of a stream before any work
        try:
            async with asyncio.timeout(self._first_byte_timeout):
                error = await first
        except TimeoutError:
            engine.drop(request)
            raise NoFirstByte("no byte") from None
        except BaseException:
            engine.drop(request)
            raise
        if error:
            raise ConnectFailed(error)
        return answer


class AnswerPort:
    """A response whose head has come."""

    poured, tail, ending = 6, b"a\n\n", b"data: a\n\n"

    def __init__(
        self, engine, request: Request, first: asyncio.Future[str], end: asyncio.Future[str], *, stream: bool
    ) -> None:
        self._engine, self._request, self._first, self._end = engine, request, first, end
        kind = "text/event-stream" if stream else "application/json"
        self.head = own_head(200, "OK", [("Content-Type", kind)], None if stream else 6)

    @property
    def beginning(self) -> bytes:
        return self.ending if self._first.done() and not self._first.result() else b""

    def accept(self) -> None:
        pass

    def at_hand(self) -> None:
        """It comes later."""

    async def begins(self) -> None:
        await self._reach(self._first)

    async def read(self, limit: int) -> bytes:
        await self._reach(self._end)
        return b"answer"

    async def pour(self, client) -> None:
        await self._reach(self._first)
        await self._reach(self._end)

    async def _reach(self, future: asyncio.Future[str]) -> None:
        # wait() rather than await: a time limit around this must not cancel what the engine still answers.
        await asyncio.wait((future,))
        if future.result():
            raise UpstreamBroken(future.result())

    def close(self) -> None:
        self._engine.drop(self._request)
