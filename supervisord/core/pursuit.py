"""The next thing to do towards a replica's goal: one function per state, nothing done twice, nothing on a busy GPU."""

from __future__ import annotations

from supervisord.core import arbitration, lifecycle
from supervisord.core.actions import CommandFailure
from supervisord.core.fleet import Turn
from supervisord.core.goals import fail_goal, reach_goal
from supervisord.core.replica import Goal, Replica
from supervisord.core.states import Cause, Health, Life


def pursue(turn: Turn, replica: Replica) -> None:
    """Do the next thing towards the goal, if it may be done now. Safe to call at any time."""
    if turn.fleet.draining:
        return
    if replica.goal is None and replica.health is not Health.DEAD and replica.life is not Life.DRAINING:
        return  # most of the time
    gpu_free = replica.shares_gpu_with(turn.fleet.replicas.values()) is None
    if replica.health is Health.DEAD and replica.life in (Life.READY, Life.DRAINING, Life.ASLEEP):
        if gpu_free:
            lifecycle.restart_broken(turn, replica, replica.last_error)
        return
    goal = replica.goal
    if goal is None:
        if replica.life is Life.DRAINING:  # what it drained for is not wanted any more
            turn.advance(replica, Cause.GATE_REOPENED)
        return
    match replica.life:
        case Life.READY:
            _pursue_ready(turn, replica, goal, gpu_free)
        case Life.DRAINING:
            _pursue_draining(turn, replica, goal, gpu_free)
        case Life.ASLEEP:
            _pursue_asleep(turn, replica, goal, gpu_free)
        case Life.STOPPED | Life.FAILED:
            _pursue_down(turn, replica, goal, gpu_free)
        case Life.STARTING:
            # A start once begun finishes, unless an operator says stop. Leases here are of the run before.
            if goal is Goal.STOPPED and gpu_free and replica.in_flight == 0:
                lifecycle.begin_stop(turn, replica, Cause.STOP)
        case Life.WAKING | Life.FALLING_ASLEEP | Life.STOPPING:
            pass


def _pursue_ready(turn: Turn, replica: Replica, goal: Goal, gpu_free: bool) -> None:
    if goal is Goal.AWAKE:
        reach_goal(turn, replica)
    elif goal is Goal.DRAINED:
        if replica.in_flight == 0:
            reach_goal(turn, replica)
    else:
        turn.advance(replica, Cause.GATE_CLOSED)
        _pursue_draining(turn, replica, goal, gpu_free)


def _pursue_draining(turn: Turn, replica: Replica, goal: Goal, gpu_free: bool) -> None:
    if goal in (Goal.AWAKE, Goal.DRAINED):
        turn.advance(replica, Cause.GATE_REOPENED)
        _pursue_ready(turn, replica, goal, gpu_free)
    elif replica.in_flight or not gpu_free:
        return
    elif goal is Goal.STOPPED:
        lifecycle.begin_stop(turn, replica, Cause.DRAINED_TO_STOP)
    elif goal is Goal.RESTARTED:
        lifecycle.begin_restart(turn, replica, Cause.RESTART)
    else:
        lifecycle.begin_sleep(turn, replica, goal.level)


def _pursue_asleep(turn: Turn, replica: Replica, goal: Goal, gpu_free: bool) -> None:
    if goal is Goal.DRAINED or (goal.level and replica.level >= goal.level):
        reach_goal(turn, replica)
    elif not gpu_free:
        return
    elif goal is Goal.STOPPED:
        # Somebody may have slept it by hand with requests inside; those are leases still.
        if replica.in_flight == 0:
            lifecycle.begin_stop(turn, replica, Cause.STOP)
    elif goal is Goal.RESTARTED:
        if replica.in_flight == 0 and _has_room(turn, replica):
            lifecycle.begin_restart(turn, replica, Cause.RESTART)
    elif goal is Goal.AWAKE:
        if _has_room(turn, replica):
            lifecycle.begin_wake(turn, replica, replica.level, Cause.WAKE)
    elif arbitration.fits(turn.fleet, replica):
        # The way from level 1 to level 2: asked directly, vLLM answers 200 and does nothing.
        lifecycle.begin_wake(turn, replica, replica.level, Cause.WAKE)
    elif replica.in_flight == 0:
        # Nobody rests for a sleeper that only wants to sleep deeper: stopping gives the same memory back.
        lifecycle.begin_stop(turn, replica, Cause.STOP)


def _has_room(turn: Turn, replica: Replica) -> bool:
    """There is room on its GPUs now; else it is being made, or the goal has failed since it never can be."""
    if not arbitration.could_ever_fit(turn.fleet, replica):
        limit = turn.fleet.supervisor.gpu_memory
        message = f"it declares {replica.spec.gpu_memory} bytes of GPU memory, and a GPU has {limit}"
        replica.last_error = message
        fail_goal(turn, replica, CommandFailure.INSUFFICIENT_MEMORY, message)
        return False
    if arbitration.make_room(turn, replica):
        return True
    waited = turn.now - replica.wanted_since
    if waited >= turn.fleet.supervisor.start_timeout:
        # Whoever holds the memory is held itself, or too busy: an answer is owed all the same.
        fail_goal(turn, replica, CommandFailure.INSUFFICIENT_MEMORY, f"no room on its GPUs within {waited:.0f} s")
        replica.room_at = None
    return False


def _pursue_down(turn: Turn, replica: Replica, goal: Goal, gpu_free: bool) -> None:
    if goal in (Goal.AWAKE, Goal.RESTARTED):
        if gpu_free and replica.may_retry(turn.now) and _has_room(turn, replica):
            if goal is Goal.RESTARTED and replica.unit_up:  # it could not be stopped: a start would find it as it is
                lifecycle.begin_restart(turn, replica, Cause.START)
            else:
                lifecycle.begin_start(turn, replica)
    elif goal is Goal.STOPPED and replica.life is Life.FAILED:
        if replica.unit is not None and replica.unit.active_state not in ("inactive", "failed"):
            # Another failed unit that is still up must not be in its way: each would wait for the other.
            others = (other for other in turn.fleet.replicas.values() if other.life is not Life.FAILED)
            if replica.shares_gpu_with(others) is None:
                lifecycle.begin_stop(turn, replica, Cause.STOP)
        else:
            turn.advance(replica, Cause.UNIT_DOWN)
            reach_goal(turn, replica)
    else:
        reach_goal(turn, replica)  # already deeper than any sleep
