"""vllmctl starts quickly: no command imports what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Run ``main`` with our arguments, then say which modules that took.
SCRIPT = """
import json, sys
from supervisord.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as exited:
    code = exited.code
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def imported(env, *argv):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    told = json.loads(ended.stderr.splitlines()[-1])
    return told["code"], set(told["modules"])


HEAVY = {"aiohttp", "pystemd", "multidict", "yarl", "sdnotify", "hypothesis"}


@pytest.mark.parametrize("argv", [["status"], ["wake", "chat"], ["list", "--names"]])
def test_talking_to_the_daemon_imports_neither_aiohttp_nor_pystemd(vllmctl, supervisor, argv):
    code, modules = imported(vllmctl.env, *argv)
    assert code == 0
    assert HEAVY & modules == set()
    assert "supervisord.config" not in modules


@pytest.mark.parametrize("argv", [["config", "path"], ["--version"], ["--help"]])
def test_what_needs_no_bus_imports_no_dbus(vllmctl, argv):
    code, modules = imported(vllmctl.env, *argv)
    assert code == 0
    assert HEAVY & modules == set()
    assert {"dbus_next", "asyncio"} & modules == set()
