"""Who can reach the port, and what keeps strangers out?"""

from __future__ import annotations

from supervisord.cli.doctor.findings import Finding, ok, skip, warn
from supervisord.cli.doctor.host import Host
from supervisord.config.endpoints import is_loopback
from supervisord.core.spec import Config


def check_exposure(host: Host) -> Finding:
    """A port for other machines wants keys, or a list of networks."""
    config, fleet = host.config(), host.fleet()
    if not isinstance(config, Config):
        return skip("exposure", "Cannot be checked: the configuration is not valid.")
    listens = (config.proxy.listen,) if isinstance(fleet, str) else fleet.manager.listen
    outside = [address for address in listens if not _is_local(address)]
    if not outside:
        return ok("exposure", f"Only this machine can reach the port: {', '.join(listens)}.")
    proxy = config.proxy
    settings = (("API keys", proxy.api_keys), ("allow_clients", proxy.allow_clients), ("TLS", proxy.tls_certificate))
    given = [name for name, value in settings if value]
    if proxy.api_keys and not proxy.tls_certificate:
        return warn(
            "exposure",
            f"Other machines can reach {', '.join(outside)}, and API keys go there in the clear: whoever is on the way "
            "can read them.",
            "Set tls_certificate and tls_key in [proxy], or listen on 127.0.0.1 behind a proxy that speaks TLS",
        )
    if proxy.api_keys or proxy.allow_clients:
        return ok("exposure", f"Other machines can reach {', '.join(outside)}, guarded by {' and '.join(given)}.")
    return warn(
        "exposure",
        f"Other machines can reach {', '.join(outside)}, and everybody there may use the models: no API keys are asked "
        "for, and all client networks are allowed.",
        "Set api_keys or allow_clients in [proxy], or listen on 127.0.0.1 (docs/security.md)",
    )


def _is_local(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith(("unix:", "/")) or is_loopback(host)
