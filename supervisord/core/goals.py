"""Goals: who sets them and how they end. (The next thing to do towards one: pursuit.py.)"""

from __future__ import annotations

from supervisord.core.actions import Answer, CommandFailure
from supervisord.core.fleet import Fleet, Turn
from supervisord.core.idle import rung_due
from supervisord.core.replica import GOAL_OF_RUNG, Goal, Replica
from supervisord.core.spec import IdleLadder
from supervisord.core.states import Hold, Life


def set_goal(turn: Turn, replica: Replica, goal: Goal, *, ticket: int | None = None, why: str = "") -> None:
    """Want ``goal`` from now on; whoever waited for another one is told that it was overtaken."""
    if replica.goal is not goal:
        fail_goal(turn, replica, CommandFailure.SUPERSEDED, why or f"'{goal}' is wanted now")
        replica.goal = goal
        replica.room_at = None
        if goal is Goal.AWAKE:
            replica.wanted_since, replica.yields_to = turn.now, ""
    if ticket is not None:
        replica.tickets.append(ticket)


def reach_goal(turn: Turn, replica: Replica) -> None:
    """The goal is reached."""
    turn.actions.extend(Answer(ticket) for ticket in replica.tickets)
    replica.goal, replica.tickets = None, []


def fail_goal(turn: Turn, replica: Replica, failure: CommandFailure, message: str) -> None:
    """The goal cannot be reached, or is no longer wanted."""
    text = f"replica {replica.name}: {message}"
    turn.actions.extend(Answer(ticket, failure, text) for ticket in replica.tickets)
    replica.goal, replica.tickets = None, []


def ladder_of(fleet: Fleet, replica: Replica) -> IdleLadder | None:
    """The ladder that an idle replica goes down; None while anything is in flight, waiting, wanted or held."""
    model = fleet.model_of(replica)
    if (
        model is None
        or fleet.draining
        or replica.goal is not None
        or replica.life not in (Life.READY, Life.ASLEEP)
        or replica.in_flight
        or model.waiting
        or replica.hold is not Hold.NONE
        or replica.leaving
    ):
        return None
    return model.spec.idle


def set_idle_goal(turn: Turn, replica: Replica) -> None:
    """Let an idle replica go down the ladder."""
    ladder = ladder_of(turn.fleet, replica)
    if ladder is None or turn.now < replica.rest_at:
        return
    due = rung_due(ladder, turn.now - replica.idle_since, can_sleep=replica.can_sleep)
    if due > replica.rung:
        goal = GOAL_OF_RUNG[due]
        if goal is Goal.SLEEP1 and not turn.fleet.nap_fits(replica):
            # Host RAM is a budget too. A ladder without a second level may be of an engine that does not wake from it.
            goal = Goal.SLEEP2 if ladder.sleep2 is not None else Goal.STOPPED
        set_goal(turn, replica, goal if replica.sleeps_well else Goal.STOPPED)


def set_config_goal(turn: Turn, replica: Replica) -> None:
    """A running engine whose configuration changed is restarted (drained), a resting one stopped."""
    if replica.leaving and replica.goal is not Goal.STOPPED:
        # One that could not be stopped is tried again when its back-off is over.
        backs_off = replica.occupies_gpu and not replica.may_retry(turn.now)
        if replica.spec.bundled and replica.life is not Life.STOPPED and not backs_off:
            set_goal(turn, replica, Goal.STOPPED, why="it is no longer configured")
    elif replica.stale and replica.goal is None:
        model = turn.fleet.model_of(replica)
        siblings = [r for r in model.replicas if r is not replica] if model is not None else []
        one_is_away = any(r.goal is Goal.RESTARTED or r.life is Life.STARTING for r in siblings)
        if replica.life is Life.READY and not one_is_away:
            set_goal(turn, replica, Goal.RESTARTED)
        elif replica.life is Life.ASLEEP:
            set_goal(turn, replica, Goal.STOPPED)
