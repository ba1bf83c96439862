"""What the configuration only points to, read with it: API keys, the engines' own keys, the certificate of the port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

from proxy.clients.keys import ApiKeys, KeyFileError, parse_keys
from proxy.credentials import Credentials
from supervisord.certificates import Certificate, CertificateError, digest_of, make_certificate
from supervisord.config.problems import ConfigError, Problem
from supervisord.core.spec import Config, ModelSpec, ProxySpec, ReplicaSpec
from supervisord.launcher.command import api_key_of
from supervisord.private_files import PrivateFileError, locate, read_private

log = logging.getLogger(__name__)

#: Seconds between two looks at the files of the certificate: those who renew one do so weeks before its end.
LOOK = 60.0


class CredentialKeeper:
    """Keeps the credentials that hold now. ``environ``: the daemon's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.now = Credentials()
        #: Called with all new credentials.
        self.changed: list[Callable[[Credentials], None]] = []
        self._environ = environ
        #: What was made of the files last; the one that holds is in ``now``.
        self._certificate: Certificate | None = None
        self._complaint = ""

    def read(self, config: Config) -> Credentials:
        """What ``config`` points to; nothing is taken over. Raises ``ConfigError`` with every mistake."""
        proxy, problems = config.proxy, list[Problem]()
        keys = certificate = None
        try:
            keys = self._read_keys(proxy.api_keys) if proxy.api_keys else None
        except ConfigError as error:
            problems += error.problems
        try:
            certificate = self._read_certificate(proxy) if proxy.tls_certificate else None
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        replicas = [(model, replica) for model in config.models for replica in model.replicas]
        engine_keys = {replica.name: engine_key(model, replica, self._environ) for model, replica in replicas}
        return Credentials(
            keys,
            {name: key for name, key in engine_keys.items() if key},
            None if certificate is None else certificate.context,
        )

    def take(self, credentials: Credentials) -> list[str]:
        """Let them hold; returns what a person should know of that, in sentences."""
        before, self.now = self.now, credentials
        for tell in self.changed:
            tell(credentials)
        said = []
        if before.keys and credentials.keys and before.keys != credentials.keys:
            said.append(f"[proxy] api_keys: the file changed, {len(credentials.keys)} in it")
        certificate = self._certificate
        if certificate is not None and credentials.tls is certificate.context:
            if before.tls is not None and before.tls is not credentials.tls:
                said.append(f"[proxy] tls_certificate: the file changed, it is valid until {certificate.not_after:%F}")
            for sentence in self.warnings():
                log.warning(sentence)
                said.append(sentence)
        return said

    def warnings(self) -> list[str]:
        """What is wrong with what was read last, though it can be used; sentences."""
        trouble = self._certificate.trouble(datetime.now(UTC)) if self._certificate is not None else ""
        return [f"[proxy] tls_certificate {trouble}"] if trouble else []

    async def watch_certificate(self, spec: Callable[[], ProxySpec]) -> None:
        """Look at the files of the certificate for ever. ``spec``: the configuration that holds."""
        while True:
            await asyncio.sleep(LOOK)
            self.look_at_certificate(spec())

    def look_at_certificate(self, spec: ProxySpec) -> None:
        """Take a renewed certificate; a broken one, or half of one, is told of once, and the one before holds."""
        if self.now.tls is None or not spec.tls_certificate:
            return
        try:
            renewed = self._read_certificate(spec)
        except ConfigError as error:
            if str(error) != self._complaint:
                log.warning("the certificate was not taken over: %s", error)
                self._complaint = str(error)
            return
        self._complaint = ""
        if renewed.context is not self.now.tls:
            for sentence in self.take(replace(self.now, tls=renewed.context)):
                log.info(sentence)

    def _read_keys(self, source: str) -> ApiKeys:
        data = self._file("api_keys", source)
        try:
            return parse_keys(data.decode())
        except UnicodeDecodeError as error:
            self._refuse("api_keys", source, f"cannot read: not UTF-8 at byte {error.start}")
        except KeyFileError as error:
            self._refuse("api_keys", source, str(error))

    def _read_certificate(self, spec: ProxySpec) -> Certificate:
        """The certificate in the files; the one that was read before, where nothing changed."""
        chain = self._file("tls_certificate", spec.tls_certificate, secret=False)
        key = self._file("tls_key", spec.tls_key)
        if self._certificate is not None and self._certificate.digest == digest_of(chain, key):
            return self._certificate
        try:
            self._certificate = make_certificate(chain, key)
        except CertificateError as error:
            at_fault = ("tls_key", spec.tls_key) if error.of_key else ("tls_certificate", spec.tls_certificate)
            self._refuse(*at_fault, str(error))
        return self._certificate

    def _file(self, key: str, source: str, *, secret: bool = True) -> bytes:
        try:
            return read_private(locate(source, self._environ), self._environ, secret=secret)
        except PrivateFileError as error:
            self._refuse(key, source, str(error))

    def _refuse(self, key: str, source: str, reason: str) -> NoReturn:
        try:
            place = str(locate(source, self._environ))
        except PrivateFileError:
            place = source
        raise ConfigError([Problem(place, "proxy", key, reason)]) from None


def engine_key(model: ModelSpec, replica: ReplicaSpec, environ: Mapping[str, str]) -> str:
    """The key that a replica's engine asks for, where we start it and so know; else empty."""
    if not replica.bundled or model.serve is None:
        return ""
    return api_key_of(model.serve, {**environ, **model.serve.env})
