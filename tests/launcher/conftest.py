"""A service manager's notify socket, and a launcher that becomes the fake engine."""

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).parents[2]
#: No test takes that long; a bound for what should have come by itself.
PATIENCE = 20.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Message:
    """One datagram and who sent it."""

    fields: Mapping[str, str]
    sender: int


class Manager:
    """The receiving end of sd_notify: reads messages with their sender's pid, closes barriers as systemd does."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.address = address

    def receive(self, timeout: float = PATIENCE) -> Message | None:
        """The next message, None when none comes in time."""
        if not select.select([self.socket], [], [], timeout)[0]:
            return None
        data, ancillary, _, _ = self.socket.recvmsg(4096, 1024)
        sender = 0
        for _level, kind, content in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                sender = int.from_bytes(content[:4], sys.byteorder)
            elif kind == socket.SCM_RIGHTS:
                for start in range(0, len(content), 4):
                    os.close(int.from_bytes(content[start : start + 4], sys.byteorder))
        return Message(dict(line.split("=", 1) for line in data.decode().split("\n")), sender)

    def until(self, field: str) -> Message:
        """The first message that has ``field``."""
        while message := self.receive():
            if field in message.fields:
                return message
        raise AssertionError(f"no message with {field} came")

    def waiting(self) -> list[Message]:
        """What has arrived and was not read."""
        messages = []
        while message := self.receive(0):
            messages.append(message)
        return messages


@pytest.fixture
def manager_at() -> Iterator[Callable[[str], Manager]]:
    """A notify socket at an address."""
    made: list[Manager] = []

    def make(address: str) -> Manager:
        made.append(Manager(address))
        return made[-1]

    yield make
    for each in made:
        each.socket.close()


@pytest.fixture
def manager(tmp_path: Path, manager_at: Callable[[str], Manager]) -> Manager:
    return manager_at(str(tmp_path / "notify"))


class Started:
    """A launcher that was started; it talks as the fake engine once it has become it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._heard = b""

    def hear(self) -> dict[str, Any]:
        """The engine's next line; {} when it has ended."""
        assert self.process.stdout
        fd = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            assert select.select([fd], [], [], PATIENCE)[0], "the engine says nothing"
            if not (piece := os.read(fd, 65536)):
                return {}
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        result: dict[str, Any] = json.loads(line)
        return result

    def hear_of(self, **what: object) -> dict[str, Any]:
        """Its first line with these values."""
        while line := self.hear():
            if what.items() <= line.items():
                return line
        raise AssertionError(f"the engine ended without {what}")

    def say(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Wait for its end; exit status and what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration with one model, whose replica ``chat-a`` runs the fake engine."""

    def write(serve: str = "", replica: str = "", model: str = "") -> Path:
        file = tmp_path / "config.toml"
        file.write_text(
            f"[models.chat]\naliases = ['default']\n{model}\n"
            f"[models.chat.serve]\nmodel = 'org/chat'\ncommand = ['{sys.executable}', '{ENGINE}']\n{serve}\n"
            f"[models.chat.replicas.chat-a]\n{replica}\n"
        )
        return file

    return write


@pytest.fixture
def start(tmp_path: Path, manager: Manager) -> Iterator[Callable[..., Started]]:
    """Start ``vllm-replica`` as a unit would. Watchers become children of the test, so that their end is seen."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started: list[Started] = []

    def run(config: Path, *arguments: str, **env: str) -> Started:
        command = [sys.executable, "-m", "supervisord.launcher.main", "--config", str(config), "chat-a", *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "XDG_RUNTIME_DIR": str(tmp_path),
                "NOTIFY_SOCKET": manager.address,
                **env,
            },
        )
        started.append(Started(process))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()
    for orphan in children():
        wait_for(orphan)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def wait_for(pid: int) -> int:
    """The exit status of a child, orphans that fell to us included."""
    fd = os.pidfd_open(pid)
    ended = select.select([fd], [], [], PATIENCE)[0]
    os.close(fd)
    assert ended, f"process {pid} was left behind"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def ended() -> Callable[[int], int]:
    return wait_for


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
