"""What a request is told that cannot be let in: why, and when to come again."""

from __future__ import annotations

from supervisord.core.admission import RefusalCode, Refuse
from supervisord.core.arbitration import could_ever_fit
from supervisord.core.estimates import FIRST_GUESS_START, FIRST_GUESS_WAKE1, FIRST_GUESS_WAKE2, retry_after
from supervisord.core.fleet import Model, Turn
from supervisord.core.replica import Replica
from supervisord.core.states import Hold, Life


def hopeless(turn: Turn, model: Model, only: frozenset[str] | None) -> Refuse:
    """Nothing that it could wait for is on its way. ``only``: see ``Waiter``."""
    replicas = [r for r in model.replicas if only is None or r.name in only]
    if replicas and all(r.hold is not Hold.NONE for r in replicas):
        message = f"The model `{model.name}` is held down by its operator."
        return Refuse(RefusalCode.MODEL_HELD, message, retry_after(60.0))
    if any(not could_ever_fit(turn.fleet, r) for r in replicas):
        message = f"The model `{model.name}` needs more GPU memory than there is."
        return Refuse(RefusalCode.INSUFFICIENT_MEMORY, message, retry_after(60.0))
    failed = [r for r in replicas if r.life is Life.FAILED]
    if failed:
        soonest = min(failed, key=lambda r: r.retry_at)
        message = f"The model `{model.name}` could not be started: {soonest.last_error}"
        return Refuse(RefusalCode.WAKE_FAILED, message, retry_after(soonest.retry_at - turn.now))
    message = f"No replica of the model `{model.name}` can answer now."
    return Refuse(RefusalCode.NO_LIVE_REPLICA, message, retry_after(until_ready(turn, model)))


def too_long(turn: Turn, model: Model, ticket: int) -> Refuse:
    """It has waited for as long as anybody may."""
    held = model.held.get(ticket)
    if held is not None:
        message = (
            f"The KV cache of `{model.name}` has been full of other conversations for {model.spec.wake.timeout:g} s."
        )
        return Refuse(RefusalCode.INSUFFICIENT_MEMORY, message, retry_after(held.likely_in))
    remaining = retry_after(until_ready(turn, model))
    if any(r.room_at is not None for r in model.replicas):
        message = f"Other models have held the GPU memory that `{model.name}` needs for {model.spec.wake.timeout:g} s."
        return Refuse(RefusalCode.INSUFFICIENT_MEMORY, message, remaining)
    waking = any(r.life in (Life.WAKING, Life.FALLING_ASLEEP, Life.ASLEEP) for r in model.replicas)
    if waking:
        message = f"The model `{model.name}` is still waking after {model.spec.wake.timeout:g} s."
        return Refuse(RefusalCode.MODEL_WAKING, message, remaining)
    message = f"The model `{model.name}` is still starting after {model.spec.wake.timeout:g} s."
    return Refuse(RefusalCode.MODEL_STARTING, message, remaining)


def until_ready(turn: Turn, model: Model) -> float:
    """Seconds until the soonest replica is likely to be ready: from what its last wakes and starts took."""
    return min((_remaining(turn, r) for r in model.replicas if r.hold is Hold.NONE), default=FIRST_GUESS_START)


def _remaining(turn: Turn, replica: Replica) -> float:
    start = replica.start_seconds or FIRST_GUESS_START
    wake = replica.wake_seconds.get(replica.level) or (FIRST_GUESS_WAKE1 if replica.level == 1 else FIRST_GUESS_WAKE2)
    match replica.life:
        case Life.READY | Life.DRAINING:
            return 0.0
        case Life.ASLEEP | Life.FALLING_ASLEEP:
            return wake
        case Life.WAKING:
            return max(0.0, wake - (turn.now - replica.op_began))
        case Life.STARTING:
            return max(0.0, start - (turn.now - replica.op_began))
        case Life.FAILED:
            return start + max(0.0, replica.retry_at - turn.now)
        case _:
            return start
