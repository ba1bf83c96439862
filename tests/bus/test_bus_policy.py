"""On the system bus everybody may look, and only root may be or command the supervisor."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.bus.errors import BusError
from supervisord.bus.names import BUS_NAME, MANAGER_INTERFACE, MODEL_INTERFACE, REPLICA_INTERFACE, ROOT_PATH
from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("busctl"),
    reason="needs root, to call as somebody else, and setpriv and busctl",
)

POLICY = Path(__file__).parents[2] / "packaging" / "dbus" / "io.github.vllmctl1.conf"
MODEL_PATH = "/io/github/vllmctl1/models/qwen3_2d8b"
REPLICA_PATH = "/io/github/vllmctl1/replicas/qwen_2da"

#: What the system bus of a distribution says of services without a policy of their own.
_SYSTEM = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus"/>
  </policy>
  {ours}
</busconfig>
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def system_bus(daemon: Any, folder: Path, ours: str) -> Any:
    bus = type(daemon)(folder)
    (folder / "bus.conf").write_text(_SYSTEM.format(socket=folder / "bus", ours=ours))
    await bus.start()
    return bus


async def as_nobody(address: str, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "busctl", f"--address={address}", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 20.0)
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_others_may_look_and_not_touch(daemon: Any, control: Any, facts: ManagerFacts, folder: Path) -> None:
    bus = await system_bus(daemon, folder, f"<include>{POLICY}</include>")
    service = BusService(control, lambda: facts, bus.address)
    await service.start()
    for member in ("ListModels", "ListReplicas"):
        code, out = await as_nobody(bus.address, "call", BUS_NAME, ROOT_PATH, MANAGER_INTERFACE, member)
        assert code == 0, out
    code, out = await as_nobody(bus.address, "introspect", BUS_NAME, REPLICA_PATH)
    assert code == 0, out
    code, out = await as_nobody(bus.address, "get-property", BUS_NAME, REPLICA_PATH, REPLICA_INTERFACE, "State")
    assert (code, out) == (0, 's "ready"\n')
    for path, interface, member in (
        (ROOT_PATH, MANAGER_INTERFACE, "Reload"),
        (MODEL_PATH, MODEL_INTERFACE, "Stop"),
        (REPLICA_PATH, REPLICA_INTERFACE, "Stop"),
    ):
        code, out = await as_nobody(bus.address, "call", BUS_NAME, path, interface, member)
        assert code != 0
        assert "denied" in out
    assert control.commands == []
    await service.stop()
    await bus.kill()


async def test_without_the_policy_not_even_root_may_be_the_supervisor(
    daemon: Any, control: Any, facts: ManagerFacts, folder: Path
) -> None:
    bus = await system_bus(daemon, folder, "")
    with pytest.raises(BusError, match=f"cannot own the bus name {BUS_NAME}: .*security policies"):
        await BusService(control, lambda: facts, bus.address).start()
    await bus.kill()
