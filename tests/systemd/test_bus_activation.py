"""A call on the bus starts the supervisor, through the service file that is shipped and systemd's alias."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAME = "io.github.vllmctl1"
RELOAD = ("call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "ReloadConfig")
VERSION = ("get-property", NAME, "/io/github/vllmctl1", f"{NAME}.Manager", "Version")


async def busctl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "busctl", "--user", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30.0)
    return out.decode().strip()


@pytest.fixture
def activatable(unit_dir: Any) -> Iterator[Path]:
    """The service file, installed for the running bus daemon."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"], "dbus-1", "services")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{NAME}.service"
    file.write_text((ROOT / "packaging" / "dbus" / f"{NAME}.service.in").read_text())
    yield file
    file.unlink()


async def test_a_call_on_the_bus_starts_the_unit_and_is_answered_by_it(
    unit_dir: Any, activatable: Path, systemctl: Callable[..., str]
) -> None:
    unit_dir.service(
        "bus-stand-in.service",
        f"{sys.executable} {Path(__file__).with_name('bus_stand_in.py')}",
        "Type=dbus",
        f"BusName={NAME}",
        f"Environment=PYTHONPATH={ROOT}",
        reload=False,
    )
    alias = unit_dir.path / f"dbus-{NAME}.service"
    alias.symlink_to(unit_dir.path / "bus-stand-in.service")
    try:
        systemctl("daemon-reload")
        await busctl(*RELOAD)
        assert systemctl("is-active", "bus-stand-in.service", check=False) == "inactive"
        assert await busctl(*VERSION) == 's "stand-in"'
        assert systemctl("is-active", "bus-stand-in.service") == "active"
        systemctl("stop", "bus-stand-in.service")
        assert systemctl("show", "--value", "-p", "Result", "bus-stand-in.service") == "success"
    finally:
        alias.unlink()


async def test_without_the_units_alias_a_call_fails_at_once(activatable: Path) -> None:
    """As on a machine where the service is installed and not enabled."""
    await busctl(*RELOAD)
    assert "not found" in await busctl(*VERSION)
