"""Every failover, demotion, wake, sleep, eviction and escalation is one structured journal line and one count."""

import logging

import pytest

from supervisord.control import Failover
from supervisord.core.actions import Note, NoteKind
from supervisord.fleet_events import EVENTS, FAILOVER, FleetEvents, Happening


def test_every_kind_of_event_has_a_counter_of_its_own():
    assert EVENTS.keys() == {*NoteKind, FAILOVER}
    assert len({row.name for row in EVENTS.values()}) == len(EVENTS)


@pytest.mark.parametrize("kind", list(NoteKind))
def test_a_note_is_one_line_with_its_fields_and_one_count(kind, caplog):
    events = FleetEvents()
    with caplog.at_level(logging.INFO, "supervisord.fleet"):
        events.note(Note(kind, "chat", "a", "as it was", warning=True, level=2))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "a: as it was"
    assert record.fields == {"event": kind.value, "model": "chat", "replica": "a", "level": 2}
    assert events.counts == {Happening(kind, "chat", "a", 2 if EVENTS[kind].by_level else 0): 1}


def test_a_wake_and_a_start_tell_how_long_they_took(caplog):
    events = FleetEvents()
    with caplog.at_level(logging.INFO, "supervisord.fleet"):
        events.note(Note(NoteKind.WOKEN, "chat", "a", "awake", level=1, seconds=2.5))
        events.note(Note(NoteKind.READY, "chat", "a", "ready", seconds=40.0))
    assert [record.fields["seconds"] for record in caplog.records] == [2.5, 40.0]
    assert events.wakes["chat", 1].total == 2.5
    assert events.starts["chat"].total == 40.0


def test_a_failover_is_counted_at_the_replica_that_failed():
    events = FleetEvents()
    events.failed_over(Failover("chat", "a", "b", "refused"))
    events.failed_over(Failover("chat", "a", "", "refused"))
    assert events.counts == {Happening(FAILOVER, "chat", "a", 0): 2}
