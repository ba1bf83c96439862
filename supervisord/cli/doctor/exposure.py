"""Who can reach the port, what keeps strangers out, and can that be used?"""

from __future__ import annotations

from supervisord.cli.credentials import look_at_credentials
from supervisord.cli.doctor.findings import Finding, fail, ok, skip, warn
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


def check_credentials(host: Host) -> Finding:
    """The files of the keys and of the certificate, as they are now: the daemon may have read others."""
    config = host.config()
    if not isinstance(config, Config):
        return skip("credentials", "Cannot be checked: the configuration is not valid.")
    if not (config.proxy.api_keys or config.proxy.tls_certificate):
        return ok("credentials", "Neither API keys nor TLS are configured, so no files of theirs either.")
    looked = look_at_credentials(config, host.env, as_daemon=not host.system or host.uid == 0)
    if looked.problems:
        more = f" (and {len(looked.problems) - 1} more)" if len(looked.problems) > 1 else ""
        mend = "Mend it, then: vllmctl config check && vllmctl reload"
        return fail("credentials", f"{looked.problems[0]}{more}", mend)
    if looked.warnings:
        mend = "Renew the certificate; files are read again within a minute, credentials of the unit with its restart"
        return warn("credentials", f"{'; '.join(looked.warnings)}.", mend)
    if looked.unseen:
        return skip("credentials", f"Only the daemon can read the files of {', '.join(looked.unseen)}.")
    return ok("credentials", f"The files of {', '.join(looked.seen)} can be used.")


def _is_local(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith(("unix:", "/")) or is_loopback(host)
