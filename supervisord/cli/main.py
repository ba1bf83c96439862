"""Entry point of vllmctl: parse, run one action, tell how it failed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from supervisord.cli.console import Console
from supervisord.cli.exits import Exit, Report
from supervisord.cli.parser import build_parser
from supervisord.cli.session import Session

#: Commands whose work goes on in the daemon when nobody waits for it any more.
_GOES_ON = frozenset({"up", "down", "sleep", "wake", "restart", "drain", "reload"})


def main(
    argv: Sequence[str] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Run vllmctl; returns its exit code (a usage error raises SystemExit(2), as argparse does)."""
    args = build_parser().parse_args(argv)
    environment = os.environ if env is None else env
    console = Console.for_streams(
        sys.stdout if out is None else out,
        sys.stderr if err is None else err,
        environment,
        json=args.json,
        quiet=args.quiet,
        no_color=args.no_color,
    )
    session = Session(args, console, environment, os.getuid())
    try:
        return int(_action(args.action)(session))
    except BrokenPipeError:
        # Whoever read us had enough. What is still buffered must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.BROKEN_PIPE)
    except KeyboardInterrupt:
        return int(_interrupted(session))
    except Exception as error:
        from supervisord.cli.reports import report

        told = report(error, session)
        if told is None:
            raise
        _tell(console, told)
        return int(told.exit)


def _action(name: str) -> Callable[[Session], Exit]:
    """The function that ``module:function`` names; no other action is imported, so that each starts quickly."""
    module, _, function = name.partition(":")
    action: Callable[[Session], Exit] = getattr(importlib.import_module(module), function)
    return action


def _tell(console: Console, report: Report) -> None:
    if console.json:
        console.data(report.as_json())
    console.complain(report.message)


def _interrupted(session: Session) -> Exit:
    if session.args.command == "watch":  # Ctrl-C is how it ends
        return Exit.DONE
    if session.args.command in _GOES_ON:
        session.console.note(
            "\nvllmctl: not waiting any longer; the operation goes on in the daemon ('vllmctl status' shows it)."
        )
    if session.args.command == "pull":
        session.console.note("\nvllmctl: stopped; every file that has come as a whole stays for the next pull.")
    return Exit.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
