"""Certificates for tests: each its own authority, made in a moment."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from supervisord.certificates import make_certificate

PEM, PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """What two PEM files hold."""

    chain: bytes
    key: bytes

    def server(self) -> ssl.SSLContext:
        """What the product makes of it."""
        return make_certificate(self.chain, self.key).context

    def client(self, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """What a client that trusts it, and checks everything, connects with."""
        context = ssl.create_default_context(cadata=self.chain.decode())
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = newest
        return context


def pair(name: str = "first", begins: int = -1, ends: int = 30, *, password: bytes = b"", old: bool = False) -> Pair:
    """A self-signed certificate for localhost, valid from and to so many days from now; ``old``: RSA instead of EC."""
    key = rsa.generate_private_key(65537, 2048) if old else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + begins * DAY)
        .not_valid_after(now + ends * DAY)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    how = serialization.BestAvailableEncryption(password) if password else PLAIN
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how)
    return Pair(made.public_bytes(PEM), private)
