"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well as it could, or not always
    FAIL = "fail"
    SKIP = "skip"  # cannot be checked here, or does not apply


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence on one subject; ``mend`` says what to do, empty where there is nothing to."""

    check: str
    level: Level
    text: str
    mend: str = ""

    def as_json(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level.value, "text": self.text, "mend": self.mend}


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, mend: str = "") -> Finding:
    return Finding(check, Level.WARN, text, mend)


def fail(check: str, text: str, mend: str = "") -> Finding:
    return Finding(check, Level.FAIL, text, mend)


def skip(check: str, text: str) -> Finding:
    return Finding(check, Level.SKIP, text)
