"""Changes are published at once after quiet, at a bounded rate under load, and nothing ticks in between."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

from supervisord.bus.feed import ChangeFeed


class Loop:
    """A loop whose clock a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[tuple[float, Callable[[], None], Any]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> Any:
        return self.call_at(self.now, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        entry = (when, callback, self)
        self.due.append(entry)

        class Handle:
            def cancel(handle) -> None:
                if entry in self.due:
                    self.due.remove(entry)

        return Handle()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for when, callback, _ in list(self.due):
            if when <= self.now:
                callback()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def published() -> list[float]:
    return []


@pytest.fixture
def feed(loop: Loop, published: list[float]) -> ChangeFeed:
    return ChangeFeed(cast(asyncio.AbstractEventLoop, loop), lambda: published.append(loop.now), 0.1)


def test_the_first_change_is_published_in_the_next_turn(loop: Loop, feed: ChangeFeed, published: list[float]) -> None:
    feed.mark()
    assert published == []
    loop.advance(0)
    assert published == [1000.0]


def test_many_changes_share_one_publication_per_interval(loop: Loop, feed: ChangeFeed, published: list[float]) -> None:
    for _ in range(1000):
        feed.mark()
        loop.advance(0.001)
    assert 10 <= len(published) <= 11
    assert all(later - earlier >= 0.0999 for earlier, later in itertools.pairwise(published))


def test_the_last_change_is_never_lost(loop: Loop, feed: ChangeFeed, published: list[float]) -> None:
    feed.mark()
    loop.advance(0)
    feed.mark()
    loop.advance(0.05)
    assert published == [1000.0]
    loop.advance(0.06)
    assert len(published) == 2


def test_nothing_is_scheduled_while_nothing_changes(loop: Loop, feed: ChangeFeed, published: list[float]) -> None:
    assert loop.due == []
    feed.mark()
    loop.advance(0)
    assert loop.due == []
    loop.advance(1000)
    assert published == [1000.0]


def test_flush_publishes_what_waits_and_only_that(loop: Loop, feed: ChangeFeed, published: list[float]) -> None:
    feed.flush()
    assert published == []
    feed.mark()
    feed.flush()
    assert published == [1000.0]
    assert loop.due == []


def test_stop_forgets(loop: Loop, feed: ChangeFeed, published: list[float]) -> None:
    feed.mark()
    feed.stop()
    loop.advance(1)
    assert published == []
