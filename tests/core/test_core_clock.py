"""What people see of instants when the machine was suspended, or its clock was set."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from world import model

from supervisord.core.events import Configured
from supervisord.core.spec import SupervisorSpec
from supervisord.loop import Dispatcher


async def test_instants_are_those_of_a_clock_that_a_suspend_does_not_stop(monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 5.0)
    wall = 1_700_000_000.0
    dispatcher = Dispatcher(lambda action: None, lambda note: None, lambda: wall)
    dispatcher.dispatch(Configured((model(),), SupervisorSpec()))
    before = dispatcher.view()
    wall += 0.3  # a clock that is slewed changes nothing
    assert dispatcher.view() == before
    wall += 8 * 3600.0  # a night, which the loop's clock does not count
    after = dispatcher.view()
    assert round(after.replicas[0].state_since - before.replicas[0].state_since, 3) == 8 * 3600.0 + 0.3
    # What never was is still never, and looks that follow agree.
    assert after.replicas[0].idle_since == before.replicas[0].idle_since == 0.0
    assert dispatcher.view() == after
    assert replace(after.replicas[0], state_since=0.0) == replace(before.replicas[0], state_since=0.0)
    dispatcher.close()
