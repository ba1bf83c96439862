"""Who listens on an endpoint: found for real processes, and never called foreign without having been seen."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervisord.engine.owner import Listener, Ownership, answering, owner_of, parse_tcp_table

# Two listeners, one established connection (01), one line cut short.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1E5B 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0000000000000000 100 0
   1: 00000000:1E5C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4343 1 0000000000000000 100 0
   2: 0100007F:1E5B 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4444 1 0000000000000000 20 4
   3: 0100007F:1E5D
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000001000000:1E5B 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 51
   1: 00000000000000000000000000000000:1E5D 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 52
   2: 0000000000000000FFFF00000100007F:1E5E 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 53
"""
LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.mark.skipif(sys.byteorder != "little", reason="the sample is a little-endian machine's")
def test_the_kernels_tables_are_read() -> None:
    assert parse_tcp_table(TCP) == [
        Listener(LOOPBACK, 7771, 4242),
        Listener(ipaddress.ip_address("0.0.0.0"), 7772, 4343),
    ]
    assert parse_tcp_table(TCP6) == [
        Listener(ipaddress.ip_address("::1"), 7771, 51),
        Listener(ipaddress.ip_address("::"), 7773, 52),
        Listener(LOOPBACK, 7774, 53),
    ]
    assert parse_tcp_table("") == []


@pytest.mark.parametrize(
    ("host", "port", "inodes"),
    [
        ("127.0.0.1", 7771, {4242}),
        ("::1", 7771, {51}),
        ("127.0.0.1", 7772, {4343}),  # a wildcard answers for every address
        ("127.0.0.1", 7773, {52}),  # and [::] for IPv4 too
        ("127.0.0.1", 7774, {53}),
        ("127.0.0.1", 7775, set()),
        ("192.0.2.1", 7771, set()),
    ],
)
def test_the_socket_that_answers_is_the_one_with_the_nearest_address(host: str, port: int, inodes: set[int]) -> None:
    assert answering(parse_tcp_table(TCP) + parse_tcp_table(TCP6), host, port) == frozenset(inodes)


def test_a_name_is_as_good_as_its_addresses() -> None:
    # Whether it is an IPv6 address too is the machine's affair.
    assert answering(parse_tcp_table(TCP), "localhost", 7771) == {4242}


def test_an_exact_address_comes_before_a_wildcard() -> None:
    listeners = [Listener(LOOPBACK, 7771, 1), Listener(ipaddress.ip_address("0.0.0.0"), 7771, 2)]
    assert answering(listeners, "127.0.0.1", 7771) == {1}


# A child that listens where it is told to and says where; it ends with its standard input.
SERVER = """
import socket, sys
family = socket.AF_UNIX if sys.argv[1] == "unix" else socket.AF_INET
server = socket.socket(family)
if family == socket.AF_INET:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(sys.argv[2] if family == socket.AF_UNIX else ("127.0.0.1", int(sys.argv[2])))
server.listen()
where = server.getsockname()
print("unix:" + where if family == socket.AF_UNIX else "http://127.0.0.1:%d" % where[1], flush=True)
sys.stdin.read()
"""


class Server:
    """A process that listens on ``endpoint``."""

    def __init__(self, kind: str, where: str, python: str = sys.executable) -> None:
        self.process = subprocess.Popen(
            [python, "-c", SERVER, kind, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        if self.process.returncode is None:
            self.process.communicate()


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that end with the test."""
    with ExitStack() as servers:

        def start(kind: str, where: str, python: str = sys.executable) -> Server:
            server = Server(kind, where, python)
            servers.callback(server.close)
            return server

        yield start


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, serve: Serve, tmp_path: Path) -> Server:
    """One server of each kind."""
    return serve(request.param, str(tmp_path / "engine.sock") if request.param == "unix" else "0")


async def test_a_listener_among_the_units_processes_is_ours(server: Server) -> None:
    assert (await owner_of(server.endpoint, lambda: {os.getpid(), server.pid})).ownership is Ownership.OURS


async def test_a_listener_that_is_not_the_units_is_foreign_and_named(server: Server) -> None:
    owner = await owner_of(server.endpoint, lambda: {os.getpid()})
    assert owner.ownership is Ownership.FOREIGN
    assert owner.detail.startswith(f"process {server.pid} (python")


async def test_a_unit_without_processes_owns_nothing(server: Server) -> None:
    assert (await owner_of(server.endpoint, lambda: ())).ownership is Ownership.FOREIGN


async def test_where_nobody_listens_nothing_is_known(server: Server) -> None:
    server.close()
    assert (await owner_of(server.endpoint, lambda: {os.getpid()})).ownership is Ownership.UNKNOWN


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_forwarder_outside_of_the_unit_is_not_called_foreign(serve: Serve, tmp_path: Path, kind: str) -> None:
    # The process's name is what counts: a link to Python that is called like podman's port forwarder.
    forwarder = tmp_path / "rootlessport"
    forwarder.symlink_to(sys.executable)
    server = serve(kind, str(tmp_path / "engine.sock") if kind == "unix" else "0", str(forwarder))
    owner = await owner_of(server.endpoint, lambda: {os.getpid()})
    assert owner.ownership is Ownership.UNKNOWN
    assert "rootlessport" in owner.detail


async def test_an_old_copy_that_shares_the_port_is_seen(serve: Serve) -> None:
    ours = serve("tcp", "0")
    old_copy = serve("tcp", ours.endpoint.rpartition(":")[2])
    owner = await owner_of(ours.endpoint, lambda: {ours.pid})
    both = await owner_of(ours.endpoint, lambda: {ours.pid, old_copy.pid})
    assert owner.ownership is Ownership.FOREIGN
    assert f"process {old_copy.pid} " in owner.detail
    assert both.ownership is Ownership.OURS


async def test_an_old_copy_that_lost_the_path_of_its_socket_does_not_matter(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    serve("unix", str(path))  # the old copy
    path.unlink()
    ours = serve("unix", str(path))
    owner = await owner_of(ours.endpoint, lambda: {ours.pid})
    assert owner.ownership is Ownership.OURS


async def test_a_listener_whose_process_may_not_be_read_is_not_called_foreign(tmp_path: Path) -> None:
    # A /proc in which the listener is in the table and no process shows its socket, as with another user's process.
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(TCP)
    (tmp_path / "77").mkdir()
    owner = await owner_of("http://127.0.0.1:7771", lambda: {88}, tmp_path)
    assert owner.ownership is Ownership.UNKNOWN
    assert "cannot be seen" in owner.detail


def test_a_socket_is_not_left_behind_by_the_question(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "engine.sock"))
        server.listen(8)
        before = len(list(Path("/proc/self/fd").iterdir()))
        owner = asyncio.run(owner_of(f"unix:{tmp_path / 'engine.sock'}", lambda: {os.getpid()}))
        assert owner.ownership is Ownership.OURS
        assert len(list(Path("/proc/self/fd").iterdir())) == before
