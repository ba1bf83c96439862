"""Durations and sizes in systemd's spelling (systemd.time(7); sizes as in ``MemoryMax=``, base 1024).

One difference on purpose: inside a sum every number needs its unit. systemd reads ``1h 30`` as one hour and
30 *seconds*, which hardly anybody means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

from supervisord.config.problems import did_you_mean

_UNITS: tuple[tuple[Decimal, tuple[str, ...]], ...] = (
    (Decimal(31_557_600), ("years", "year", "y")),
    (Decimal(2_629_800), ("months", "month", "M")),
    (Decimal(604_800), ("weeks", "week", "w")),
    (Decimal(86_400), ("days", "day", "d")),
    (Decimal(3600), ("hours", "hour", "hr", "h")),
    (Decimal(60), ("minutes", "minute", "min", "m")),
    (Decimal(1), ("seconds", "second", "sec", "s")),
    (Decimal("0.001"), ("msec", "ms")),
    (Decimal("0.000001"), ("usec", "us", "µs", "μs")),
)
_SECONDS = MappingProxyType({name: seconds for seconds, names in _UNITS for name in names})
_BYTES: Mapping[str, int] = MappingProxyType({suffix: 1024**power for power, suffix in enumerate("BKMGTPE")})

# Digits are bounded so that no sum overflows. The patterns keep to what Python and ECMA-262 (JSON Schema) read alike.
_SPACE = r"[ \t]*"
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_UNIT = "(?:" + "|".join(sorted(_SECONDS, key=lambda name: (-len(name), name))) + ")"

#: What a duration looks like, without anchors. ``infinity`` is not in it.
DURATION_PATTERN = rf"{_SPACE}(?:{_NUMBER}{_SPACE}|(?:{_NUMBER}{_SPACE}{_UNIT}{_SPACE})+)"
#: What a size looks like, without anchors.
SIZE_PATTERN = rf"{_SPACE}{_NUMBER}{_SPACE}[BKMGTPE]?{_SPACE}"

#: The largest duration that may be given as a plain number of seconds, and the largest plain number of bytes.
MAX_SECONDS = 10**12
MAX_BYTES = 2**62


def parse_duration(text: str) -> float:
    """Seconds of ``1h 30min``, ``500ms`` or ``90``; ``infinity`` is ``math.inf``. Raises ValueError with the reason."""
    if text.strip(" \t") == "infinity":
        return math.inf
    if re.fullmatch(DURATION_PATTERN, text):
        parts = re.findall(rf"({_NUMBER}){_SPACE}([^0-9 \t]*)", text)
        return float(sum(Decimal(number) * _SECONDS[unit or "s"] for number, unit in parts))
    for number, unit in re.findall(r"([0-9.]+)[ \t]*([^0-9 \t]*)", text):
        if unit and unit not in _SECONDS:
            raise ValueError(f"{unit!r} is no unit of time{did_you_mean(unit, _SECONDS)}")
        if not unit and text.strip() != number:
            raise ValueError(f"{number!r} in {text!r} needs a unit (10min, 1h 30min)")
    raise ValueError(f"{text!r} is not a duration (10min, 1h 30min, 500ms; a plain number is seconds)")


def parse_size(text: str) -> int:
    """Bytes of ``32G`` or ``1.5G`` (base 1024), fractions rounded up. Raises ValueError with the reason."""
    if not re.fullmatch(SIZE_PATTERN, text):
        raise ValueError(f"{text!r} is not a size (32G, 1.5G, 512M; base 1024; a plain number is bytes)")
    stripped = text.strip(" \t")
    suffix = stripped[-1] if stripped[-1] in _BYTES else ""
    number = Decimal(stripped.removesuffix(suffix).strip(" \t"))
    return math.ceil(number * _BYTES[suffix or "B"])


def spell_duration(seconds: float) -> str:
    """The usual spelling: ``1h 30min``, ``500ms``, ``infinity``; only values too fine for it do not read back."""
    if math.isinf(seconds):
        return "infinity"
    rest, words = Decimal(repr(seconds)), []
    for unit in ("d", "h", "min", "s", "ms"):
        count = rest // _SECONDS[unit]
        if count:
            words.append(f"{count:f}{unit}")
            rest -= count * _SECONDS[unit]
    text = " ".join(words) or "0"
    if rest == 0 and re.fullmatch(DURATION_PATTERN, text) and parse_duration(text) == seconds:
        return text
    return f"{Decimal(repr(seconds)):f}s"


def spell_size(size: int) -> str:
    """``32G`` where it comes out even, else a smaller unit, at last plain bytes."""
    for suffix in "EPTGMK":
        if size and size % _BYTES[suffix] == 0:
            return f"{size // _BYTES[suffix]}{suffix}"
    return str(size)
