"""Is there a user manager with a bus, and does it stay when nobody is logged in?"""

from __future__ import annotations

from supervisord.cli.doctor.findings import Finding, fail, ok, skip, warn
from supervisord.cli.doctor.host import Host

#: ``systemctl is-system-running`` says these of a manager that works; degraded: some unit failed, ours or not.
_MANAGER_WORKS = ("running", "degraded", "starting", "initializing", "stopping", "maintenance")


def systemctl(host: Host) -> tuple[str, ...]:
    return ("systemctl",) if host.system else ("systemctl", "--user")


def check_manager(host: Host) -> Finding:
    ran = host.run(*systemctl(host), "is-system-running")
    state = ran.out.splitlines()[0] if ran.out else ""
    if state in _MANAGER_WORKS:
        if state == "degraded":
            failed = host.run(*systemctl(host), "list-units", "--failed", "--plain", "--no-legend").out
            units = ", ".join(line.split()[0] for line in failed.splitlines() if line.strip())
            return warn(
                "manager",
                f"The service manager is degraded; failed: {units or 'unknown'}.",
                f"See: {' '.join(systemctl(host))} status {units}",
            )
        return ok("manager", f"The {'system' if host.system else 'user'} manager answers ({state}).")
    if host.system:
        return fail("manager", f"The system manager does not answer: {ran.err or state or 'no answer'}.")
    return fail(
        "manager",
        f"The user manager does not answer: {ran.err or state or 'no answer'}.",
        f"Log in as {host.user} itself (not with su or sudo), or: loginctl enable-linger {host.user}; then "
        f"export XDG_RUNTIME_DIR=/run/user/{host.uid}",
    )


def check_bus(host: Host) -> Finding:
    why = host.bus()
    name = "system" if host.system else "session"
    if why:
        return fail("bus", f"The {name} bus cannot be reached: {why}.", "Install dbus-user-session, then log in again.")
    if not host.system and not host.env.get("DBUS_SESSION_BUS_ADDRESS"):
        return ok("bus", "The session bus answers (found without DBUS_SESSION_BUS_ADDRESS, in the runtime directory).")
    return ok("bus", f"The {name} bus answers.")


def check_user_bus_socket(host: Host) -> Finding:
    """The bus must be the user manager's: one that a desktop started ends with the desktop."""
    if host.system:
        return skip("dbus-user-session", "Not needed in system mode.")
    shown = properties(
        host.run("systemctl", "--user", "show", "-p", "LoadState", "-p", "ActiveState", "dbus.socket").out
    )
    if not shown:
        return skip("dbus-user-session", "Cannot be checked: the user manager does not answer.")
    if shown[0].get("LoadState") != "loaded":
        return fail(
            "dbus-user-session",
            "The user manager has no dbus.socket: without a desktop there is no session bus.",
            "apt install dbus-user-session (or dbus-broker), then log in again",
        )
    if shown[0].get("ActiveState") != "active":
        return fail(
            "dbus-user-session",
            f"The user manager's dbus.socket is {shown[0].get('ActiveState')}.",
            "systemctl --user start dbus.socket",
        )
    return ok("dbus-user-session", "The session bus belongs to the user manager.")


def check_linger(host: Host) -> Finding:
    if host.system:
        return skip("linger", "Not needed in system mode.")
    if host.owner_and_mode(f"/var/lib/systemd/linger/{host.user}") is not None:
        return ok("linger", f"{host.user} lingers: the replicas start at boot and outlive the last logout.")
    ran = host.run("loginctl", "show-user", host.user, "-p", "Linger", "--value")
    if ran.out == "yes":
        return ok("linger", f"{host.user} lingers: the replicas start at boot and outlive the last logout.")
    if ran.code != 0 and "not logged in" not in ran.err:
        why = ran.err.splitlines()[0] if ran.err else f"exit code {ran.code}"
        return warn("linger", f"Whether {host.user} lingers cannot be told, for logind does not answer: {why}.")
    return warn(
        "linger",
        f"{host.user} does not linger: everything stops at the last logout, and nothing starts at boot.",
        f"loginctl enable-linger {host.user}",
    )


def check_runtime_directory(host: Host) -> Finding:
    """Engine sockets lie in it, and whoever reaches one may put the engine to sleep."""
    if host.system:
        return skip("runtime-directory", "Not needed in system mode.")
    path = host.env.get("XDG_RUNTIME_DIR") or f"/run/user/{host.uid}"
    found = host.owner_and_mode(path)
    if found is None:
        return fail("runtime-directory", f"{path} does not exist.", f"loginctl enable-linger {host.user}, or log in.")
    for folder in (path, f"{path}/vllm"):
        found = host.owner_and_mode(folder)
        if found is None:
            continue
        uid, mode = found
        if uid != host.uid:
            return fail("runtime-directory", f"{folder} belongs to uid {uid}.", f"chown {host.user} {folder}")
        if mode & 0o077 and folder == path:
            return fail("runtime-directory", f"{folder} is open to others (mode {mode:04o}).", f"chmod 0700 {folder}")
    if not host.env.get("XDG_RUNTIME_DIR"):
        return warn(
            "runtime-directory",
            f"{path} is right, but XDG_RUNTIME_DIR is not set: systemctl --user and journalctl need it.",
            f"export XDG_RUNTIME_DIR={path}",
        )
    return ok("runtime-directory", f"{path} is {host.user}'s alone.")


def check_journal(host: Host) -> Finding:
    ran = host.run("journalctl", "-n", "0", "--no-pager")
    complaint = ran.err
    if ran.code == 127:
        return warn("journal", "There is no journalctl.", "Install systemd's journal, or let units log to files.")
    if "insufficient permissions" in complaint:
        return warn(
            "journal",
            f"{host.user} may not read the journal, so neither 'vllmctl logs' nor an engine's last words can be shown.",
            f"usermod -a -G systemd-journal {host.user}, or make it persistent: mkdir -p /var/log/journal",
        )
    if "No journal files were found" in complaint:
        return warn(
            "journal",
            "There are no journal files; the units' output is kept only where it goes to a file.",
            "Is systemd-journald running? Persistent storage: mkdir -p /var/log/journal",
        )
    if ran.code != 0:
        return warn("journal", f"The journal cannot be read: {ran.err or complaint}.")
    return ok("journal", "The journal can be read.")


def properties(shown: str) -> list[dict[str, str]]:
    """The answer of ``systemctl show UNIT...``: one block of KEY=VALUE lines a unit, blank lines between."""
    blocks = [block for block in shown.split("\n\n") if block.strip()]
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]
