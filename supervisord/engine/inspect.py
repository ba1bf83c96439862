"""Looking at an engine's processes from outside: whose socket, how much memory. Ties units to the readers of /proc."""

from __future__ import annotations

import asyncio

from supervisord.core.spec import ReplicaSpec
from supervisord.engine.cgroup import processes, unit_group
from supervisord.engine.memory import GpuMemory, MemoryReader, SimulatedMemory
from supervisord.engine.owner import Ownership, owner_of
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import Engine, ServiceManager, UnitError

#: Seconds that systemd has to tell a unit's main process: looks and sleeps do not wait for a bus that is away.
ASK_TIMEOUT = 2.0
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
            group = await self._group_of(spec)
            reader = GpuMemory(lambda: processes(group))
        return await reader.read(MEASURE_TIMEOUT)

    async def stranger(self, spec: ReplicaSpec) -> str | None:
        """Who listens on the endpoint in place of the unit's own process, in words; empty when nobody is known to.

        None where the unit's processes are not known: then everybody would be a stranger.
        """
        group = await self._group_of(spec)
        if group is None:
            return None
        owner = await owner_of(spec.endpoint, lambda: processes(group))
        return owner.detail if owner.ownership is Ownership.FOREIGN else ""

    async def _group_of(self, spec: ReplicaSpec) -> str | None:
        """The unit's control group; None where that is not known."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                (status,) = await self._manager.status([spec.unit])
        except (UnitError, TimeoutError):
            return None
        return await asyncio.to_thread(unit_group, spec.unit, status.main_pid)
