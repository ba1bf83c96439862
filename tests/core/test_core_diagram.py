"""The documented life cycle is the one in the code, and every row of it can happen."""

from pathlib import Path

import pytest

from supervisord.core.diagram import document
from supervisord.core.states import TRANSITIONS, Cause, IllegalTransition, Life, advance

ROOT = Path(__file__).parents[2]


def test_the_page_is_drawn_from_the_table():
    written = (ROOT / "docs/lifecycle.md").read_text()
    assert written == document(), "run: python -m supervisord.core.diagram > docs/lifecycle.md"


def test_every_state_can_be_reached_and_left():
    assert {row.target for row in TRANSITIONS} | {Life.STOPPED} == set(Life)
    assert {row.source for row in TRANSITIONS} == set(Life)


def test_every_cause_is_used():
    assert {row.cause for row in TRANSITIONS} == set(Cause)


def test_a_row_that_is_not_there_is_an_error_that_says_which():
    with pytest.raises(IllegalTransition, match=r"replica a: no transition from asleep for 'start wanted'"):
        advance("a", Life.ASLEEP, Cause.START)
