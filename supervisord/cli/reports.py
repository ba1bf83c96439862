"""From an exception to what is told and the exit code. The outermost layer: nothing below prints why it failed."""

from __future__ import annotations

from supervisord.bus.client import DaemonAbsent, StillWorking
from supervisord.bus.errors import BusUnavailable, CallFailed
from supervisord.cli.exits import Exit, Failure, Report
from supervisord.cli.session import Session, no_bus
from supervisord.control import ControlError, ErrorCode

_EXITS = {
    ErrorCode.NO_SUCH_MODEL: Exit.NO_SUCH,
    ErrorCode.NO_SUCH_REPLICA: Exit.NO_SUCH,
    ErrorCode.INVALID_ARGUMENT: Exit.USAGE,
    ErrorCode.SUPERSEDED: Exit.SUPERSEDED,
    ErrorCode.HELD: Exit.SUPERSEDED,
    ErrorCode.CONFIG_INVALID: Exit.CONFIG_INVALID,
    ErrorCode.SHUTTING_DOWN: Exit.NOT_RUNNING,
}


def report_control_error(error: ControlError) -> Report:
    """How an operator's command failed, in the supervisor's own words."""
    return Report(error.code.value, str(error), _EXITS.get(error.code, Exit.FAILED))


def report(error: Exception, session: Session) -> Report | None:
    """How ``error`` is told; None for a defect of vllmctl, which deserves its traceback."""
    match error:
        case Failure():
            return error.report
        case ControlError():
            return report_control_error(error)
        case BusUnavailable():
            return Report("NoBus", no_bus(session, str(error)), Exit.NOT_RUNNING)
        case DaemonAbsent():
            return _absence(error, session)
        case StillWorking():
            return Report("StillWorking", f"the daemon did not answer in time: {error}.", Exit.FAILED)
        case CallFailed():
            return Report("CallFailed", f"the bus or the daemon refused the call: {error}", Exit.FAILED)
        case _:
            return None


def _absence(error: DaemonAbsent, session: Session) -> Report:
    bus, control = ("system", "systemctl") if session.system else ("session", "systemctl --user")
    if error.vanished:
        return Report(
            "DaemonVanished",
            "vllm-supervisord went away before it answered; whether the operation was done is not known.\n"
            f"See: {control} status vllm-supervisord",
            Exit.NOT_RUNNING,
        )
    detail = f"\n{error}" if error.start_failed else ""
    return Report(
        "DaemonNotRunning",
        f"vllm-supervisord is not running (no io.github.vllmctl1 on the {bus} bus). "
        f"Start it: {control} start vllm-supervisord{detail}",
        Exit.NOT_RUNNING,
    )
