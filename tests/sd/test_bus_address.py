"""The session bus is found in a login, over ssh and from cron, and its absence is said in words."""

import socket
from pathlib import Path

import pytest
from dbus_next._private.address import parse_address

from supervisord.bus.address import NoSessionBus, session_bus_address, system_bus_address


def listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


def test_the_variable_wins(tmp_path: Path) -> None:
    with listen_at(tmp_path / "bus"):
        env = {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/elsewhere,guid=0", "XDG_RUNTIME_DIR": str(tmp_path)}
        assert session_bus_address(env) == "unix:path=/elsewhere,guid=0"


@pytest.mark.parametrize("folder", ["plain", "with space", "ünicode", "a,b;c=d%e~f*g\\h"])
def test_without_the_variable_the_runtime_directory_is_searched(tmp_path: Path, folder: str) -> None:
    runtime = tmp_path / folder
    runtime.mkdir()
    with listen_at(runtime / "bus"):
        address = session_bus_address({"DBUS_SESSION_BUS_ADDRESS": "", "XDG_RUNTIME_DIR": str(runtime)})
    assert parse_address(address) == [("unix", {"path": str(runtime / "bus")})]


def test_a_missing_bus_is_told_with_the_place_that_was_searched(tmp_path: Path) -> None:
    (tmp_path / "bus").write_text("a file, not a socket")
    with pytest.raises(NoSessionBus, match=f"cannot find the session bus: .*{tmp_path}/bus does not exist.*linger"):
        session_bus_address({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_the_system_bus_has_a_fixed_place_unless_told_otherwise() -> None:
    assert system_bus_address({}) == "unix:path=/run/dbus/system_bus_socket"
    assert system_bus_address({"DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/x"}) == "unix:path=/x"
