"""The seams: the network and the parser are known at the two edges only, so that either edge can be replaced."""

import ast
from pathlib import Path

import pytest

import proxy

FOLDER = Path(proxy.__file__).parent
EDGES = {
    "clients/connected.py",
    "clients/connection.py",
    "clients/incoming.py",
    "clients/response.py",
    "engines/connectors.py",
    "engines/engine.py",
    "engines/enginesocket.py",
    "engines/upstream.py",
    "http/heads.py",
    "server.py",
}
FILES = sorted(FOLDER.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def test_the_edges_are_there():
    assert {name(path) for path in FILES} >= EDGES


@pytest.mark.parametrize("path", [path for path in FILES if name(path) not in EDGES], ids=name)
def test_what_is_not_an_edge_knows_no_http_library(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"aiohttp", "yarl", "multidict", "httptools", "dbus_next", "pystemd"}
    assert not imported(path) & {f"proxy.{edge.removesuffix('.py').replace('/', '.')}" for edge in EDGES}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_proxy_knows_the_supervisor_by_its_interfaces_only(path):
    # (and a histogram, which is plain numbers and nothing of the supervisor's)
    allowed = {"supervisord.control", "supervisord.core.admission", "supervisord.core.spec"}
    allowed |= {"supervisord.core.histogram"} if name(path) == "tally.py" else set()
    assert {name for name in imported(path) if name.startswith("supervisord")} <= allowed


def test_routing_is_pure():
    path = FOLDER / "routing.py"
    assert not imported(path) & {"asyncio", "time", "random", "os", "socket", "logging"}
