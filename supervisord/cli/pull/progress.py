"""How far the pulls are, on stderr: one line that is rewritten on a terminal; a line for every tenth on a pipe."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from supervisord.cli.console import Console, printable
from supervisord.cli.tables import cut
from supervisord.cli.words import span
from supervisord.pull.job import Progress

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(number: float) -> str:
    """Bytes as shops and hubs count them, in tens: ``16.1 GB``."""
    for unit in _UNITS[:-1]:
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} {_UNITS[-1]}"


class Line:
    """One pull's progress. ``clock``: seconds, monotonic."""

    def __init__(self, console: Console, who: str, clock: Callable[[], float]) -> None:
        self._console = console
        self._who = who
        self._clock = clock
        self._name = ""
        self._began = (0.0, 0)
        self._tenth = -1
        self._shown = False

    def show(self, progress: Progress) -> None:
        """Tell it."""
        now = self._clock()
        if progress.name != self._name:
            self._name, self._began, self._tenth = progress.name, (now, progress.done), -1
        text = printable(f"{self._who}: {progress.name}: {self._words(progress, now)}")
        if self._console.live and not self._console.quiet:
            line = cut(text, shutil.get_terminal_size().columns)
            self._console.err.write(f"\r{line}\x1b[K")
            self._console.err.flush()
            self._shown = True
            return
        tenth = 10 * progress.done // progress.total if progress.total else 0
        if tenth > self._tenth or not progress.total:
            self._tenth = tenth
            self._console.note(text)

    def clear(self) -> None:
        """Take the rewritten line away."""
        if self._shown:
            self._console.err.write("\r\x1b[K")
            self._console.err.flush()
            self._shown = False

    def _words(self, progress: Progress, now: float) -> str:
        if not progress.total:
            return progress.text or "asking"
        words = f"{size(progress.done)} of {size(progress.total)}"
        began, had = self._began
        if now - began < 1.0 or progress.done <= had:
            return words
        rate = (progress.done - had) / (now - began)
        return f"{words}, {size(rate)}/s, {span((progress.total - progress.done) / rate)} left"
