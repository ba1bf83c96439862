"""The seams: the network and the parser are known at the two edges only, so that either edge can be replaced."""

import ast
from pathlib import Path

import pytest

import proxy

EDGES = {
    "client.py",
    "connection.py",
    "incoming.py",
    "clients.py",
    "connectors.py",
    "engine.py",
    "enginesocket.py",
    "heads.py",
    "server.py",
    "upstream.py",
}
FILES = sorted(Path(proxy.__file__).parent.glob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in EDGES], ids=lambda path: path.name)
def test_what_is_not_an_edge_knows_no_http_library(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"aiohttp", "yarl", "multidict", "httptools", "dbus_next", "pystemd"}
    assert not imported(path) & {f"proxy.{edge.removesuffix('.py')}" for edge in EDGES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_proxy_knows_the_supervisor_by_its_interfaces_only(path):
    # (and a histogram, which is plain numbers and nothing of the supervisor's)
    allowed = {"supervisord.control", "supervisord.core.admission", "supervisord.core.spec"}
    allowed |= {"supervisord.core.histogram"} if path.name == "tally.py" else set()
    assert {name for name in imported(path) if name.startswith("supervisord")} <= allowed


def test_routing_is_pure():
    path = Path(proxy.__file__).parent / "routing.py"
    assert not imported(path) & {"asyncio", "time", "random", "os", "socket", "logging"}
