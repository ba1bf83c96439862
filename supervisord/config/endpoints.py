"""Addresses: where an engine answers, where the proxy listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

#: Bytes that fit into ``sun_path`` before its closing NUL (unix(7)).
UNIX_PATH_MAX = 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed ``http://HOST:PORT`` (``path`` empty) or ``unix:/PATH`` (``host`` empty)."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Only this machine can reach it."""
        return bool(self.path) or is_loopback(self.host)

    def same_place(self) -> tuple[str, int, str]:
        """Equal for two spellings of one place."""
        return ("127.0.0.1" if self.host == "localhost" else self.host, self.port, self.path)


def parse_endpoint(text: str) -> Endpoint:
    """Parse ``http://HOST:PORT`` or ``unix:/PATH``. Raises ValueError with the reason."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        length = len(path.encode())
        if length > UNIX_PATH_MAX:
            raise ValueError(f"the socket's path is {length} bytes long, the most is {UNIX_PATH_MAX}: {path}")
        return Endpoint(path=path)
    address = text.removeprefix("http://")
    host, port = parse_address(address)
    if port == 0:
        raise ValueError(f"{address!r}: the port must be from 1 to 65535")
    return Endpoint(host, port)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[V6]:PORT``. Raises ValueError with the reason."""
    host, _, digits = text.rpartition(":")
    port = int(digits)
    if port > 65535:
        raise ValueError(f"{text!r}: the port must not be above 65535")
    if host.startswith("["):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{text!r}: {host!r} is not an IPv6 address") from None
    elif host.replace(".", "").isdigit():
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"{text!r}: {host!r} is not an IPv4 address") from None
    return host.lower(), port


def is_loopback(host: str) -> bool:
    """``localhost``, 127.0.0.0/8 or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def why_no_network(text: str) -> str:
    """What is wrong with ``ADDRESS`` or ``ADDRESS/PREFIX``; empty when it is one."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return f"{text!r} is not an IP address or a network"
    address = text.partition("/")[0]
    if ipaddress.ip_address(address) == network.network_address:
        return ""
    return f"{text!r} is an address within a network: write {network} for all of it, or {address} for that one alone"


def bundled_endpoint(runtime_dir: Path, replica: str) -> str:
    """The default endpoint of a bundled replica, in the unit's own ``RuntimeDirectory=vllm/%i`` (mode 0700)."""
    return f"unix:{runtime_dir}/vllm/{replica}/engine.sock"
