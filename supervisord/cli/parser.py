"""The command line: every subcommand, its options and its help. What each does is where its ``action`` says."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from supervisord import __version__

_EPILOG = """\
examples:
  vllmctl status                  everything at a glance
  vllmctl sleep chat --level 2    free the GPU; the next request wakes it
  vllmctl wake chat               wake it now
  vllmctl down replica:chat-a     stop one replica and hold it; vllmctl up ends that
  vllmctl logs -f chat            follow the engines' logs
  vllmctl status --json           the same for programs

A TARGET is a model, one of its aliases, or a replica; where a name is both, say
model:NAME or replica:NAME.

exit codes: 0 done, 1 failed, 2 usage, 3 the daemon is not running, 4 no such model
or replica, 5 superseded or held, 6 configuration invalid, 7 doctor found a problem,
130 interrupted. See vllmctl(1).
"""

_BENCH_KEY = (
    "Where the port asks for a key, it is taken from OPENAI_API_KEY. Where it speaks TLS: --url https://NAME:PORT,"
    " and SSL_CERT_FILE names a certificate authority of your own."
)

Add = Callable[..., argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """The parser; ``action`` in its result is ``module:function``, imported only when it is run."""
    parser = argparse.ArgumentParser(
        prog="vllmctl",
        description="See and steer the vLLM replicas of this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllmctl {__version__}")
    _common(parser, root=True)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, action: str, help: str, examples: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _common(sub)
        sub.set_defaults(action=action)
        return sub

    _look(add)
    _operate(add)
    _prepare(add)
    _configure(add)
    _route(add)
    _measure(add)
    return parser


def _common(parser: argparse.ArgumentParser, *, root: bool = False) -> None:
    """Options that may stand before or after the command. A subparser's defaults would undo what stood before."""

    def default(value: object) -> object:
        return value if root else argparse.SUPPRESS

    group = parser.add_argument_group("options for every command")
    group.add_argument("--json", action="store_true", default=default(False), help="answer in JSON")
    group.add_argument("--quiet", "-q", action="store_true", default=default(False), help="only errors")
    group.add_argument(
        "--no-color", action="store_true", default=default(False), help="no colours; NO_COLOR does the same"
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=default(None),
        help="stop waiting for the daemon then; its work goes on",
    )
    group.add_argument(
        "--system", action="store_true", default=default(False), help="the system's daemon and not the user's"
    )


def _look(add: Add) -> None:
    status = add(
        "status",
        "supervisord.cli.status:run_status",
        "show all models and replicas, or some in detail",
        "  vllmctl status\n  vllmctl status chat-a\n  vllmctl status --json | jq '.replicas[].state'",
    )
    _targets(status, "show these in detail")

    listing = add(
        "list", "supervisord.cli.status:run_list", "list the models", "  vllmctl list\n  vllmctl list --names"
    )
    listing.add_argument("--names", action="store_true", help="only names: models, aliases and replicas, one a line")

    add(
        "watch",
        "supervisord.cli.watch:run_watch",
        "show changes as they happen, until Ctrl-C",
        "  vllmctl watch\n  vllmctl watch --json | jq -c 'select(.event == \"failover\")'",
    )

    logs = add(
        "logs",
        "supervisord.cli.logs:run_logs",
        "show the logs of replicas, or of everything",
        "  vllmctl logs -f chat\n  vllmctl logs -n 200 chat-a",
    )
    _targets(logs, "whose logs; without: the daemon's and every replica's")
    logs.add_argument("--follow", "-f", action="store_true", help="go on with new lines until Ctrl-C")
    logs.add_argument("--lines", "-n", type=_lines, default="100", metavar="N", help="how many lines, or 'all' (100)")
    _config_file(logs)

    doctor = add(
        "doctor",
        "supervisord.cli.doctor.run:run_doctor",
        "check this machine and the installation, and say how to mend what is wrong",
        "  vllmctl doctor\n  vllmctl doctor --json | jq -r '.findings[] | select(.level == \"fail\") | .text'",
    )
    _config_file(doctor)


def _operate(add: Add) -> None:
    operation = "supervisord.cli.operate:run_operation"
    for name, verb, help, example in (
        ("up", "start", "start replicas, and end a hold", "  vllmctl up chat\n  vllmctl up --all"),
        ("down", "stop", "stop replicas and hold them: no request starts them until 'up'", "  vllmctl down chat-a"),
        ("sleep", "sleep", "put replicas to sleep; the next request wakes them", "  vllmctl sleep chat --level 2"),
        ("wake", "wake", "wake sleeping replicas", "  vllmctl wake chat"),
        ("restart", "restart", "let requests finish, then restart the units", "  vllmctl restart chat-a"),
        (
            "drain",
            "drain",
            "give replicas no new requests and hold them so, running, until 'up'",
            "  vllmctl drain chat-a && systemctl --user restart vllm@chat-a; vllmctl up chat-a",
        ),
    ):
        sub = add(name, operation, help, example)
        _targets(sub, "a model, an alias, or a replica")
        sub.add_argument("--all", action="store_true", help="every model")
        sub.set_defaults(verb=verb)
        if verb == "sleep":
            sub.add_argument(
                "--level",
                "-l",
                type=int,
                choices=(1, 2),
                default=1,
                help="1: weights to host memory, quick to wake (default); 2: weights dropped",
            )


def _prepare(add: Add) -> None:
    pull = add(
        "pull",
        "supervisord.cli.pull.run:run_pull",
        "fetch what replicas will need (weights, a Quadlet's image); nothing is woken",
        "  vllmctl pull chat\n  vllmctl pull --all --quiet && vllmctl up --all",
    )
    _targets(pull, "a model, an alias, or a replica")
    pull.add_argument("--all", action="store_true", help="every model")
    _config_file(pull)


def _configure(add: Add) -> None:
    add(
        "reload",
        "supervisord.cli.reload:run_reload",
        "have the daemon read its configuration again",
        "  vllmctl reload",
    )
    config = add(
        "config",
        "",
        "look at the configuration on disk; the daemon need not run",
        "  vllmctl config check && vllmctl reload\n  vllmctl config schema > ~/.config/vllm-supervisord/schema.json",
    )
    steps = config.add_subparsers(dest="config_command", metavar="check|show|schema|path", required=True)
    for name, help in (
        ("check", "say whether it is valid, and everything that is wrong with it"),
        ("show", "print the merged result"),
        ("schema", "print its JSON schema, for editors"),
        ("path", "say which files are read"),
    ):
        sub = steps.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
        _common(sub)
        _config_file(sub)
        sub.set_defaults(action=f"supervisord.cli.config:run_{name}")


def _route(add: Add) -> None:
    route = add(
        "route",
        "",
        "see where requests go",
        "  vllmctl route explain chat request.json\n  jq .request log.json | vllmctl route explain chat - --json",
    )
    steps = route.add_subparsers(dest="route_command", metavar="explain", required=True)
    help = "say which replica a request would go to now, and why; nothing is sent"
    explain = steps.add_parser("explain", help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
    _common(explain)
    explain.set_defaults(action="supervisord.cli.route:run_explain")
    explain.add_argument("model", metavar="MODEL", help="a model or an alias")
    explain.add_argument("file", metavar="FILE", help="the request's JSON; - for standard input")
    explain.add_argument(
        "--path",
        metavar="PATH",
        default="/v1/chat/completions",
        help="where it would be sent (/v1/chat/completions)",
    )


def _measure(add: Add) -> None:
    bench = add(
        "bench",
        "",
        "measure this machine's own replicas; it puts a real load on them",
        "  vllmctl bench routing chat\n  vllmctl bench routing chat --tokens 8000 --rounds 3 --json",
    )
    steps = bench.add_subparsers(dest="bench_command", metavar="routing", required=True)
    help = "compare the routing policies: a cold burst of one text, and conversations that go on"
    routing = steps.add_parser(
        "routing", help=help, description=f"{help[0].upper()}{help[1:]}.", epilog=_BENCH_KEY, allow_abbrev=False
    )
    _common(routing)
    routing.set_defaults(action="supervisord.cli.bench.routing:run_routing")
    routing.add_argument("model", nargs="?", metavar="MODEL", help="whose replicas; without: the only model's")
    routing.add_argument("--policies", metavar="LIST", default="", help="which, with commas between (all)")
    for option, default, help in (
        ("--tokens", None, "of the burst's text and of a conversation's first turn (half the context, at most 32768)"),
        ("--burst", 16, "requests of the burst (16)"),
        ("--conversations", None, "at a time (one more than replicas)"),
        ("--turns", 4, "of each conversation (4)"),
        ("--output", 32, "tokens of each answer (32)"),
        ("--rounds", 1, "how often everything is done (1)"),
    ):
        routing.add_argument(option, type=_count, metavar="N", default=default, help=help)
    routing.add_argument("--url", metavar="URL", default=None, help="the public port (default: where the daemon says)")


def _targets(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=help)


def _config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="read this main file (and the config.d beside it)"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _lines(text: str) -> str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of lines nor 'all'")
    return text
