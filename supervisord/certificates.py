"""A certificate and its key, as files: read, checked, and made into what the port speaks TLS with."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

_BEGIN_CERTIFICATE, _BEGIN_KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"
# Tags of DER (X.690): the two spellings of a time, and the version, which old certificates leave out.
_UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x17, 0x18, 0xA0


class CertificateError(Exception):
    """The pair cannot be used. ``of_key``: it is the key's fault, else the certificate's."""

    def __init__(self, reason: str, *, of_key: bool = False) -> None:
        super().__init__(reason)
        self.of_key = of_key


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate in use."""

    context: ssl.SSLContext
    #: Equal for the same two files.
    digest: bytes
    not_before: datetime
    not_after: datetime

    def trouble(self, now: datetime) -> str:
        """Why clients will not accept it though it could be loaded; empty where they may."""
        if now > self.not_after:
            return f"has expired on {self.not_after:%Y-%m-%d}: clients will not accept it"
        if now < self.not_before:
            return f"is not valid before {self.not_before:%Y-%m-%d %H:%M} UTC: clients will not accept it"
        return ""


def digest_of(chain: bytes, key: bytes) -> bytes:
    """What ``Certificate.digest`` is for the contents of these two files."""
    return sha256(sha256(chain).digest() + sha256(key).digest()).digest()


def make_certificate(chain: bytes, key: bytes) -> Certificate:
    """From the contents of the two PEM files, the certificate's own first in its chain; raises ``CertificateError``."""
    if _BEGIN_CERTIFICATE not in chain:
        raise CertificateError("is not a certificate in PEM form")
    if _BEGIN_KEY not in key:
        raise CertificateError("is not a private key in PEM form", of_key=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load(context, chain, key)
    try:
        first = ssl.PEM_cert_to_DER_cert(_first_block(chain))
        not_before, not_after = _validity(first)
    except (ValueError, IndexError):
        raise CertificateError("cannot read the certificate's dates") from None
    return Certificate(context, digest_of(chain, key), not_before, not_after)


def _load(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    # Out of memory and not from the files: what was checked is what is loaded, also while somebody replaces them.
    with ExitStack() as stack:
        paths = []
        for name, data in (("certificate", chain), ("key", key)):
            file = os.memfd_create(name, os.MFD_CLOEXEC)
            stack.callback(os.close, file)
            os.write(file, data)
            paths.append(f"/proc/self/fd/{file}")
        try:
            context.load_cert_chain(paths[0], paths[1], password=_ask_nobody)
        except ssl.SSLError as error:
            # The last: of another kind than the certificate's.
            if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
                raise CertificateError("does not belong to the certificate", of_key=True) from None
            raise CertificateError(f"cannot be loaded, or its key cannot: {error.reason or error}") from None


def _ask_nobody() -> str:
    raise CertificateError("is encrypted: the daemon has nobody to ask for the password", of_key=True)


def _first_block(chain: bytes) -> str:
    end = b"-----END CERTIFICATE-----"
    start = chain.index(_BEGIN_CERTIFICATE)
    return chain[start : chain.index(end, start) + len(end)].decode("ascii")


def _validity(der: bytes) -> tuple[datetime, datetime]:
    """The two dates of a certificate (RFC 5280 4.1), which OpenSSL does not look at in a server's own."""
    (_, certificate), *_ = _elements(der)
    (_, signed), *_ = _elements(certificate)
    fields = list(_elements(signed))
    # [version] serial, signature algorithm, issuer, validity
    _, validity = fields[4 if fields[0][0] == _VERSION else 3]
    not_before, not_after = (_time(tag, text) for tag, text in _elements(validity))
    return not_before, not_after


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:  # the long form: so many bytes of length
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        yield tag, der[at : at + length]
        at += length


def _time(tag: int, text: bytes) -> datetime:
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # RFC 5280 4.1.2.5.1: two digits of the year, of this century up to 49
        digits = ("20" if int(digits[:2]) < 50 else "19") + digits
    elif tag != _GENERALIZED_TIME:
        raise ValueError("not a time")
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
