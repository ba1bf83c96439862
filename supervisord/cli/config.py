"""``vllmctl config check``, ``show``, ``schema`` and ``path``: the configuration on disk; no daemon is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from supervisord.cli.credentials import Looked, look_at_credentials
from supervisord.cli.exits import Exit, Failure
from supervisord.cli.session import Session
from supervisord.cli.words import count
from supervisord.config import ConfigError, default_files, files_beside, load, runtime_directory
from supervisord.core.spec import Config


def config_files(session: Session) -> list[Path]:
    """The main file (there or not) and the drop-ins, in the order in which they are merged."""
    named: str | None = session.args.config
    if named is not None:
        return files_beside(Path(named).absolute())
    return default_files(session.env, system=session.system)


def load_config(session: Session) -> Config | ConfigError:
    """The configuration, or everything that is wrong with it."""
    try:
        return load(
            config_files(session),
            runtime_dir=runtime_directory(session.env, system=session.system),
            env=session.env,
            system=session.system,
        )
    except ConfigError as error:
        return error


def run_check(session: Session) -> Exit:
    """Say whether the configuration is valid, with the files that it points to, and everything that is wrong."""
    console, loaded = session.console, load_config(session)
    looked = Looked(loaded.problems) if isinstance(loaded, ConfigError) else _look(session, loaded)
    problems = looked.problems
    if console.json:
        files = list(loaded.files) if isinstance(loaded, Config) else [str(file) for file in config_files(session)]
        console.data(
            {
                "valid": not problems,
                "files": files,
                "problems": [
                    {"file": each.file, "table": each.table, "key": each.key, "reason": each.reason}
                    for each in problems
                ],
                "warnings": list(looked.warnings),
            }
        )
        return Exit.CONFIG_INVALID if problems else Exit.DONE
    if problems:
        console.complain(str(ConfigError(problems)))
    for warning in looked.warnings:
        console.complain(f"warning: {warning}")
    if isinstance(loaded, Config) and not problems and not console.quiet:
        models = count(len(loaded.models), "model")
        replicas = count(sum(len(model.replicas) for model in loaded.models), "replica")
        console.say(f"The configuration is valid: {models}, {replicas}, from {', '.join(loaded.files)}.")
        if looked.unseen:
            console.say(f"Not looked at, since only the daemon can read their files: {', '.join(looked.unseen)}.")
    return Exit.CONFIG_INVALID if problems else Exit.DONE


def _look(session: Session, config: Config) -> Looked:
    proxy = config.proxy
    if not (proxy.api_keys or proxy.tls_certificate):
        return Looked()
    return look_at_credentials(config, session.env, as_daemon=not session.system or session.uid == 0)


def run_path(session: Session) -> Exit:
    """Say which files are read, in the order in which they are merged."""
    main, *drop_ins = config_files(session)
    if session.console.json:
        session.console.data(
            {"main": str(main), "exists": main.exists(), "drop_ins": [str(drop_in) for drop_in in drop_ins]}
        )
        return Exit.DONE
    session.console.say(str(main) if main.exists() else f"{main} (does not exist)")
    for drop_in in drop_ins:
        session.console.say(str(drop_in))
    return Exit.DONE


def run_show(session: Session) -> Exit:
    """Print the merged result, defaults included: as TOML that loads to the same, or as JSON in seconds and bytes."""
    loaded = load_config(session)
    if not isinstance(loaded, Config):
        raise Failure("ConfigInvalid", str(loaded), Exit.CONFIG_INVALID)
    if session.console.json:
        session.console.data(_plain(loaded))
    else:
        from supervisord.config.show import show

        session.console.say(show(loaded).rstrip("\n"))
    return Exit.DONE


def run_schema(session: Session) -> Exit:
    """Print the JSON schema; it is JSON with and without ``--json``."""
    from supervisord.config.schema import text

    session.console.say(text().rstrip("\n"))
    return Exit.DONE


def _plain(value: object) -> object:
    """Dataclasses, tuples and mappings as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
