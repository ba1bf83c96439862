"""Reading the configuration again: what is being written is not taken, no signal is lost, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from supervisord.config.problems import ConfigError
from supervisord.control import ControlError
from supervisord.core.spec import Config, ModelSpec, ProxySpec, ReplicaSpec
from supervisord.loop import Dispatcher
from supervisord.reload import Reloader

FULL = Config(models=(ModelSpec("m", (ReplicaSpec("m", "m", "m.service", "unix:/m"),)),))
EMPTY = Config()


@pytest.fixture
def reloader(monkeypatch) -> Iterator[Callable[..., Reloader]]:
    """Make one that reads these configurations, one after the other, and the last one ever after."""
    monkeypatch.setattr("supervisord.reload.SETTLE", 0.0)
    dispatchers = []

    def make(*readings: Config | ConfigError) -> Reloader:
        left = list(readings)

        def read() -> Config:
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, ConfigError):
                raise found
            return found

        dispatcher = Dispatcher(lambda action: None, lambda note: None)
        dispatchers.append(dispatcher)
        effects = SimpleNamespace(configure=lambda models: None)
        manager = SimpleNamespace(watch=lambda units, on_change: None)
        notifier = SimpleNamespace(reloading=lambda: None, ready=lambda status: None)
        made = Reloader(FULL, read, dispatcher, effects, manager, notifier)
        made.begin({})
        return made

    yield make
    for dispatcher in dispatchers:
        dispatcher.close()


def bad() -> ConfigError:
    return ConfigError([])


async def test_a_file_that_is_being_written_is_read_until_it_stays_the_same(reloader):
    # As an editor does that saves in place: first nothing, then half, then all of it.
    changed = Config(models=FULL.models, proxy=ProxySpec(max_body=1))
    subject = reloader(EMPTY, bad(), FULL, changed)
    assert await subject.reload() == ["[proxy] max_body changed"]
    assert subject.config == changed


async def test_a_mistake_that_stays_is_told_and_changes_nothing(reloader):
    subject = reloader(FULL, bad())
    with pytest.raises(ControlError):
        await subject.reload()
    assert subject.config == FULL


async def test_a_signal_during_a_reload_is_followed_by_another_reload(reloader):
    subject = reloader(FULL)
    taken: list[Config] = []
    subject.reconfigured.append(taken.append)
    subject.reconfigured.append(lambda config: subject.reload_soon() if len(taken) == 1 else None)
    subject.reload_soon()
    assert subject._reloading is not None
    await subject._reloading
    assert len(taken) == 2


async def test_a_person_who_empties_the_configuration_means_it(reloader):
    subject = reloader(EMPTY)
    assert await subject.reload() == ["model m is gone"]
