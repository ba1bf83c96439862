"""API keys: the file that lists them, and the one that a request shows. Pure; a key itself is not kept here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256

from proxy.errors import ProxyError
from proxy.http.headers import Fields, RequestHead

#: A shorter one can be guessed.
SHORTEST = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_KEY = re.compile(r"[!-~]*")
#: How OpenAI's clients show their key from a browser, which lets a page set no other field of a WebSocket's handshake.
_OFFER = b"openai-insecure-api-key."
_HINT = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"


class KeyFileError(Exception):
    """What is wrong with a list of keys; never tells a key."""


class ApiKeys:
    """The keys of a port, as digests; two lists are equal when they let the same clients in under the same names."""

    def __init__(self, owners: Mapping[bytes, str]) -> None:
        """``owners``: names by the SHA-256 of their keys."""
        self._owners = dict(owners)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKeys) and self._owners == other._owners

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, shown: bytes) -> str | None:
        """The name of the key, None if it is none of ours."""
        # What is compared are digests: how far two of them agree tells nothing of how far two keys do.
        return self._owners.get(sha256(shown).digest())


def parse_keys(text: str) -> ApiKeys:
    """A list of keys: ``NAME:KEY`` or ``KEY`` a line, lines with ``#`` and empty ones aside; raises ``KeyFileError``.

    Several keys may have one name (an old and a new one). A key without a name is called by its place: ``key-2``.
    """
    owners: dict[bytes, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        name, key = (name.strip(), key.strip()) if colon else (f"key-{len(owners) + 1}", line)
        if not _NAME.fullmatch(name):
            raise KeyFileError(
                f"line {number}: what stands before the colon is no name: letters, digits, '_', '.', '@' and '-' "
                "(a key with a colon in it needs a name)"
            )
        if not _KEY.fullmatch(key):
            raise KeyFileError(f"line {number}: the key has a space, or a character that is not ASCII")
        if len(key) < SHORTEST:
            raise KeyFileError(
                f"line {number}: the key has {len(key)} characters, fewer than {SHORTEST} can be guessed: "
                "'openssl rand -hex 24' makes one"
            )
        digest = sha256(key.encode()).digest()
        if digest in owners:
            raise KeyFileError(f"line {number}: the same key stands further up, under the name {owners[digest]}")
        owners[digest] = name
    if not owners:
        raise KeyFileError("has no keys, so nobody could ask")
    return ApiKeys(owners)


def authenticate(keys: ApiKeys, head: RequestHead) -> str:
    """The name of the key that a request shows; raises ``ProxyError`` 401.

    The key is taken out of what goes on to the engine, which has no business with it; credentials that are none of ours
    stay, for they may be the engine's.
    """
    owner, others = None, []
    shown = False
    for field in head.passing:
        if (key := _shown(field)) is not None:
            shown = True
            if (name := keys.owner(key)) is not None:
                owner = name
                others += _without_key(field)
                continue
        others.append(field)
    if owner is None:
        said = f"the API key is not known here, in {_HINT}" if shown else f"no API key: send {_HINT}"
        raise ProxyError(401, "invalid_api_key", said, headers=(("WWW-Authenticate", "Bearer"),))
    head.passing = tuple(others)
    return owner


def _shown(field: tuple[bytes, bytes]) -> bytes | None:
    """The key in a field, None if it is a field of another kind."""
    name = field[0].lower()
    if name == b"x-api-key":
        return field[1].strip(b" \t")
    if name == b"authorization":
        scheme, _, token = field[1].strip(b" \t").partition(b" ")
        return token.strip(b" \t") if scheme.lower() == b"bearer" else b""
    if name == b"sec-websocket-protocol":
        return next((token[len(_OFFER) :] for token in _tokens(field[1]) if token.startswith(_OFFER)), None)
    return None


def _without_key(field: tuple[bytes, bytes]) -> Fields:
    """What is left of a field whose key was ours."""
    if field[0].lower() != b"sec-websocket-protocol":
        return []
    return [(field[0], b", ".join(token for token in _tokens(field[1]) if not token.startswith(_OFFER)))]


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip(b" \t") for token in value.split(b",")]
