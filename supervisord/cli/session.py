"""What every action is given, and how one reaches the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from supervisord.bus.address import NoSessionBus, session_bus_address, system_bus_address
from supervisord.bus.client import Client, DaemonAbsent
from supervisord.bus.errors import BusUnavailable
from supervisord.cli.console import Console
from supervisord.cli.exits import Exit, Failure, Report

#: Seconds for questions that the supervisor answers from memory.
QUESTION_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Session:
    """One run of vllmctl."""

    args: argparse.Namespace
    console: Console
    env: Mapping[str, str]
    uid: int
    #: Seconds since the epoch.
    clock: Callable[[], float] = field(default=time.time)

    @property
    def system(self) -> bool:
        return bool(self.args.system)

    @property
    def timeout(self) -> float | None:
        """``--timeout``: seconds, None where it was not given."""
        limit: float | None = self.args.timeout
        return limit

    @property
    def question_timeout(self) -> float:
        return self.timeout if self.timeout is not None else QUESTION_TIMEOUT

    def run(self, work: Callable[[], Awaitable[Exit]]) -> Exit:
        """Run an action that talks to the supervisor."""

        async def main() -> Exit:
            return await work()

        return asyncio.run(main())

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A connection to the bus; raises ``Failure`` where there is none."""
        try:
            address = system_bus_address(self.env) if self.system else session_bus_address(self.env)
        except NoSessionBus as error:
            raise Failure("NoBus", no_bus(self, str(error)), Exit.NOT_RUNNING) from error
        async with Client.connect(address) as client:
            yield client


def no_bus(session: Session, why: str) -> str:
    """There is no bus: why, and what usually mends it."""
    if session.system:
        return f"{why}."
    return (
        f"{why}.\nA login has a session bus where the package dbus-user-session is installed; without a login (cron, "
        "after a reboot)\nthe user must linger too: loginctl enable-linger. 'vllmctl doctor' checks both."
    )


def report_absence(error: BusUnavailable | DaemonAbsent, session: Session) -> Report:
    """The daemon or the bus is not there, in words that say what to do."""
    if isinstance(error, BusUnavailable):
        return Report("NoBus", no_bus(session, str(error)), Exit.NOT_RUNNING)
    bus, command = ("system", "systemctl") if session.system else ("session", "systemctl --user")
    if error.vanished:
        return Report(
            "DaemonVanished",
            "vllm-supervisord went away before it answered; whether the operation was done is not known.\n"
            f"See: {command} status vllm-supervisord",
            Exit.NOT_RUNNING,
        )
    detail = f"\n{error}" if "could not start" in str(error) else ""
    return Report(
        "DaemonNotRunning",
        f"vllm-supervisord is not running (no io.github.vllmctl1 on the {bus} bus). "
        f"Start it: {command} start vllm-supervisord{detail}",
        Exit.NOT_RUNNING,
    )
