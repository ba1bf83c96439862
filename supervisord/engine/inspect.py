"""Looking at an engine's processes from outside: whose socket, how much memory. Ties units to the readers of /proc."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from supervisord.core.spec import ReplicaSpec
from supervisord.engine.cgroup import processes, unit_group
from supervisord.engine.memory import GpuMemory, MemoryReader, SimulatedMemory
from supervisord.engine.owner import Ownership, owner_of
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import Engine, ServiceManager, UnitError

#: Seconds that one measurement of memory may take; a wedged driver must not hold up a sleep for long.
MEASURE_TIMEOUT = 10.0


class ProcessInspector:
    """Answers the two questions for any replica; asks systemd for the unit's main process each time."""

    def __init__(self, manager: ServiceManager) -> None:
        self._manager = manager

    async def gpu_bytes(self, spec: ReplicaSpec, engine: Engine, *, simulated: bool) -> int | None:
        """Bytes of GPU memory that the replica holds; None where that cannot be measured."""
        reader: MemoryReader
        if simulated and isinstance(engine, VllmEngine):
            reader = SimulatedMemory(engine)
        else:
            reader = GpuMemory(await self._processes_of(spec))
        return await reader.read(MEASURE_TIMEOUT)

    async def stranger(self, spec: ReplicaSpec) -> str:
        """Who listens on the endpoint in place of the unit's own process, in words; empty when nobody is known to."""
        owner = await owner_of(spec.endpoint, await self._processes_of(spec))
        return owner.detail if owner.ownership is Ownership.FOREIGN else ""

    async def _processes_of(self, spec: ReplicaSpec) -> Callable[[], Iterable[int]]:
        try:
            (status,) = await self._manager.status([spec.unit])
        except UnitError:
            return lambda: ()
        group = await asyncio.to_thread(unit_group, spec.unit, status.main_pid)
        return lambda: processes(group) if group else ()
