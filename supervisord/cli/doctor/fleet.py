"""Is the configuration valid, and is what it names there?"""

from __future__ import annotations

from supervisord.cli.doctor.findings import Finding, fail, ok, skip, warn
from supervisord.cli.doctor.host import Host
from supervisord.cli.doctor.login import properties, systemctl
from supervisord.cli.words import count
from supervisord.core.spec import Config


def check_config(host: Host) -> Finding:
    config = host.config()
    if not isinstance(config, Config):
        more = f" (and {len(config) - 1} more)" if len(config) > 1 else ""
        return fail(
            "config", f"{config[0] if config else 'cannot be read'}{more}", "See all of it: vllmctl config check"
        )
    files = ", ".join(config.files)
    if not config.models:
        return warn(
            "config", f"No models are configured ({files or 'no file was found'}).", "Write one: vllmctl config path"
        )
    replicas = sum(len(model.replicas) for model in config.models)
    return ok("config", f"Valid, {count(len(config.models), 'model')} and {count(replicas, 'replica')}, from {files}.")


def check_replica_units(host: Host) -> Finding:
    units = _units(host)
    if not units:
        return skip("replica-units", "No replicas are known.")
    shown = properties(host.run(*systemctl(host), "show", "-p", "Id,LoadState,LoadError", *units.values()).out)
    if not shown:
        return skip("replica-units", "Cannot be checked: the service manager does not answer.")
    # systemctl answers in the order in which it was asked; an alias has another Id.
    wrong = [
        f"{unit} of replica {replica} is {'missing' if state['LoadState'] == 'not-found' else state['LoadState']}"
        for (replica, unit), state in zip(units.items(), shown, strict=False)
        if state.get("LoadState", "loaded") != "loaded"
    ]
    if wrong:
        mend = f"A masked one: {' '.join(systemctl(host))} unmask UNIT; a missing one: check its unit file or Quadlet"
        return fail("replica-units", f"{'; '.join(wrong)}.", mend)
    return ok("replica-units", f"Every replica's unit is there ({', '.join(units.values())}).")


def check_state_directory(host: Host) -> Finding:
    fleet = host.fleet()
    path = "" if isinstance(fleet, str) else fleet.manager.state_directory
    path = path or ("/var/lib/vllm-supervisord" if host.system else f"{host.home}/.local/state/vllm-supervisord")
    why = host.why_unwritable(path)
    if why:
        return fail(
            "state-directory",
            f"{path} is not writable ({why}): no wake could be made safe against a crash.",
            f"chown -R {host.user} {path}, or free some space",
        )
    return ok("state-directory", f"{path} is writable.")


def check_engines(host: Host) -> Finding:
    """The program that bundled replicas run must be on the service manager's PATH, not only on the shell's."""
    config = host.config()
    if not isinstance(config, Config):
        return skip("engines", "Cannot be checked: the configuration is not valid.")
    environment = dict(
        line.split("=", 1) for line in host.run(*systemctl(host), "show-environment").out.splitlines() if "=" in line
    )
    missing: list[str] = []
    found: list[str] = []
    for model in config.models:
        if model.serve is None or not any(replica.bundled for replica in model.replicas):
            continue
        if model.serve.engine == "simulator" and not model.serve.command:
            found.append("the simulator")
            continue
        program = model.serve.command[0] if model.serve.command else "vllm"
        path = model.serve.env.get("PATH") or environment.get("PATH")
        where = host.which(program, path)
        if where is None:
            missing.append(f"'{program}' of model {model.name} is not on the service manager's PATH")
        else:
            found.append(where)
    if missing:
        return fail(
            "engines",
            f"{'; '.join(missing)}.",
            'Name it with its directory: [models.NAME.serve] command = ["/path/to/vllm", "serve"]',
        )
    if not found:
        return skip("engines", "No replica uses the bundled unit.")
    return ok("engines", f"Bundled replicas run {', '.join(dict.fromkeys(found))}.")


def _units(host: Host) -> dict[str, str]:
    """Replica -> unit: as configured, else as the daemon knows them."""
    config = host.config()
    if isinstance(config, Config):
        return {replica.name: replica.unit for model in config.models for replica in model.replicas}
    fleet = host.fleet()
    return {} if isinstance(fleet, str) else {replica.name: replica.unit for replica in fleet.replicas}
