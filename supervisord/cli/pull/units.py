"""What systemd knows about the replicas' units, read through busctl: its JSON is exact, ``systemctl show``'s quoting is
not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supervisord.bus.address import NoSessionBus, session_bus_address
from supervisord.cli.exits import Exit, Failure
from supervisord.cli.session import Session, no_bus

_SYSTEMD = "org.freedesktop.systemd1"
_UNIT = ("LoadState", "SourcePath", "Requires")
_SERVICE = ("ExecStart", "Environment", "EnvironmentFiles", "UnsetEnvironment", "WorkingDirectory", "User", "Group")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a unit's processes find themselves in, as far as it matters to a download."""

    #: ``NAME=VALUE`` of its Environment=.
    environment: tuple[str, ...] = ()
    #: Its EnvironmentFile=, each with a ``-`` before it where it need not be there.
    environment_files: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    directory: str = ""
    user: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """One loaded unit."""

    name: str
    #: ``loaded``, ``not-found``, ``masked``, ``bad-setting``, ``error``.
    load_state: str
    #: What it was generated from, or empty.
    source: str
    requires: tuple[str, ...]
    #: The first command of ExecStart=, specifiers replaced.
    command: tuple[str, ...]
    surroundings: Surroundings


def manager_environment(session: Session) -> dict[str, str]:
    """The environment for systemd's tools, also under cron and ssh. Raises ``Failure`` where there is no bus."""
    env = dict(session.env)
    if not session.system:
        try:
            env["DBUS_SESSION_BUS_ADDRESS"] = session_bus_address(env)
        except NoSessionBus as error:
            raise Failure("NoBus", no_bus(session, str(error)), Exit.NOT_RUNNING) from error
        env.setdefault("XDG_RUNTIME_DIR", f"/run/user/{session.uid}")
    return env


class Units:
    """Asks the manager. Every method raises ``Failure`` where it does not answer."""

    def __init__(self, env: Mapping[str, str], *, system: bool) -> None:
        self._env = env
        self._manager = "--system" if system else "--user"

    def unit(self, name: str) -> Unit:
        """The unit ``name``; one that is not there is ``not-found``."""
        manager = ("/org/freedesktop/systemd1", f"{_SYSTEMD}.Manager")
        path = self._busctl("call", _SYSTEMD, *manager, "LoadUnit", "s", name)[0][0]
        load_state, source, requires = self._busctl("get-property", _SYSTEMD, path, f"{_SYSTEMD}.Unit", *_UNIT)
        commands: list[Any] = []
        surroundings = Surroundings()
        if name.endswith(".service"):
            commands, environment, files, unset, directory, user, group = self._busctl(
                "get-property", _SYSTEMD, path, f"{_SYSTEMD}.Service", *_SERVICE
            )
            marked = tuple(f"-{file}" if optional else file for file, optional in files)
            surroundings = Surroundings(tuple(environment), marked, tuple(unset), directory, user, group)
        command = tuple(commands[0][1]) if commands else ()
        return Unit(name, load_state, source, tuple(requires), command, surroundings)

    def _busctl(self, *words: str) -> list[Any]:
        """The data of each line of the answer."""
        command = ["busctl", self._manager, "--json=short", "--no-pager", "--timeout=20", *words]
        try:
            ran = subprocess.run(command, env=dict(self._env), capture_output=True, text=True, check=False)
        except OSError as error:
            raise Failure("NoManager", f"cannot run busctl: {error.strerror}", Exit.NOT_RUNNING) from error
        if ran.returncode != 0:
            text = f"cannot ask the service manager: {ran.stderr.strip() or f'busctl ended with {ran.returncode}'}"
            raise Failure("NoManager", text, Exit.NOT_RUNNING)
        return [json.loads(line)["data"] for line in ran.stdout.splitlines()]
