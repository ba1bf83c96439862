"""The shipped XML is the interface: complete, documented, and what packages install."""

from __future__ import annotations

import configparser
import re
import xml.etree.ElementTree as ET
from importlib import resources
from pathlib import Path
from typing import Any, cast

import pytest

from supervisord.bus import names
from supervisord.bus.calls import Calls
from supervisord.bus.connection import Call
from supervisord.bus.interfaces import (
    INTROSPECTABLE,
    OBJECT_MANAGER,
    PEER,
    PROPERTIES,
    introspection,
    load_interfaces,
)
from supervisord.bus.objects import Exported

OURS = (names.MANAGER_INTERFACE, names.MODEL_INTERFACE, names.REPLICA_INTERFACE)
PACKAGING = Path(__file__).parents[2] / "packaging" / "dbus"

CONTRACT = {
    names.MANAGER_INTERFACE: (
        {"ListModels": ("", "a(ssuuo)"), "ListReplicas": ("", "a(ssssso)"), "GetModel": ("s", "o")}
        | {"GetReplica": ("s", "o"), "Reload": ("", "as")},
        "Version s, Draining b, Simulated b, Status s, Listen as, ConfigFiles as, StateDirectory s",
        {"Failover": "ssss"},
    ),
    names.MODEL_INTERFACE: (
        {"Sleep": ("u", ""), "Wake": ("", ""), "Start": ("", ""), "Stop": ("", ""), "Restart": ("", "")}
        | {"ExplainRoute": ("say", "ssa(sdddt)")},
        "Name s, Aliases as, State s, Held b, Routing s, InFlight u, Waiting u, WaitingForKV u, IdleSinceUSec t,"
        " WakeUSec t, MaxModelLen u, Replicas ao",
        {},
    ),
    names.REPLICA_INTERFACE: (
        {"Sleep": ("u", ""), "Wake": ("", ""), "Start": ("", ""), "Stop": ("", ""), "Restart": ("", "")}
        | {"Drain": ("", "")},
        "Name s, Model s, ModelPath o, State s, SleepLevel u, Step s, Health s, Hold s, Unit s, Endpoint s, Gpus au,"
        " InFlight u, LastError s, StateSinceUSec t, IdleSinceUSec t, WakeUSec t, StartUSec t, RetryAtUSec t,"
        " MaxModelLen u, ServedNames as, Simulated b, CanSleep b",
        {},
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_names_and_signatures_are_those_that_were_promised(name: str) -> None:
    interface = load_interfaces()[name]
    methods, properties, signals = CONTRACT[name]
    assert {member: (method.takes, method.gives) for member, method in interface.methods.items()} == methods
    assert ", ".join(f"{prop} {signature}" for prop, signature in interface.properties.items()) == properties
    assert interface.signals == signals


@pytest.mark.parametrize("name", OURS)
def test_every_argument_has_a_name_and_every_member_a_comment_that_begins_with_its_own(name: str) -> None:
    text = (resources.files("supervisord.bus") / "xml" / f"{name}.xml").read_text(encoding="utf-8")
    [interface] = ET.fromstring(text).findall("interface")
    for member in interface:
        name = member.attrib["name"]
        assert re.search(rf'<!--\s*{name}: [^>]*-->\s*<{member.tag} name="{name}"', text), f"{name} has no comment"
        assert all(arg.attrib["name"] for arg in member.findall("arg"))


@pytest.mark.parametrize("name", OURS)
def test_packages_install_the_very_files_that_the_service_reads(name: str) -> None:
    packaged = PACKAGING / f"{name}.xml"
    shipped = resources.files("supervisord.bus") / "xml" / f"{name}.xml"
    assert packaged.read_bytes() == shipped.read_bytes()


def test_every_method_of_the_xml_is_handled() -> None:
    interfaces = load_interfaces()
    tree = {
        names.ROOT_PATH: Exported("", names.MANAGER_INTERFACE, {}),
        "/model": Exported("m", names.MODEL_INTERFACE, {}),
        "/replica": Exported("r", names.REPLICA_INTERFACE, {}),
    }
    calls = Calls(cast(Any, None), interfaces, lambda: tree)
    for path, exported in tree.items():
        managing = {OBJECT_MANAGER} if path == names.ROOT_PATH else set()
        for name in {exported.interface, PEER, INTROSPECTABLE, PROPERTIES} | managing:
            for member, method in interfaces[name].methods.items():
                interface, handler = calls.resolve(Call(path, name, member, method.takes, (), ":1.1", 1, True))
                assert interface.name == name
                assert callable(handler)


def test_introspection_lists_interfaces_and_children_as_a_document() -> None:
    interfaces = load_interfaces()
    text = introspection([interfaces[names.MODEL_INTERFACE]], ["a", "b"])
    assert text.startswith("<!DOCTYPE node PUBLIC")
    node = ET.fromstring(text)
    assert [child.attrib["name"] for child in node.findall("interface")] == [names.MODEL_INTERFACE]
    assert [child.attrib["name"] for child in node.findall("node")] == ["a", "b"]


def test_activation_goes_through_systemd_by_the_alias_of_our_unit() -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((PACKAGING / "io.github.vllmctl1.service.in").read_text(encoding="utf-8"))
    assert dict(parser["D-BUS Service"]) == {
        "Name": names.BUS_NAME,
        "Exec": "/bin/false",
        "SystemdService": f"dbus-{names.BUS_NAME}.service",
    }
