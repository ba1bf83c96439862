"""What the machine's own tools see: busctl, gdbus and dbus-send against the running service."""

from __future__ import annotations

import asyncio
import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import pytest

from supervisord.bus.names import BUS_NAME, MANAGER_INTERFACE, MODEL_INTERFACE, REPLICA_INTERFACE, ROOT_PATH
from supervisord.bus.service import BusService
from supervisord.control import ControlError, ErrorCode, Failover, Verb
from supervisord.core.states import Life

MODEL_PATH = "/io/github/vllmctl1/models/qwen3_2d8b"
REPLICA_PATH = "/io/github/vllmctl1/replicas/qwen_2da"

needs_busctl = pytest.mark.skipif(shutil.which("busctl") is None, reason="no busctl here")
needs_gdbus = pytest.mark.skipif(shutil.which("gdbus") is None, reason="no gdbus here")
needs_dbus_send = pytest.mark.skipif(shutil.which("dbus-send") is None, reason="no dbus-send here")


async def run(*command: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20.0)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def busctl(daemon: Any, *arguments: str) -> str:
    code, out, err = await run("busctl", f"--address={daemon.address}", *arguments)
    assert code == 0, err
    return out


def described(text: str) -> dict[str, Any]:
    """The interfaces of an introspection document, all that matters of them, comparable."""

    def members(element: ET.Element) -> list[Any]:
        return [(child.tag, sorted(child.attrib.items()), members(child)) for child in element]

    return {interface.attrib["name"]: members(interface) for interface in ET.fromstring(text).findall("interface")}


OBJECTS = [(ROOT_PATH, MANAGER_INTERFACE), (MODEL_PATH, MODEL_INTERFACE), (REPLICA_PATH, REPLICA_INTERFACE)]


@needs_busctl
@pytest.mark.parametrize(("path", "interface"), OBJECTS)
async def test_the_shipped_xml_is_the_live_introspection(
    service: BusService, daemon: Any, caller: Any, path: str, interface: str
) -> None:
    shipped = described((resources.files("supervisord.bus") / "xml" / f"{interface}.xml").read_text(encoding="utf-8"))
    standard = described((resources.files("supervisord.bus") / "xml" / "standard.xml").read_text(encoding="utf-8"))
    if path != ROOT_PATH:
        del standard["org.freedesktop.DBus.ObjectManager"]
    [raw] = await caller.call(path, "org.freedesktop.DBus.Introspectable", "Introspect")
    assert described(raw) == shipped | standard
    seen = await busctl(daemon, "--xml-interface", "introspect", BUS_NAME, path)
    assert described(seen) == shipped | standard


@needs_busctl
async def test_busctl_shows_the_tree_and_every_member_with_its_value(service: BusService, daemon: Any) -> None:
    tree = await busctl(daemon, "--list", "tree", BUS_NAME)
    assert {ROOT_PATH, MODEL_PATH, REPLICA_PATH} <= set(tree.split())
    table = {
        (row.split()[0].removeprefix("."), row.split()[1]): row.split()[2:]
        for row in (await busctl(daemon, "introspect", BUS_NAME, REPLICA_PATH, REPLICA_INTERFACE)).splitlines()[1:]
    }
    assert table["Sleep", "method"][0] == "u"
    assert table["State", "property"] == ["s", '"ready"', "emits-change"]
    assert table["Name", "property"] == ["s", '"qwen-a"', "const"]


@needs_busctl
async def test_busctl_calls_methods_and_reads_properties(service: BusService, daemon: Any, control: Any) -> None:
    out = await busctl(daemon, "call", BUS_NAME, ROOT_PATH, MANAGER_INTERFACE, "ListModels")
    assert out == f'a(ssuuo) 1 "qwen3-8b" "ready" 3 2 "{MODEL_PATH}"\n'
    out = await busctl(daemon, "call", BUS_NAME, ROOT_PATH, MANAGER_INTERFACE, "ListReplicas")
    assert out == f'a(ssssso) 1 "qwen-a" "qwen3-8b" "ready" "ok" "vllm@qwen-a.service" "{REPLICA_PATH}"\n'
    out = await busctl(daemon, "call", BUS_NAME, ROOT_PATH, MANAGER_INTERFACE, "GetModel", "s", "default")
    assert out == f'o "{MODEL_PATH}"\n'
    assert await busctl(daemon, "call", BUS_NAME, MODEL_PATH, MODEL_INTERFACE, "Sleep", "u", "2") == ""
    assert control.commands == [("model qwen3-8b", Verb.SLEEP, 2)]
    out = await busctl(daemon, "get-property", BUS_NAME, REPLICA_PATH, REPLICA_INTERFACE, "Gpus", "WakeUSec")
    assert out == "au 2 0 1\nt 2500000\n"


@needs_busctl
async def test_busctl_prints_our_error_texts(service: BusService, daemon: Any, control: Any) -> None:
    control.outcome = ControlError(ErrorCode.WAKE_FAILED, "cannot wake qwen-a: reload_weights answered 500")
    code, _, err = await run(
        "busctl", f"--address={daemon.address}", "call", BUS_NAME, REPLICA_PATH, REPLICA_INTERFACE, "Wake"
    )
    assert code != 0
    assert "cannot wake qwen-a: reload_weights answered 500" in err


@pytest.fixture
async def monitor(service: BusService, daemon: Any) -> AsyncIterator[asyncio.StreamReader]:
    """``busctl monitor``, ready to see."""
    process = await asyncio.create_subprocess_exec(
        "busctl",
        f"--address={daemon.address}",
        "--json=short",
        "monitor",
        f"--match=sender={BUS_NAME},type=signal",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"Monitoring bus message stream" in await asyncio.wait_for(process.stderr.readline(), 20.0)
    yield process.stdout
    process.terminate()
    await process.communicate()


@needs_busctl
async def test_busctl_monitor_sees_changes_and_failovers(monitor: asyncio.StreamReader, control: Any) -> None:
    control.set_replica(state=Life.WAKING, step="reload_weights")
    for on_failover in control.on_failover:
        on_failover(Failover("qwen3-8b", "qwen-a", "qwen-b", "connection refused"))
    seen: dict[str, Any] = {}
    while "Failover" not in seen or "PropertiesChanged" not in seen:
        message = json.loads(await asyncio.wait_for(monitor.readline(), 20.0))
        if message["path"] in (ROOT_PATH, REPLICA_PATH) and message["payload"]["data"][0] != MANAGER_INTERFACE:
            seen[message["member"]] = message["payload"]["data"]
    assert seen["Failover"] == ["qwen3-8b", "qwen-a", "qwen-b", "connection refused"]
    assert seen["PropertiesChanged"] == [
        REPLICA_INTERFACE,
        {"State": {"type": "s", "data": "waking"}, "Step": {"type": "s", "data": "reload_weights"}},
        [],
    ]


@needs_gdbus
async def test_gdbus_names_arguments_and_errors(service: BusService, daemon: Any, control: Any) -> None:
    address = f"--address={daemon.address}"
    target = ("--dest", BUS_NAME, "--object-path")
    code, out, err = await run("gdbus", "introspect", address, *target, ROOT_PATH)
    assert code == 0, err
    assert "GetModel(in  s name,\n               out o model);" in out
    assert "Failover(s model,\n" in out
    code, out, err = await run(
        "gdbus", "call", address, *target, ROOT_PATH, "--method", f"{MANAGER_INTERFACE}.GetModel", "nobody"
    )
    assert code != 0
    assert "io.github.vllmctl1.Error.NoSuchModel: there is no model 'nobody'" in err
    code, out, err = await run(
        "gdbus", "call", address, *target, MODEL_PATH, "--method", f"{MODEL_INTERFACE}.Sleep", "1"
    )
    assert (code, out) == (0, "()\n"), err
    assert control.commands == [("model qwen3-8b", Verb.SLEEP, 1)]


@needs_dbus_send
async def test_dbus_send_reads_all_managed_objects(service: BusService, daemon: Any) -> None:
    code, out, err = await run(
        "dbus-send",
        f"--bus={daemon.address}",
        "--print-reply",
        f"--dest={BUS_NAME}",
        ROOT_PATH,
        "org.freedesktop.DBus.ObjectManager.GetManagedObjects",
    )
    assert code == 0, err
    assert f'object path "{MODEL_PATH}"' in out
    assert f'object path "{REPLICA_PATH}"' in out
