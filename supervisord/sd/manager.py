"""systemd as the supervisor's service manager: commands that end with their jobs, and what changes by itself.

Commands and readings go through the worker process (``commands.py``), signals come through dbus-next (``bus.py``). A
signal is never believed further than that a unit is worth another reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from supervisord.bus.address import session_bus_address, system_bus_address
from supervisord.bus.errors import BusError
from supervisord.bus.names import escape
from supervisord.ports import UnitError, UnitStatus
from supervisord.sd.bus import Signals
from supervisord.sd.commands import CommandFailed, Commands
from supervisord.sd.errors import DISCONNECTED, NOT_THERE, START_LIMIT_HIT, unit_error
from supervisord.sd.jobs import Job, Jobs
from supervisord.sd.logs import TO_A_FILE, file_lines, journal_lines, output_file

_log = logging.getLogger(__name__)

#: Seconds that a command waits for a manager that is off the bus. A daemon-reexec takes about one; a machine that
#: swaps, or is paused by its host, takes many, and an operation that failed meanwhile would be a needless error.
_REACH_LIMIT = 30.0
#: Seconds that ``open`` waits: without a manager there is nothing to supervise, and whoever starts us wants to know.
_OPEN_LIMIT = 10.0
#: Seconds until a call that found no manager is made again, and until a reading that failed is tried again.
_CALL_RETRY, _READ_RETRY = 0.1, 1.0


class SystemdManager:
    """Implements ``ports.ServiceManager``, between ``open`` and ``close``."""

    def __init__(self, *, system: bool = False, commands: Commands | None = None) -> None:
        """``system``: the machine's manager instead of the user's."""
        self._system = system
        self._commands = commands or Commands(self._address, system=system)
        self._signals = Signals(self._address, self)
        self._jobs = Jobs()
        #: Object paths to watched units; a unit with aliases is named by the path of its real name too.
        self._watched: dict[str, str] = {}
        #: What was told last of each unit, and the paths that are to be read again.
        self._told: dict[str, UnitStatus] = {}
        self._unread: set[str] = set()
        self._on_change: Callable[[UnitStatus], None] = lambda status: None
        self._work = asyncio.Event()
        self._look_at_jobs = False
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect to the manager; raises ``UnitError`` when it cannot be reached."""
        self._signals.open()
        self._reader = asyncio.get_running_loop().create_task(self._read_changes(), name="systemd readings")
        try:
            await self._reach("reach", "systemd", _OPEN_LIMIT)
        except UnitError:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect; commands in flight fail, the units go on."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        await self._signals.close()
        await self._commands.close()
        self.manager_lost("the supervisor is closing")

    # ---- commands --------------------------------------------------------------------------------------------------

    async def start(self, unit: str) -> str:
        return await self._run_job("start", unit)

    async def stop(self, unit: str) -> str:
        return await self._run_job("stop", unit)

    async def restart(self, unit: str) -> str:
        return await self._run_job("restart", unit)

    async def reset_failed(self, unit: str) -> None:
        await self._call("reset_failed", unit, unit)

    async def kill(self, unit: str, signal: int) -> None:
        await self._call("kill", unit, unit, signal)

    async def status(self, units: Sequence[str]) -> list[UnitStatus]:
        return [await self._read(unit) for unit in units]

    async def last_lines(self, unit: str, count: int = 20) -> list[str]:
        try:
            found = await self._call("read", unit, unit_path(unit))
        except UnitError as error:
            _log.info("no log lines of %s: %s", unit, error)
            return []
        if found.get("StandardOutput") not in TO_A_FILE:
            return await journal_lines(unit, count, system=self._system)
        files = [Path(name) for name in (found["FragmentPath"], *found["DropInPaths"]) if name]
        return await asyncio.to_thread(_tail, unit, files, count)

    async def _run_job(self, verb: str, unit: str) -> str:
        before = await self._read(unit, verb)
        with self._jobs.dispatching() as expect:
            result = expect(Job(await self._call(verb, unit, unit), verb, unit))
        try:
            outcome = await result
        except ConnectionError as error:
            raise unit_error(verb, unit, DISCONNECTED, str(error)) from None
        if outcome == "failed" and verb != "stop" and start_was_refused(before, await self._read(unit, verb)):
            raise unit_error(verb, unit, START_LIMIT_HIT, "")
        return outcome

    async def _read(self, unit: str, verb: str = "read") -> UnitStatus:
        return reading(unit, await self._call("read", unit, unit_path(unit), verb=verb))

    async def _call(self, name: str, unit: str, *args: str | int, verb: str = "") -> Any:
        """Make one of the worker's calls; ``verb`` is what a failure says that we cannot do."""
        verb = verb or _IN_WORDS.get(name, name)
        loop = asyncio.get_running_loop()
        until = loop.time() + _REACH_LIMIT
        while True:
            await self._reach(verb, unit)
            try:
                return await self._commands.call(name, *args)
            except CommandFailed as failure:
                if failure.name not in NOT_THERE or name in _NOT_TWICE or loop.time() > until:
                    raise unit_error(verb, unit, failure.name, str(failure)) from None
            # The bus went away under the call, or is back before the manager: to ask again is harmless.
            await asyncio.sleep(_CALL_RETRY)

    async def _reach(self, verb: str, unit: str, limit: float = _REACH_LIMIT) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._signals.present()
        except TimeoutError:
            raise unit_error(verb, unit, DISCONNECTED, self._signals.trouble) from None

    # ---- readings --------------------------------------------------------------------------------------------------

    def watch(self, units: Sequence[str], on_change: Callable[[UnitStatus], None]) -> None:
        """As the port says; each unit's present status is told too, once, as the first change."""
        self._watched = {unit_path(unit): unit for unit in units}
        self._on_change = on_change
        self._told.clear()
        self.look_again()

    async def _read_changes(self) -> None:
        """Read again what changed, and tell it; changes that come meanwhile are one more reading, however many."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self._signals.present()
            await self._signals.watch(self._watched)
            if self._look_at_jobs:
                self._look_at_jobs = False
                await self._settle_jobs()
            unread, self._unread = self._unread, set()
            for path in sorted(unread & self._watched.keys()):
                await self._read_change(path)

    async def _read_change(self, path: str) -> None:
        unit = self._watched[path]
        try:
            found = await self._call("read", unit, path)
        except UnitError as error:
            _log.warning("%s; it is tried again", error)
            asyncio.get_running_loop().call_later(_READ_RETRY, self.unit_changed, path)
            return
        if self._watched.get(path) != unit:
            return
        real_path = unit_path(found["Id"])
        if real_path not in self._watched:  # the unit was named by an alias: signals come from its real name
            self._watched[real_path] = unit
            self.unit_changed(real_path)
        status = reading(unit, found)
        if self._told.get(unit) == status:
            return
        self._told[unit] = status
        # By way of the loop: an error in there is reported by the loop, and is no reason to stop reading.
        asyncio.get_running_loop().call_soon(self._on_change, status)

    async def _settle_jobs(self) -> None:
        """End the waiting for jobs whose end was announced while nobody could hear it."""
        for job in self._jobs.waited_for():
            try:
                unit = await self._commands.call("job_unit", job.path)
                found = await self._commands.call("read", unit_path(job.unit))
                await self._signals.flush()
            except (CommandFailed, BusError) as error:
                _log.warning("cannot look for the %s job of %s: %s", job.verb, job.unit, error)
                continue
            if unit != found["Id"]:
                self._jobs.removed(job.path, job.result_seen_in(reading(job.unit, found)))

    # ---- what the signals say (bus.Listener) -----------------------------------------------------------------------

    def job_removed(self, job: str, result: str) -> None:
        self._jobs.removed(job, result)

    def unit_changed(self, path: str) -> None:
        if path in self._watched:
            self._unread.add(path)
            self._work.set()

    def look_again(self) -> None:
        self._unread.update(self._watched)
        self._look_at_jobs = True
        self._work.set()

    def manager_away(self) -> None:
        self._commands.release()  # its connection is no better than ours

    def manager_lost(self, reason: str) -> None:
        self._jobs.fail(reason)

    def _address(self) -> str:
        return system_bus_address(os.environ) if self._system else session_bus_address(os.environ)


#: Calls that may have been heard though they failed, and would do more harm when heard twice.
_NOT_TWICE = ("restart", "kill")
#: The worker's calls as a person says them after "cannot".
_IN_WORDS = {"reset_failed": "reset the failure of", "kill": "signal"}


def unit_path(unit: str) -> str:
    """The object path of a unit."""
    return f"/org/freedesktop/systemd1/unit/{escape(unit)}"


def reading(unit: str, found: Mapping[str, Any]) -> UnitStatus:
    """The unit's properties as the port's reading."""
    return UnitStatus(
        unit=unit,
        load_state=found["LoadState"],
        active_state=found["ActiveState"],
        sub_state=found["SubState"],
        invocation=found["InvocationID"],
        result=found.get("Result", "success"),
        main_pid=found.get("MainPID", 0),
        exec_main_status=found.get("ExecMainStatus", 0),
        n_restarts=found.get("NRestarts", 0),
        changed=found.get("StateChangeTimestampMonotonic", 0),
        status_text=found.get("StatusText", ""),
    )


def start_was_refused(before: UnitStatus, after: UnitStatus) -> bool:
    """Whether a start job failed because the unit's start limit was hit.

    systemd has no error for that. ``result`` says so only where it was ``success`` before (seen on 252), but each start
    that is really tried has an invocation ID of its own.
    """
    return after.result == "start-limit-hit" or (after.invocation == before.invocation != "")


def _tail(unit: str, files: Sequence[Path], count: int) -> list[str]:
    path = output_file(unit, files, os.environ)
    return file_lines(path, count) if path is not None else []
