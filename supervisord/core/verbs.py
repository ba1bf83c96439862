"""The words of an operator. Alone in a module: vllmctl starts faster when it imports nothing else for them."""

from __future__ import annotations

from enum import StrEnum


class Verb(StrEnum):
    """What can be asked of a replica, or of all replicas of a model."""

    SLEEP = "sleep"
    WAKE = "wake"
    START = "start"  # and end a hold
    STOP = "stop"  # and hold
    RESTART = "restart"
    DRAIN = "drain"  # and hold, running
