"""``vllmctl route explain``: where a request would go now, and why."""

from __future__ import annotations

import sys
from pathlib import Path

from supervisord.bus.snapshot import FleetStatus, ModelStatus
from supervisord.cli.console import Console, printable
from supervisord.cli.exits import Exit, Failure
from supervisord.cli.session import Session
from supervisord.cli.tables import Row, columns
from supervisord.cli.targets import resolve
from supervisord.core.admission import Explanation

#: Bytes of a request: what a message bus lets through.
_MOST = 64 * 1024 * 1024


def run_explain(session: Session) -> Exit:
    """Ask the supervisor, which knows what each replica has and does."""
    body = _read(session.args.file)
    return session.run(lambda: _explain(session, body))


def _read(name: str) -> bytes:
    try:
        body = sys.stdin.buffer.read(_MOST + 1) if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise Failure("CannotRead", f"cannot read {name}: {error.strerror or error}.", Exit.FAILED) from error
    if len(body) > _MOST:
        raise Failure("TooLarge", f"{name} is larger than {_MOST // 1024 // 1024} MiB.", Exit.FAILED)
    return body


async def _explain(session: Session, body: bytes) -> Exit:
    args, console, limit = session.args, session.console, session.question_timeout
    async with session.client() as client:
        fleet = await client.fleet(timeout=limit)
        model = _model(fleet, args.model)
        told = await client.explain_route(model.path, args.path, body, timeout=limit)
    if console.json:
        console.data(_shape(model, told))
    else:
        _print(console, model, told)
    return Exit.DONE


def _model(fleet: FleetStatus, word: str) -> ModelStatus:
    target = resolve(word if word.startswith("model:") else f"model:{word}", fleet)
    return next(model for model in fleet.models if model.name == target.name)


def _print(console: Console, model: ModelStatus, told: Explanation) -> None:
    where = f"to {told.replica}" if told.replica else "to no replica yet"
    console.say(printable(f"{model.name} (routing {model.routing}): it would go {where}: {told.reason}"))
    if not told.bids:
        return
    rows: list[Row] = [
        (
            printable(bid.replica),
            f"{bid.seconds:.2f} s",
            f"{bid.pending:.2f} s",
            f"{bid.prefill:.2f} s",
            f"{max(0.0, bid.seconds - bid.pending - bid.prefill):.2f} s",
            str(bid.cached_tokens),
        )
        for bid in told.bids
    ]
    head = ("REPLICA", "FIRST TOKEN", "WORK BEFORE", "PREFILL", "SHARING", "TOKENS CACHED")
    console.say()
    for cells in columns(head, rows, right=frozenset({1, 2, 3, 4, 5})):
        console.say("  ".join(console.paint(cell.text, cell.colour) for cell in cells).rstrip())


def _shape(model: ModelStatus, told: Explanation) -> dict[str, object]:
    return {
        "model": model.name,
        "routing": model.routing,
        "replica": told.replica or None,
        "reason": told.reason,
        "bids": [
            {
                "replica": bid.replica,
                "seconds": bid.seconds,
                "pending_seconds": bid.pending,
                "prefill_seconds": bid.prefill,
                "cached_tokens": bid.cached_tokens,
            }
            for bid in told.bids
        ],
    }
