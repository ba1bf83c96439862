"""Data flows one way through the folders: who may import whom, held by reading every import statement."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("supervisord", "proxy")

#: The bare package, for its version alone.
VERSION = "=supervisord"

#: folder or file -> what of ours, and which third-party packages, it may import. The first match counts.
RULES = {
    "supervisord/core": (("supervisord.core",), ()),
    "supervisord/ports.py": (("supervisord.core",), ()),
    "supervisord/control.py": (("supervisord.core",), ()),
    "proxy/http/codings.py": (("proxy.http", "proxy.errors"), ("backports", "brotli", "compression")),
    "proxy/http/heads.py": (("proxy.http",), ("httptools",)),
    "proxy/http": (("proxy.http", "proxy.errors"), ()),
    "proxy/reading/facts.py": (("proxy.routes",), ("xxhash",)),
    "proxy/reading/members.py": (("proxy.reading", "proxy.routes"), ("msgspec",)),
    "proxy/reading": (("proxy.reading", "proxy.http", "proxy.errors", "proxy.routes"), ()),
    "proxy/policies": (("proxy.policies", "proxy.reading.facts", "proxy.routes", "supervisord.core"), ()),
    "proxy/clients": (("proxy.clients", "proxy.http", "proxy.errors", "proxy.exchange", "supervisord.core"), ()),
    "proxy/engines": (
        ("proxy.engines", "proxy.realtime", "proxy.http", "proxy.reading", "proxy.exchange", "supervisord.core"),
        (),
    ),
    "proxy/realtime": (
        (
            "proxy.realtime",
            "proxy.attempts",
            "proxy.errors",
            "proxy.exchange",
            "proxy.http",
            "proxy.models",
            "proxy.policies",
            "proxy.reading",
            "proxy.reply",
            "proxy.routes",
            "proxy.waiting",
            "supervisord.core",
        ),
        (),
    ),
    "proxy/routing.py": (("proxy.policies", "proxy.reading.facts", "supervisord.core"), ()),
    "proxy/routes.py": (("proxy", "supervisord.core"), ()),
    "proxy/errors.py": (("proxy", "supervisord.core"), ()),
    "proxy/attempts.py": (("proxy", "supervisord.core", "supervisord.control"), ()),
    "proxy/relay.py": (("proxy", "supervisord.core", "supervisord.control"), ()),
    "proxy": (("proxy", "supervisord.core", "supervisord.control"), ()),
    "supervisord/config": (("supervisord.config", "supervisord.core"), ()),
    "supervisord/launcher": (("supervisord",), ()),
    "supervisord/pull/hub.py": ((), ("huggingface_hub",)),
    "supervisord/pull": (("supervisord.pull", "supervisord.core", "supervisord.launcher"), ()),
    "supervisord/simulator": (("supervisord.simulator", VERSION), ("aiohttp", "multidict", "yarl")),
    "supervisord/engine": (("supervisord.engine", "supervisord.core", "supervisord.ports"), ("aiohttp",)),
    "supervisord/sd": (
        ("supervisord.sd", "supervisord.core", "supervisord.ports", "supervisord.bus"),
        ("dbus_next", "pystemd", "sdnotify"),
    ),
    "supervisord/bus": (("supervisord.bus", "supervisord.core", "supervisord.control"), ("dbus_next",)),
    "supervisord/cli/bench": (("supervisord",), ("aiohttp", "dbus_next")),
    "supervisord/cli": (("supervisord",), ("dbus_next",)),
    "supervisord/monitoring/collector.py": (("supervisord", "proxy.tally"), ("prometheus_client",)),
    "supervisord/monitoring/server.py": (("supervisord.monitoring",), ("aiohttp",)),
    "supervisord/monitoring": (("supervisord", "proxy"), ()),
    "supervisord/statedir.py": (("supervisord.core",), ()),
    "supervisord/app.py": (("supervisord", "proxy"), ("uvloop",)),
    "supervisord": (("supervisord", "proxy"), ()),
}

#: The same the other way round: where a package may be imported at all.
HOMES = {
    "httptools": ("proxy/http/heads.py",),
    "msgspec": ("proxy/reading/members.py",),
    "xxhash": ("proxy/reading/facts.py",),
    "brotli": ("proxy/http/codings.py",),
    "backports": ("proxy/http/codings.py",),
    "uvloop": ("supervisord/app.py",),
    "dbus_next": ("supervisord/bus", "supervisord/sd/bus.py"),
    "huggingface_hub": ("supervisord/pull/hub.py",),
    "pystemd": ("supervisord/sd/worker.py",),
    "sdnotify": ("supervisord/sd/notify.py",),
    "prometheus_client": ("supervisord/monitoring/collector.py",),
}


def _sources():
    return sorted(file for folder in OURS for file in (ROOT / folder).rglob("*.py"))


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}


def _within(name: str, packages) -> bool:
    return any(name == package.lstrip("=") or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("file", _sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_what_its_folder_may(file):
    relative = str(file.relative_to(ROOT))
    ours, others = next(rule for place, rule in RULES.items() if relative == place or relative.startswith(place + "/"))
    wrong = {name for name in _imports(file) if not _within(name, (*ours, *others))}
    assert not wrong


@pytest.mark.parametrize("package", HOMES)
def test_a_package_is_imported_only_where_it_is_isolated(package):
    for file in _sources():
        relative = str(file.relative_to(ROOT))
        if any(_within(name, (package,)) for name in _imports(file)):
            assert any(relative == home or relative.startswith(home + "/") for home in HOMES[package]), relative


def test_nothing_but_the_composition_root_knows_the_composition_root():
    for file in _sources():
        assert file.name == "app.py" or "supervisord.app" not in _imports(file), file
