"""The files that the configuration only points to (API keys, the port's certificate), looked at as the daemon would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from supervisord.config.problems import ConfigError, Problem
from supervisord.core.spec import Config
from supervisord.private_files import is_credential


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is to say of the files."""

    #: Why the daemon would not take this configuration.
    problems: Sequence[Problem] = ()
    #: It would, but clients would not be served; sentences.
    warnings: Sequence[str] = ()
    #: The keys of ``[proxy]`` whose files were read.
    seen: Sequence[str] = ()
    #: Those whose files only the daemon can see.
    unseen: Sequence[str] = ()


def look_at_credentials(config: Config, env: Mapping[str, str], *, as_daemon: bool) -> Looked:
    """Read what ``[proxy]`` points to. ``as_daemon``: whether this process may read what the daemon may."""
    from supervisord.credentials import CredentialKeeper  # ssl and the proxy's part, only where they are needed

    proxy, seen, unseen = config.proxy, list[str](), list[str]()
    if proxy.api_keys:
        if as_daemon and not is_credential(proxy.api_keys):
            seen.append("api_keys")
        else:
            unseen.append("api_keys")
            proxy = replace(proxy, api_keys="")
    if proxy.tls_certificate:
        if as_daemon and not (is_credential(proxy.tls_certificate) or is_credential(proxy.tls_key)):
            seen += ("tls_certificate", "tls_key")
        else:
            unseen += ("tls_certificate", "tls_key")
            proxy = replace(proxy, tls_certificate="", tls_key="")
    keeper = CredentialKeeper(env)
    try:
        keeper.read(replace(config, proxy=proxy))
    except ConfigError as error:
        return Looked(error.problems, (), seen, unseen)
    return Looked((), keeper.warnings(), seen, unseen)
