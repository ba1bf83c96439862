"""``vllm-replica NAME``: read the configuration, check, leave a watcher behind, become the engine.

The unit's main process *is* the engine: systemd sees its end, and its output goes to the journal, through no pipe of
ours.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from supervisord.config import ConfigError, files_beside, load, runtime_directory
from supervisord.core.spec import Config
from supervisord.launcher.command import Launch, LaunchError, find, launch, shell_line
from supervisord.launcher.explain import explanation, output_of
from supervisord.launcher.notify import Notifier
from supervisord.launcher.preflight import Busy, preflight
from supervisord.launcher.started import write
from supervisord.launcher.watcher import Pace, start_watcher

#: sysexits.h. systemd's RestartPreventExitStatus= has 78: nothing but a person can mend it.
EX_TEMPFAIL, EX_CONFIG = 75, 78


def main(argv: Sequence[str] | None = None) -> int:
    """Returns an exit code; on success it does not return, the process is the engine then."""
    arguments = _parser().parse_args(argv)
    if arguments.explain:
        return _explain(arguments.name, os.environ, system=arguments.system)
    try:
        config = _load(arguments, os.environ)
        plan = launch(*find(config, arguments.name), os.environ)
        if arguments.print:
            sys.stdout.write(shell_line(plan) + "\n")
            return 0
        program = preflight(plan)
        write(plan, config, runtime_directory(os.environ, arguments.system))
    except (ConfigError, LaunchError) as error:
        return _refuse(error, EX_CONFIG)
    except Busy as error:
        return _refuse(error, EX_TEMPFAIL)
    return _become(plan, program, config.supervisor.start_timeout, os.environ)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-replica", description="Become the engine of one bundled replica.")
    parser.add_argument("name", metavar="NAME", help="a replica of the configuration")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="the main configuration file (config.d is the one beside it)"
    )
    parser.add_argument("--system", action="store_true", help="the machine's configuration in /etc, sockets in /run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print the command and its environment, and run nothing")
    what.add_argument("--explain", action="store_true", help="say why it ended (for ExecStopPost=)")
    return parser


def _load(arguments: argparse.Namespace, env: Mapping[str, str]) -> Config:
    files = files_beside(arguments.config) if arguments.config else None
    return load(files, runtime_dir=runtime_directory(env, arguments.system), env=env, system=arguments.system)


def _refuse(error: Exception, status: int) -> int:
    sys.stderr.write("".join(f"vllm-replica: {line}\n" for line in str(error).splitlines()))
    return status


def _become(plan: Launch, program: str, start_timeout: float, env: Mapping[str, str]) -> int:
    if address := env.get("NOTIFY_SOCKET"):
        start_watcher(plan, Notifier(address), start_timeout, Pace())
    try:
        os.execve(program, plan.argv, plan.env)
    except OSError as error:
        return _refuse(LaunchError(f"cannot start the engine: {program}: {error.strerror}"), EX_CONFIG)


def _explain(name: str, env: Mapping[str, str], *, system: bool) -> int:
    """Never fails: what happened is in systemd's own log in any case."""
    if env.get("SERVICE_RESULT", "success") == "success":
        return 0
    text = explanation(name, env, output_of(f"vllm@{name}.service", env, system=system))
    sys.stderr.write(f"{text}\n")
    if address := env.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError):
            notifier = Notifier(address)
            notifier.send(f"STATUS={text.partition(f'{name}: ')[2]}")
            notifier.barrier(5.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
