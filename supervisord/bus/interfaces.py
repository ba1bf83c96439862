"""Our interfaces as the shipped XML describes them: the one place that says what can be called, with which types.

The files in ``xml/`` are what is installed for people and tools, what introspection answers, and what every call's
arguments are checked against.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

PEER = "org.freedesktop.DBus.Peer"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"

#: What the specification defines; these have no properties.
STANDARD = frozenset({PEER, INTROSPECTABLE, PROPERTIES, OBJECT_MANAGER})

_DOCTYPE = (
    '<!DOCTYPE node PUBLIC "-//freedesktop//DTD D-BUS Object Introspection 1.0//EN"\n'
    ' "http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd">\n'
)


@dataclass(frozen=True, slots=True)
class Method:
    """The signatures of a method's arguments and of its answer."""

    takes: str
    gives: str


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface: its members with their D-Bus signatures, and the XML that says so."""

    name: str
    methods: Mapping[str, Method]
    #: The signature of each property. All of ours are read-only.
    properties: Mapping[str, str]
    signals: Mapping[str, str]
    element: ET.Element


def load_interfaces() -> dict[str, Interface]:
    """Every interface of the XML files that are shipped in this package, by name."""
    found: dict[str, Interface] = {}
    for file in sorted((resources.files("supervisord.bus") / "xml").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".xml"):
            for element in ET.fromstring(file.read_text(encoding="utf-8")).findall("interface"):
                interface = _interface(element)
                found[interface.name] = interface
    return found


def introspection(interfaces: Iterable[Interface], children: Iterable[str]) -> str:
    """The introspection document of an object with these interfaces and, one level below it, these nodes."""
    node = ET.Element("node")
    node.extend(interface.element for interface in interfaces)
    for child in children:
        ET.SubElement(node, "node", name=child)
    return _DOCTYPE + ET.tostring(node, encoding="unicode")


def _interface(element: ET.Element) -> Interface:
    ET.indent(element)
    return Interface(
        name=element.attrib["name"],
        methods={
            method.attrib["name"]: Method(_signature(method, "in"), _signature(method, "out"))
            for method in element.findall("method")
        },
        properties={prop.attrib["name"]: prop.attrib["type"] for prop in element.findall("property")},
        signals={signal.attrib["name"]: _signature(signal, None) for signal in element.findall("signal")},
        element=element,
    )


def _signature(member: ET.Element, direction: str | None) -> str:
    return "".join(arg.attrib["type"] for arg in member.findall("arg") if arg.attrib.get("direction") == direction)
