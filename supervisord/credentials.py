"""What the configuration only points to, read with it: API keys, and the keys that the engines ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.credentials import Credentials
from proxy.keys import ApiKeys, KeyFileError, parse_keys
from supervisord.config.problems import ConfigError, Problem
from supervisord.core.spec import Config, ModelSpec, ReplicaSpec
from supervisord.launcher.command import api_key_of
from supervisord.private_files import PrivateFileError, locate, read_private


class CredentialKeeper:
    """Keeps the credentials that hold now. ``environ``: the daemon's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.now = Credentials()
        #: Called with all new credentials.
        self.changed: list[Callable[[Credentials], None]] = []
        self._environ = environ

    def read(self, config: Config) -> Credentials:
        """What ``config`` points to; nothing is taken over. Raises ``ConfigError``."""
        keys = self._keys(config.proxy.api_keys) if config.proxy.api_keys else None
        replicas = [(model, replica) for model in config.models for replica in model.replicas]
        engine_keys = {replica.name: engine_key(model, replica, self._environ) for model, replica in replicas}
        return Credentials(keys, {name: key for name, key in engine_keys.items() if key})

    def take(self, credentials: Credentials) -> list[str]:
        """Let them hold; returns what that changes, in sentences."""
        before, self.now = self.now, credentials
        for tell in self.changed:
            tell(credentials)
        if credentials.keys is None or before.keys is None or before.keys == credentials.keys:
            return []
        return [f"[proxy] api_keys: the file changed, {len(credentials.keys)} in it"]

    def _keys(self, source: str) -> ApiKeys:
        path = None
        try:
            path = locate(source, self._environ)
            return parse_keys(read_private(path, self._environ).decode())
        except UnicodeDecodeError as error:
            reason = f"cannot read: not UTF-8 at byte {error.start}"
        except (PrivateFileError, KeyFileError) as error:
            reason = str(error)
        raise ConfigError([Problem(str(path or source), "proxy", "api_keys", reason)])


def engine_key(model: ModelSpec, replica: ReplicaSpec, environ: Mapping[str, str]) -> str:
    """The key that a replica's engine asks for, where we start it and so know; else empty."""
    if not replica.bundled or model.serve is None:
        return ""
    return api_key_of(model.serve, {**environ, **model.serve.env})
