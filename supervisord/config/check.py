"""Typed reading of a merged document by the descriptions in keys.py.

Collects every mistake; the verdict is exactly the JSON schema's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from supervisord.config.forms import NOT_EMPTY, PLAIN, VARIABLE
from supervisord.config.keys import ROOT
from supervisord.config.kinds import (
    CommandLine,
    Duration,
    EngineOption,
    Environment,
    Flag,
    Form,
    Key,
    Kind,
    ListOf,
    Named,
    Size,
    Table,
    Text,
    Whole,
)
from supervisord.config.merge import Merged
from supervisord.config.problems import Path, Problem, did_you_mean, nearest, spelled_key, spelled_path
from supervisord.config.quantities import MAX_SECONDS, parse_duration, parse_size


class _Bad:
    """Stands for a value that was given but is wrong, so that no rule takes it for missing."""

    def __repr__(self) -> str:
        return "BAD"


BAD: Final = _Bad()


class Reader:
    """Reads values and collects what is wrong with them in ``problems``."""

    def __init__(self, merged: Merged) -> None:
        self._merged = merged
        # With a file missing from the sum, what is required may well be in that file.
        self._complete = not merged.problems
        self.problems: list[Problem] = []

    def complain(self, path: Path, reason: str) -> None:
        """A mistake in the key at ``path``."""
        key = spelled_key(path[-1]) if path else ""
        self.problems.append(Problem(self._merged.origin(path), spelled_path(path[:-1]), key, reason))

    def document(self) -> dict[str, Any]:
        """The whole document in the spec's own terms; wrong values are ``BAD``, unknown keys are left out."""
        return self._table(ROOT, self._merged.document, ())

    def _value(self, kind: Kind, value: object, path: Path) -> Any:
        match kind:
            case Table():
                return self._table(kind, value, path) if self._is(dict, value, path) else BAD
            case Named():
                return self._named(kind, value, path) if self._is(dict, value, path) else BAD
            case Environment():
                return self._environment(value, path) if self._is(dict, value, path) else BAD
            case EngineOption():
                return value if self._option(value, path) else BAD
            case ListOf():
                return self._list(kind, value, path) if self._is(list, value, path) else BAD
            case CommandLine():
                if isinstance(value, str):
                    return self._text(Text(NOT_EMPTY), value, path)
                return self._list(ListOf(Text(PLAIN)), value, path) if self._is(list, value, path, "or a text") else BAD
            case Text():
                return self._text(kind, value, path) if self._is(str, value, path) else BAD
            case Flag():
                return self._flag(value, path)
            case Whole():
                return self._whole(kind, value, path, "a whole number")
            case Size():
                return self._size(kind, value, path)
            case Duration():
                return self._duration(kind, value, path)

    def _is(
        self,
        wanted: type[dict[str, Any]] | type[list[Any]] | type[str],
        value: object,
        path: Path,
        alternative: str = "",
    ) -> bool:
        if isinstance(value, wanted):
            return True
        name = "a table" if wanted is dict else "a list" if wanted is list else "a text"
        words = f"{name} {alternative}" if alternative else name
        self.complain(path, f"must be {words}, not {_kind_of(value)}")
        return False

    def _table(self, table: Table, value: Any, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        taken = dict(table.taken)
        for name, item in value.items():
            here = (*path, name)
            if key := table.key(name):
                result[name] = self._value(key.kind, item, here)
            elif name in taken:
                self.complain(here, taken[name])
            elif table.others is None:
                self.complain(here, f"unknown key{_suggestion(name, table)}")
            elif table.others_form and not _matches(table.others_form, name):
                self.complain(here, f"is not {table.others_form.means}")
            else:
                result[name] = self._value(table.others, item, here)
        for key in table.keys:
            if key.required and key.name not in value and self._complete:
                near = nearest(key.name, [name for name in value if not table.key(name)])
                self.complain((*path, key.name), f"is required but missing{f' (is {near} misspelt?)' if near else ''}")
        return result

    def _named(self, named: Named, value: Any, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, item in value.items():
            here = (*path, name)
            if not _matches(named.form, name):
                self.complain(here, f"is not {named.form.means}")
            if self._is(dict, item, here):
                result[name] = self._table(named.table, item, here)
            else:
                result[name] = BAD
        return result

    def _environment(self, value: Any, path: Path) -> Any:
        result: dict[str, str] = {}
        for name, item in value.items():
            here = (*path, name)
            if not _matches(VARIABLE, name):
                self.complain(here, f"is not {VARIABLE.means}")
            if isinstance(item, bool) or not isinstance(item, str | int | float) or not _finite(item):
                self.complain(here, f"must be a text or a number, not {_kind_of(item)}")
            elif isinstance(item, str) and not _matches(PLAIN, item):
                self.complain(here, "must not contain a NUL")
            else:
                result[name] = str(item)
        return result

    def _option(self, value: object, path: Path, place: str = "") -> bool:
        """True when ``value`` can be told to an engine, whose tables become JSON."""
        if isinstance(value, dict):
            inside = [self._option(item, path, f"{place}.{name}" if place else name) for name, item in value.items()]
            return all(inside)
        if isinstance(value, list):
            inside = [self._option(item, path, f"{place}[{index}]") for index, item in enumerate(value)]
            return all(inside)
        within = f"{place}: " if place else ""
        if not isinstance(value, str | int | float):
            self.complain(
                path, f"{within}must be a text, a number, true or false, a list or a table, not {_kind_of(value)}"
            )
        elif not _finite(value):
            self.complain(path, f"{within}must be a finite number")
        elif isinstance(value, str) and not _matches(PLAIN, value):
            self.complain(path, f"{within}must not contain a NUL")
        else:
            return True
        return False

    def _list(self, kind: ListOf, value: Any, path: Path) -> Any:
        result: list[Any] = []
        for index, item in enumerate(value):
            before = len(self.problems)
            result.append(self._value(kind.item, item, path))
            for number in range(before, len(self.problems)):
                problem = self.problems[number]
                reason = f"item {index + 1}: {problem.reason}"
                self.problems[number] = Problem(problem.file, problem.table, problem.key, reason)
        if BAD in result:
            return BAD
        if kind.unique and (twice := [item for index, item in enumerate(result) if item in result[:index]]):
            self.complain(path, f"{twice[0]!r} is listed twice")
            return BAD
        return tuple(result)

    def _text(self, kind: Text, value: Any, path: Path) -> Any:
        if kind.choices and value not in kind.choices:
            self.complain(path, f"{value!r} is not one of {', '.join(kind.choices)}{did_you_mean(value, kind.choices)}")
        elif not _matches(kind.form, value):
            self.complain(path, f"{value!r} is not {kind.form.means}")
        else:
            return value
        return BAD

    def _flag(self, value: object, path: Path) -> Any:
        if isinstance(value, bool):
            return value
        self.complain(path, f"must be true or false, not {_kind_of(value)}")
        return BAD

    def _whole(self, kind: Whole | Size, value: Any, path: Path, wanted: str) -> Any:
        # JSON Schema counts 5.0 as a whole number, so we do too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value) or value != int(value):
            self.complain(path, f"must be {wanted}, not {_kind_of(value)}")
        elif value < kind.minimum:
            self.complain(path, f"{value} is too small, the least is {kind.minimum}")
        elif value > kind.maximum:
            self.complain(path, f"{value} is too large, the most is {kind.maximum}")
        else:
            return int(value)
        return BAD

    def _size(self, kind: Size, value: Any, path: Path) -> Any:
        if not isinstance(value, str):
            return self._whole(kind, value, path, 'a size ("32G", "512M", or a whole number of bytes)')
        try:
            size = parse_size(value)
        except ValueError as error:
            self.complain(path, str(error))
            return BAD
        if kind.minimum and not re.search("[1-9]", value):
            self.complain(path, f"{value!r} is too small, it must be more than 0")
            return BAD
        return size

    def _duration(self, kind: Duration, value: Any, path: Path) -> Any:
        if isinstance(value, str):
            try:
                seconds = parse_duration(value)
            except ValueError as error:
                self.complain(path, str(error))
                return BAD
            if math.isinf(seconds):
                if kind.never:
                    return None
                self.complain(path, "must have an end, infinity is not allowed here")
                return BAD
            positive = re.search("[1-9]", value) is not None
        elif isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            self.complain(
                path, f'must be a duration ("10min", "1h 30min", or a number of seconds), not {_kind_of(value)}'
            )
            return BAD
        else:
            seconds, positive = float(value), value > 0
            if value < 0 or value > MAX_SECONDS:
                self.complain(path, f"{value} is out of range, durations are from 0 to {MAX_SECONDS} seconds")
                return BAD
        if not positive and not kind.zero:
            self.complain(path, "must be longer than 0")
            return BAD
        return seconds


def _matches(form: Form, text: str) -> bool:
    return re.fullmatch(form.pattern, text) is not None


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _kind_of(value: object) -> str:
    """What was written there, in TOML's terms."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f"the text {value!r}"
        case int() | float():
            return f"the number {value}"
        case dict():
            return "a table"
        case list():
            return "a list"
        case _:
            return f"the date or time {value}"


def _suggestion(name: str, table: Table) -> str:
    """The nearest key of this table, else the place where a key of exactly this name belongs."""
    if near := did_you_mean(name, [key.name for key in table.keys]):
        return near
    places = [path for path in _places(ROOT, ()) if path[-1] == name]
    return f" (did you mean [{'.'.join(places[0][:-1])}] {name}?)" if places and len(places[0]) > 1 else ""


def _places(kind: Kind, path: Path) -> Sequence[Path]:
    keys: Sequence[Key] = ()
    match kind:
        case Table():
            keys = kind.keys
        case Named():
            return _places(kind.table, (*path, kind.word))
    return [place for key in keys for place in ((*path, key.name), *_places(key.kind, (*path, key.name)))]


def read(merged: Merged) -> tuple[Mapping[str, Any], list[Problem]]:
    """The document's values in the spec's terms, and every mistake that one value alone can have."""
    reader = Reader(merged)
    return reader.document(), reader.problems
