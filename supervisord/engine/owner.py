"""Whose process listens on a replica's endpoint: the unit's own, or somebody else's (an old copy, another server)?

Not everything that answers for a unit is in its control group. A container with a network of its own is reached
through a forwarder (pasta, slirp4netns, rootlessport, docker-proxy) that podman or docker may have started elsewhere, a
socket may be systemd's, and another user's process does not show its sockets. So the answer has three values, and
UNKNOWN must be taken for OURS: the served model's name is still checked. FOREIGN is said only of a process that was
found, is none of these, and is not the unit's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from supervisord.engine.cgroup import PROC

#: Programs that listen for others, by /proc/PID/comm (15 characters). ``systemd`` holds the sockets of socket units;
#: ``exe`` is what rootlessport is called after it has run itself again.
FORWARDERS = frozenset(
    {"pasta", "pasta.avx2", "passt", "passt.avx2", "slirp4netns", "rootlessport", "exe", "docker-proxy", "conmon"}
    | {"systemd", "systemd-socket-", "socat"}
)
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
#: struct ucred: pid, uid, gid.
_UCRED = struct.Struct("iII")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Ownership(StrEnum):
    """Whether the listener is the unit's."""

    OURS = "ours"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Owner:
    """The answer, and who it is, for the log."""

    ownership: Ownership
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket of the kernel's table."""

    address: _Address
    port: int
    inode: int


async def owner_of(endpoint: str, processes: Callable[[], Iterable[int]], proc: Path = PROC) -> Owner:
    """Who listens on ``endpoint`` (``http://host:port`` or ``unix:/path``); ``processes`` lists the unit's own.

    Reads /proc, and calls ``processes``, in a thread. A Unix socket is connected to and closed at once.
    """
    return await asyncio.to_thread(_owner_of, endpoint, processes, proc)


def _owner_of(endpoint: str, processes: Callable[[], Iterable[int]], proc: Path) -> Owner:
    if endpoint.startswith("unix:"):
        return _unix_owner(endpoint.removeprefix("unix:"), processes, proc)
    url = urlsplit(endpoint)
    listeners = parse_tcp_table(_text(proc / "net/tcp")) + parse_tcp_table(_text(proc / "net/tcp6"))
    inodes = answering(listeners, url.hostname or "", url.port or 80)
    if not inodes:
        return Owner(Ownership.UNKNOWN, f"no listener on {url.netloc} is to be seen in this network namespace")
    ours = frozenset(processes())
    foreign = inodes - _socket_inodes(ours, proc)
    if not foreign:
        return Owner(Ownership.OURS)
    # Also where only some are ours: with SO_REUSEPORT an old copy shares the port, and gets a part of the requests.
    for pid in sorted(_every_process(proc) - ours):
        if foreign & _socket_inodes((pid,), proc):
            return _stranger(pid, proc)
    return Owner(Ownership.UNKNOWN, f"the process that listens on {url.netloc} cannot be seen (another user's)")


def _unix_owner(path: str, processes: Callable[[], Iterable[int]], proc: Path) -> Owner:
    # The kernel tells a client who called listen(), in the client's own PID namespace: the truth for this very path,
    # which /proc/net/unix is not (there a path is what the server once bound, in its own mount namespace).
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
            pid, _, _ = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        except OSError as error:
            return Owner(Ownership.UNKNOWN, f"cannot connect to {path}: {error.strerror or error}")
    if pid in frozenset(processes()):
        return Owner(Ownership.OURS)
    if pid <= 0 or not (proc / str(pid)).exists():
        # Outside of our PID namespace; or whoever listened is gone and a child of it answers.
        return Owner(Ownership.UNKNOWN, f"the process that listens on {path} cannot be seen")
    return _stranger(pid, proc)


def _stranger(pid: int, proc: Path) -> Owner:
    """The judgement of a listener that is not in the unit's control group."""
    name = _text(proc / str(pid) / "comm").strip()
    detail = f"process {pid} ({name or 'unknown'}) listens there"
    return Owner(Ownership.UNKNOWN if name in FORWARDERS or not name else Ownership.FOREIGN, detail)


def parse_tcp_table(table: str) -> list[Listener]:
    """The listening sockets of the text of /proc/net/tcp or tcp6; lines that make no sense are passed over."""
    listeners = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        with suppress(ValueError, IndexError, struct.error):
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                listeners.append(Listener(_address(address), int(port, 16), int(fields[9])))
    return listeners


def _address(digits: str) -> _Address:
    """The kernel prints an address as 32-bit words in the machine's byte order."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return ipaddress.IPv4Address(packed)
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address


def answering(listeners: Iterable[Listener], host: str, port: int) -> frozenset[int]:
    """The inodes of the sockets that get a connection to ``host:port``: an exact address comes before a wildcard."""
    wanted = _host_addresses(host)
    here = [listener for listener in listeners if listener.port == port]
    exact = frozenset(listener.inode for listener in here if listener.address in wanted)
    return exact or frozenset(listener.inode for listener in here if listener.address.is_unspecified)


def _host_addresses(host: str) -> frozenset[_Address]:
    with suppress(ValueError):
        return frozenset({ipaddress.ip_address(host)})
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return frozenset(ipaddress.ip_address(str(entry[4][0])) for entry in found)
    return frozenset()


def _socket_inodes(pids: Iterable[int], proc: Path) -> frozenset[int]:
    """The sockets that the processes hold open; what may not be read counts as nothing."""
    inodes: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(proc / str(pid) / "fd"):
                with suppress(OSError, ValueError):
                    target = os.readlink(entry.path)  # noqa: PTH115 - there may be thousands
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    return frozenset(inodes)


def _every_process(proc: Path) -> frozenset[int]:
    return frozenset(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
