"""``vllmctl status`` and ``vllmctl list``."""

from __future__ import annotations

from supervisord.bus.snapshot import FleetStatus, ModelStatus, ReplicaStatus
from supervisord.cli import words
from supervisord.cli.console import Console, printable
from supervisord.cli.exits import Exit
from supervisord.cli.session import Session
from supervisord.cli.shapes import fleet_shape, model_shape, replica_shape
from supervisord.cli.tables import Cell, Row, columns, cut
from supervisord.cli.targets import known, resolve_all


def run_status(session: Session) -> Exit:
    """Everything, or the named models and replicas in detail."""
    fleet = _ask(session)
    console, now = session.console, session.clock()
    if not session.args.targets:
        if console.json:
            console.data(fleet_shape(fleet))
        else:
            for line in overview(fleet, now, console):
                console.say(line)
        return Exit.DONE
    targets = resolve_all(session.args.targets, fleet)
    models = [model for model in fleet.models if any(model.path == target.path for target in targets)]
    replicas = [replica for replica in fleet.replicas if any(replica.path == target.path for target in targets)]
    if console.json:
        console.data(
            {"models": [model_shape(model) for model in models], "replicas": [replica_shape(each) for each in replicas]}
        )
        return Exit.DONE
    blocks = [model_details(model, now) for model in models]
    blocks += [replica_details(replica, now) for replica in replicas]
    for number, block in enumerate(blocks):
        if number:
            console.say()
        for line in block:
            console.say(line)
    return Exit.DONE


def run_list(session: Session) -> Exit:
    """The models, one a line; with ``--names`` every name that a target may be."""
    fleet = _ask(session)
    console, now = session.console, session.clock()
    if session.args.names:
        names = known(fleet).words
        if console.json:
            console.data(names)
        else:
            for name in names:
                console.say(printable(name))
        return Exit.DONE
    if console.json:
        console.data([model_shape(model) for model in fleet.models])
        return Exit.DONE
    if not fleet.models:
        console.say("No models are configured.")
        return Exit.DONE
    rows: list[Row] = [
        (
            printable(model.name),
            Cell(words.model_words(model, now), words.colour_of(model.state)),
            str(len(model.replicas)),
            str(model.max_model_len) if model.max_model_len else "-",
            printable(", ".join(model.aliases)),
        )
        for model in fleet.models
    ]
    _print_table(console, columns(("MODEL", "STATE", "REPLICAS", "CONTEXT", "ALIASES"), rows, right=frozenset({2, 3})))
    return Exit.DONE


def _ask(session: Session) -> FleetStatus:
    answer: list[FleetStatus] = []

    async def ask() -> Exit:
        async with session.client() as client:
            answer.append(await client.fleet(timeout=session.question_timeout))
        return Exit.DONE

    session.run(ask)
    return answer[0]


def overview(fleet: FleetStatus, now: float, console: Console) -> list[str]:
    """The whole fleet as lines: the supervisor in one, a row for each replica, then what failed."""
    manager = fleet.manager
    head = printable(manager.status) or "running"
    where = f", listening on {printable(', '.join(manager.listen))}" if manager.listen else ""
    lines = [console.paint(cut(f"{head}{where}", console.width), "bold")]
    if manager.simulated:
        lines.append(console.paint("The replicas marked 'simulated' are no real engines.", "yellow"))
    if not fleet.models:
        return [*lines, "No models are configured."]
    rows: list[Row] = []
    for model in fleet.models:
        replicas = fleet.replicas_of(model.name)
        for number, replica in enumerate(replicas):
            notes = words.replica_notes(replica, now)
            if number == 0 and model.waiting:
                notes.insert(0, waiting_words(model))
            rows.append(
                (
                    printable(model.name) if number == 0 else "",
                    printable(replica.name),
                    Cell(printable(words.replica_words(replica, now)), words.colour_of(replica.state)),
                    str(replica.in_flight),
                    ", ".join(notes),
                )
            )
        if not replicas:
            rows.append((printable(model.name), "-", words.state_words(model.state), "0", "no replicas"))
    lines.append("")
    table = columns(("MODEL", "REPLICA", "STATE", "IN FLIGHT", "NOTE"), rows, right=frozenset({3}))
    lines += _render(console, table)
    failed = [replica for replica in fleet.replicas if replica.state == "failed" and replica.last_error]
    if failed:
        lines.append("")
    for replica in failed:
        text = f"{printable(replica.name)}: {printable(replica.last_error)}"
        lines.append(console.paint(cut(text, console.width), "red"))
    return lines


def waiting_words(model: ModelStatus) -> str:
    """How many wait, and how many of them for room in a KV cache."""
    for_kv = f" ({model.waiting_for_kv} for KV)" if model.waiting_for_kv else ""
    return f"{model.waiting} waiting{for_kv}"


def model_details(model: ModelStatus, now: float) -> list[str]:
    """One model, a fact a line."""
    in_flight = f"{model.in_flight}, {waiting_words(model)}" if model.waiting else str(model.in_flight)
    facts = [
        ("state", words.model_words(model, now)),
        ("aliases", ", ".join(model.aliases)),
        ("routing", model.routing),
        ("in flight", in_flight),
        (
            "wake time",
            f"{words.span(model.wake_seconds)} when last woken" if model.wake_seconds else "not measured yet",
        ),
        ("context", words.tokens(model.max_model_len)),
        ("replicas", ", ".join(model.replicas)),
    ]
    return [f"model {printable(model.name)}", *_facts(facts)]


def replica_details(replica: ReplicaStatus, now: float) -> list[str]:
    """One replica, a fact a line."""
    notes = words.replica_notes(replica, now)
    engine = "the simulator, no real engine" if replica.simulated else ""
    facts = [
        ("state", words.replica_words(replica, now)),
        ("notes", ", ".join(note for note in notes if note != "simulated")),
        ("health", replica.health),
        ("engine", engine),
        ("unit", replica.unit),
        ("endpoint", replica.endpoint),
        ("GPUs", ", ".join(str(gpu) for gpu in replica.gpus) or "not declared"),
        ("in flight", str(replica.in_flight)),
        (
            "wake time",
            f"{words.span(replica.wake_seconds)} when last woken" if replica.wake_seconds else "not measured yet",
        ),
        (
            "start time",
            f"{words.span(replica.start_seconds)} when last started" if replica.start_seconds else "not measured yet",
        ),
        ("context", words.tokens(replica.max_model_len)),
        ("served as", ", ".join(replica.served_names)),
        ("last error", replica.last_error),
    ]
    return [f"replica {printable(replica.name)} of model {printable(replica.model)}", *_facts(facts)]


def _facts(facts: list[tuple[str, str]]) -> list[str]:
    return [f"  {label:<11} {printable(value)}" for label, value in facts if value]


def _print_table(console: Console, table: list[list[Cell]]) -> None:
    for line in _render(console, table):
        console.say(line)


def _render(console: Console, table: list[list[Cell]]) -> list[str]:
    """Two blanks between columns; on a terminal the last column gives way."""
    lines = []
    for row in table:
        used = sum(len(cell.text) + 2 for cell in row[:-1])
        left = None if console.width is None else max(console.width - used, 0)
        last = cut(row[-1].text, left)
        line = "  ".join(console.paint(cell.text, cell.colour) for cell in row[:-1])
        lines.append(f"{line}  {console.paint(last, row[-1].colour)}".rstrip() if last else line.rstrip())
    return lines
