"""The keys that engines ask for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from supervisord.core.admission import Running


class EngineKeys:
    """By replica, as they are configured. A process goes on asking for the key that it was started with.

    ``running``: the processes that there are.
    """

    def __init__(self, running: Callable[[], Sequence[Running]]) -> None:
        self._running = running
        self._keys: Mapping[str, str] | None = None
        #: What processes were started with, where another key is configured now: by replica, their run and key.
        self._before: dict[str, tuple[str, str]] = {}

    def replace(self, keys: Mapping[str, str]) -> None:
        """Take other ones; the first are those of the processes that run already."""
        if self._keys is not None:
            now = {place.replica: (place.run, self.of(place.replica)) for place in self._running()}
            self._before = {name: kept for name, kept in now.items() if kept[1] != keys.get(name, "")}
        self._keys = keys

    def of(self, replica: str) -> str:
        """What the replica's process asks for; empty: nothing."""
        if replica in self._before:
            run, key = self._before[replica]
            if any((place.replica, place.run) == (replica, run) for place in self._running()):
                return key
            del self._before[replica]
        return (self._keys or {}).get(replica, "")
