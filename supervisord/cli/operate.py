"""``vllmctl up``, ``down``, ``sleep``, ``wake``, ``restart`` and ``drain``: ask, show how it goes, say how it ended."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass

from supervisord.bus.client import Client, StillWorking
from supervisord.bus.errors import UNKNOWN_OBJECT, CallFailed
from supervisord.bus.snapshot import FleetStatus
from supervisord.cli import words
from supervisord.cli.console import printable
from supervisord.cli.exits import Exit, Failure, Report, combine
from supervisord.cli.progress import Progress
from supervisord.cli.reports import report_control_error
from supervisord.cli.session import Session
from supervisord.cli.targets import Target, model_target, replica_target, resolve_all
from supervisord.control import ControlError, Verb

#: Only these start the supervisor itself where it does not run: the rest makes no sense to one that just started.
_MAY_START_DAEMON = frozenset({Verb.START, Verb.WAKE})

#: How the success of each is told.
_DONE = {
    Verb.START: "up",
    Verb.STOP: "down, and held until 'vllmctl up'",
    Verb.SLEEP: "asleep",
    Verb.WAKE: "awake",
    Verb.RESTART: "restarted",
    Verb.DRAIN: "drained, and held until 'vllmctl up'",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the operation ended for one target; ``failure`` is None when it is done."""

    target: Target
    seconds: float
    failure: Report | None

    @property
    def exit(self) -> Exit:
        return self.failure.exit if self.failure is not None else Exit.DONE

    def as_json(self) -> dict[str, object]:
        error = self.failure.as_json()["error"] if self.failure is not None else None
        return {
            "kind": self.target.kind,
            "name": self.target.name,
            "done": self.failure is None,
            "seconds": round(self.seconds, 3),
            "error": error,
        }


def run_operation(session: Session) -> Exit:
    """Carry out ``args.verb`` on every target at once; exits when all have ended."""
    args = session.args
    if args.all and args.targets:
        raise Failure("Usage", "give targets or --all, not both.", Exit.USAGE)
    if not args.all and not args.targets:
        raise Failure("Usage", f"say what to {args.command}: a model, a replica, or --all.", Exit.USAGE)
    return session.run(lambda: _operate(session, Verb(args.verb)))


async def _operate(session: Session, verb: Verb) -> Exit:
    console, may_start = session.console, verb in _MAY_START_DAEMON
    limit = session.start_timeout if may_start else session.question_timeout
    async with session.client() as client, client.watch(start_daemon=may_start, timeout=limit) as watch:
        fleet = watch.fleet
        assert fleet is not None, "watch begins with a snapshot"
        targets = _targets(session, fleet, verb)
        replicas = {replica.name for target in targets for replica in target.replicas}
        width = shutil.get_terminal_size().columns if console.live else None
        progress = Progress(console, watch, replicas, session.clock, width)
        following = asyncio.create_task(progress.follow(), name="progress")
        try:
            outcomes = await asyncio.gather(*(_command(session, client, target, verb) for target in targets))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            progress.clear()
    if console.json:
        console.data({"results": [outcome.as_json() for outcome in outcomes]})
    for outcome in outcomes:
        name = printable(outcome.target.name)
        if outcome.failure is not None:
            # The supervisor mostly names what failed itself, one replica of a model for instance.
            message = outcome.failure.message
            console.complain(message if outcome.target.name in message else f"{name}: {message}")
        elif not console.json and not console.quiet:
            level = f" (level {session.args.level})" if verb is Verb.SLEEP else ""
            console.say(f"{name}: {_DONE[verb]}{level}, after {words.span(outcome.seconds)}")
    if not outcomes and not console.json:
        console.say("No models are configured.")
    return combine([outcome.exit for outcome in outcomes])


def _targets(session: Session, fleet: FleetStatus, verb: Verb) -> list[Target]:
    if session.args.all:
        targets = [model_target(fleet, model) for model in fleet.models]
    else:
        targets = resolve_all(session.args.targets, fleet)
    if verb is Verb.DRAIN:  # a model has no Drain of its own: it is that of all its replicas
        replicas = {replica.path: replica for target in targets for replica in target.replicas}
        targets = [replica_target(replica) for replica in replicas.values()]
    return targets


async def _command(session: Session, client: Client, target: Target, verb: Verb) -> Outcome:
    began = time.monotonic()
    failure: Report | None = None
    try:
        await client.command(target.path, verb, getattr(session.args, "level", 0), timeout=session.timeout)
    except ControlError as error:
        failure = report_control_error(error)
    except StillWorking:
        failure = Report(
            "StillWorking",
            f"not done after {session.timeout:g} s; the operation goes on in the daemon ('vllmctl status' shows it).",
            Exit.FAILED,
        )
    except CallFailed as error:
        if error.error == UNKNOWN_OBJECT:  # a reload came between
            failure = Report("NoSuchTarget", "it is no longer configured.", Exit.NO_SUCH)
        else:
            failure = Report("CallFailed", f"the bus or the daemon refused the call: {error}", Exit.FAILED)
    return Outcome(target, time.monotonic() - began, failure)
