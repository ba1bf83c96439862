"""``vllmctl pull``: fetch what replicas will need, now, and wake or stop nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from supervisord.cli import words
from supervisord.cli.config import load_config
from supervisord.cli.console import printable
from supervisord.cli.exits import Exit, Failure, Report, combine
from supervisord.cli.pull.jobs import Need, need_of
from supervisord.cli.pull.progress import Line, size
from supervisord.cli.pull.transient import pulling
from supervisord.cli.pull.units import Units, manager_environment
from supervisord.cli.session import Session
from supervisord.cli.targets import configured
from supervisord.core.spec import Config
from supervisord.pull.job import Failed, Progress, Pulled


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended for one replica. ``pulled``: what is here now, in whole."""

    need: Need
    pulled: tuple[Pulled, ...] = ()
    seconds: float = 0.0
    failure: Report | None = None

    @property
    def result(self) -> str:
        """``pulled``, ``present`` (all of it was here), ``nothing`` (nothing to fetch), or ``failed``."""
        if self.failure is not None:
            return "failed"
        if self.need.job is None:
            return "nothing"
        return "pulled" if any(each.new for each in self.pulled) else "present"

    @property
    def sentence(self) -> str:
        if self.need.job is None:
            return self.need.why
        title = self.need.job.title
        if self.result == "present":
            return f"{title}: all of it is here"
        fetched = sum(each.fetched for each in self.pulled)
        much = f", {size(fetched)}" if fetched else ""
        return f"{title}: fetched{much}, in {words.span(self.seconds)}"

    def as_json(self) -> dict[str, object]:
        return {
            "kind": "replica",
            "name": self.need.replica,
            "model": self.need.model,
            "done": self.failure is None,
            "result": self.result,
            "items": [
                {"name": each.name, "new": each.new, "fetched": each.fetched, "bytes": each.total or None}
                for each in self.pulled
            ],
            "seconds": round(self.seconds, 3),
            "text": self.failure.message if self.failure is not None else self.sentence,
            "error": self.failure.as_json()["error"] if self.failure is not None else None,
        }


def run_pull(session: Session) -> Exit:
    """Fetch for every target, one thing after the other; one that fails does not keep the others from being fetched."""
    args, console = session.args, session.console
    if args.all and args.targets:
        raise Failure("Usage", "give targets or --all, not both.", Exit.USAGE)
    if not args.all and not args.targets:
        raise Failure("Usage", "say what to pull: a model, a replica, or --all.", Exit.USAGE)
    config = load_config(session)
    if not isinstance(config, Config):
        raise Failure("ConfigInvalid", str(config), Exit.CONFIG_INVALID)
    targets = configured(args.targets, config)
    env = manager_environment(session)
    units = Units(env, system=session.system)
    home = env.get("HOME", "/")
    needs = [need_of(model, replica, units, home) for model, replica in targets]
    outcomes: dict[object, Outcome] = {}
    for need in needs:
        if need.job is not None and need.key not in outcomes:
            who = ", ".join(each.replica for each in needs if each.key == need.key)
            outcomes[need.key] = _pull(session, need, who, env)
    results = [_result(need, outcomes) for need in needs]
    if console.json:
        console.data({"results": [result.as_json() for result in results]})
    for result in results:
        name = printable(result.need.replica)
        if result.failure is not None:
            console.complain(printable(f"{name}: {result.failure.message}"))
        elif not console.json and not console.quiet:
            console.say(printable(f"{name}: {result.sentence}"))
    if not results and not console.json:
        console.say("No models are configured.")
    return combine([result.failure.exit if result.failure is not None else Exit.DONE for result in results])


def _pull(session: Session, need: Need, who: str, env: dict[str, str]) -> Outcome:
    assert need.job is not None
    began, pulled, failed = time.monotonic(), [], []
    line = Line(session.console, who, time.monotonic)
    unit = f"vllmctl-pull-{os.getpid()}-{need.replica}.service"
    try:
        with pulling(need.job, need.surroundings, unit, env, system=session.system) as events:
            for event in events:
                match event:
                    case Progress():
                        line.show(event)
                    case Pulled():
                        pulled.append(event)
                    case Failed():
                        failed.append(event)
    finally:
        line.clear()
    failure = None
    if failed:
        text = "; ".join(f"cannot pull {each.name}: {each.message}" for each in failed)
        failure = Report(failed[0].code, text, Exit.FAILED)
    return Outcome(need, tuple(pulled), time.monotonic() - began, failure)


def _result(need: Need, outcomes: dict[object, Outcome]) -> Outcome:
    if need.job is None:
        return Outcome(need, failure=need.failure)
    done = outcomes[need.key]
    return Outcome(need, done.pulled, done.seconds, done.failure)
