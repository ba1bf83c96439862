"""Mistakes in a configuration: where they are, and why they are mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

#: Where a value stands: the names of the tables around it, and its key.
Path = tuple[str, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake.

    ``table`` is spelled as in TOML (``models.chat.idle``); table and key are empty where the file itself is at fault.
    """

    file: str
    table: str
    key: str
    reason: str

    def __str__(self) -> str:
        place = " ".join(part for part in (f"[{self.table}]" if self.table else "", self.key) if part)
        return f"{self.file}: {place}: {self.reason}" if place else f"{self.file}: {self.reason}"


class ConfigError(Exception):
    """The configuration cannot be used; ``problems`` has every mistake, in the order of the files."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        super().__init__("\n".join([f"cannot use the configuration, {count}:", *(f"  {p}" for p in self.problems)]))


def spelled_key(name: str) -> str:
    """A key as TOML spells it: bare where it may be, else quoted."""
    return name if _BARE_KEY.fullmatch(name) else spelled_text(name)


def spelled_text(text: str) -> str:
    """A text as TOML's basic string: JSON's spelling, but for the one control character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def spelled_path(path: Iterable[str]) -> str:
    """A table's name as TOML spells it between the brackets."""
    return ".".join(spelled_key(name) for name in path)


def nearest(word: str, valid: Iterable[str]) -> str:
    """The valid word that is most like ``word``, or nothing when none is near."""
    candidates = {name.lower(): name for name in valid}
    near = get_close_matches(word.lower(), candidates, n=1, cutoff=0.6)
    return candidates[near[0]] if near else ""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the nearest valid word, or nothing when none is near."""
    near = nearest(word, valid)
    return f" (did you mean {near}?)" if near else ""
