"""Are our units there, right, enabled and running, and is the port ours?"""

from __future__ import annotations

from collections.abc import Sequence

from supervisord.cli.doctor.findings import Finding, fail, ok, skip, warn
from supervisord.cli.doctor.host import Host
from supervisord.cli.doctor.login import properties, systemctl
from supervisord.core.spec import Config, ProxySpec

SERVICE = "vllm-supervisord.service"
SOCKET = "vllm-supervisord.socket"
TEMPLATE = "vllm@.service"

_INSTALL = "Install vllm-supervisord (again): its installer puts the units in place, then: {} daemon-reload"


def check_units(host: Host) -> Finding:
    states = _unit_files(host)
    if states is None:
        return skip("units", "Cannot be checked: the service manager does not answer.")
    missing = [unit for unit in (SERVICE, SOCKET, TEMPLATE) if unit not in states]
    if missing:
        return fail("units", f"Not installed: {', '.join(missing)}.", _INSTALL.format(" ".join(systemctl(host))))
    masked = [unit for unit in (SERVICE, SOCKET, TEMPLATE) if states[unit].startswith("masked")]
    if masked:
        return fail("units", f"Masked: {', '.join(masked)}.", f"{' '.join(systemctl(host))} unmask {' '.join(masked)}")
    stale = [
        block.get("Id", "")
        for block in properties(host.run(*systemctl(host), "show", "-p", "Id,NeedDaemonReload", SERVICE, SOCKET).out)
        if block.get("NeedDaemonReload") == "yes"
    ]
    if stale:
        return warn(
            "units",
            f"Changed on disk since they were loaded: {', '.join(stale)}.",
            f"{' '.join(systemctl(host))} daemon-reload",
        )
    return ok("units", f"{SERVICE}, {SOCKET} and {TEMPLATE} are installed.")


def check_units_verify(host: Host) -> Finding:
    """``systemd-analyze verify`` finds keys that this systemd does not know, and programs that are not there."""
    states = _unit_files(host)
    units = [unit for unit in (SERVICE, SOCKET, TEMPLATE) if states is not None and unit in states]
    if not units:
        return skip("units-verify", "Nothing to verify: our units are not installed.")
    paths = []
    for unit in units:
        ran = host.run(*systemctl(host), "cat", unit)
        paths += [line.removeprefix("# ") for line in ran.out.splitlines()[:1] if line.startswith("# /")]
    ran = host.run("systemd-analyze", *(() if host.system else ("--user",)), "--man=no", "verify", *paths)
    if ran.code == 127:
        return skip("units-verify", "There is no systemd-analyze.")
    complaints = [
        line for line in ran.err.splitlines() if any(unit.split("@")[0].split(".")[0] in line for unit in units)
    ]
    if ran.code != 0 or complaints:
        first = complaints[0] if complaints else ran.err.splitlines()[0] if ran.err else f"exit code {ran.code}"
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        command = " ".join(("systemd-analyze", *(() if host.system else ("--user",)), "verify", *paths))
        level = fail if ran.code != 0 else warn
        return level("units-verify", f"systemd-analyze complains: {first}{more}", f"See all of it: {command}")
    return ok("units-verify", "systemd-analyze verify finds nothing to say about our units.")


def check_enabled(host: Host) -> Finding:
    states = _unit_files(host)
    if states is None or SERVICE not in states:
        return skip("enabled", "Cannot be checked: the units are not installed.")
    off = [
        unit for unit in (SERVICE, SOCKET) if states.get(unit) not in ("enabled", "enabled-runtime", "static", "alias")
    ]
    if off:
        return warn(
            "enabled",
            f"Not enabled, so not started at {'boot' if host.system else 'login or boot'}: {', '.join(off)}.",
            f"{' '.join(systemctl(host))} enable --now {SOCKET} {SERVICE}",
        )
    return ok("enabled", "The daemon and its socket are enabled.")


def check_daemon(host: Host) -> Finding:
    fleet = host.fleet()
    if not isinstance(fleet, str):
        simulated = " Some replicas are simulated." if fleet.manager.simulated else ""
        return ok("daemon", f"vllm-supervisord {fleet.manager.version} answers: {fleet.manager.status}.{simulated}")
    shown = properties(
        host.run(*systemctl(host), "show", "-p", "LoadState,ActiveState,SubState,Result,StatusText", SERVICE).out
    )
    state = shown[0] if shown else {}
    activity = f"{state.get('ActiveState', 'unknown')}/{state.get('SubState', 'unknown')}"
    said = f", '{state['StatusText']}'" if state.get("StatusText") else ""
    result = f", result {state['Result']}" if state.get("Result", "success") != "success" else ""
    return fail(
        "daemon",
        f"{fleet} Its unit is {activity}{result}{said}.",
        f"{' '.join(systemctl(host))} start vllm-supervisord; why it ended: vllmctl logs",
    )


def check_socket(host: Host) -> Finding:
    """The port must be held by the socket unit: then it survives restarts of the daemon."""
    shown = properties(host.run(*systemctl(host), "show", "-p", "LoadState,ActiveState,Result,Listen", SOCKET).out)
    if not shown or shown[0].get("LoadState") != "loaded":
        return skip("socket", f"Cannot be checked: {SOCKET} is not installed.")
    state = shown[0]
    listens = [word for word in state.get("Listen", "").split() if not word.startswith("(")]
    if state.get("ActiveState") == "active":
        wanted, fleet = _configured(host), host.fleet()
        if wanted and wanted not in listens:
            return warn(
                "socket",
                f"{SOCKET} holds {', '.join(listens) or 'nothing'}, so the configured proxy.listen = '{wanted}' is "
                "ignored.",
                f"{' '.join(systemctl(host))} edit {SOCKET}, or leave listen out",
            )
        if not isinstance(fleet, str) and fleet.manager.listen and not _ports(listens) & _ports(fleet.manager.listen):
            return fail(
                "socket",
                f"{SOCKET} holds {', '.join(listens)}, but the daemon listens on {', '.join(fleet.manager.listen)}.",
                f"{' '.join(systemctl(host))} restart vllm-supervisord",
            )
        return ok("socket", f"{SOCKET} holds {', '.join(listens)}.")
    taken = [listen for listen in listens if _accepts(host, listen)]
    if taken:
        owner = "the daemon itself" if not isinstance(host.fleet(), str) else "another program"
        return (warn if owner == "the daemon itself" else fail)(
            "socket",
            f"{SOCKET} is {state.get('ActiveState')}, and {', '.join(taken)} is held by {owner}.",
            "Find it: ss -ltnp" if owner == "another program" else _restart(host),
        )
    return fail("socket", f"{SOCKET} is {state.get('ActiveState')} (result {state.get('Result')}).", _restart(host))


def _restart(host: Host) -> str:
    control = " ".join(systemctl(host))
    return f"{control} stop vllm-supervisord; {control} start {SOCKET} {SERVICE}"


def _configured(host: Host) -> str:
    """The configured address, empty where it is the default: then the unit file decides, and nobody is surprised."""
    config = host.config()
    listen = config.proxy.listen if isinstance(config, Config) else ""
    return listen if listen != ProxySpec().listen else ""


def _ports(addresses: Sequence[str]) -> set[str]:
    """0.0.0.0:80, [::]:80 and 80 may all be told of one socket: only the port is comparable."""
    return {address.rpartition(":")[2] for address in addresses}


def _accepts(host: Host, listen: str) -> bool:
    address, _, port = listen.rpartition(":")
    return port.isdigit() and host.accepts(address.strip("[]") or "127.0.0.1", int(port))


def _unit_files(host: Host) -> dict[str, str] | None:
    """Unit file -> its state (enabled, disabled, static, masked ...); None when the manager does not answer."""
    ran = host.run(*systemctl(host), "list-unit-files", "--no-legend", "--no-pager", "--plain", "vllm*")
    if ran.code not in (0, 1) or (ran.code == 1 and ran.err):
        return None
    rows: Sequence[list[str]] = [line.split() for line in ran.out.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) >= 2}
