"""How far a pull is, as it is told."""

from __future__ import annotations

import io

import pytest

from supervisord.cli.console import Console
from supervisord.cli.pull.progress import Line, size
from supervisord.pull.job import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(err: io.StringIO, quiet: bool = False) -> Console:
    return Console.for_streams(io.StringIO(), err, {}, json=False, quiet=quiet, no_color=False)


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (16.06e9, "16.1 GB")]
)
def test_sizes_are_told_in_tens(number, told):
    assert size(number) == told


def test_on_a_pipe_there_is_a_line_for_every_tenth_and_no_other():
    err, now = io.StringIO(), iter(range(100))
    line = Line(console(err), "chat-a", lambda: float(next(now)))
    for done in range(0, 101):
        line.show(Progress("org/chat", done * 10**9, 100 * 10**9)) if done < 99 else None
    told = err.getvalue().splitlines()
    assert len(told) == 10
    assert told[0] == "chat-a: org/chat: 0 B of 100.0 GB"
    assert told[1] == "chat-a: org/chat: 10.0 GB of 100.0 GB, 1.0 GB/s, 2 min left"


def test_on_a_terminal_one_line_is_rewritten_and_taken_away():
    err = Terminal()
    line = Line(console(err), "chat-a", lambda: 0.0)
    line.show(Progress("org/chat", 1, 2))
    line.show(Progress("img", text="Copying \x1b[31mblob"))
    line.clear()
    assert err.getvalue() == ("\rchat-a: org/chat: 1 B of 2 B\x1b[K\rchat-a: img: Copying  [31mblob\x1b[K\r\x1b[K")


def test_quiet_is_quiet():
    err = Terminal()
    Line(console(err, quiet=True), "chat-a", lambda: 0.0).show(Progress("org/chat", 1, 2))
    assert err.getvalue() == ""
