"""What the kernel tells about the engine's processes: which they are, what they did, who listens on an address."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisord.config.endpoints import Endpoint

_PROC = Path("/proc")
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Work:
    """What a group of processes has done since it began."""

    cpu_seconds: float = 0.0
    read_bytes: int = 0


def group_of(main: int) -> set[int]:
    """``main``, its descendants, and everything in its unit's control group but ourselves."""
    parents = {pid: _stat(pid)[1] for pid in _pids()}
    group, unit = {main}, unit_group(main)
    while new := {pid for pid, parent in parents.items() if parent in group} - group:
        group |= new
    if unit:
        group |= {pid for pid in parents if unit_group(pid) == unit}
    return group - {os.getpid()}


def work_of(group: set[int]) -> Work:
    """The sum over ``group``; a process that has ended counts no more."""
    cpu, read = 0.0, 0
    for pid in group:
        cpu += _stat(pid)[2]
        try:
            fields = dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
            read += int(fields["rchar"]) + int(fields["read_bytes"])
        except (OSError, KeyError, ValueError):
            continue
    return Work(cpu, read)


def unit_group(pid: int) -> str:
    """The control group of ``pid`` up to its service (``.../vllm@chat.service``); empty when it is in none."""
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:  # "0::PATH", and on a hybrid layout "1:name=systemd:PATH" beside it
        _, _, path = line.split(":", 2)
        head, service, _ = path.rpartition(".service")
        if service:
            return head + service
    return ""


def listener(endpoint: Endpoint, connection: socket.socket) -> set[int]:
    """The processes that hold the listening socket behind an open ``connection``; empty when that cannot be told."""
    if endpoint.path:
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return {pid} - {0}
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(connection.getpeername()[1])}
    return {pid for pid in _pids() if wanted & set(_open_files(pid))} if wanted else set()


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                yield fields[9]


def _open_files(pid: int) -> Iterator[str]:
    try:
        links = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            yield str(link.readlink())
        except OSError:
            continue


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> tuple[str, int, float]:
    """Name, parent and CPU seconds; zeroes when it has ended. A name may hold anything: count from its last bracket."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return "", 0, 0.0
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK


def name_of(pid: int) -> str:
    """The short name of a process, or empty."""
    return _stat(pid)[0]
