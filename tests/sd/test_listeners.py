"""The public port: systemd's socket, or one of our own, and then it is said."""

import logging
import socket

import pytest

from supervisord.listeners import ListenFailed, listening


@pytest.fixture
def sockets():
    """A listening socket; every one is closed afterwards."""
    made = []

    def make() -> socket.socket:
        made.append(socket.create_server(("127.0.0.1", 0)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def address(sock: socket.socket) -> str:
    return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("active", [True, False])
def test_the_socket_of_our_name_is_the_port_and_nothing_is_said(sockets, caplog, active):
    ours = sockets()
    assert listening({"proxy": [ours]}, "127.0.0.1:1", socket_unit_active=active) == [ours]
    assert caplog.text == ""


def test_an_active_socket_unit_that_handed_nothing_over_is_said_loudly(caplog):
    (own,) = listening({}, "127.0.0.1:0", socket_unit_active=True)
    own.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "vllm-supervisord.socket is active, but handed no socket over: listening on 127.0.0.1:0" in caplog.text


def test_sockets_of_another_name_are_said_and_not_used(sockets, caplog):
    other = sockets()
    (own,) = listening({"web": [other]}, "127.0.0.1:0")
    own.close()
    assert other.fileno() == -1
    assert "systemd handed over sockets that are not ours, named web: they are not used" in caplog.text


def test_a_port_that_the_socket_unit_holds_is_explained(sockets):
    taken = address(sockets())
    with pytest.raises(ListenFailed, match=f"cannot listen on {taken}: .*; vllm-supervisord.socket is active and has"):
        listening({}, taken, socket_unit_active=True)
    with pytest.raises(ListenFailed, match=f"cannot listen on {taken}: [^;]*$"):
        listening({}, taken)
