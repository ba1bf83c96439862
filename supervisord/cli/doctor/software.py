"""Are the versions good enough?"""

from __future__ import annotations

import re

from supervisord import __version__
from supervisord.cli.doctor.findings import Finding, fail, ok, skip, warn
from supervisord.cli.doctor.host import Host

#: Least versions: of aiohttp for its request-smuggling fixes, of the others as pyproject.toml has them.
PACKAGES = {"aiohttp": (3, 14, 5), "dbus-next": (0, 2, 3), "pystemd": (0, 15), "sdnotify": (0, 3, 2)}

#: Debian 12's; older ones lack what the units need.
SYSTEMD = 252


def check_python(host: Host) -> Finding:
    version = ".".join(str(part) for part in host.python)
    if host.python < (3, 11, 0):
        return fail("python", f"Python {version} is too old; 3.11 is the least.", "Install Python 3.11 or newer.")
    return ok("python", f"Python {version}.")


def check_packages(host: Host) -> Finding:
    found: list[str] = []
    wrong: list[str] = []
    for name, least in PACKAGES.items():
        version = host.package(name)
        wanted = ".".join(str(part) for part in least)
        if version is None:
            wrong.append(f"{name} is not installed ({wanted} or newer is needed)")
        elif _numbers(version) < least:
            wrong.append(f"{name} {version} is too old ({wanted} or newer is needed)")
        else:
            found.append(f"{name} {version}")
    if wrong:
        return fail("packages", f"{'; '.join(wrong)}.", "Install vllm-supervisord again: its installer brings them.")
    return ok("packages", f"{', '.join(found)}.")


def check_systemd(host: Host) -> Finding:
    ran = host.run("systemctl", "--version")
    match = re.match(r"systemd (\d+)", ran.out)
    if not match:
        return fail(
            "systemd", f"cannot tell systemd's version: {ran.err or ran.out or 'no answer'}.", "Install systemd."
        )
    if int(match[1]) < SYSTEMD:
        return fail("systemd", f"systemd {match[1]} is too old; {SYSTEMD} is the least.", "Upgrade the distribution.")
    if int(match[1]) < 254:
        return ok("systemd", f"systemd {match[1]} (restart steps and kept descriptors came with 254; all else works).")
    return ok("systemd", f"systemd {match[1]}.")


def check_versions_agree(host: Host) -> Finding:
    fleet = host.fleet()
    if isinstance(fleet, str):
        return skip("versions", f"vllmctl is {__version__}; the daemon does not answer.")
    if fleet.manager.version != __version__:
        return warn(
            "versions",
            f"vllmctl is {__version__}, but the running daemon is {fleet.manager.version}.",
            f"Restart it: {'systemctl' if host.system else 'systemctl --user'} restart vllm-supervisord",
        )
    return ok("versions", f"vllmctl and the running daemon are both {__version__}.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
