"""The faults of the D-Bus library that would hurt a daemon stay outside of it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.bus import connection as connection_module
from supervisord.bus.connection import Connection, clean_text
from supervisord.bus.errors import BusError, BusUnavailable
from supervisord.bus.names import BUS_NAME, ROOT_PATH


def on_call(*_: object) -> None:
    """Nobody calls here."""


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """Something that listens where a bus should."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "bus"))
        server.listen(0)
        server.setblocking(False)
        yield server


def address_of(server: socket.socket) -> str:
    return f"unix:path={server.getsockname()}"


@pytest.fixture
async def peer(listening: socket.socket, nothing_left: None) -> AsyncIterator[Any]:
    """Accepts one connection, gives each line it reads the next answer of the test, then hangs up."""
    tasks = []

    def serve(*answers: bytes, hang_up: bool = True) -> None:
        async def talk() -> None:
            loop = asyncio.get_running_loop()
            stream, _ = await loop.sock_accept(listening)
            with stream:
                for answer in answers:
                    heard = b""
                    while b"\r\n" not in heard:
                        more = await loop.sock_recv(stream, 1000)
                        assert more, "it hung up first"
                        heard += more
                    await loop.sock_sendall(stream, answer)
                if not hang_up:
                    await asyncio.Event().wait()

        tasks.append(asyncio.create_task(talk()))

    yield serve
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_bus_that_hangs_up_during_authentication_is_an_error_and_no_endless_loop(
    peer: Any, listening: socket.socket
) -> None:
    peer(b"OK 12")
    with pytest.raises(BusUnavailable, match="it hung up during authentication"):
        await Connection.open(address_of(listening), on_call)


async def test_a_bus_that_hangs_up_after_authentication_is_an_error(peer: Any, listening: socket.socket) -> None:
    peer(b"OK 1234\r\n", b"")
    with pytest.raises(BusUnavailable, match=r"cannot connect to the bus at unix:path=.*: it hung up$"):
        await Connection.open(address_of(listening), on_call)


async def test_a_bus_that_says_no_is_an_error(peer: Any, listening: socket.socket) -> None:
    peer(b"REJECTED EXTERNAL\r\n")
    with pytest.raises(BusUnavailable, match=r"cannot connect to the bus at unix:path=.*authentication failed"):
        await Connection.open(address_of(listening), on_call)


async def test_a_bus_that_says_nothing_is_given_up(
    peer: Any, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "DAEMON_TIMEOUT", 0.05)
    peer(hang_up=False)
    with pytest.raises(BusUnavailable, match=r"no answer within 0\.05 s"):
        await Connection.open(address_of(listening), on_call)


async def test_a_bus_whose_backlog_is_full_does_not_stop_the_loop(listening: socket.socket) -> None:
    first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with first:
        first.connect(listening.getsockname())
        with pytest.raises(BusUnavailable, match="Resource temporarily unavailable"):
            await Connection.open(address_of(listening), on_call)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp:host=localhost,port=1", "unix:runtime=yes"])
async def test_an_address_that_names_no_socket_is_an_error(address: str) -> None:
    with pytest.raises(BusUnavailable, match="cannot connect to the bus at"):
        await Connection.open(address, on_call)


async def test_the_second_address_is_tried_when_the_first_has_no_bus(daemon: Any) -> None:
    connection = await Connection.open(f"unix:path=/nowhere;{daemon.address}", on_call)
    assert connection.unique_name.startswith(":")
    connection.close()


async def test_nothing_is_sent_on_a_lost_connection(daemon: Any) -> None:
    connection = await Connection.open(daemon.address, on_call)
    await daemon.kill()
    assert await connection.lost == "it hung up"
    assert not connection.alive
    connection.signal("/x", "a.b", "C", "s", ["x"])
    with pytest.raises(BusUnavailable, match="the connection is lost"):
        await connection.request_name("a.b")
    connection.close()
    connection.signal("/x", "a.b", "C", "s", ["x"])
    connection.close()


async def test_a_bus_that_does_not_read_for_a_while_gets_everything_later(daemon: Any, connect: Any) -> None:
    connection = await Connection.open(daemon.address, on_call)
    await connection.request_name(BUS_NAME)
    listener = await connect()
    await listener.listen()
    daemon.signal(signal.SIGSTOP)
    for number in range(2000):
        connection.signal(ROOT_PATH, "a.b", "Tick", "us", [number, "x" * 1000])
    await asyncio.sleep(0)
    daemon.signal(signal.SIGCONT)
    assert [(await listener.signal("Tick")).body[0] for _ in range(2000)] == list(range(2000))
    assert connection.alive
    connection.close()


async def test_a_bus_that_never_reads_again_is_lost_before_it_costs_memory_without_end(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_BACKLOG", 100)
    connection = await Connection.open(daemon.address, on_call)
    daemon.signal(signal.SIGSTOP)
    while connection.alive:
        connection.signal(ROOT_PATH, "a.b", "Tick", "s", ["x" * 10_000])
    assert await connection.lost == "it takes no messages any more"
    connection.close()


async def test_a_call_under_way_ends_when_the_connection_is_closed(daemon: Any) -> None:
    connection = await Connection.open(daemon.address, on_call)
    call = asyncio.create_task(connection.request_name("a.b"))
    await asyncio.sleep(0)
    connection.close()
    with pytest.raises(BusUnavailable, match="the connection was closed"):
        await call
    assert await connection.lost == "closed"


async def test_a_name_that_we_may_not_own_is_an_error_with_the_bus_daemons_reason(daemon: Any) -> None:
    connection = await Connection.open(daemon.address, on_call)
    with pytest.raises(BusError, match=r"^cannot own the bus name org\.freedesktop\.DBus: "):
        await connection.request_name("org.freedesktop.DBus")
    connection.close()


def test_forbidden_text_is_cleaned() -> None:
    assert clean_text("plain é") == "plain é"
    assert clean_text("a\0b\udcffc") == "ab?c"


def test_it_can_be_imported_where_typing_has_lost_what_the_library_wants() -> None:
    """Python 3.15 has no ``typing.no_type_check_decorator``."""
    code = (
        "import typing\n"
        "if hasattr(typing, 'no_type_check_decorator'): del typing.no_type_check_decorator\n"
        "import supervisord.bus.connection, supervisord.bus.service"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
