"""Which clients may connect, by their address: the allow-list of ``[proxy] allow_clients``. Pure."""

from __future__ import annotations

import socket
from bisect import bisect_right
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

_MAPPED = bytes(10) + b"\xff\xff"
_MAPPED_NETWORK = IPv6Network("::ffff:0:0/96")


class ClientNetworks:
    """The networks whose clients are let in; one binary search each, however many there are."""

    def __init__(self, networks: Iterable[str]) -> None:
        """``networks``: addresses and ``ADDRESS/PREFIX`` as the configuration has them, already checked."""
        old: list[IPv4Network] = []
        new: list[IPv6Network] = []
        for text in networks:
            network = _unmapped(ip_network(text))
            if isinstance(network, IPv4Network):
                old.append(network)
            else:
                new.append(network)
        self._old, self._new = _Ranges(collapse_addresses(old)), _Ranges(collapse_addresses(new))

    def has(self, address: str) -> bool:
        """Whether the client at ``address`` (of its socket) is in one of them; an IPv4-mapped IPv6 address is IPv4."""
        try:
            if ":" not in address:
                return self._old.has(socket.inet_pton(socket.AF_INET, address))
            packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
        except OSError:
            return False
        return self._old.has(packed[12:]) if packed.startswith(_MAPPED) else self._new.has(packed)


class _Ranges:
    """Addresses from each of ``_first`` to its ``_last``, in order, none within another."""

    def __init__(self, networks: Iterable[IPv4Network] | Iterable[IPv6Network]) -> None:
        ordered = sorted((network[0].packed, network[-1].packed) for network in networks)
        self._first = [first for first, _ in ordered]
        self._last = [last for _, last in ordered]

    def has(self, address: bytes) -> bool:
        at = bisect_right(self._first, address)
        return at > 0 and address <= self._last[at - 1]


def _unmapped(network: IPv4Network | IPv6Network) -> IPv4Network | IPv6Network:
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED_NETWORK):
        return IPv4Network((network.network_address.packed[12:], network.prefixlen - 96))
    return network
