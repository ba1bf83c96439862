"""All checks, one after the other; one that breaks does not keep the others from being made."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from supervisord.bus.client import Client, DaemonAbsent, StillWorking
from supervisord.bus.errors import BusUnavailable, CallFailed
from supervisord.bus.snapshot import FleetStatus
from supervisord.cli.config import load_config
from supervisord.cli.console import Console, printable
from supervisord.cli.doctor import exposure, login, service, software
from supervisord.cli.doctor import fleet as fleet_checks
from supervisord.cli.doctor.findings import Finding, Level, fail
from supervisord.cli.doctor.host import Host, RealHost
from supervisord.cli.exits import Exit, Failure
from supervisord.cli.session import Session
from supervisord.control import ControlError
from supervisord.core.spec import Config

Check = Callable[[Host], Finding]

CHECKS: Sequence[Check] = (
    software.check_python,
    software.check_packages,
    software.check_systemd,
    login.check_manager,
    login.check_bus,
    login.check_user_bus_socket,
    login.check_linger,
    login.check_runtime_directory,
    login.check_journal,
    service.check_units,
    service.check_units_verify,
    service.check_enabled,
    service.check_daemon,
    software.check_versions_agree,
    service.check_socket,
    exposure.check_exposure,
    exposure.check_credentials,
    fleet_checks.check_config,
    fleet_checks.check_replica_units,
    fleet_checks.check_state_directory,
    fleet_checks.check_engines,
)

_MARKS = {
    Level.OK: ("ok", "green"),
    Level.WARN: ("warn", "yellow"),
    Level.FAIL: ("FAIL", "red"),
    Level.SKIP: ("-", "dim"),
}


def run_doctor(session: Session) -> Exit:
    """Check everything; 7 when anything failed."""
    host = _host(session)
    findings = [examine(host, check) for check in CHECKS]
    worst = Exit.PROBLEM_FOUND if any(finding.level is Level.FAIL for finding in findings) else Exit.DONE
    if session.console.json:
        session.console.data({"ok": worst is Exit.DONE, "findings": [finding.as_json() for finding in findings]})
    else:
        _show(session.console, findings)
    return worst


def examine(host: Host, check: Check) -> Finding:
    """What ``check`` finds; a check that breaks is a failure of that check alone."""
    try:
        return check(host)
    except Exception as error:  # noqa: BLE001 - a defect in one check must not hide the findings of the others
        name = check.__name__.removeprefix("check_").replace("_", "-")
        return fail(
            name, f"cannot check: {type(error).__name__}: {error}", "Please report this: it is a defect of vllmctl."
        )


def _host(session: Session) -> RealHost:
    found: list[FleetStatus | str] = []
    bus: list[str] = []

    async def ask() -> Exit:
        try:
            async with session.client() as client:
                found.append(await _fleet(client, session.question_timeout))
        except BusUnavailable as error:
            bus.append(str(error))
        except Failure as failure:
            bus.append(str(failure).splitlines()[0].rstrip("."))
        return Exit.DONE

    session.run(ask)
    config: Config | Sequence[str]
    loaded = load_config(session)
    config = loaded if isinstance(loaded, Config) else [str(problem) for problem in loaded.problems]
    return RealHost(
        session.env,
        system=session.system,
        fleet=found[0] if found else "The daemon cannot be asked without a bus.",
        bus=bus[0] if bus else "",
        config=config,
    )


async def _fleet(client: Client, timeout: float) -> FleetStatus | str:
    try:
        return await client.fleet(timeout=timeout)
    except DaemonAbsent:
        return "vllm-supervisord is not on the bus."
    except StillWorking as error:
        return f"vllm-supervisord is on the bus but does not answer: {error}."
    except (CallFailed, ControlError) as error:
        return f"vllm-supervisord refuses to answer: {error}."


def _show(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, colour = _MARKS[finding.level]
        first, *more = _wrapped(console, finding.text)
        console.say(f"{console.paint(f'{mark:<4}', colour)}  {finding.check:<17}  {first}")
        for line in more:
            console.say(f"{'':<25}{line}")
        if finding.mend:
            first, *more = _wrapped(console, f"-> {finding.mend}")
            for line in (first, *(f"   {line}" for line in more)):
                console.say(f"{'':<25}{line}")
    failed = sum(finding.level is Level.FAIL for finding in findings)
    warned = sum(finding.level is Level.WARN for finding in findings)
    console.say()
    console.say(f"{len(findings)} checks: {failed} failed, {warned} with a warning.")


def _wrapped(console: Console, text: str) -> list[str]:
    """To the terminal's width; on a pipe a finding stays one line, for grep."""
    text = printable(text)
    if console.width is None:
        return [text]
    return textwrap.wrap(text, max(console.width - 28, 20), break_on_hyphens=False, break_long_words=False) or [""]
