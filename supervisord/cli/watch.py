"""``vllmctl watch``: the fleet as it changes, until Ctrl-C."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence

from supervisord.bus.client import Watch
from supervisord.bus.snapshot import (
    Change,
    DaemonLeft,
    DaemonReturned,
    FailoverSeen,
    ManagerChange,
    ModelChange,
    ReplicaChange,
    ReplicaStatus,
)
from supervisord.cli import words
from supervisord.cli.console import printable
from supervisord.cli.exits import Exit
from supervisord.cli.session import Session
from supervisord.cli.shapes import change_shape, fleet_shape
from supervisord.cli.status import overview

#: Seconds between two drawings of the table in which only times changed.
TICK = 1.0


def run_watch(session: Session) -> Exit:
    """A table that is redrawn on a terminal; one line a change on a pipe; one JSON object a change with ``--json``."""
    return session.run(lambda: _watch(session))


async def _watch(session: Session) -> Exit:
    console = session.console
    table = not console.json and console.width is not None
    async with session.client() as client, client.watch(timeout=session.question_timeout) as watch:
        _begin(session, watch)
        screen = _Screen(session)
        while True:
            if table:
                screen.draw(watch)
            try:
                async with asyncio.timeout(TICK if table else None):
                    changes = await watch.next()
            except TimeoutError:
                continue
            if not table:
                _tell(session, changes)


def _begin(session: Session, watch: Watch) -> None:
    """What holds before the first change."""
    console, now, fleet = session.console, session.clock(), watch.fleet
    if fleet is None:
        return
    if console.json:
        console.record({"time": now, "event": "snapshot", **fleet_shape(fleet)})
    elif console.width is None:
        console.say(f"{_time_of_day(now)} {printable(fleet.manager.status)}")


def _time_of_day(now: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(now))


class _Screen:
    """The table, drawn over itself. It stays on the terminal when the command ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lines = 0

    def draw(self, watch: Watch) -> None:
        console, fleet = self._session.console, watch.fleet
        size = shutil.get_terminal_size()
        if fleet is None:
            lines = ["vllm-supervisord is not on the bus; waiting for it."]
        else:
            lines = overview(fleet, self._session.clock(), console)
        if len(lines) > size.lines - 1:
            lines = [*lines[: size.lines - 2], f"... {len(lines) - size.lines + 2} more lines"]
        up = f"\x1b[{self._lines}A" if self._lines else ""
        console.out.write(f"{up}\r\x1b[J" + "".join(f"{line}\n" for line in lines))
        console.out.flush()
        self._lines = len(lines)


def _tell(session: Session, changes: Sequence[Change]) -> None:
    console, now = session.console, session.clock()
    for change in changes:
        if console.json:
            console.record(change_shape(change, now))
            continue
        text = _sentence(change)
        if text:
            console.say(f"{_time_of_day(now)} {printable(text)}")


def _sentence(change: Change) -> str:
    """A change in words; empty where only counters changed, which they do with every request."""
    if isinstance(change, ReplicaChange):
        return _replica_sentence(change.before, change.after)
    if isinstance(change, ModelChange):
        return _model_sentence(change)
    if isinstance(change, ManagerChange):
        return "vllm-supervisord is shutting down" if change.after.draining and not change.before.draining else ""
    if isinstance(change, FailoverSeen):
        target = f"to {change.target}" if change.target else "and no other replica was left"
        return f"{change.model}: failover from {change.source} {target}: {change.reason}"
    if isinstance(change, DaemonReturned):
        return f"vllm-supervisord is on the bus again: {change.fleet.manager.status}"
    assert isinstance(change, DaemonLeft)
    return "vllm-supervisord left the bus"


def _replica_sentence(before: ReplicaStatus | None, after: ReplicaStatus | None) -> str:
    if after is None:
        return f"{before.name}: no longer configured" if before is not None else ""
    if before is None:
        return f"{after.name}: new, {words.state_words(after.state)}"
    parts = []
    if before.state != after.state or before.sleep_level != after.sleep_level:
        level = f" (level {after.sleep_level})" if after.sleep_level else ""
        parts.append(f"{words.state_words(before.state)} -> {words.state_words(after.state)}{level}")
    if before.step != after.step and after.step:
        parts.append(words.printable_step(after.step))
    if before.health != after.health:
        parts.append(f"health {before.health} -> {after.health}")
    if before.hold != after.hold:
        parts.append(f"hold {before.hold} -> {after.hold}")
    if before.last_error != after.last_error and after.last_error:
        parts.append(after.last_error)
    return f"{after.name}: {', '.join(parts)}" if parts else ""


def _model_sentence(change: ModelChange) -> str:
    before, after = change.before, change.after
    if after is None:
        return f"{before.name}: no longer configured" if before is not None else ""
    if before is None:
        return f"{after.name}: new model"
    if before.held != after.held:
        return f"{after.name}: {'held' if after.held else 'no longer held'}"
    return ""
