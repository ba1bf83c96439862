"""Sockets from systemd, in a real child process that inherits them as systemd's children do."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervisord.sd.listen import ListenError, take_sockets

ROOT = Path(__file__).parents[2]
#: Stands for systemd's exec: LISTEN_PID is the child's own, the descriptors begin at 3.
CHILD = """
import json, os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
from supervisord.sd.listen import ListenError, take_sockets
try:
    found = take_sockets(os.environ, os.getpid())
except ListenError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({
        "sockets": {name: [each.getsockname() for each in sockets] for name, sockets in found.items()},
        "inheritable": [each.get_inheritable() for sockets in found.values() for each in sockets],
        "left": [name for name in os.environ if name.startswith("LISTEN_")],
    }))
"""


def run_child(sockets: list[socket.socket], **env: str) -> dict:
    """Run CHILD with ``sockets`` as its descriptors 3, 4 ... and these variables."""
    numbers = [os.dup(each.fileno()) for each in sockets]
    high = [os.dup2(number, 100 + at) for at, number in enumerate(numbers)]
    moves = "; ".join(f"exec {3 + at}<&{number} {number}<&-" for at, number in enumerate(high)) or ":"
    command = ["/bin/bash", "-c", f'{moves}; exec "$0" -c "$1"', sys.executable, CHILD]
    try:
        done = subprocess.run(
            command,
            env=os.environ | env,
            cwd=ROOT,
            pass_fds=high,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    finally:
        for number in (*numbers, *high):
            os.close(number)
    return json.loads(done.stdout)


def listeners(stack: ExitStack, count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]


def test_sockets_are_found_by_name_whatever_their_order() -> None:
    with ExitStack() as stack:
        a, b, c = listeners(stack, 3)
        found = run_child([a, b, c], LISTEN_FDS="3", LISTEN_FDNAMES="metrics:proxy:metrics")
        assert found["sockets"] == {
            "proxy": [list(b.getsockname())],
            "metrics": [list(a.getsockname()), list(c.getsockname())],
        }


def test_nothing_is_handed_on_to_children() -> None:
    with ExitStack() as stack:
        found = run_child(listeners(stack, 1), LISTEN_FDS="1", LISTEN_FDNAMES="proxy")
    assert (found["inheritable"], found["left"]) == ([False], [])


def test_a_name_count_that_does_not_fit_is_an_error() -> None:
    with ExitStack() as stack:
        found = run_child(listeners(stack, 1), LISTEN_FDS="1", LISTEN_FDNAMES="a:b")
    assert found == {"error": "cannot use the sockets from systemd: LISTEN_FDS is 1, but LISTEN_FDNAMES is 'a:b'"}


def test_a_descriptor_that_is_no_listening_socket_is_named() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        found = run_child([datagrams], LISTEN_FDS="1", LISTEN_FDNAMES="proxy")
    assert found == {"error": "cannot use descriptor 3 (proxy) from systemd: it is not a listening stream socket"}


def test_a_descriptor_that_is_not_there_is_named() -> None:
    with ExitStack() as stack:
        found = run_child(listeners(stack, 1), LISTEN_FDS="2", LISTEN_FDNAMES="proxy:metrics")
    assert found == {"error": "cannot use descriptor 4 (metrics) from systemd: Bad file descriptor"}


def test_without_systemd_there_are_none() -> None:
    assert take_sockets({}, 42) == {}


def test_those_of_another_process_are_left_alone() -> None:
    env = {"LISTEN_FDS": "1", "LISTEN_PID": "41", "LISTEN_FDNAMES": "proxy", "PATH": "/bin"}
    assert take_sockets(env, 42) == {}
    assert env == {"PATH": "/bin"}


def test_a_count_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ListenError, match="LISTEN_FDS is 'two', not a number"):
        take_sockets({"LISTEN_FDS": "two", "LISTEN_PID": "42"}, 42)
