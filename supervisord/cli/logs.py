"""``vllmctl logs``: the newest lines of the units, from the journal or from the file that a unit appends to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from supervisord.bus.client import DaemonAbsent
from supervisord.bus.errors import BusUnavailable
from supervisord.bus.snapshot import FleetStatus
from supervisord.cli.config import load_config
from supervisord.cli.exits import Exit, Failure
from supervisord.cli.session import Session
from supervisord.cli.targets import configured, resolve_all
from supervisord.core.spec import Config

DAEMON_UNIT = "vllm-supervisord.service"

#: What journalctl says (on stderr, with exit code 0) where it has nothing to read.
_NO_JOURNAL = "No journal files were found"
_NO_PERMISSION = "insufficient permissions"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one unit's output goes: a ``file``, else the journal; ``lost`` says why it is kept nowhere."""

    unit: str
    file: str = ""
    lost: str = ""


def run_logs(session: Session) -> Exit:
    """Show them; with ``-f`` until Ctrl-C. Becomes the journalctl or tail that does it, where one is enough."""
    units = _units(session)
    if not session.system and not session.env.get("XDG_RUNTIME_DIR"):
        # By it systemctl finds the user's manager; cron, su and some ssh do not set it.
        session = replace(session, env={**session.env, "XDG_RUNTIME_DIR": f"/run/user/{session.uid}"})
    sources = find_sources(session, units)
    journal = [source.unit for source in sources if not source.file and not source.lost]
    commands: list[list[str]] = []
    if journal:
        why = _why_no_journal(session)
        if not why:
            commands.append(journal_command(journal, session))
        elif len(journal) == len(sources):
            raise Failure("NoJournal", why, Exit.FAILED)
        else:
            session.console.note(f"vllmctl: {', '.join(journal)}: {why}")
    for source in sources:
        if source.lost:
            session.console.note(f"vllmctl: {source.unit}: {source.lost}")
    files = [source for source in sources if source.file]
    if session.console.json:
        return _stream_json(session, commands, files)
    if files:
        commands.append(tail_command([source.file for source in files], session))
    if not commands:
        raise Failure("NoLog", "there is no log to show for " + ", ".join(units) + ".", Exit.FAILED)
    return _show(commands, session.env)


def _units(session: Session) -> list[str]:
    """The named targets' units; without targets the daemon's and every replica's. The daemon need not run."""
    words: Sequence[str] = session.args.targets
    fleet = _fleet(session)
    if fleet is not None:
        targets = resolve_all(words, fleet)
        replicas = [replica for target in targets for replica in target.replicas] if words else list(fleet.replicas)
        units = [replica.unit for replica in replicas]
    else:
        units = _configured_units(session, words)
    return list(dict.fromkeys(units if words else [DAEMON_UNIT, *units]))


def _fleet(session: Session) -> FleetStatus | None:
    found: list[FleetStatus] = []

    async def ask() -> Exit:
        async with session.client() as client:
            found.append(await client.fleet(timeout=session.question_timeout))
        return Exit.DONE

    try:
        session.run(ask)
    except (DaemonAbsent, BusUnavailable, Failure):
        return None
    return found[0]


def _configured_units(session: Session, words: Sequence[str]) -> list[str]:
    loaded = load_config(session)
    if not isinstance(loaded, Config):
        if not words:
            return []
        raise Failure(
            "DaemonNotRunning",
            "vllm-supervisord is not running, and the configuration is not valid, so the units are not known.\n"
            "See: vllmctl config check; vllmctl logs",
            Exit.NOT_RUNNING,
        )
    return [replica.unit for _, replica in configured(words, loaded)]


def find_sources(session: Session, units: Sequence[str]) -> list[Source]:
    """Ask systemd where each unit's output goes."""
    shown = _output(session, "show", "-p", "Id,StandardOutput,MainPID", *units)
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in shown.split("\n\n")]
    if not shown or len(blocks) != len(units):  # no service manager: the journal may still be there
        runtime = "" if session.system else f" (is XDG_RUNTIME_DIR that of their user, as /run/user/{session.uid} is?)"
        why = f"cannot ask the service manager where they log to, so what is not in the journal is not shown{runtime}."
        session.console.note(f"vllmctl: {', '.join(units)}: {why}")
        return [Source(unit) for unit in units]
    return [_source(session, unit, block) for unit, block in zip(units, blocks, strict=True)]


def _source(session: Session, unit: str, shown: Mapping[str, str]) -> Source:
    output = shown.get("StandardOutput", "")
    if output in ("append", "file", "truncate"):
        # systemctl show keeps the file's name to itself. The running process has it open; else the unit file has it.
        opened = _opened(shown.get("MainPID", "0"))
        named = opened or written_file(_output(session, "cat", unit), unit, session.env)
        return Source(unit, file=named) if named else Source(unit, lost="writes to a file that cannot be told")
    if output == "null":
        return Source(unit, lost="throws its output away (StandardOutput=null)")
    return Source(unit)


def _opened(pid: str) -> str:
    try:
        path = str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""
    return path if Path(path).is_file() else ""


def written_file(unit_file: str, unit: str, env: Mapping[str, str]) -> str:
    """The file of the last ``StandardOutput=append:FILE`` in the unit's text, its specifiers replaced."""
    found = re.findall(r"^\s*StandardOutput\s*=\s*(?:append|file|truncate):(.+?)\s*$", unit_file, re.MULTILINE)
    if not found:
        return ""
    name = unit.rpartition(".")[0]
    prefix, _, instance = name.partition("@")
    home = env.get("HOME", "")
    specifiers = {
        "%": "%",
        "n": unit,
        "N": name,
        "p": prefix,
        "i": instance,
        "I": instance.replace("-", "/"),
        "h": home,
        "t": env.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"),
        "S": env.get("XDG_STATE_HOME", f"{home}/.local/state"),
        "L": f"{env.get('XDG_STATE_HOME', f'{home}/.local/state')}/log",
        "C": env.get("XDG_CACHE_HOME", f"{home}/.cache"),
        "E": env.get("XDG_CONFIG_HOME", f"{home}/.config"),
    }
    return re.sub(r"%(.)", lambda match: specifiers.get(match[1], match[0]), found[-1])


def _why_no_journal(session: Session) -> str:
    """Empty where the journal can be read."""
    try:
        ran = subprocess.run(
            ["journalctl", "-n", "0", "--no-pager"], env=dict(session.env), capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "there is no journalctl on this machine, and the units log to the journal."
    if _NO_JOURNAL in ran.stderr:
        return (
            "there is no journal on this machine (journalctl finds no files): what the units print is lost.\n"
            "Start systemd-journald, or give the units StandardOutput=append:FILE: vllmctl then shows that file."
        )
    if _NO_PERMISSION in ran.stderr:
        return (
            "this user may not read the journal. Either keep it on disk (mkdir -p /var/log/journal), where every user\n"
            "can read his own, or add the user to the group systemd-journal."
        )
    return ""


def journal_command(units: Sequence[str], session: Session) -> list[str]:
    """``--user-unit`` and not ``--user --unit``: the latter looks only where systemd keeps users' own journals, and a
    journal in memory, or root's, is not kept so."""
    option = "--unit" if session.system else "--user-unit"
    args = session.args
    return [
        "journalctl",
        *(f"{option}={unit}" for unit in units),
        f"--lines={args.lines}",
        *(["--follow"] if args.follow else []),
        *(["--output=json"] if session.console.json else []),
        "--no-pager",
    ]


def tail_command(files: Sequence[str], session: Session) -> list[str]:
    args = session.args
    return [
        "tail",
        f"--lines={'+1' if args.lines == 'all' else args.lines}",
        *(["-F"] if args.follow else []),
        "--",
        *files,
    ]


def _show(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> Exit:
    if len(commands) == 1:
        command = commands[0]
        try:
            os.execvpe(command[0], list(command), dict(env))
        except OSError as error:
            raise Failure("NoLog", f"cannot run {command[0]}: {error.strerror}", Exit.FAILED) from error
    running = [subprocess.Popen(command, env=dict(env)) for command in commands]
    codes = [process.wait() for process in running]
    return Exit.FAILED if any(codes) else Exit.DONE


def _stream_json(session: Session, commands: Sequence[Sequence[str]], files: Sequence[Source]) -> Exit:
    """The journal's own JSON as it is; a file's lines under the journal's names for the same."""
    if len(commands) == 1 and not files:
        return _show(commands, session.env)
    running: list[subprocess.Popen[str]] = [
        subprocess.Popen(command, env=dict(session.env), text=True) for command in commands
    ]
    readers = []
    for source in files:
        process = subprocess.Popen(
            tail_command([source.file], session),
            env=dict(session.env),
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        running.append(process)
        readers.append(threading.Thread(target=_relay, args=(session, source, process), daemon=True))
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    codes = [process.wait() for process in running]
    return Exit.FAILED if any(codes) else Exit.DONE


def _relay(session: Session, source: Source, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    field = "_SYSTEMD_UNIT" if session.system else "_SYSTEMD_USER_UNIT"
    with process.stdout as lines:
        for line in lines:
            print(json.dumps({field: source.unit, "MESSAGE": line.rstrip("\n")}), file=session.console.out, flush=True)


def _output(session: Session, *arguments: str) -> str:
    command = ["systemctl", *([] if session.system else ["--user"]), "--no-pager", *arguments]
    try:
        ran = subprocess.run(command, env=dict(session.env), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return ran.stdout.strip()
