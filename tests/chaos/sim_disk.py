"""A simulated state directory: one write after the other, each either done or not, however the daemon ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim_loop import Process

from supervisord.core.canary import Fingerprint
from supervisord.core.record import Record
from supervisord.statedir import StateError

if TYPE_CHECKING:
    from sim_world import World


class Disk:
    """What survives."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, object]] = {}
        self._fingerprints: dict[str, tuple[str, Fingerprint]] = {}
        self.full = False

    def get(self, name: str) -> Record | None:
        stored = self._records.get(name)
        return Record.from_json(stored) if stored is not None else None

    def put(self, name: str, record: Record | None) -> None:
        if record is None:
            self._records.pop(name, None)
        else:
            self._records[name] = record.to_json()

    def put_fingerprint(self, name: str, invocation: str, fingerprint: Fingerprint) -> None:
        self._fingerprints[name] = (invocation, fingerprint)

    def fingerprint_of(self, name: str, invocation: str) -> Fingerprint | None:
        """The one that was taken in this run."""
        of, fingerprint = self._fingerprints.get(name, ("", None))
        return fingerprint if of == invocation else None

    def load_fingerprints(self) -> list[tuple[str, str, Fingerprint]]:
        return [(name, of, fingerprint) for name, (of, fingerprint) in self._fingerprints.items()]

    def load(self) -> dict[str, Record]:
        return {name: Record.from_json(stored) for name, stored in self._records.items()}


class StorePort:
    """Implements ``effects.RecordStore`` for ``process``."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._free_at = 0.0

    async def save(self, name: str, record: Record | None) -> None:
        await self._queue(name, "disk", lambda: self._world.disk.put(name, record))

    async def save_fingerprint(self, name: str, invocation: str, fingerprint: Fingerprint) -> None:
        await self._queue(name, "canary file", lambda: self._world.disk.put_fingerprint(name, invocation, fingerprint))

    async def _queue(self, name: str, what: str, write: Callable[[], None]) -> None:
        world = self._world
        fault = world.choices.fault(world.unit_of(name), what, ("full", "flush fails", "slow", "stuck"))
        if fault:
            world.choices.blame[""] = world.now  # whoever writes next waits for this one
        takes = {"slow": 4.0, "stuck": 40.0}.get(fault, world.choices.latency("disk", 0.0005, 0.02))
        begin = max(world.now, self._free_at)
        self._free_at = begin + takes
        world.at("write asked")
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The write reaches the disk somewhere within its time, so that a kill finds it done or not.
        written = begin + takes * world.choices.fraction(f"written {begin}")
        world.later(written - world.now, self._write, write, fault, done)
        world.later(self._free_at - world.now, lambda: done.done() or done.set_result(""))
        error = await done
        if error:
            raise StateError(error)

    def _write(self, write: Callable[[], None], fault: str, done: asyncio.Future[str]) -> None:
        if not self._process.alive:
            return  # the queue died with its process
        if fault == "full" or self._world.disk.full:
            done.set_result("cannot save: no space left on device")
            return
        write()
        self._world.at("written")
        if fault == "flush fails":
            done.set_result("cannot save: input/output error")
