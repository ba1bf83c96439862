"""Taking in the configuration, at the start and again: serialised, by difference, all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

from supervisord.config.changes import changes
from supervisord.config.problems import ConfigError
from supervisord.control import ControlError, ErrorCode
from supervisord.core.canary import Fingerprint
from supervisord.core.events import Configured, UnitChanged
from supervisord.core.readings import UnitStatus
from supervisord.core.record import Record
from supervisord.core.spec import Config, ModelSpec, ReplicaSpec
from supervisord.credentials import CredentialKeeper, engine_key
from supervisord.effects import Effects, replicas_of
from supervisord.engine.vllm import VllmEngine
from supervisord.launcher.started import Started, compare
from supervisord.loop import Dispatcher
from supervisord.ports import ServiceManager
from supervisord.sd.notify import Notifier

log = logging.getLogger(__name__)

#: An editor that saves in place empties the file first. So what is read must be there a moment later too, else it is
#: read again: seconds between two readings, and how many there are before the newest is taken whatever happens.
SETTLE, MOST_READINGS = 0.05, 100


def engine_for(model: ModelSpec, spec: ReplicaSpec) -> VllmEngine:
    """The control client of one replica. What a bundled one was started with is known: names and key."""
    if not spec.bundled or model.serve is None:
        return VllmEngine(spec.endpoint)
    return VllmEngine(spec.endpoint, (model.name,), engine_key(model, spec, os.environ) or None)


class Reloader:
    """Keeps the configuration that holds now."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        dispatcher: Dispatcher,
        effects: Effects,
        manager: ServiceManager,
        notifier: Notifier,
        credentials: CredentialKeeper | None = None,
    ) -> None:
        """``read`` reads the files again and raises ``ConfigError``; ``credentials`` keeps what they point to."""
        self.config = config
        #: Called with every new configuration.
        self.reconfigured: list[Callable[[Config], None]] = []
        #: Called after those; what they say is told to who asked for the reload, one sentence each.
        self.also: list[Callable[[Config], Awaitable[Sequence[str]]]] = []
        self._read = read
        self._credentials = credentials or CredentialKeeper({})
        self._dispatcher, self._effects, self._manager, self._notifier = dispatcher, effects, manager, notifier
        self._units: dict[str, str] = {}
        self._adopted = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._reloading: asyncio.Task[None] | None = None
        self._signalled = False

    def begin(
        self,
        records: Mapping[str, Record],
        fingerprints: Sequence[tuple[str, str, Fingerprint]] = (),
        running: Sequence[Started] = (),
    ) -> None:
        """The first configuration, with what the daemon before us left on disk, and left running.

        An engine is held against the configuration as in a reload: perhaps one was, and its daemon died in the middle.
        """
        self._dispatcher.subscribe(self._check_adopted)
        outdated, left_over = compare(self.config, running, os.environ)
        kept = (tuple(records.items()), tuple(fingerprints))
        self._take(Configured(self.config.models, self.config.supervisor, *kept, outdated, left_over))

    async def adopted(self) -> None:
        """Returns when every unit was read, and every running engine looked at once."""
        self._check_adopted()
        await self._adopted.wait()

    async def reload(self) -> Sequence[str]:
        """Read the files again; a bad configuration changes nothing. Raises ``ControlError`` with every mistake."""
        async with self._one_at_a_time:
            self._notifier.reloading()
            try:
                new = await self._settled()
                # All that can be wrong with it comes before anything is taken over.
                credentials = self._credentials.read(new)
                said = changes(self.config, new)
                # Also when nothing was said: idempotent, and the file list may have changed.
                self.config = new
                self._take(Configured(new.models, new.supervisor))
                for tell in self.reconfigured:
                    tell(new)
                said += self._credentials.take(credentials)
                for ask in self.also:
                    said += await ask(new)
            except ConfigError as error:
                log.error("the configuration was not taken over: %s", error)
                raise ControlError(ErrorCode.CONFIG_INVALID, str(error)) from None
            finally:
                self._notifier.ready(self._dispatcher.view().status_line())
        log.info("configuration read again: %s", "; ".join(said) or "nothing changed")
        return said

    def reload_soon(self) -> None:
        """SIGHUP. One that comes while a reload is under way is followed by another."""
        self._signalled = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload_for_signal())

    def cancel(self) -> None:
        if self._reloading is not None:
            self._reloading.cancel()

    async def _reload_for_signal(self) -> None:
        while self._signalled:
            self._signalled = False
            with contextlib.suppress(ControlError):  # logged, with every mistake
                await self.reload()

    async def _settled(self) -> Config:
        """The configuration, when nobody is in the middle of writing it; raises ``ConfigError``."""
        seen = self._look()
        for _ in range(MOST_READINGS):
            await asyncio.sleep(SETTLE)
            before, seen = seen, self._look()
            if str(seen) == str(before):
                break
        if isinstance(seen, ConfigError):
            raise seen
        return seen

    def _look(self) -> Config | ConfigError:
        try:
            return self._read()
        except ConfigError as error:
            return error

    def _take(self, event: Configured) -> None:
        self._effects.configure(event.models)
        self._units = {spec.unit: name for name, spec in replicas_of(event.models).items()}
        self._dispatcher.dispatch(event)
        self._manager.watch(tuple(self._units), self._unit_changed)

    def _unit_changed(self, status: UnitStatus) -> None:
        name = self._units.get(status.unit)
        if name is not None:
            self._dispatcher.dispatch(UnitChanged(name, status))

    def _check_adopted(self) -> None:
        if not self._adopted.is_set() and self._dispatcher.adopted():
            self._adopted.set()
