"""The kinds of value that a configuration key can have.

Plain descriptions: check.py reads by them, schema.py and document.py tell of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from supervisord.config.quantities import MAX_BYTES


@dataclass(frozen=True, slots=True)
class Form:
    """How a text must look.

    ``pattern`` has no anchors and keeps to what Python and ECMA-262 read alike; ``means`` says it in words.
    """

    pattern: str
    means: str


@dataclass(frozen=True, slots=True)
class Text:
    form: Form
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number."""

    minimum: int = 0
    maximum: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds as a number, or systemd's spelling. ``never``: ``"infinity"`` is allowed and becomes None."""

    zero: bool = False
    never: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes as a whole number, or systemd's spelling."""

    minimum: int = 0
    maximum: int = MAX_BYTES


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Text | Whole
    unique: bool = False


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A list of words, or one text that is split as a shell does."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A table of variables: texts, or numbers that become texts."""


@dataclass(frozen=True, slots=True)
class EngineOption:
    """Any value that can be told to the engine: text, number, true or false, a list or a table of them."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table.

    ``default`` is in the terms of core/spec.py (seconds, bytes); ``shown`` replaces it in the documentation.
    """

    name: str
    kind: Kind
    doc: str
    default: Any = None
    required: bool = False
    shown: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Keys by name.

    ``others``: what any other name means (``[serve]``); None: there is none. ``taken``: names refused, and why.
    """

    keys: tuple[Key, ...]
    doc: str = ""
    others: EngineOption | None = None
    others_form: Form | None = None
    taken: tuple[tuple[str, str], ...] = ()

    def key(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name), None)


@dataclass(frozen=True, slots=True)
class Named:
    """A table of tables under names that the person chooses; ``word`` stands for the name in the documentation."""

    word: str
    form: Form
    table: Table


Kind = Text | Whole | Flag | Duration | Size | ListOf | CommandLine | Environment | EngineOption | Table | Named
