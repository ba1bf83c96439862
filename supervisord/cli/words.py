"""States, times and counts as a person says them. Pure; the clock is an argument."""

from __future__ import annotations

from supervisord.bus.snapshot import ModelStatus, ReplicaStatus

_COLOUR_OF = {
    "ready": "green",
    "draining": "yellow",
    "starting": "yellow",
    "waking": "yellow",
    "falling_asleep": "yellow",
    "stopping": "yellow",
    "asleep": "blue",
    "stopped": "dim",
    "failed": "red",
}


def colour_of(state: str) -> str:
    """The colour of a state's words; empty for a state of a newer supervisor."""
    return _COLOUR_OF.get(state, "")


def state_words(state: str) -> str:
    """``falling_asleep`` as ``falling asleep``."""
    return state.replace("_", " ") or "unknown"


def span(seconds: float) -> str:
    """A length of time, short: ``0.4 s``, ``12 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(minutes / 60), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def age(seconds: float) -> str:
    """How long something has been so: whole seconds, since nobody needs more of the past."""
    return span(seconds) if seconds >= 9.95 else f"{max(seconds, 0.0):.0f} s"


def replica_words(replica: ReplicaStatus, now: float) -> str:
    """``asleep (level 1) for 12 min``, ``waking: reload_weights, 2.1 s``, ``ready, idle for 3 min``."""
    words = state_words(replica.state)
    lasted = now - replica.state_since if replica.state_since else None
    if replica.state in ("asleep", "falling_asleep") and replica.sleep_level:
        words += f" (level {replica.sleep_level})"
    if replica.state in ("starting", "waking", "falling_asleep", "draining", "stopping"):
        if replica.step:
            words += f": {printable_step(replica.step)}"
        return f"{words}, {span(lasted)}" if lasted is not None else words
    if replica.state == "ready":
        return f"{words}, idle for {age(now - replica.idle_since)}" if replica.idle_since else words
    return f"{words} for {age(lasted)}" if lasted is not None else words


def printable_step(step: str) -> str:
    return step.replace("_", " ")


def replica_notes(replica: ReplicaStatus, now: float) -> list[str]:
    """What else is worth a word, most important first."""
    notes = []
    if replica.hold == "down":
        notes.append("held down")
    elif replica.hold == "drained":
        notes.append("held drained")
    if replica.health == "suspect":
        notes.append("suspect")
    elif replica.health == "dead":
        notes.append("dead, being restarted")
    if replica.retry_at and replica.state == "failed":
        left = replica.retry_at - now
        notes.append(f"tried again in {span(left)}" if left > 0 else "tried again now")
    if replica.state == "asleep" and replica.wake_seconds:
        notes.append(f"last wake took {span(replica.wake_seconds)}")
    if replica.state in ("stopped", "starting") and replica.start_seconds and replica.hold == "none":
        notes.append(f"starts in about {span(replica.start_seconds)}")
    if replica.state == "ready" and not replica.can_sleep:
        notes.append("cannot sleep")
    if replica.simulated:
        notes.append("simulated")
    return notes


def model_words(model: ModelStatus, now: float) -> str:
    """``ready, idle for 3 min``, ``asleep``, ``stopped, held down``."""
    words = state_words(model.state)
    if model.held:
        words += ", held"
    if model.idle_since and model.state == "ready":
        words += f", idle for {age(now - model.idle_since)}"
    return words


def count(number: int, noun: str) -> str:
    """``1 replica``, ``2 replicas``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tokens(number: int) -> str:
    """A context length: ``32768 tokens``, or ``not known yet``."""
    return f"{number} tokens" if number else "not known yet"
