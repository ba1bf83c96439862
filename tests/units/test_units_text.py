"""The unit files as texts: what is rendered into them, and what must be in them and what must not."""

import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "units"
RENDER = UNITS.parent / "packaging" / "render"
#: Silently not applied in user units, or they make the unit fail (measured on 252 and 257).
WITHOUT_EFFECT = {
    *("ProtectSystem", "ProtectHome", "PrivateTmp", "InaccessiblePaths", "ReadOnlyPaths", "ReadWritePaths"),
    *("DevicePolicy", "DeviceAllow", "IPAddressDeny", "IPAddressAllow", "PrivateDevices", "PrivateNetwork"),
    *("CapabilityBoundingSet", "AmbientCapabilities", "ProtectClock", "ProtectKernelLogs", "ProtectKernelTunables"),
    *("ProtectKernelModules", "ProtectControlGroups", "PrivateUsers", "ProtectHostname", "ProtectProc", "ProcSubset"),
}


def lines(name: str) -> list[str]:
    text = (UNITS / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["vllm-supervisord.service.in", "vllm-supervisord.socket.in", "vllm@.service.in"])
def test_no_unit_claims_a_protection_that_a_user_unit_does_not_get(name: str) -> None:
    keys = {line.partition("=")[0] for line in lines(name)}
    assert not keys & WITHOUT_EFFECT


def test_the_names_that_others_rely_on() -> None:
    service, socket = lines("vllm-supervisord.service.in"), lines("vllm-supervisord.socket.in")
    assert "FileDescriptorName=proxy" in socket
    assert "Alias=dbus-io.github.vllmctl1.service" in service
    activation = (UNITS.parent / "packaging" / "dbus" / "io.github.vllmctl1.service.in").read_text()
    assert "SystemdService=dbus-io.github.vllmctl1.service" in activation.splitlines()
    assert {"RuntimeDirectory=vllm/%i", "RuntimeDirectoryMode=0700"} <= set(lines("vllm@.service.in"))


def test_every_protection_and_limit_says_why(tmp_path: Path) -> None:
    """A line that nobody can explain is one that nobody dares to change: each block begins with a comment."""
    for name in ("vllm-supervisord.service.in", "vllm@.service.in"):
        section = (UNITS / name).read_text().partition("[Service]\n")[2].partition("[Install]")[0]
        for block in section.strip().split("\n\n"):
            assert block.startswith(("#", "NoNewPrivileges=", "Slice=")), block


def test_the_folder_of_the_programs_may_have_any_usual_name(tmp_path: Path) -> None:
    subprocess.run([RENDER, tmp_path / "out", "/home/jörg & co/100%", "127.0.0.1:8000"], check=True)
    text = (tmp_path / "out" / "vllm@.service").read_text()
    assert 'ExecStart="/home/jörg & co/100%%/vllm-replica" %i' in text
    assert "@" not in text.replace("vllm@", "").replace("@system-service", "")


def test_a_folder_that_a_unit_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([RENDER, tmp_path / "out", '/home/a"b', "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot make unit files" in done.stderr
