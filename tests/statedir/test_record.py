"""A stored record is read back equal, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.core.record import Phase, Record, RecordError
from supervisord.core.states import Hold

records = st.builds(
    Record,
    level=st.integers(0, 2),
    phase=st.sampled_from(Phase),
    invocation=st.one_of(st.just(""), st.text("0123456789abcdef", min_size=32, max_size=32)),
    hold=st.sampled_from(Hold),
    since=st.floats(0, 1e11, allow_nan=False),
)
ASLEEP = Record(2, Phase.SETTLED, "ab" * 16, Hold.NONE, 1700000000.25)


@given(records)
def test_a_record_survives_json(record: Record) -> None:
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "version 2 is not the version 1"),
        ({"version": "1"}, "'version' is not an integer"),
        ({"version": True}, "'version' is not an integer"),
        ({"level": 3}, "'level' is 3"),
        ({"level": True}, "'level' is True"),
        ({"level": 1.0}, "'level' is 1.0"),
        ({"phase": "dreaming"}, "'phase' is 'dreaming', not one of settled, falling_asleep, waking"),
        ({"phase": None}, "'phase' is None"),
        ({"invocation": "xyz"}, "'invocation' is 'xyz'"),
        ({"invocation": 0}, "'invocation' is 0"),
        ({"hold": "up"}, "'hold' is 'up', not one of none, drained, down"),
        ({"since": "now"}, "'since' is 'now'"),
        ({"since": float("nan")}, "'since' is nan"),
        ({"since": -1}, "'since' is -1"),
        ({"since": False}, "'since' is False"),
        ({"colour": "blue"}, "'colour' is not a key"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(RecordError) as caught:
        Record.from_json(ASLEEP.to_json() | change)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("key", sorted(ASLEEP.to_json()))
def test_a_missing_key_is_refused(key: str) -> None:
    value = ASLEEP.to_json()
    del value[key]
    with pytest.raises(RecordError, match=f"'{key}'"):
        Record.from_json(value)


@pytest.mark.parametrize("value", [None, [], "record", 1])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(RecordError, match="not a JSON object"):
        Record.from_json(value)
