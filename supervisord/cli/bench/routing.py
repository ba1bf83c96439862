"""``vllmctl bench routing``: the burst and the later turns under every policy, on this machine's own replicas."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from supervisord.bus.snapshot import FleetStatus, ModelStatus, ReplicaStatus
from supervisord.cli.bench.caller import Caller, calling
from supervisord.cli.bench.loads import Load, Measured, percentile, run_burst, run_conversations
from supervisord.cli.bench.texts import Writer
from supervisord.cli.bench.verdict import Verdict, judge
from supervisord.cli.exits import Exit, Failure
from supervisord.cli.session import Session
from supervisord.cli.tables import Row, columns
from supervisord.cli.targets import resolve
from supervisord.cli.words import count, span
from supervisord.config.forms import ROUTINGS
from supervisord.control import Verb

#: Tokens of the text by which the tokenizer is known.
_SAMPLE = 500
#: Without --tokens: this much of the context length, and no more than this.
_SHARE, _MOST = 0.5, 32_768
#: A context of which nothing is known.
_UNKNOWN = 8_192


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured."""

    model: ModelStatus
    replicas: tuple[ReplicaStatus, ...]
    url: str


def run_routing(session: Session) -> Exit:
    """Measure, print the table and what to choose; fails where a request failed."""
    return session.run(lambda: _bench(session))


async def _bench(session: Session) -> Exit:
    args, console = session.args, session.console
    policies = _policies(args.policies)
    subject = await _subject(session)
    key = session.env.get("OPENAI_API_KEY", "")
    async with calling(subject.url, subject.model.name, key) as caller:
        writer = await ask_first(caller)
        load = _load(session, subject)
        console.note(
            f"{', '.join(policies)}: {load.requests} requests each, of about {load.context} tokens, to "
            f"{len(subject.replicas)} replicas of {subject.model.name} at {subject.url}"
        )
        if subject.model.in_flight:
            others = count(subject.model.in_flight, "request")
            console.note(f"{others} of others in flight: the figures will not be clean")
        results = [Measured(policy) for policy in policies]
        salt = secrets.token_hex(4)
        for round_number in range(args.rounds):
            turn = round_number % len(results)
            for measured in (*results[turn:], *results[:turn]):  # nobody is always first
                name = f"{salt} {round_number} {measured.policy}"
                await run_burst(caller, writer, load, f"burst {name}", measured)
                await run_conversations(caller, writer, load, f"talk {name}", measured)
                console.note(_progress(measured))
    verdict = judge(results, subject.model.routing)
    simulated = any(replica.simulated for replica in subject.replicas)
    if console.json:
        console.data(_shape(subject, load, results, verdict, simulated))
    else:
        _print(session, results, verdict, simulated)
    return Exit.FAILED if any(measured.errors for measured in results) else Exit.DONE


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ROUTINGS
    for name in names:
        if name not in ROUTINGS:
            raise Failure("Usage", f"'{name}' is no policy: there are {', '.join(ROUTINGS)}.", Exit.USAGE)
    return names


async def _subject(session: Session) -> _Subject:
    args = session.args
    async with session.client() as client:
        fleet = await client.fleet(timeout=session.question_timeout)
        model = _model(fleet, args.model)
        await client.command(model.path, Verb.WAKE, timeout=session.timeout)
        fleet = await client.fleet(timeout=session.question_timeout)
    model = _model(fleet, args.model)
    ready = tuple(r for r in fleet.replicas_of(model.name) if r.state == "ready")
    if len(ready) < 2:
        many = count(len(ready), "replica") + (" is" if len(ready) == 1 else " are")
        text = f"{model.name}: {many} ready, and between fewer than two there is nothing to choose"
        raise Failure("NothingToRoute", f"{text} ('vllmctl up {model.name}' starts all).", Exit.FAILED)
    return _Subject(model, ready, args.url or _public_url(fleet))


def _model(fleet: FleetStatus, word: str | None) -> ModelStatus:
    if word is None:
        if len(fleet.models) != 1:
            names = ", ".join(model.name for model in fleet.models) or "none"
            raise Failure("Usage", f"say which model is to be measured: {names}.", Exit.USAGE)
        return fleet.models[0]
    target = resolve(word if word.startswith("model:") else f"model:{word}", fleet)
    return next(model for model in fleet.models if model.name == target.name)


def _public_url(fleet: FleetStatus) -> str:
    """Where this machine's clients call, from what the daemon listens on."""
    for address in fleet.manager.listen:
        if address.startswith("unix:"):
            return address
        host, _, port = address.rpartition(":")
        if host in ("", "0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    raise Failure("NotListening", "the daemon does not say where it listens; name it with --url.", Exit.FAILED)


def _remedy(error: str) -> str:
    """What to do where the port guards itself."""
    if "https://" in error:
        return "\nName it as its certificate does: --url https://NAME:PORT"
    if "certificate" in error.lower():
        return "\nAnother name: --url https://NAME:PORT. An authority of your own: SSL_CERT_FILE=/PATH/TO/ITS.pem"
    if error.startswith("401:"):
        return "\nvllmctl takes it from the environment: OPENAI_API_KEY=KEY"
    return ""


async def ask_first(caller: Caller) -> Writer:
    """Ask once, so that the model is awake, and to learn how many tokens a word has."""
    words = Writer(1.0)
    answer = await caller.chat([{"role": "user", "content": words.text("a sample", _SAMPLE)}], 1)
    if answer.error:
        raise Failure("CannotAsk", f"cannot ask the model: {answer.error}.{_remedy(answer.error)}", Exit.FAILED)
    return Writer(answer.prompt_tokens / _SAMPLE) if answer.prompt_tokens else Writer()


def _load(session: Session, subject: _Subject) -> Load:
    args = session.args
    longest = subject.model.max_model_len
    context = args.tokens or min(_MOST, round((longest or _UNKNOWN) * _SHARE))
    # One more than there are replicas: turns that are taken one after the other do not come home by chance.
    conversations = args.conversations or len(subject.replicas) + 1
    load = Load(context, args.burst, conversations, args.turns, args.output)
    if longest and load.longest > longest:
        text = f"the longest request would have about {load.longest} tokens, and {subject.model.name} takes {longest}"
        raise Failure("TooLong", f"{text}: choose fewer --tokens or --turns.", Exit.USAGE)
    return load


def _progress(measured: Measured) -> str:
    warm = percentile(measured.warm_first, 0.5)
    failed = f", {count(len(measured.errors), 'error')}: {measured.errors[0]}" if measured.errors else ""
    return f"  {measured.policy}: burst {span(measured.bursts[-1])}, later turns {_time(warm)}{failed}"


def _print(session: Session, results: list[Measured], verdict: Verdict, simulated: bool) -> None:
    console = session.console
    header = ("POLICY", "BURST DONE", "FIRST TOKEN p50/p95", "LATER TURNS p50/p95", "FROM CACHE", "COST", "ERRORS")
    rows: list[Row] = []
    for each in sorted(results, key=lambda measured: verdict.scores.get(measured.policy, float("inf"))):
        share = each.cached_share
        rows.append(
            (
                each.policy,
                _time(percentile(each.bursts, 0.5)),
                f"{_time(percentile(each.burst_first, 0.5))} / {_time(percentile(each.burst_first, 0.95))}",
                f"{_time(percentile(each.warm_first, 0.5))} / {_time(percentile(each.warm_first, 0.95))}",
                "not told" if share is None else f"{share:.0%}",
                f"{verdict.scores[each.policy]:.2f}x" if each.policy in verdict.scores else "-",
                str(len(each.errors)),
            )
        )
    for cells in columns(header, rows, right=frozenset({1, 2, 3, 4, 5, 6})):
        console.say("  ".join(console.paint(cell.text, cell.colour) for cell in cells).rstrip())
    console.say()
    chosen = f'routing = "{verdict.policy}"' if verdict.policy else "Nothing to choose"
    console.say(f"{chosen}: {verdict.why}.")
    if simulated:
        console.say("These replicas are simulated: the table says nothing about a GPU.")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _shape(
    subject: _Subject, load: Load, results: list[Measured], verdict: Verdict, simulated: bool
) -> dict[str, object]:
    return {
        "model": subject.model.name,
        "replicas": [replica.name for replica in subject.replicas],
        "simulated": simulated,
        "configured": subject.model.routing,
        "load": {
            "context_tokens": load.context,
            "burst": load.burst,
            "conversations": load.conversations,
            "turns": load.turns,
            "output_tokens": load.output,
        },
        "policies": [
            {
                "policy": each.policy,
                "burst_seconds": each.bursts,
                "burst_first_token_seconds": each.burst_first,
                "cold_first_token_seconds": each.cold_first,
                "warm_first_token_seconds": each.warm_first,
                "cached_share": each.cached_share,
                "cost": verdict.scores.get(each.policy),
                "errors": each.errors,
            }
            for each in results
        ],
        "choose": verdict.policy or None,
        "why": verdict.why,
    }
