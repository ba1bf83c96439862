"""What was seen, against what was believed: readings of units and looks at engines.

State follows the world. A unit that somebody started, stopped or restarted, an engine that somebody slept or woke by
hand, and the engines found running at start-up all come through here, and are judged the same way.
"""

from __future__ import annotations

from supervisord.core.actions import CommandFailure, NoteKind
from supervisord.core.events import UnitJobDone
from supervisord.core.fleet import Turn
from supervisord.core.goals import fail_goal, reach_goal, set_goal
from supervisord.core.lifecycle import (
    GRACE,
    become_routable,
    begin_wake,
    fail,
    first_look,
    give_up,
    go_down,
    step_failed,
)
from supervisord.core.persist import save_record
from supervisord.core.readings import EngineState, Probe, UnitStatus
from supervisord.core.recovery import Verdict, judge
from supervisord.core.replica import GOAL_OF_RUNG, Goal, Replica
from supervisord.core.states import Cause, Health, Hold, Life

#: Between looks at an engine that is loading, in its first seconds and later.
LOADING_LOOK_EARLY = 0.25
LOADING_LOOK = 1.0
LOADING_EARLY_FOR = 10.0
#: So many looks in a row must fail before an engine can be believed dead, however long they took.
DEAD_LOOKS = 3
#: A replica whose requests failed is tried again with one request after 2**strikes seconds, at most this many.
LONGEST_STRIKE = 30.0

_DOWN = ("inactive", "failed")


# --- units ---------------------------------------------------------------------------------------------------------


def unit_changed(turn: Turn, replica: Replica, status: UnitStatus) -> None:
    """A new reading of the unit."""
    if status.invocation and status.invocation == replica.past_invocation:
        return
    before = replica.unit
    if before is not None and 0 < status.changed < before.changed:
        return  # told late: what it was since is known
    replica.unit = status
    state = status.active_state
    match replica.life:
        case Life.STOPPED:
            # A reading that still shows the run that we stopped is late, not news.
            if state in ("active", "reloading", "activating") and _is_another_run(replica, status):
                _came_up(turn, replica, adopted=before is None)
            elif before is None and state == "failed":
                turn.advance(replica, Cause.UNIT_FAILED)
                fail(turn, replica, CommandFailure.START_FAILED, f"{status.unit} had failed ({status.result})")
                replica.retry_at = turn.now
        case Life.STARTING:
            _starting_unit(turn, replica, status)
        case Life.STOPPING:
            pass  # the job's own end decides
        case Life.FAILED:
            # Our own stop of a unit that systemd was about to restart is no sign of life.
            up = state in ("active", "reloading") or (state == "activating" and not status.between_runs)
            if up and _is_another_run(replica, status):
                _came_up(turn, replica, adopted=False)
        case Life.READY | Life.DRAINING | Life.FALLING_ASLEEP | Life.ASLEEP | Life.WAKING:
            _running_unit(turn, replica, status)


def _is_another_run(replica: Replica, status: UnitStatus) -> bool:
    return not status.invocation or status.invocation != replica.known_invocation


def _runs_again(status: UnitStatus, run_before: str) -> bool:
    """The run that was stopped is over, and somebody has started another one already."""
    up = status.active_state in ("active", "reloading", "activating") and not status.between_runs
    return up and status.invocation not in ("", run_before)


def _came_up(turn: Turn, replica: Replica, *, adopted: bool) -> None:
    turn.advance(replica, Cause.UNIT_UP)
    turn.forget_operation(replica)
    replica.op_began, replica.job_ended = turn.now, True
    replica.op_deadline = turn.now + turn.fleet.supervisor.start_timeout + GRACE
    replica.probe_at = turn.now if replica.unit_up else None
    replica.stale = replica.stale and adopted
    if replica.unit is not None and replica.unit.between_runs:
        replica.known_invocation = replica.invocation  # the run that has ended; the next one is to become ready
    kind = NoteKind.ADOPTED if adopted else NoteKind.DRIFT
    words = "found running" if adopted else "was started by somebody"
    turn.note(kind, replica, f"{replica.spec.unit} {words}")
    record = replica.record
    if adopted and record is not None and record.hold is Hold.DOWN and record.invocation == replica.invocation != "":
        # It was said to go down, and that was not finished. (A later run was started by somebody in spite of the hold.)
        set_goal(turn, replica, Goal.STOPPED)


def _starting_unit(turn: Turn, replica: Replica, status: UnitStatus) -> None:
    state = status.active_state
    if state in ("active", "reloading"):
        if not replica.steps and replica.probe_op == 0 and (replica.probe_at is None or replica.probe_at > turn.now):
            replica.probe_at = turn.now
    elif replica.job_ended and (state in _DOWN or _loops(turn, replica, status)):
        ended = f"{status.unit} ended before the engine was ready ({status.result}, status {status.exec_main_status})"
        give_up(turn, replica, CommandFailure.START_FAILED, ended)


def _loops(turn: Turn, replica: Replica, status: UnitStatus) -> bool:
    """The run that somebody waits for has ended before it was ready. systemd would try the next one, and the next."""
    model = turn.fleet.model_of(replica)
    wanted = replica.goal is not None or (model is not None and bool(model.waiting))
    return wanted and status.between_runs and status.invocation != replica.known_invocation


def _running_unit(turn: Turn, replica: Replica, status: UnitStatus) -> None:
    state = status.active_state
    if state == "inactive":
        turn.note(NoteKind.DRIFT, replica, f"{status.unit} was stopped by somebody, or ended", warning=True)
        turn.advance(replica, Cause.UNIT_DOWN)
        fail_goal_unless(turn, replica, Goal.STOPPED, f"{status.unit} is down")
        go_down(turn, replica)
    elif state == "failed":
        turn.advance(replica, Cause.UNIT_FAILED)
        fail(turn, replica, CommandFailure.START_FAILED, f"{status.unit} failed ({status.result})")
    elif _restarts(replica, status):
        turn.note(NoteKind.DRIFT, replica, f"{status.unit} restarts (not asked for by us)", warning=True)
        turn.advance(replica, Cause.UNIT_RESTARTED)
        _restarted(turn, replica)
    elif state == "deactivating" and replica.health is Health.OK:
        demote(turn, replica, f"{status.unit} is being stopped by somebody")


def _restarts(replica: Replica, status: UnitStatus) -> bool:
    """It is in another run, or on its way there. (That the present run is activating is told late: it was active.)"""
    if status.active_state == "activating" and (status.between_runs or not status.invocation):
        return True
    up = status.active_state in ("activating", "active", "reloading")
    return up and bool(status.invocation) and status.invocation != replica.known_invocation


def _restarted(turn: Turn, replica: Replica) -> None:
    turn.forget_operation(replica)
    replica.op_began, replica.job_ended, replica.level = turn.now, True, 0
    replica.op_deadline = turn.now + turn.fleet.supervisor.start_timeout + GRACE
    replica.generation += 1
    replica.health = Health.OK
    replica.sleep_broken = replica.stale = False
    replica.probe_at = turn.now if replica.unit_up else None
    asked = replica.tickets or replica.yields_to or replica.leaving or replica.hold is Hold.DOWN
    if replica.goal in GOAL_OF_RUNG.values() and not asked:
        replica.goal = None  # of the idle ladder, whose clock starts anew when it is ready


def fail_goal_unless(turn: Turn, replica: Replica, wanted: Goal, message: str) -> None:
    """End the goal: reached if it was ``wanted``, else failed."""
    if replica.goal is wanted:
        reach_goal(turn, replica)
    else:
        fail_goal(turn, replica, CommandFailure.START_FAILED, message)


def job_done(turn: Turn, replica: Replica, event: UnitJobDone) -> None:
    """The awaited unit job ended."""
    run_before = replica.known_invocation
    if event.status is not None:
        replica.unit = event.status
        if event.status.invocation not in ("", replica.known_invocation):
            replica.past_invocation = replica.known_invocation
    replica.job_ended = True
    replica.op = 0  # the deadline stays: the engine must answer within it
    text = event.detail or f"systemd says '{event.result}'"
    if replica.life is Life.STOPPING:
        down = replica.unit is not None and replica.unit.active_state in _DOWN
        # (Where there was no job at all, another run is older than our stop.)
        again = event.result != "error" and event.status is not None and _runs_again(event.status, run_before)
        if event.result == "done" or down or again:
            turn.advance(replica, Cause.UNIT_DOWN)
            fail_goal_unless_stop(turn, replica)
            go_down(turn, replica)
            if again:
                _came_up(turn, replica, adopted=False)
        else:
            give_up(turn, replica, CommandFailure.STOP_FAILED, f"cannot stop {replica.spec.unit}: {text}", event.lines)
    elif event.result == "done":
        replica.probe_at = turn.now
        # Where it could not be read, what is known of it is of before the job.
        if event.status is not None:
            _starting_unit(turn, replica, event.status)
    else:
        failure = CommandFailure.START_FAILED
        if replica.unit is not None and replica.unit.load_state in ("not-found", "masked"):
            failure = CommandFailure.UNIT_MISSING
        give_up(turn, replica, failure, f"cannot start {replica.spec.unit}: {text}", event.lines)


def fail_goal_unless_stop(turn: Turn, replica: Replica) -> None:
    """A stop ended well. Whoever wanted the replica awake meanwhile still does; pursuit starts it again."""
    if replica.goal is Goal.STOPPED:
        reach_goal(turn, replica)


# --- engines -------------------------------------------------------------------------------------------------------


def looked(turn: Turn, replica: Replica, probe: Probe) -> None:
    """A routine look at the engine ended."""
    replica.looked = True
    learn(replica, probe)
    match replica.life:
        case Life.STARTING:
            _look_at_loading(turn, replica, probe)
        case Life.READY | Life.DRAINING:
            _look_at_ready(turn, replica, probe)
        case Life.ASLEEP:
            _look_at_sleeper(turn, replica, probe)
        case _:
            pass  # a sequence does its own looking


def learn(replica: Replica, probe: Probe) -> None:
    """Remember what the engine told about itself."""
    if probe.state in (EngineState.AWAKE, EngineState.ASLEEP):
        replica.can_sleep, replica.simulated = probe.can_sleep, probe.simulated
        if probe.served_names:
            replica.served_names, replica.adapters = probe.served_names, probe.adapters
        replica.max_model_len = probe.max_model_len or replica.max_model_len
        if probe.kv_tokens is not None:
            replica.kv_tokens = probe.kv_tokens


def _look_at_loading(turn: Turn, replica: Replica, probe: Probe) -> None:
    early = turn.now - replica.op_began < LOADING_EARLY_FOR
    replica.probe_at = turn.now + (LOADING_LOOK_EARLY if early else LOADING_LOOK)
    if not replica.unit_up or replica.op:
        return  # the unit's own start is not over: it may still say no
    if probe.state is EngineState.WRONG_MODEL:
        replica.last_error = f"something else answers on {replica.spec.endpoint}: {probe.detail}"
        return
    if probe.state not in (EngineState.AWAKE, EngineState.ASLEEP):
        return
    verdict, level = judge(replica.record, replica.invocation, probe.state)
    if verdict is Verdict.FINISH_WAKE:
        turn.note(NoteKind.DRIFT, replica, f"a wake from level {level} was begun and not finished: finishing it")
        begin_wake(turn, replica, level, Cause.WEIGHTS_UNKNOWN)
    elif verdict is Verdict.ASLEEP:
        _fell_asleep(turn, replica, level)
    else:
        first_look(turn, replica)


def _fell_asleep(turn: Turn, replica: Replica, level: int) -> None:
    restarted = replica.goal is Goal.RESTARTED and replica.life is Life.STARTING
    turn.advance(replica, Cause.ENGINE_ASLEEP)
    turn.forget_operation(replica)
    replica.level, replica.misses, replica.health = level, 0, Health.OK
    replica.generation += 1
    replica.known_invocation = replica.invocation
    replica.probe_at = turn.now + turn.fleet.supervisor.probe_interval
    # The idle clock goes on from when it was last used; for one found asleep, from now.
    replica.idle_since = replica.idle_since or turn.now
    if restarted:
        replica.goal = Goal.AWAKE
    save_record(turn, replica)
    if replica.in_flight:
        set_goal(turn, replica, Goal.AWAKE, why="requests are in flight")


def _look_at_ready(turn: Turn, replica: Replica, probe: Probe) -> None:
    replica.probe_at = turn.now + turn.fleet.supervisor.probe_interval
    if probe.state is EngineState.AWAKE:
        replica.misses, replica.progress = 0, None
        if turn.now - replica.since >= turn.fleet.supervisor.backoff_max:
            replica.failures = 0
        if replica.health is Health.SUSPECT and replica.unit_up:
            if replica.strikes:
                # Looks were never the trouble: one request at a time decides.
                replica.health, replica.trial_lease = Health.TRIAL, 0
                replica.trial_at = turn.now + min(2.0 ** (replica.strikes - 1) - 1.0, LONGEST_STRIKE)
            else:
                replica.health = Health.OK
                turn.note(NoteKind.REVIVED, replica, "answers again")
    elif probe.state is EngineState.ASLEEP:
        verdict, level = judge(replica.record, replica.invocation, probe.state)
        turn.note(NoteKind.DRIFT, replica, "was put to sleep by somebody", warning=True)
        if replica.goal is not None and replica.goal.level:
            level = max(level, replica.goal.level)
        _fell_asleep(turn, replica, level)
        if verdict is Verdict.FINISH_WAKE:
            set_goal(turn, replica, Goal.AWAKE)
    elif replica.stale and probe.state in (EngineState.WRONG_MODEL, EngineState.UNREACHABLE):
        # It has the name and the place that were configured before. What is in flight there goes on; nothing that comes
        # now can be answered, so it is not one that its siblings' restarts have to wait for.
        if replica.goal is None:
            set_goal(turn, replica, Goal.RESTARTED)
    else:
        _miss(turn, replica, probe)


def _look_at_sleeper(turn: Turn, replica: Replica, probe: Probe) -> None:
    replica.probe_at = turn.now + turn.fleet.supervisor.probe_interval
    if probe.state is EngineState.AWAKE:
        if replica.level != 1 and replica.shares_gpu_with(turn.fleet.replicas.values()) is not None:
            # Its weights are loaded again as soon as nobody else is at work on the GPU; it gets no request until then.
            replica.probe_at = turn.now + turn.fleet.supervisor.suspect_interval
            return
        turn.note(NoteKind.DRIFT, replica, f"was woken from level {replica.level} by somebody", warning=True)
        if replica.level == 1:
            turn.advance(replica, Cause.ENGINE_AWAKE)
            become_routable(turn, replica, fresh=True)
        else:
            begin_wake(turn, replica, replica.level, Cause.WEIGHTS_UNKNOWN)
    elif probe.state is EngineState.ASLEEP:
        replica.misses = 0
    else:
        _miss(turn, replica, probe)


def _miss(turn: Turn, replica: Replica, probe: Probe) -> None:
    """The engine should have answered. Suspect it at once; believe it dead only on lasting evidence."""
    if replica.misses == 0:
        replica.missing_since = turn.now
    replica.misses += 1
    reason = f"the engine is {probe.state}{': ' + probe.detail if probe.detail else ''}"
    if replica.health is Health.OK:
        demote(turn, replica, reason)
    supervisor = turn.fleet.supervisor
    replica.probe_at = turn.now + supervisor.suspect_interval
    missing_for = turn.now - replica.missing_since
    dead = replica.misses >= DEAD_LOOKS
    if probe.state is EngineState.HUNG:
        # A busy engine misses looks too, but its token counters move.
        if probe.progress is not None and probe.progress != replica.progress:
            if replica.progress is not None:
                replica.progress_at = turn.now
            replica.progress = probe.progress
        patience = supervisor.hung_after if replica.in_flight else supervisor.hung_idle_after
        dead = dead and turn.now - max(replica.missing_since, replica.progress_at) >= patience
    else:
        dead = dead and missing_for >= supervisor.dead_after and replica.unit_up
    if not dead or replica.health is Health.DEAD:
        return
    replica.last_error = f"{reason} for {missing_for:.0f} s"
    if replica.life is not Life.ASLEEP or replica.goal is Goal.AWAKE:
        replica.health = Health.DEAD
    elif replica.goal is not Goal.STOPPED:
        # Nobody wants it: restarting it would only fill the GPU. The next request starts it.
        turn.note(NoteKind.ESCALATED, replica, f"stopping a sleeper: {replica.last_error}", warning=True)
        set_goal(turn, replica, Goal.STOPPED, why="the engine is dead")


def demote(turn: Turn, replica: Replica, reason: str) -> None:
    """Requests go elsewhere from now on, while there is an elsewhere; look at the engine at once."""
    news = replica.health is not Health.SUSPECT
    replica.health, replica.trial_lease = Health.SUSPECT, 0
    if replica.life in (Life.READY, Life.DRAINING, Life.ASLEEP) and replica.probe_op == 0:
        replica.probe_at = turn.now
    if news:
        turn.note(NoteKind.DEMOTED, replica, reason, warning=True)


# --- time ----------------------------------------------------------------------------------------------------------


def overdue(turn: Turn, replica: Replica) -> None:
    """The awaited operation did not end in time."""
    waited = turn.now - replica.op_began
    match replica.life:
        case Life.STARTING:
            reason = f"not ready after {waited:.0f} s"
            if replica.last_error:
                reason += f" ({replica.last_error})"
            give_up(turn, replica, CommandFailure.START_FAILED, reason)
        case Life.STOPPING:
            give_up(turn, replica, CommandFailure.STOP_FAILED, f"{replica.spec.unit} did not stop in {waited:.0f} s")
        case Life.WAKING | Life.FALLING_ASLEEP:
            step_failed(turn, replica, "it did not end in time")
        case _:
            turn.forget_operation(replica)
