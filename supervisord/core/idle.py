"""The idle ladder: sleep1 -> sleep2 -> stop, by seconds since the last completion (or since ready)."""

from __future__ import annotations

from enum import IntEnum

from supervisord.core.spec import IdleLadder


class Rung(IntEnum):
    """How far down a replica is; deeper is larger."""

    AWAKE = 0
    SLEEP1 = 1
    SLEEP2 = 2
    STOPPED = 3


def _rungs(ladder: IdleLadder, can_sleep: bool) -> list[tuple[float, Rung]]:
    tiers = [(ladder.sleep1, Rung.SLEEP1), (ladder.sleep2, Rung.SLEEP2), (ladder.stop, Rung.STOPPED)]
    return [(after, rung) for after, rung in tiers if after is not None and (can_sleep or rung is Rung.STOPPED)]


def rung_due(ladder: IdleLadder, idle_for: float, *, can_sleep: bool) -> Rung:
    """The deepest rung whose time has come. An engine that cannot sleep only knows the last one."""
    return max((rung for after, rung in _rungs(ladder, can_sleep) if idle_for >= after), default=Rung.AWAKE)


def leads_anywhere(ladder: IdleLadder) -> bool:
    """Whether it has a rung at all."""
    return ladder.sleep1 is not None or ladder.sleep2 is not None or ladder.stop is not None


def next_rung_after(ladder: IdleLadder, current: Rung, *, can_sleep: bool) -> float | None:
    """Seconds of idleness at which a rung deeper than ``current`` comes due; None when there is none."""
    return min((after for after, rung in _rungs(ladder, can_sleep) if rung > current), default=None)
