"""A healthy machine for the checks of vllmctl doctor, with recorded answers; a test changes what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from supervisord import __version__
from supervisord.bus.snapshot import FleetStatus, ManagerStatus
from supervisord.cli.doctor.findings import Finding, Level
from supervisord.cli.doctor.host import Ran
from supervisord.core.spec import Config, ModelSpec, ProxySpec, ReplicaSpec, ServeSpec

UNIT_FILES = """\
vllm-supervisord.service enabled enabled
vllm@.service            disabled enabled
vllm.slice               static  -
vllm-supervisord.socket  enabled enabled
"""

SOCKET = "LoadState=loaded\nActiveState=active\nResult=success\nListen=127.0.0.1:8000 (Stream)"


def manager(**changes: object) -> FleetStatus:
    status = ManagerStatus(
        version=__version__,
        draining=False,
        simulated=False,
        status="1/1 awake, 0 in flight",
        listen=("127.0.0.1:8000",),
        config_files=(),
        state_directory="/home/ada/.local/state/vllm-supervisord",
    )
    return FleetStatus(dataclasses.replace(status, **changes), (), ())


def config(*, listen: str = ProxySpec().listen, proxy: ProxySpec | None = None, **serve: object) -> Config:
    replica = ReplicaSpec("chat-a", "chat", "vllm@chat-a.service", "unix:/run/user/1000/vllm/chat-a/engine.sock", True)
    model = ModelSpec("chat", (replica,), serve=ServeSpec(**({"model": "m"} | serve)))
    return Config(proxy=proxy or ProxySpec(listen=listen), models=(model,), files=("/home/ada/config.toml",))


class RecordedHost:
    """A healthy machine; a test changes what it is about. Commands are looked up by their longest known beginning."""

    system = False
    uid = 1000
    user = "ada"
    home = "/home/ada"
    python = (3, 11, 2)

    def __init__(self) -> None:
        self.env: Mapping[str, str] = {"XDG_RUNTIME_DIR": "/run/user/1000", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/b"}
        self.packages: dict[str, str] = {
            "aiohttp": "3.14.5",
            "dbus-next": "0.2.3",
            "pystemd": "0.15.3",
            "sdnotify": "0.3.2",
        }
        self.commands: dict[str, Ran] = {
            "systemctl --version": Ran(0, "systemd 252 (252.39-1~deb12u2)\n+PAM +AUDIT"),
            "systemctl --user is-system-running": Ran(0, "running"),
            "systemctl --user show -p LoadState -p ActiveState dbus.socket": Ran(
                0, "LoadState=loaded\nActiveState=active"
            ),
            "systemctl --user list-unit-files": Ran(0, UNIT_FILES),
            "systemctl --user show -p Id,NeedDaemonReload": Ran(
                0, "Id=vllm-supervisord.service\nNeedDaemonReload=no\n\nId=vllm-supervisord.socket\nNeedDaemonReload=no"
            ),
            "systemctl --user cat": Ran(0, "# /home/ada/.config/systemd/user/vllm-supervisord.service\n[Unit]"),
            "systemctl --user show -p LoadState,ActiveState,Result,Listen": Ran(0, SOCKET),
            "systemctl --user show -p LoadState,ActiveState,SubState": Ran(
                0, "LoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\nStatusText="
            ),
            "systemctl --user show -p Id,LoadState,LoadError": Ran(0, "Id=vllm@chat-a.service\nLoadState=loaded"),
            "systemctl --user show-environment": Ran(0, "PATH=/usr/bin:/opt/vllm/bin\nLANG=C"),
            "systemd-analyze": Ran(0),
            "loginctl": Ran(0, "yes"),
            "journalctl": Ran(0),
        }
        self.files: dict[str, tuple[int, int]] = {"/run/user/1000": (1000, 0o700), "/run/user/1000/vllm": (1000, 0o755)}
        self.programs = {"vllm": "/opt/vllm/bin/vllm"}
        self.unwritable = ""
        self.listening: set[tuple[str, int]] = set()
        self.answers: FleetStatus | str = manager()
        self.why_no_bus = ""
        self.configured: Config | Sequence[str] = config()

    def package(self, name: str) -> str | None:
        return self.packages.get(name)

    def run(self, *argv: str) -> Ran:
        command = " ".join(argv)
        known = [start for start in self.commands if command.startswith(start)]
        return self.commands[max(known, key=len)] if known else Ran(127, err=f"{argv[0]}: not found")

    def owner_and_mode(self, path: str) -> tuple[int, int] | None:
        return self.files.get(path)

    def why_unwritable(self, directory: str) -> str:
        return self.unwritable

    def which(self, program: str, path: str | None) -> str | None:
        return self.programs.get(program)

    def accepts(self, address: str, port: int) -> bool:
        return (address, port) in self.listening

    def fleet(self) -> FleetStatus | str:
        return self.answers

    def bus(self) -> str:
        return self.why_no_bus

    def config(self) -> Config | Sequence[str]:
        return self.configured


def expect(finding: Finding, level: Level, *parts: str) -> None:
    assert finding.level is level, finding
    for part in parts:
        assert part in f"{finding.text} -> {finding.mend}", finding
    assert finding.text.endswith((".", ")")) or level is Level.FAIL, finding
    assert bool(finding.mend) is (level in (Level.WARN, Level.FAIL)) or level is Level.WARN, finding
