"""A supervisor with nothing to supervise, on the session bus: what systemd starts in test_bus_activation.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from supervisord.bus.address import session_bus_address
from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService
from supervisord.core.view import FleetView


class NothingToDo:
    """A ``Control`` of an empty fleet."""

    def view(self) -> FleetView:
        return FleetView((), (), draining=False)

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def subscribe_failovers(self, on_failover: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: None

    async def command_model(self, model: str, verb: Any, level: int = 0) -> None: ...

    async def command_replica(self, replica: str, verb: Any, level: int = 0) -> None: ...

    async def reload(self) -> Sequence[str]:
        return ()


async def main() -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    facts = ManagerFacts("stand-in", (), (), "", simulated=True)
    service = BusService(NothingToDo(), lambda: facts, session_bus_address(os.environ))
    await service.start()
    await ended.wait()
    await service.stop()


asyncio.run(main())
