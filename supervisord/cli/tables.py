"""Columns of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, and the name of its colour (empty: none)."""

    text: str
    colour: str = ""


Row = Sequence[Cell | str]


def columns(head: Sequence[str], rows: Sequence[Row], *, right: frozenset[int] = frozenset()) -> list[list[Cell]]:
    """The rows padded to common widths, the head first; ``right``: columns aligned to the right."""
    table = [[Cell(title, "dim") for title in head]]
    table += [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    widths = [max(len(row[spot].text) for row in table) for spot in range(len(head))]
    last = len(head) - 1
    return [
        [
            Cell(
                cell.text.rjust(widths[spot]) if spot in right else cell.text.ljust(widths[spot] * (spot < last)),
                cell.colour,
            )
            for spot, cell in enumerate(row)
        ]
        for row in table
    ]


def cut(text: str, width: int | None) -> str:
    """``text`` in at most ``width`` columns; None: as it is."""
    if width is None or len(text) <= width:
        return text
    return text[: max(width - 1, 0)] + "…"
