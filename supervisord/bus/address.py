"""Where the session bus is, also for ssh and cron, where DBUS_SESSION_BUS_ADDRESS is not set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote


class NoSessionBus(Exception):
    """There is no session bus to talk to; the text says where it was looked for and what usually helps."""


def session_bus_address(env: Mapping[str, str]) -> str:
    """The address of the session bus for this environment; raises ``NoSessionBus`` when there is none.

    ``DBUS_SESSION_BUS_ADDRESS`` if it is set. Otherwise the socket at ``$XDG_RUNTIME_DIR/bus``, or, when that variable
    is missing too, as in cron jobs, the one at ``/run/user/UID/bus``, where logind puts the runtime directory.
    """
    address = env.get("DBUS_SESSION_BUS_ADDRESS", "")
    if address:
        return address
    runtime = env.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    path = Path(runtime, "bus")
    try:
        found = path.is_socket()
    except PermissionError:
        found = False
    if not found:
        raise NoSessionBus(
            f"cannot find the session bus: DBUS_SESSION_BUS_ADDRESS is not set and {path} does not exist"
            " (it needs the package dbus-user-session, and a login or `loginctl enable-linger`)"
        )
    # D-Bus escapes like a URL does, but "~" too, and dbus-next refuses "*" and "\\", which the specification allows.
    return "unix:path=" + quote(str(path), safe="/").replace("~", "%7E")


def system_bus_address(env: Mapping[str, str]) -> str:
    """The address of the system bus for this environment."""
    return env.get("DBUS_SYSTEM_BUS_ADDRESS") or "unix:path=/run/dbus/system_bus_socket"
