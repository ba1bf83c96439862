"""systemd as one supervisor process sees it: ``ports.ServiceManager`` over a bus that may be away, late, or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sim_loop import Process
from sim_systemd import Unit

from supervisord.core.readings import UnitStatus
from supervisord.ports import UnitError

if TYPE_CHECKING:
    from sim_world import World

#: How long a command waits for a manager that is off the bus. Seconds.
REACH_LIMIT = 30.0


class ManagerPort:
    """Implements ``ports.ServiceManager`` for ``process``."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._watched: dict[str, Callable[[UnitStatus], None]] = {}
        self._told: dict[str, UnitStatus] = {}
        #: Readings of one unit are told in the order in which they were made.
        self._next: dict[str, float] = {}
        self._lost: list[asyncio.Future[str]] = []

    async def start(self, unit: str) -> str:
        return await self._job(unit, "start")

    async def stop(self, unit: str) -> str:
        return await self._job(unit, "stop")

    async def restart(self, unit: str) -> str:
        return await self._job(unit, "restart")

    async def reset_failed(self, unit: str) -> None:
        await self._reach(unit)
        self._unit(unit).reset_failed()

    async def kill(self, unit: str, signal: int) -> None:
        await self._reach(unit)

    async def status(self, units: Sequence[str]) -> list[UnitStatus]:
        found = []
        for name in units:
            await self._reach(name)
            if self._world.choices.fault(name, "status", ("error",)):
                raise UnitError(name, "org.freedesktop.DBus.Error.NoReply", f"cannot read {name}: no reply")
            found.append(self._unit(name).status())
        return found

    async def last_lines(self, unit: str, count: int = 20) -> list[str]:
        slow = self._world.choices.fault(unit, "journal", ("slow", "empty"))
        await asyncio.sleep(8.0 if slow == "slow" else 0.01)
        return [] if slow else ["it said something"]

    async def _job(self, name: str, verb: str) -> str:
        world = self._world
        await self._reach(name)
        if not self._process.alive:
            world.fail("13", f"a killed supervisor asks for {verb} of {name}")
        unit = self._unit(name)
        if verb != "stop" and unit.load_state != "loaded":
            raise UnitError(name, "org.freedesktop.systemd1.NoSuchUnit", f"cannot {verb} {name}: {unit.load_state}")
        fault = world.choices.fault(name, "job", ("refused", "answer lost", "late"))
        if fault == "refused":
            raise UnitError(name, "org.freedesktop.DBus.Error.NoReply", f"cannot {verb} {name}: no reply")
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        latency = 3.0 if fault == "late" else world.choices.latency(f"{name} job", 0.001, 0.03)

        def done(outcome: str) -> None:
            if fault != "answer lost":
                world.later(latency, self._settle, result, outcome)

        self._lost = [future for future in self._lost if not future.done()]
        self._lost.append(result)
        world.at("job asked")
        world.commanded(unit, verb)
        getattr(unit, verb)(done)
        if fault == "answer lost":
            world.later(20.0, self._lose, result)
        outcome = await result
        if outcome == "lost":
            raise UnitError(name, "org.freedesktop.DBus.Error.Disconnected", f"cannot {verb} {name}: systemd is away")
        return outcome

    def _settle(self, result: asyncio.Future[str], outcome: str) -> None:
        if result.done():
            return
        if self._world.bus_away:
            self._world.later(self._world.bus_back - self._world.now + 0.01, self._settle, result, outcome)
        else:
            self._world.at("job done")
            result.set_result(outcome)

    def _lose(self, result: asyncio.Future[str]) -> None:
        if not result.done():
            result.set_result("lost")

    async def _reach(self, unit: str) -> None:
        await asyncio.sleep(self._world.choices.latency(f"{unit} systemd", 0.0005, 0.01))
        waited = 0.0
        while self._world.bus_away:
            pause = min(self._world.bus_back - self._world.now + 0.001, REACH_LIMIT - waited)
            if pause <= 0.0:
                raise UnitError(unit, "org.freedesktop.DBus.Error.Disconnected", "systemd is not on the bus")
            await asyncio.sleep(pause)
            waited += pause

    def _unit(self, name: str) -> Unit:
        return self._world.units[name]

    # --- readings ---

    def watch(self, units: Sequence[str], on_change: Callable[[UnitStatus], None]) -> None:
        self._watched = dict.fromkeys(units, on_change)
        self._told.clear()
        self.look_again()

    def look_again(self) -> None:
        for name in self._watched:
            self.unit_changed(self._world.units[name])

    def lose_jobs(self) -> None:
        """The connection broke: who waits for a job hears nothing of it any more."""
        lost, self._lost = self._lost, []
        for result in lost:
            self._lose(result)

    def unit_changed(self, unit: Unit) -> None:
        """Something about the unit is worth a reading; it is told some time later."""
        world = self._world
        if unit.name not in self._watched or not self._process.alive or world.bus_away:
            return
        fault = world.choices.fault(unit.name, "reading", ("late", "twice"))
        delay = 3.0 * world.choices.fraction(f"late {world.now}") if fault == "late" else 0.0
        when = world.now + delay + world.choices.latency(f"{unit.name} reading", 0.001, 0.06)
        when = self._next[unit.name] = max(when, self._next.get(unit.name, 0.0))
        reading = unit.status()
        world.later(when - world.now, self._tell, unit, reading, fault == "twice")

    def _tell(self, unit: Unit, reading: UnitStatus, again: bool) -> None:
        on_change = self._watched.get(unit.name)
        if on_change is None or not self._process.alive:
            return
        if self._world.bus_away:
            return  # everything is read again when it is back
        if again or self._told.get(unit.name) != reading:
            self._world.at("told")
            self._told[unit.name] = reading
            self._process.call_soon(on_change, reading)
