"""How a replica's operations begin, go on and end: start, stop, restart, the sleep and wake sequences."""

from __future__ import annotations

from collections.abc import Sequence

from supervisord.core import backoff
from supervisord.core.actions import (
    Call,
    CallEngine,
    CommandFailure,
    NoteKind,
    Persist,
    ProbeEngine,
    ReadLastLines,
    RunUnitJob,
    SaveFingerprint,
    TakeFingerprint,
    UnitVerb,
)
from supervisord.core.canary import Fingerprint, difference
from supervisord.core.estimates import blend
from supervisord.core.fleet import Turn
from supervisord.core.goals import fail_goal, reach_goal
from supervisord.core.persist import save_hold, save_record
from supervisord.core.readings import EngineState, Probe
from supervisord.core.record import Phase, Record
from supervisord.core.recovery import UNKNOWN_LEVEL
from supervisord.core.replica import Goal, Replica
from supervisord.core.sequences import (
    FIRST_LOOK_STEPS,
    CallStep,
    CanaryStep,
    PersistStep,
    Step,
    VerifyStep,
    resume_steps,
    sleep_steps,
    wake_steps,
)
from supervisord.core.states import Cause, Health, Life

#: Restarts of the unit before a failed wake (or a dead engine) is given up. One: a second would meet the same fault.
MAX_ESCALATIONS = 1
#: Effects time out by themselves; this much later the core stops believing in them.
GRACE = 5.0
#: Writing one small file; beyond that the disk is not working.
PERSIST_TIMEOUT = 10.0
#: A rest that could not be begun (no intent on disk, no answer) is tried again this much later.
REST_AGAIN = 30.0
#: How long the last lines of a failed unit are waited for before its waiters are told without them.
AUTOPSY_TIMEOUT = 3.0
#: Prefill and decode of a few tokens; an engine that needs longer for them is not well.
CANARY_TIMEOUT = 60.0
#: A sleep that gave back less than half of the memory did not happen.
FREED_AT_LEAST = 0.5


# --- unit jobs -----------------------------------------------------------------------------------------------------


def begin_start(turn: Turn, replica: Replica) -> None:
    """Start the unit of a stopped or failed replica."""
    turn.advance(replica, Cause.START)
    turn.note(NoteKind.STARTED, replica, f"starting {replica.spec.unit}")
    _run_job(turn, replica, UnitVerb.START, turn.fleet.supervisor.start_timeout)


def begin_stop(turn: Turn, replica: Replica, cause: Cause) -> None:
    """Stop the unit. Nothing is in flight, or the engine never became ready."""
    turn.advance(replica, cause)
    _run_job(turn, replica, UnitVerb.STOP, turn.fleet.supervisor.stop_timeout)


def begin_restart(turn: Turn, replica: Replica, cause: Cause) -> None:
    """Restart the unit; the replica is starting from here on."""
    turn.advance(replica, cause)
    _only_awake_now(replica)
    counted = cause is Cause.ESCALATE
    _run_job(turn, replica, UnitVerb.RESTART, turn.fleet.supervisor.start_timeout, counted=counted)


def _only_awake_now(replica: Replica) -> None:
    """What a restart is wanted for is under way: what is left of it is that the engine becomes ready."""
    if replica.goal is Goal.RESTARTED:
        replica.goal = Goal.AWAKE


def restart_broken(turn: Turn, replica: Replica, reason: str) -> None:
    """A step failed or the engine is dead: escalate to a restart of the unit, a bounded number of times."""
    replica.last_error = reason
    replica.escalations += 1
    if turn.fleet.draining:
        give_up(turn, replica, CommandFailure.SHUTTING_DOWN, f"{reason}; left to the supervisor after this one")
        return
    if replica.leaving:
        give_up(turn, replica, CommandFailure.GONE, f"{reason}; it is no longer configured")
        return
    if replica.escalations > MAX_ESCALATIONS:
        give_up(turn, replica, CommandFailure.WAKE_FAILED, f"{reason}; a restart of {replica.spec.unit} did not help")
        return
    turn.note(NoteKind.ESCALATED, replica, f"restarting {replica.spec.unit}: {reason}", warning=True)
    begin_restart(turn, replica, Cause.ESCALATE)


def _run_job(turn: Turn, replica: Replica, verb: UnitVerb, timeout: float, *, counted: bool = False) -> None:
    turn.forget_operation(replica)
    op = turn.expect(replica, timeout + GRACE)
    replica.op_began, replica.job_ended, replica.probe_at, replica.level = turn.now, False, None, 0
    replica.known_invocation = replica.invocation
    if verb is UnitVerb.RESTART or (verb is UnitVerb.START and not replica.unit_up):
        # The new run reads the configuration of now. One that changes while it loads is news again.
        replica.stale = False
    turn.actions.append(RunUnitJob(replica.name, op, replica.spec.unit, verb, timeout, counted))


# --- sequences -----------------------------------------------------------------------------------------------------


def begin_sleep(turn: Turn, replica: Replica, level: int) -> None:
    """The gate is closed and nothing is in flight: go to ``level``."""
    turn.advance(replica, Cause.DRAINED_TO_SLEEP)
    replica.level = level
    turn.note(NoteKind.SLEEP_STARTED, replica, f"falling asleep, level {level}", level=level)
    _begin_sequence(turn, replica, sleep_steps(level))


def begin_wake(turn: Turn, replica: Replica, level: int, cause: Cause) -> None:
    """Wake from ``level``, or make weights whole that may not be (the same sequence)."""
    turn.advance(replica, cause)
    replica.level = level
    turn.note(NoteKind.WAKE_STARTED, replica, f"waking from level {level}: {cause}", level=level)
    _begin_sequence(turn, replica, wake_steps(level, canary=wants_canary(turn, replica)))


def _begin_sequence(turn: Turn, replica: Replica, steps: Sequence[Step]) -> None:
    turn.forget_operation(replica)
    replica.steps, replica.op_began, replica.probe_at = tuple(steps), turn.now, None
    replica.known_invocation = replica.invocation
    _run_step(turn, replica)


def _run_step(turn: Turn, replica: Replica) -> None:
    step = replica.steps[replica.step_index]
    asleep_soon = replica.life is Life.FALLING_ASLEEP
    limit = turn.fleet.supervisor.sleep_timeout if asleep_soon else turn.fleet.supervisor.wake_step_timeout
    match step:
        case PersistStep(phase, level):
            replica.record = Record(level, phase, replica.invocation, replica.hold, turn.now)
            op = turn.expect(replica, PERSIST_TIMEOUT + GRACE)
            turn.actions.append(Persist(replica.name, op, replica.record))
        case CallStep(call, level, tags):
            op = turn.expect(replica, limit + GRACE)
            turn.actions.append(CallEngine(replica.name, op, call, limit, level, tags))
        case VerifyStep():
            op = turn.expect(replica, limit + GRACE)
            turn.actions.append(ProbeEngine(replica.name, op, limit, verify=True))
        case CanaryStep():
            op = turn.expect(replica, CANARY_TIMEOUT + GRACE)
            turn.actions.append(TakeFingerprint(replica.name, op, CANARY_TIMEOUT))


def step_done(turn: Turn, replica: Replica) -> None:
    """The awaited step of a sequence succeeded: on to the next, or to the end."""
    replica.step_index += 1
    if replica.step_index < len(replica.steps):
        _run_step(turn, replica)
    elif replica.life is Life.WAKING:
        _woken(turn, replica)
    elif replica.life is Life.STARTING:
        _started(turn, replica)
    else:
        _slept(turn, replica)


def step_failed(turn: Turn, replica: Replica, reason: str) -> None:
    """The awaited step failed. What is true now is asked of the engine, where it can still be asked."""
    step = replica.steps[replica.step_index]
    reason = f"'{step.words}' failed: {reason}"
    replica.last_error = reason
    match replica.life, step:
        case Life.FALLING_ASLEEP, CallStep():
            step_done(turn, replica)  # look whether it sleeps all the same
        case Life.FALLING_ASLEEP, PersistStep(Phase.FALLING_ASLEEP, _):
            # Without the intent on disk nothing may be done.
            _stay_awake(turn, replica, reason, nothing_done=True)
        case Life.FALLING_ASLEEP, PersistStep():
            # It sleeps, and the intent on disk says at least that: a wake from there is right.
            turn.note(NoteKind.RECORD_FAILED, replica, reason, warning=True)
            step_done(turn, replica)
        case _:
            restart_broken(turn, replica, reason)


def verified(turn: Turn, replica: Replica, probe: Probe) -> None:
    """The answer to a ``VerifyStep``."""
    step = replica.steps[replica.step_index]
    assert isinstance(step, VerifyStep)
    if probe.state is step.expected:
        step_done(turn, replica)
    elif replica.life is Life.WAKING and probe.state is EngineState.ASLEEP and not _resuming(replica):
        replica.level = UNKNOWN_LEVEL
        _go_on_with(turn, replica, resume_steps(canary=wants_canary(turn, replica)))
    elif replica.life is Life.FALLING_ASLEEP and step.expected is EngineState.AWAKE:
        _not_awake_any_more(turn, replica, probe)
    elif replica.life is Life.FALLING_ASLEEP and probe.state is EngineState.AWAKE:
        reason = replica.last_error or f"it is still awake after sleep {replica.level}"
        _stay_awake(turn, replica, reason, nothing_done=False)
    else:
        step_failed_for_good(turn, replica, f"the engine is {probe.state} {probe.detail}".rstrip())


def _not_awake_any_more(turn: Turn, replica: Replica, probe: Probe) -> None:
    """The look before a sleep found something else than an awake engine; nothing was done yet."""
    if probe.state is EngineState.ASLEEP:
        turn.note(NoteKind.DRIFT, replica, "was put to sleep by somebody", warning=True)
        replica.level = UNKNOWN_LEVEL
        _go_on_with(turn, replica, (PersistStep(Phase.SETTLED, UNKNOWN_LEVEL),))
    else:
        _stay_awake(turn, replica, f"the engine is {probe.state} {probe.detail}".rstrip(), nothing_done=True)
        replica.probe_at = turn.now


def _resuming(replica: Replica) -> bool:
    return replica.steps in (resume_steps(), resume_steps(canary=True))


def _go_on_with(turn: Turn, replica: Replica, steps: Sequence[Step]) -> None:
    """More steps of the same operation; its time is counted from its own beginning."""
    began = replica.op_began
    _begin_sequence(turn, replica, steps)
    replica.op_began = began


# --- the canary ------------------------------------------------------------------------------------------------------


def wants_canary(turn: Turn, replica: Replica) -> bool:
    """A fingerprint is to be compared before traffic is let in."""
    model = turn.fleet.model_of(replica)
    return model is not None and model.spec.wake.canary and (replica.no_canary_of or None) != replica.invocation


def first_look(turn: Turn, replica: Replica) -> None:
    """The engine has become ready, or was found so: keep its fingerprint, or compare with what it answered before."""
    if wants_canary(turn, replica):
        _go_on_with(turn, replica, FIRST_LOOK_STEPS)
    else:
        _started(turn, replica)


def fingerprinted(turn: Turn, replica: Replica, seen: Fingerprint | None) -> None:
    """The answer to a ``CanaryStep``; None: the engine offers no route for one."""
    known = replica.fingerprint if replica.fingerprint_of == replica.invocation else None
    if seen is None:
        replica.no_canary_of = replica.invocation
    elif known is None:
        # Weights of a new run, or just loaded again step by step: whatever they answer is right.
        replica.fingerprint, replica.fingerprint_of = seen, replica.invocation
        turn.actions.append(SaveFingerprint(replica.name, replica.invocation, seen))
    elif why := difference(known, seen):
        _not_itself(turn, replica, why)
        return
    else:
        turn.note(NoteKind.CANARY_PASSED, replica, "answers as before")
    step_done(turn, replica)


def _not_itself(turn: Turn, replica: Replica, why: str) -> None:
    """Garbage with HTTP 200. Load the weights again; if that does not help, the unit is restarted."""
    turn.note(NoteKind.CANARY_FAILED, replica, f"its answers are not its own: {why}", warning=True)
    reloaded = any(isinstance(step, CallStep) and step.call is Call.RELOAD_WEIGHTS for step in replica.steps)
    if replica.life is Life.WAKING and not reloaded:
        replica.level = UNKNOWN_LEVEL
        _go_on_with(turn, replica, wake_steps(UNKNOWN_LEVEL, canary=True))
    elif replica.life is Life.STARTING:
        begin_wake(turn, replica, UNKNOWN_LEVEL, Cause.WEIGHTS_UNKNOWN)
    else:
        restart_broken(turn, replica, f"its answers are not its own: {why}")


def step_failed_for_good(turn: Turn, replica: Replica, reason: str) -> None:
    """A verification that leaves no doubt: only a restart makes this engine trustworthy again."""
    words = replica.steps[replica.step_index].words
    restart_broken(turn, replica, f"'{words}' failed: {reason}")


def memory_kept(before: int | None, after: int | None) -> bool:
    """True when a sleep was measured and gave back less than it must."""
    return bool(before) and after is not None and before is not None and after > before * (1 - FREED_AT_LEAST)


def _slept(turn: Turn, replica: Replica) -> None:
    turn.forget_operation(replica)
    turn.advance(replica, Cause.SLEEP_VERIFIED)
    replica.generation += 1
    replica.known_invocation = replica.invocation
    replica.probe_at = turn.now + turn.fleet.supervisor.probe_interval
    turn.note(NoteKind.SLEPT, replica, f"asleep, level {replica.level}", level=replica.level)
    if replica.record is not None and replica.record.hold is not replica.hold:
        save_record(turn, replica)
    if replica.sleep_broken:
        message = (
            f"sleep {replica.level} left its memory in use (is it started with --enable-sleep-mode?),"
            " so it is stopped instead"
        )
        replica.last_error = message
        turn.note(NoteKind.SLEEP_FAILED, replica, message, warning=True, level=replica.level)
        if replica.goal is Goal.DRAINED:
            reach_goal(turn, replica)
        if replica.goal is None or replica.goal.level:
            fail_goal(turn, replica, CommandFailure.SLEEP_FAILED, message)
            replica.goal = Goal.STOPPED


def _stay_awake(turn: Turn, replica: Replica, reason: str, *, nothing_done: bool) -> None:
    """A sleep did not happen. Level 2 may have dropped the weights all the same, so they are loaded again."""
    level = replica.level
    turn.forget_operation(replica)
    replica.sleep_broken = replica.sleep_broken or not nothing_done
    if nothing_done:
        replica.rest_at = turn.now + REST_AGAIN
    replica.last_error = reason
    message = f"did not fall asleep, level {level}: {reason}"
    turn.note(NoteKind.SLEEP_FAILED, replica, message, warning=True, level=level)
    if replica.goal is not None and replica.goal.level:
        fail_goal(turn, replica, CommandFailure.SLEEP_FAILED, reason)
    if level == 2 and not nothing_done:
        begin_wake(turn, replica, level, Cause.WEIGHTS_UNKNOWN)
    else:
        turn.advance(replica, Cause.SLEEP_REFUSED)
        become_routable(turn, replica, fresh=False)


def _woken(turn: Turn, replica: Replica) -> None:
    seconds = turn.now - replica.op_began
    replica.wake_seconds[replica.level] = blend(replica.wake_seconds.get(replica.level, 0.0), seconds)
    replica.last_wake_seconds = seconds
    message = f"awake after {seconds:.3f} s from level {replica.level}"
    turn.note(NoteKind.WOKEN, replica, message, level=replica.level, seconds=seconds)
    turn.advance(replica, Cause.ENGINE_AWAKE)
    become_routable(turn, replica, fresh=True)


def _started(turn: Turn, replica: Replica) -> None:
    replica.start_seconds = turn.now - replica.op_began
    turn.note(NoteKind.READY, replica, f"ready after {replica.start_seconds:.3f} s", seconds=replica.start_seconds)
    turn.advance(replica, Cause.ENGINE_AWAKE)
    _only_awake_now(replica)
    become_routable(turn, replica, fresh=True)


# --- readiness, failure --------------------------------------------------------------------------------------------


def become_routable(turn: Turn, replica: Replica, *, fresh: bool) -> None:
    """The replica is READY: whole and awake. ``fresh``: its prefix cache is empty and the idle clock starts now.

    A wake on the way from level 1 to level 2 is no use of the engine: the idle clock goes on.
    """
    turn.forget_operation(replica)
    replica.level, replica.health, replica.misses, replica.escalations = 0, Health.OK, 0, 0
    replica.strikes, replica.trial_lease, replica.progress = 0, 0, None
    replica.known_invocation = replica.invocation
    replica.probe_at = turn.now + turn.fleet.supervisor.probe_interval
    replica.progress_at = turn.now
    if fresh:
        replica.generation += 1
        if replica.goal is not Goal.SLEEP2:
            replica.idle_since = turn.now
    if replica.goal is Goal.AWAKE:
        reach_goal(turn, replica)
    save_record(turn, replica)


def give_up(turn: Turn, replica: Replica, failure: CommandFailure, message: str, lines: Sequence[str] = ()) -> None:
    """The replica failed: back off, tell whoever wanted it, and find out what its unit said last."""
    up = replica.unit is not None and replica.unit.active_state not in ("inactive", "failed")
    ours = replica.spec.bundled or not replica.leaving
    if replica.life is Life.STARTING and up and ours and not turn.fleet.draining:
        # systemd would try again by itself, at its own pace; the back-off is ours.
        turn.actions.append(
            RunUnitJob(replica.name, 0, replica.spec.unit, UnitVerb.STOP, turn.fleet.supervisor.stop_timeout)
        )
    turn.advance(replica, Cause.GIVE_UP)
    fail(turn, replica, failure, message, lines)


def fail(turn: Turn, replica: Replica, failure: CommandFailure, message: str, lines: Sequence[str] = ()) -> None:
    """Common end of everything that leads to FAILED."""
    turn.forget_operation(replica)
    replica.probe_at, replica.level, replica.health = None, 0, Health.OK
    replica.known_invocation = replica.invocation
    replica.generation += 1
    replica.failures += 1
    supervisor = turn.fleet.supervisor
    replica.retry_at = turn.now + backoff.delay(replica.failures, supervisor.backoff_min, supervisor.backoff_max)
    replica.sweep_at = replica.retry_at if replica.occupies_gpu else None
    replica.last_error = message
    replica.escalations = 0
    if lines:
        add_last_lines(replica, lines)
    else:
        replica.autopsy_until = turn.now + AUTOPSY_TIMEOUT
        turn.actions.append(ReadLastLines(replica.name, replica.spec.unit))
    turn.note(NoteKind.FAILED, replica, replica.last_error, warning=True)
    save_hold(turn, replica)
    fail_goal(turn, replica, failure, replica.last_error)


def add_last_lines(replica: Replica, lines: Sequence[str]) -> None:
    """Append what the unit said last to the error: usually the only thing that explains it."""
    replica.autopsy_until = 0.0
    said = [line.strip() for line in lines if line.strip()]
    if said:
        replica.last_error += "; its last lines: " + " | ".join(said[-5:])


def go_down(turn: Turn, replica: Replica) -> None:
    """Common end of everything that leads to STOPPED."""
    turn.forget_operation(replica)
    replica.probe_at, replica.level, replica.health, replica.misses = None, 0, Health.OK, 0
    replica.known_invocation = replica.invocation
    replica.generation += 1
    replica.stale = replica.sleep_broken = False
    turn.note(NoteKind.STOPPED, replica, f"{replica.spec.unit} is down")
    save_record(turn, replica)
