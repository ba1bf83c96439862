"""What every action is given, and how one reaches the supervisor.

asyncio and the D-Bus library are imported when they are needed: half of what a command takes is their import.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from supervisord.cli.console import Console
from supervisord.cli.exits import Exit, Failure

if TYPE_CHECKING:
    from supervisord.bus.client import Client

#: Seconds for questions that the supervisor answers from memory.
QUESTION_TIMEOUT = 10.0

#: Seconds for the same where the bus may have to start the supervisor first; its unit's TimeoutStartSec is 60 s.
START_TIMEOUT = 70.0


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

    @property
    def start_timeout(self) -> float:
        return self.timeout if self.timeout is not None else START_TIMEOUT

    def run(self, work: Callable[[], Coroutine[None, None, Exit]]) -> Exit:
        """Run an action that talks to the supervisor."""
        import asyncio

        return asyncio.run(work())

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A connection to the bus; raises ``Failure`` where none is to be found, else as ``Client.connect``."""
        from supervisord.bus.address import NoSessionBus, session_bus_address, system_bus_address
        from supervisord.bus.client import Client

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
