"""How states and times are said, and what a person's word for a target means."""

from __future__ import annotations

import dataclasses
import io

import pytest

from supervisord.bus import names
from supervisord.bus.snapshot import FleetStatus, ManagerChange, Mirror, ModelChange, ReplicaChange
from supervisord.cli.console import Console, printable
from supervisord.cli.exits import Exit, Failure, combine
from supervisord.cli.tables import cut
from supervisord.cli.targets import resolve
from supervisord.cli.words import age, replica_notes, replica_words, span

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3.0, "0.0 s"),
        (0.04, "0.0 s"),
        (3.14, "3.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (720.0, "12 min"),
        (3599.0, "1 h"),
        (3900.0, "1 h 5 min"),
        (86400.0, "1 d"),
        (100000.0, "1 d 4 h"),
    ],
)
def test_spans_are_short_and_carry_over(seconds, said):
    assert span(seconds) == said


def test_ages_are_whole_seconds():
    assert age(3.14) == "3 s"
    assert age(-1.0) == "0 s"


def fleet(**replica: object) -> FleetStatus:
    """One model with the replica chat-a, and the model solo with the replica solo."""

    def properties(name: str, model: str) -> dict[str, object]:
        return {"Name": name, "Model": model, "State": "ready", "Hold": "none", "Health": "ok", "CanSleep": True}

    return Mirror(
        {
            names.ROOT_PATH: {names.MANAGER_INTERFACE: {"Version": "0.1.0"}},
            names.model_path("chat"): {
                names.MODEL_INTERFACE: {
                    "Name": "chat",
                    "Aliases": ["gpt"],
                    "Replicas": [names.replica_path("chat-b"), names.replica_path("chat-a")],
                }
            },
            names.model_path("solo"): {
                names.MODEL_INTERFACE: {"Name": "solo", "Replicas": [names.replica_path("solo")]}
            },
            names.replica_path("chat-a"): {names.REPLICA_INTERFACE: properties("chat-a", "chat") | replica},
            names.replica_path("chat-b"): {names.REPLICA_INTERFACE: properties("chat-b", "chat")},
            names.replica_path("solo"): {names.REPLICA_INTERFACE: properties("solo", "solo")},
        }
    ).fleet()


def words(**replica: object) -> tuple[str, list[str]]:
    [status] = [each for each in fleet(**replica).replicas if each.name == "chat-a"]
    return replica_words(status, NOW), replica_notes(status, NOW)


def usec(seconds: float) -> int:
    return int((NOW + seconds) * 1e6)


@pytest.mark.parametrize(
    ("replica", "said", "notes"),
    [
        ({"State": "ready"}, "ready", []),
        ({"State": "ready", "IdleSinceUSec": usec(-180)}, "ready, idle for 3 min", []),
        ({"State": "ready", "CanSleep": False}, "ready", ["cannot sleep"]),
        (
            {"State": "asleep", "SleepLevel": 1, "StateSinceUSec": usec(-720), "WakeUSec": 3_100_000},
            "asleep (level 1) for 12 min",
            ["last wake took 3.1 s"],
        ),
        (
            {"State": "waking", "Step": "reload_weights", "StateSinceUSec": usec(-2.1)},
            "waking: reload weights, 2.1 s",
            [],
        ),
        (
            {"State": "falling_asleep", "SleepLevel": 2, "StateSinceUSec": usec(-1)},
            "falling asleep (level 2), 1.0 s",
            [],
        ),
        (
            {"State": "failed", "StateSinceUSec": usec(-5), "RetryAtUSec": usec(8)},
            "failed for 5 s",
            ["tried again in 8.0 s"],
        ),
        ({"State": "failed", "RetryAtUSec": usec(-1)}, "failed", ["tried again now"]),
        (
            {"State": "stopped", "Hold": "down", "StartUSec": 41_000_000, "Simulated": True},
            "stopped",
            ["held down", "simulated"],
        ),
        ({"State": "stopped", "StartUSec": 41_000_000}, "stopped", ["starts in about 41 s"]),
        (
            {"State": "ready", "Health": "dead", "Hold": "drained"},
            "ready",
            ["held drained", "dead, being restarted"],
        ),
        ({"State": "some_new_state"}, "some new state", []),
    ],
)
def test_a_replica_is_told_in_words(replica, said, notes):
    assert words(**replica) == (said, notes)


def test_replicas_are_in_their_models_order():
    assert [replica.name for replica in fleet().replicas] == ["chat-b", "chat-a", "solo"]


@pytest.mark.parametrize(
    ("word", "kind", "name"),
    [
        ("chat", "model", "chat"),
        ("gpt", "model", "chat"),
        ("chat-a", "replica", "chat-a"),
        ("model:gpt", "model", "chat"),
        ("replica:chat-a", "replica", "chat-a"),
        ("solo", "model", "solo"),
        ("replica:solo", "replica", "solo"),
    ],
)
def test_a_word_means_a_model_an_alias_or_a_replica(word, kind, name):
    target = resolve(word, fleet())
    assert (target.kind, target.name) == (kind, name)


@pytest.mark.parametrize(
    ("word", "code"), [("nix", "NoSuchTarget"), ("model:chat-a", "NoSuchModel"), ("replica:gpt", "NoSuchReplica")]
)
def test_a_word_of_the_wrong_kind_is_no_target(word, code):
    with pytest.raises(Failure) as failed:
        resolve(word, fleet())
    assert (failed.value.report.code, failed.value.report.exit) == (code, Exit.NO_SUCH)


def test_signals_change_the_mirror_and_tell_what_was_before():
    mirror = Mirror(
        {
            names.ROOT_PATH: {names.MANAGER_INTERFACE: {"Draining": False}},
            names.replica_path("a"): {names.REPLICA_INTERFACE: {"Name": "a", "State": "asleep"}},
        }
    )
    change = mirror.properties_changed(names.replica_path("a"), names.REPLICA_INTERFACE, {"State": "waking"})
    assert isinstance(change, ReplicaChange)
    assert (change.before.state, change.after.state) == ("asleep", "waking")
    assert mirror.properties_changed(names.replica_path("a"), names.REPLICA_INTERFACE, {"State": "waking"}) is None
    assert mirror.properties_changed(names.replica_path("a"), "org.example.Other", {"State": "x"}) is None
    change = mirror.properties_changed(names.ROOT_PATH, names.MANAGER_INTERFACE, {"Draining": True})
    assert isinstance(change, ManagerChange)
    [change] = mirror.interfaces_added(names.model_path("m"), {names.MODEL_INTERFACE: {"Name": "m"}})
    assert isinstance(change, ModelChange)
    assert (change.before, change.after.name) == (None, "m")
    [change] = mirror.interfaces_removed(names.replica_path("a"), [names.REPLICA_INTERFACE])
    assert (change.before.name, change.after) == ("a", None)
    assert mirror.interfaces_removed(names.replica_path("a"), [names.REPLICA_INTERFACE]) == []
    assert mirror.fleet().replicas == ()


def test_a_property_of_another_type_or_none_reads_as_empty():
    mirror = Mirror({names.replica_path("a"): {names.REPLICA_INTERFACE: {"Name": "a", "InFlight": "many", "Gpus": 3}}})
    [replica] = mirror.fleet().replicas
    assert (replica.in_flight, replica.gpus, replica.unit, replica.retry_at) == (0, (), "", 0.0)


def test_one_exit_code_for_several_targets():
    assert combine([]) is Exit.DONE
    assert combine([Exit.DONE, Exit.SUPERSEDED, Exit.SUPERSEDED]) is Exit.SUPERSEDED
    assert combine([Exit.NO_SUCH, Exit.SUPERSEDED]) is Exit.FAILED


def test_control_characters_do_not_reach_a_terminal():
    assert printable("out of\nmemory\x1b[31m\x07") == "out of memory [31m"


def test_a_cell_that_is_too_wide_is_cut_on_a_terminal_only():
    assert cut("simulated", 5) == "simu…"
    assert cut("simulated", None) == "simulated"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "env", "no_color", "colour"),
    [
        (Tty(), {}, False, True),
        (Tty(), {"NO_COLOR": ""}, False, True),
        (Tty(), {"NO_COLOR": "1"}, False, False),
        (Tty(), {"TERM": "dumb"}, False, False),
        (Tty(), {}, True, False),
        (io.StringIO(), {}, False, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(out, env, no_color, colour):
    console = Console.for_streams(out, io.StringIO(), env, json=False, quiet=False, no_color=no_color)
    assert console.colour is colour
    assert (console.paint("x", "red") == "x") is not colour
    assert dataclasses.replace(console, colour=True).paint("x", "red") == "\x1b[31mx\x1b[0m"
