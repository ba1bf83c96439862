"""What is brought to disk about a replica where no sequence does it: the settled truth, and what operators said."""

from __future__ import annotations

from dataclasses import replace

from supervisord.core.actions import Persist
from supervisord.core.fleet import Turn
from supervisord.core.record import Phase, Record
from supervisord.core.replica import Goal, Replica
from supervisord.core.states import Hold, Life


def save_record(turn: Turn, replica: Replica) -> None:
    """Bring the settled truth (level, hold) to disk; nobody waits for it, the intent there is safe meanwhile."""
    level = replica.level if replica.life is Life.ASLEEP else 0
    # Held down: which run is to be stopped, for the daemon after us if we do not come to it.
    stops = replica.hold is Hold.DOWN and replica.goal is Goal.STOPPED
    invocation = replica.invocation if level or stops else ""
    record = Record(level, Phase.SETTLED, invocation, replica.hold, turn.now)
    wanted = record if level or replica.hold is not Hold.NONE else None
    if wanted is None and replica.record is None:
        return
    replica.record = wanted
    turn.actions.append(Persist(replica.name, 0, wanted))


def save_hold(turn: Turn, replica: Replica) -> None:
    """Bring the hold to disk, if it is another there. What is said of a failed one's weights may still be true."""
    record = replica.record
    if record is None or replica.life is not Life.FAILED:
        save_record(turn, replica)
    elif record.hold is not replica.hold:
        replica.record = replace(record, hold=replica.hold)
        turn.actions.append(Persist(replica.name, 0, replica.record))
