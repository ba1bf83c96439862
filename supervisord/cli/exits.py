"""The exit codes of vllmctl, and what every failure says and exits with. Both are a contract with scripts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """What ``$?`` means."""

    DONE = 0
    FAILED = 1  # the operation failed
    USAGE = 2
    NOT_RUNNING = 3  # the daemon is not running, or the bus cannot be reached
    NO_SUCH = 4  # no such model or replica
    SUPERSEDED = 5  # superseded by a later command or a request, or held
    CONFIG_INVALID = 6
    PROBLEM_FOUND = 7  # doctor found one
    INTERRUPTED = 130
    BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Report:
    """One failure, as it is told: ``code`` for programs, ``message`` (plain sentences, may have lines) for people."""

    code: str
    message: str
    exit: Exit

    def as_json(self) -> dict[str, object]:
        return {"error": {"code": self.code, "message": self.message, "exit": int(self.exit)}}


class Failure(Exception):
    """vllmctl itself found that it cannot do what was asked."""

    def __init__(self, code: str, message: str, exit: Exit) -> None:
        super().__init__(message)
        self.report = Report(code, message, exit)


def combine(exits: list[Exit]) -> Exit:
    """One exit code for several targets: theirs where all that failed agree, else 1."""
    failed = {exit for exit in exits if exit is not Exit.DONE}
    if not failed:
        return Exit.DONE
    return failed.pop() if len(failed) == 1 else Exit.FAILED
