"""The daemon's heap: the pages that one body took are there for the next."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back at once")

#: Prints how many pages the kernel had to give to a round in which four blocks of 400 kB are taken and freed.
ROUNDS = """
import resource

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        blocks = [b"x" * 400_000 for _ in range(4)]
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds

async def measure(*_):
    faults(5)
    print(faults(100))
    return 0
"""
AS_PYTHON_IS = "import asyncio; asyncio.run(measure())"
AS_THE_DAEMON_IS = "from supervisord import app; app.serve = measure; app.main([])"


def faults(code: str) -> float:
    environment = {"PATH": "/usr/bin"}  # no MALLOC_...
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS + code], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_the_daemon_keeps_the_memory_of_one_body_for_the_next():
    assert faults(AS_PYTHON_IS) > 100  # else there is nothing to keep
    assert faults(AS_THE_DAEMON_IS) < 1
