"""What a reverse proxy that is trusted says of the client that it speaks for: ``[proxy] trusted_proxies``. Pure.

A client may write these fields itself, and each proxy on the way adds its word behind that. So the words are read from
the right, where the proxy that is connected to us wrote: the first address that is no trusted proxy's is the client.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from proxy.clients.networks import ClientNetworks
from proxy.http.headers import Field, HeadError, is_host

#: A client whose proxy keeps its address to itself (RFC 7239 6: ``unknown``, or an identifier of its own choice).
UNKNOWN = "unknown"

# RFC 7239 4: pairs, joined by semicolons to elements, which commas part; an empty element is allowed (RFC 9110 5.6.1).
_PAIR = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(\"(?:[^\"\\]|\\.)*\"|[!#$%&'*+.^_`|~0-9A-Za-z:\[\]-]+)")
_QUOTED_PAIR = re.compile(rb"\\(.)")
_PORT = r"(?::[0-9_A-Za-z.-]+)?"
_NODE = re.compile(rf"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]{_PORT}|([0-9.]+){_PORT}|([0-9A-Fa-f:.]+)")
_HIDDEN = re.compile(rf"(?:unknown|_[A-Za-z0-9._-]+){_PORT}", re.IGNORECASE)


class Told(NamedTuple):
    """What is believed of one request."""

    #: The client's address.
    client: str
    #: Whether it came by TLS; None where that was not said.
    secure: bool | None = None
    #: The host that it asked for; empty where that was not said.
    host: bytes = b""


def told(peer: str, hearsay: Sequence[Field], trusted: ClientNetworks) -> Told:
    """What the proxy at ``peer``, which is in ``trusted``, says in the fields ``hearsay`` (names in lower case).

    Without a word of a client the request is the proxy's own. Raises ``HeadError`` where the words make no sense, or
    two fields name different clients: one of them is not the proxy's. Where both name the same one, either may still be
    the client's, who knows its own address: of scheme and host is believed what both say.
    """
    forwarded = b",".join(value for name, value in hearsay if name == b"forwarded")
    listed = b",".join(value for name, value in hearsay if name == b"x-forwarded-for")
    by_rfc = _by_forwarded(forwarded, trusted) if forwarded.strip() else None
    if not listed.strip():
        return by_rfc or Told(peer)
    client = _client((_address(word) for word in _words(listed)), trusted) or peer
    if by_rfc is not None and by_rfc.client != client:
        raise HeadError("Forwarded and X-Forwarded-For name different clients: a proxy sets one and drops the other")
    protocol, host = (_last(hearsay, b"x-forwarded-" + name) for name in (b"proto", b"host"))
    by_list = Told(client, _secure(protocol), host if is_host(host) else b"")
    if by_rfc is None or by_rfc == by_list:
        return by_list
    return Told(
        client,
        by_list.secure if by_list.secure == by_rfc.secure else None,
        by_list.host if by_list.host == by_rfc.host else b"",
    )


def _by_forwarded(value: bytes, trusted: ClientNetworks) -> Told:
    elements = _elements(value)
    client, at = "", 0
    for at in range(len(elements) - 1, -1, -1):
        client = _address(elements[at].get(b"for", b"unknown").decode("latin-1"))
        if not trusted.has(client):
            break
    said = elements[at]
    host = said.get(b"host", b"")
    return Told(client, _secure(said.get(b"proto", b"")), host if is_host(host) else b"")


def _elements(value: bytes) -> list[dict[bytes, bytes]]:
    elements: list[dict[bytes, bytes]] = [{}]
    at, complete = 0, False
    while at < len(value):
        if value[at] in b" \t":
            at += 1
        elif value[at] in b",;":
            if value[at] in b",":
                elements.append({})
            at, complete = at + 1, False
        elif not complete and (pair := _PAIR.match(value, at)):
            name, said = pair[1].lower(), pair[2]
            if name in elements[-1]:
                raise HeadError("Forwarded says something twice")
            elements[-1][name] = _QUOTED_PAIR.sub(rb"\1", said[1:-1]) if said.startswith(b'"') else said
            at, complete = pair.end(), True
        else:
            raise HeadError("Forwarded is malformed")
    return [element for element in elements if element] or [{}]


def _words(listed: bytes) -> Iterator[str]:
    """The words of a list from its right end, without empty ones."""
    for word in reversed(listed.split(b",")):
        if word := word.strip(b" \t"):
            yield word.decode("latin-1")


def _client(addresses: Iterator[str], trusted: ClientNetworks) -> str:
    """The first that is no proxy's, else the last there is."""
    address = ""
    for address in addresses:
        if not trusted.has(address):
            break
    return address


def _address(node: str) -> str:
    """The address of a node (RFC 7239 6) without its port, in the spelling of a socket's; raises ``HeadError``."""
    if _HIDDEN.fullmatch(node):
        return UNKNOWN
    found = _NODE.fullmatch(node)
    text = next((group for group in found.groups() if group), "") if found else ""
    try:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        return socket.inet_ntop(family, socket.inet_pton(family, text))
    except OSError:
        raise HeadError("a forwarded address is none") from None


def _last(hearsay: Sequence[Field], name: bytes) -> bytes:
    """The word of the proxy next to us, where several have said something."""
    value = next((value for key, value in reversed(hearsay) if key == name), b"")
    return value.rpartition(b",")[2].strip(b" \t")


def _secure(protocol: bytes) -> bool | None:
    return {b"https": True, b"wss": True, b"http": False, b"ws": False}.get(protocol.lower())
