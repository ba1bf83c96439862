"""Where vllmctl writes: answers to stdout, everything else to stderr; colour only where a person looks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "blue": "34", "dim": "2", "bold": "1"}


@dataclass(frozen=True, slots=True)
class Console:
    """The two streams and what may be done with them."""

    out: TextIO
    err: TextIO
    json: bool = False
    quiet: bool = False
    colour: bool = False
    #: Columns of the terminal on stdout; None on a pipe, where nothing is cut.
    width: int | None = None
    #: stderr is a terminal: a line of it may be rewritten.
    live: bool = False

    @classmethod
    def for_streams(
        cls, out: TextIO, err: TextIO, env: Mapping[str, str], *, json: bool, quiet: bool, no_color: bool
    ) -> Console:
        """``NO_COLOR`` (set and not empty) and ``TERM=dumb`` are obeyed; https://no-color.org."""
        terminal = out.isatty()
        dumb = env.get("TERM", "") == "dumb"
        return cls(
            out=out,
            err=err,
            json=json,
            quiet=quiet,
            colour=terminal and not no_color and not env.get("NO_COLOR") and not dumb,
            width=shutil.get_terminal_size().columns if terminal else None,
            live=err.isatty() and not dumb,
        )

    def say(self, text: str = "") -> None:
        """A line of the answer."""
        print(text, file=self.out, flush=True)

    def data(self, value: object) -> None:
        """The whole answer, as JSON, indented where a person looks."""
        print(json.dumps(value, indent=2 if self.width else None, ensure_ascii=False), file=self.out, flush=True)

    def record(self, value: object) -> None:
        """One of many answers: JSON on one line."""
        print(json.dumps(value, ensure_ascii=False), file=self.out, flush=True)

    def note(self, text: str) -> None:
        """A line beside the answer; silent with --quiet."""
        if not self.quiet:
            print(text, file=self.err, flush=True)

    def complain(self, text: str) -> None:
        """Why it failed; never silent."""
        print(f"vllmctl: {text}", file=self.err, flush=True)

    def paint(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colour and colour else text


def printable(text: str) -> str:
    """``text`` on one line and without control characters: an engine's last words may hold escape sequences."""
    return "".join(character if character.isprintable() else " " for character in text).strip()
