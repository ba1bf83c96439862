"""sd_notify on a real socket: every letter arrives, and a deaf systemd stops nothing."""

import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from supervisord.sd.notify import Notifier, watchdog_interval


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.fixture
def notifier(systemd: socket.socket) -> Iterator[Notifier]:
    notifier = Notifier(monotonic=lambda: 12.3456789)
    yield notifier
    notifier.close()


def heard(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode("utf-8").split("\n")


def test_the_whole_life_of_the_daemon_is_told(systemd: socket.socket, notifier: Notifier) -> None:
    assert notifier.active
    notifier.extend_timeout(2.5)
    assert heard(systemd) == ["EXTEND_TIMEOUT_USEC=2500000"]
    notifier.ready("2/3 awake, 4 in flight")
    assert heard(systemd) == ["READY=1", "STATUS=2/3 awake, 4 in flight"]
    notifier.watchdog()
    assert heard(systemd) == ["WATCHDOG=1"]
    notifier.reloading()
    assert heard(systemd) == ["RELOADING=1", "MONOTONIC_USEC=12345678"]
    notifier.stopping("shutting down")
    assert heard(systemd) == ["STOPPING=1", "STATUS=shutting down"]


def test_a_status_in_any_language_arrives(systemd: socket.socket, notifier: Notifier) -> None:
    notifier.status("größer – 眠っている 😴")
    assert heard(systemd) == ["STATUS=größer – 眠っている 😴"]
    notifier.status("half a \ud83d pair")
    assert heard(systemd) == ["STATUS=half a ? pair"]


def test_a_line_break_in_a_status_smuggles_nothing_in(systemd: socket.socket, notifier: Notifier) -> None:
    notifier.status("failed: a\nSTOPPING=1\r\n")
    assert heard(systemd) == ["STATUS=failed: a STOPPING=1"]


def test_the_same_status_is_sent_once(systemd: socket.socket, notifier: Notifier) -> None:
    for text in ("one", "one", "two", "one"):
        notifier.status(text)
    notifier.watchdog()
    assert [heard(systemd)[0] for _ in range(4)] == ["STATUS=one", "STATUS=two", "STATUS=one", "WATCHDOG=1"]


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"vllm-supervisord-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notifier = Notifier()
        notifier.ready()
        assert heard(listener) == ["READY=1"]
        notifier.close()


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    assert not notifier.active
    notifier.ready("ready")
    notifier.close()
    assert not caplog.records


def test_a_socket_that_is_not_there_is_an_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not Notifier().active
    assert "cannot open NOTIFY_SOCKET" in caplog.text


def test_a_message_that_cannot_be_sent_is_logged(
    systemd: socket.socket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    systemd.close()
    with caplog.at_level(logging.WARNING):
        notifier.ready("ready")
    assert "cannot tell systemd READY=1: Connection refused" in caplog.text


def test_a_systemd_that_does_not_read_blocks_nobody(
    systemd: socket.socket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    fill(notifier, caplog)
    assert "cannot tell systemd WATCHDOG=1: Resource temporarily unavailable" in caplog.text
    notifier.status("not heard")
    systemd.recv(4096)
    notifier.status("not heard")
    while heard(systemd) != ["STATUS=not heard"]:
        pass


def test_ready_waits_for_a_systemd_that_is_busy(
    systemd: socket.socket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    fill(notifier, caplog)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(notifier.ready)
        while heard(systemd) != ["READY=1"]:
            pass
        ready.result(10)


def fill(notifier: Notifier, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10_000):
        notifier.watchdog()
        if caplog.records:
            return


@pytest.mark.parametrize(
    ("env", "interval"),
    [
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0", "WATCHDOG_PID": "42"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_PID": "42"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(env: dict[str, str], interval: float | None) -> None:
    assert watchdog_interval(env, 42) == interval
