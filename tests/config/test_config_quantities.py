"""Durations and sizes read as systemd reads them, and spell back to what they were."""

import math
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.config.quantities import parse_duration, parse_size, spell_duration, spell_size

DURATIONS = {
    "10min": 600,
    "1h 30min": 5400,
    "1h30min": 5400,
    "90": 90,
    "500ms": 0.5,
    "1.5h": 5400,
    "2 weeks": 1209600,
    "1M": 2629800,
    "1y 2months": 36817200,
    "250us": 0.00025,
    "3 days 4 hr 5 m 6 sec": 273906,
    "7µs": 0.000007,
    "0": 0,
}


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze to compare with")
def test_durations_agree_with_systemd() -> None:
    answer = subprocess.run(
        ["systemd-analyze", "timespan", *DURATIONS],
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    theirs = [int(number) for number in re.findall(r"[μu]s: (\d+)", answer.stdout)]
    assert theirs == [round(parse_duration(text) * 1_000_000) for text in DURATIONS]


def test_infinity() -> None:
    assert math.isinf(parse_duration("infinity"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10 mins", "'mins' is no unit of time (did you mean min?)"),
        ("1h 30", "'30' in '1h 30' needs a unit"),
        ("", "is not a duration"),
        ("-5min", "is not a duration"),
        ("1..5h", "is not a duration"),
        ("soon", "is not a duration"),
        ("5min\n", "is no unit of time"),
    ],
)
def test_wrong_duration_says_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("32G", 32 * 2**30), ("1.5G", 3 * 2**29), ("512M", 2**29), ("10", 10), ("7B", 7), ("1 T", 2**40), ("0", 0)],
)
def test_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["32GB", "32GiB", "32g", "-1G", "", "G", "1e9", "infinity"])
def test_wrong_size_says_why(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 10**10).map(lambda ms: ms / 1000))
def test_spelled_duration_reads_back(seconds: float) -> None:
    assert parse_duration(spell_duration(seconds)) == seconds


@given(st.integers(0, 2**50))
def test_spelled_size_reads_back(size: int) -> None:
    assert parse_size(spell_size(size)) == size


def test_spelling_is_the_usual_one() -> None:
    assert [spell_duration(s) for s in (5400.0, 600.0, 0.5, 90000.0, math.inf)] == [
        "1h 30min",
        "10min",
        "500ms",
        "1d 1h",
        "infinity",
    ]
    assert [spell_size(s) for s in (32 * 2**30, 1536, 10)] == ["32G", "1536", "10"]
