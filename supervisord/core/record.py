"""What is kept on disk about a replica, so that the next daemon knows what this one was in the middle of.

A record is written before the first call of a sleep or wake sequence and again when the sequence has ended: an engine
that was woken half-way answers 200 and generates garbage, and nothing but this record tells it from a whole one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from supervisord.core.states import Hold

#: Grows when a reader of the older form could misunderstand the newer one.
RECORD_VERSION = 1

_Words = TypeVar("_Words", bound=StrEnum)
_INVOCATION = re.compile(r"(?:[0-9a-f]{32})?")


class Phase(StrEnum):
    """Whether a sequence was under way when the record was written."""

    SETTLED = "settled"
    FALLING_ASLEEP = "falling_asleep"
    WAKING = "waking"


class RecordError(ValueError):
    """A stored record is not one of ours; the text names the key and the reason."""


@dataclass(frozen=True, slots=True)
class Record:
    """The last thing that was known, or begun, about one replica."""

    #: The sleep level reached (SETTLED), aimed at (FALLING_ASLEEP) or left (WAKING): 0 awake, 1 or 2.
    level: int
    phase: Phase
    #: InvocationID of the unit's run that this is about; empty when it was not running. A later run has whole weights.
    invocation: str
    hold: Hold
    #: When the record was made, seconds since the epoch.
    since: float

    def to_json(self) -> dict[str, object]:
        """The record as a JSON object that ``from_json`` reads back to an equal one."""
        return {
            "version": RECORD_VERSION,
            "level": self.level,
            "phase": self.phase.value,
            "invocation": self.invocation,
            "hold": self.hold.value,
            "since": self.since,
        }

    @classmethod
    def from_json(cls, value: object) -> Record:
        """Read a JSON value strictly; raises ``RecordError`` for anything that ``to_json`` would not have written."""
        if not isinstance(value, Mapping):
            raise RecordError("not a JSON object")
        version = value.get("version")
        if type(version) is not int:
            raise RecordError("'version' is not an integer")
        if version != RECORD_VERSION:
            raise RecordError(f"version {version} is not the version {RECORD_VERSION} that this program knows")
        keys = {"version", "level", "phase", "invocation", "hold", "since"}
        if missing := sorted(keys - value.keys()):
            raise RecordError(f"'{missing[0]}' is missing")
        if unknown := sorted(str(key) for key in value.keys() - keys):
            raise RecordError(f"'{unknown[0]}' is not a key of a record")
        level, since, invocation = value["level"], value["since"], value["invocation"]
        if type(level) is not int or level not in (0, 1, 2):
            raise RecordError(f"'level' is {level!r}, not 0, 1 or 2")
        if type(since) not in (int, float) or not math.isfinite(since) or since < 0:
            raise RecordError(f"'since' is {since!r}, not seconds since the epoch")
        if not isinstance(invocation, str) or not _INVOCATION.fullmatch(invocation):
            raise RecordError(f"'invocation' is {invocation!r}, not 32 hexadecimal digits")
        return cls(
            level=level,
            phase=_member(Phase, "phase", value["phase"]),
            invocation=invocation,
            hold=_member(Hold, "hold", value["hold"]),
            since=float(since),
        )


def _member(kind: type[_Words], key: str, value: object) -> _Words:
    try:
        return kind(str(value))
    except ValueError:
        words = ", ".join(member.value for member in kind)
        raise RecordError(f"'{key}' is {value!r}, not one of {words}") from None
