"""The machine as the checks see it: commands, files, and what the supervisor and its configuration say."""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from supervisord.bus.snapshot import FleetStatus
from supervisord.core.spec import Config


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended; code 127: there is no such program, 124: it was too slow."""

    code: int
    out: str = ""
    err: str = ""


class Host(Protocol):
    """Everything that a check may ask. Each answer is read once, when it is asked for."""

    system: bool
    uid: int
    user: str
    home: str
    env: Mapping[str, str]
    python: tuple[int, int, int]

    def package(self, name: str) -> str | None:
        """The installed version of a Python package."""
        ...

    def run(self, *argv: str) -> Ran: ...

    def owner_and_mode(self, path: str) -> tuple[int, int] | None:
        """Uid and permission bits; None where there is no such file."""
        ...

    def why_unwritable(self, directory: str) -> str:
        """Empty when a file could be made in ``directory`` (or where that would be made); else the reason."""
        ...

    def which(self, program: str, path: str | None) -> str | None:
        """The program's file, looked up in ``path`` (as ``$PATH``); None where there is none."""
        ...

    def accepts(self, address: str, port: int) -> bool:
        """Something accepts TCP connections there."""
        ...

    def fleet(self) -> FleetStatus | str:
        """What the supervisor says of itself; a sentence where it does not answer."""
        ...

    def bus(self) -> str:
        """Empty when the bus can be reached; else why not."""
        ...

    def config(self) -> Config | Sequence[str]:
        """The configuration, or everything that is wrong with it."""
        ...


class RealHost:
    """This machine. What comes over the bus is fetched before (``fleet`` and ``bus``), since checks do not wait."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        system: bool,
        fleet: FleetStatus | str,
        bus: str,
        config: Config | Sequence[str],
    ) -> None:
        self.system = system
        self.env = env
        self.uid = os.getuid()
        account = _account(self.uid)
        self.user = account.pw_name if account else env.get("USER", str(self.uid))
        self.home = env.get("HOME") or (account.pw_dir if account else "/")
        self.python = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
        self._fleet, self._bus, self._config = fleet, bus, config

    def package(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def run(self, *argv: str) -> Ran:
        try:
            done = subprocess.run(
                argv,
                env={**self.env, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=20,
                check=False,
            )
        except FileNotFoundError:
            return Ran(127, err=f"{argv[0]}: not found")
        except subprocess.TimeoutExpired:
            return Ran(124, err=f"{argv[0]} did not end within 20 s")
        except OSError as error:
            return Ran(126, err=f"{argv[0]}: {error.strerror}")
        return Ran(done.returncode, done.stdout.strip(), done.stderr.strip())

    def owner_and_mode(self, path: str) -> tuple[int, int] | None:
        try:
            status = Path(path).stat()
        except OSError:
            return None
        return status.st_uid, status.st_mode & 0o7777

    def why_unwritable(self, directory: str) -> str:
        place = Path(directory)
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            with tempfile.TemporaryFile(dir=place):
                return ""
        except OSError as error:
            return f"{place}: {error.strerror}"

    def which(self, program: str, path: str | None) -> str | None:
        return shutil.which(program, path=path)

    def accepts(self, address: str, port: int) -> bool:
        try:
            with socket.create_connection((address, port), timeout=1.0):
                return True
        except OSError:
            return False

    def fleet(self) -> FleetStatus | str:
        return self._fleet

    def bus(self) -> str:
        return self._bus

    def config(self) -> Config | Sequence[str]:
        return self._config


def _account(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None
