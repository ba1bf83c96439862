"""The supervisor around replicas that are awake and stay so: the real dispatcher and the real core.

What looks on while requests come and go looks on here too: the status line and what D-Bus clients are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from supervisord.bus.feed import ChangeFeed
from supervisord.bus.objects import ManagerFacts, difference, tree_of
from supervisord.bus.service import PUBLISH_INTERVAL
from supervisord.core.actions import Action, Persist, ProbeEngine, TakeFingerprint
from supervisord.core.events import Configured, Fingerprinted, Persisted, Probed, UnitChanged
from supervisord.core.readings import EngineState, Probe, UnitStatus
from supervisord.core.spec import ModelSpec, SupervisorSpec
from supervisord.heartbeat import Heartbeat
from supervisord.loop import Dispatcher
from supervisord.sd.notify import Notifier

_FACTS = ManagerFacts("bench", (), (), "", False)


async def awake(models: Sequence[ModelSpec]) -> Dispatcher:
    """A dispatcher all of whose replicas are ready."""
    loop = asyncio.get_running_loop()

    def perform(action: Action) -> None:
        match action:
            case ProbeEngine(replica, op):
                found = Probe(EngineState.AWAKE, served_names=("m",), max_model_len=131072)
                loop.call_soon(dispatcher.dispatch, Probed(replica, op, found))
            case Persist(replica, op):
                loop.call_soon(dispatcher.dispatch, Persisted(replica, op))
            case TakeFingerprint(replica, op):
                loop.call_soon(dispatcher.dispatch, Fingerprinted(replica, op))

    dispatcher = Dispatcher(perform, lambda note: None)
    dispatcher.dispatch(Configured(tuple(models), SupervisorSpec()))
    for model in models:
        for replica in model.replicas:
            status = UnitStatus(replica.unit, "loaded", "active", "running", "0" * 32, main_pid=1)
            dispatcher.dispatch(UnitChanged(replica.name, status))
    ready = asyncio.Event()

    def look() -> None:
        if all(replica.state == "ready" for replica in dispatcher.view().replicas):
            ready.set()

    unsubscribe = dispatcher.subscribe(look)
    await ready.wait()
    unsubscribe()
    _look_on(dispatcher)
    return dispatcher


def _look_on(dispatcher: Dispatcher) -> None:
    told = tree_of(dispatcher.view(), _FACTS)

    def publish() -> None:
        nonlocal told
        before, told = told, tree_of(dispatcher.view(), _FACTS)
        difference(before, told)

    dispatcher.subscribe(ChangeFeed(asyncio.get_running_loop(), publish, PUBLISH_INTERVAL).mark)
    Heartbeat(Notifier(), dispatcher, None).start()
