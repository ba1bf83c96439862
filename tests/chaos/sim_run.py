"""One history from its seed to its end, and what must hold when the faults have stopped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sim_choices import Choices
from sim_clients import Client
from sim_happenings import Happenings
from sim_plan import plan
from sim_world import Violation, World

from proxy.policies.prefill import Prefill
from supervisord.control import Verb
from supervisord.core.idle import Rung, rung_due
from supervisord.core.replica import OPERATING
from supervisord.core.spec import IdleLadder, ModelSpec
from supervisord.core.states import Health, Hold, Life

#: More steps than any history needs: something goes round in circles.
TOO_MANY_STEPS = 400_000
#: Everybody is answered and every operation over within this, when faults have stopped. Virtual seconds.
SETTLED_WITHIN = 8 * 3600.0


@dataclass
class Result:
    """What one history showed."""

    seed: int
    violation: Violation | None
    steps: int
    callbacks: int
    seconds: float
    requests: int
    kills: int
    starts: int
    failovers: int
    most_held: int
    injected: list[tuple[float, str, str]]
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)


class _Defects(logging.Handler):
    """What the product logs of its own defects is a violation."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._world._error(record.getMessage(), record.exc_info[1])


def run(seed: int, only: frozenset[str] | None = None, trace: Callable[[str], None] | None = None) -> Result:
    """Run the history of ``seed``; ``only``: those injected things and no other (see ``shrink``)."""
    history = plan(seed)
    world = World(lambda clock: Choices(seed, clock, only))
    world.trace = trace
    happenings = Happenings(world, history.config, seed)
    loggers = [logging.getLogger(name) for name in ("supervisord", "proxy")]
    handler, levels = _Defects(world), [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        world.config = history.config
        world.know(history.config)
        for name in history.running_at_first:
            world.units[name].start(lambda result: None)
        world.start_supervisor()
        for item in history.items:
            _go_on(world, item.at)
            if world.violation is not None:
                break
            if world.choices.allowed(item.name):
                happenings.happen(item)
        _end_well(world, happenings)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = True
        seconds = world.now
        world.end()
    choices = world.choices
    return Result(
        seed,
        world.violation,
        world.steps,
        world.scheduler.count,
        seconds,
        len(happenings.clients),
        world.kills,
        world.starts,
        world.failovers,
        world.most_held,
        choices.injected,
        choices.by_kind,
        world.outcomes,
        world.answers,
        world.jobs_by_verb,
    )


def _go_on(world: World, until: float, enough: Callable[[], bool] | None = None) -> None:
    """Let time pass; a history without end is a violation."""

    def stop() -> bool:
        if world.steps > TOO_MANY_STEPS:
            world.fail("liveness", f"{world.steps} steps, and no end")
        return enough is not None and enough()

    world.scheduler.run(until, stop)


def _end_well(world: World, happenings: Happenings) -> None:
    """The faults stop. Everybody is answered, every model answers, and the fleet goes down its ladder."""
    if world.violation is not None:
        return
    world.say("* the faults stop")
    world.choices.quiet = True
    world.disk.full, world.trap = False, None
    world.bus_back = 0.0
    for unit in world.units.values():
        unit.load_state = "loaded"
    if world.supervisor is not None:
        world.supervisor.process.spare()
        world.supervisor.manager.look_again()
    _until(world, lambda: _idle(world), SETTLED_WITHIN, "requests or commands are never answered")
    spec = world.config.supervisor
    _go_on(world, world.now + 2 * spec.start_timeout + 2 * spec.probe_interval + 300.0)
    _check_commands(world)
    _until(world, lambda: _idle(world), SETTLED_WITHIN, "the supervisor never accepts again")
    # What it was told last, which need not be what the files say by now.
    models = world.supervisor.reloader.config.models if world.supervisor is not None else ()
    for model in models:
        _starts(world, model.name)
    for model in models:
        if _has_room(world, model):
            _answers(world, model.name)
    longest = 0.0
    for model in models:
        ladder = model.idle
        longest = max(longest, ladder.sleep1 or 0.0, ladder.sleep2 or 0.0, ladder.stop or 0.0)
    if world.violation is None:
        _go_on(world, world.now + longest + 300.0)
        _check_rest(world, happenings)


def _check_commands(world: World) -> None:
    """What was reloaded is what runs. (Over a kill others tell: the launcher leaves word of what it started.)"""
    supervisor = world.supervisor
    if supervisor is None or world.starts > 1 or world.untold or world.violation is not None:
        return
    config = supervisor.reloader.config
    for unit in world.units.values():
        if not unit.name.startswith("vllm@") or unit.down or unit.name in world.started_by_hand:
            continue
        command = world.command_of(unit.name, config)
        if command is None:
            world.fail("12", f"{unit.name} is not configured any more, and runs on")
        elif unit.runs != command:
            world.fail("12", f"{unit.name} runs with {unit.runs}, and {command} is configured")


def _has_room(world: World, model: ModelSpec) -> bool:
    """At least one replica of it fits onto its GPUs when nothing else is there."""
    capacity = world.config.supervisor.gpu_memory
    return capacity is None or any((replica.gpu_memory or 0) <= capacity for replica in model.replicas)


def _idle(world: World) -> bool:
    supervisor = world.supervisor
    return supervisor is not None and supervisor.accepting and not supervisor.clients.count and not supervisor.asked


def _until(world: World, reached: Callable[[], bool], limit: float, complaint: str) -> None:
    if world.violation is None:
        _go_on(world, world.now + limit, reached)
        if world.violation is None and not reached():
            world.fail("liveness", complaint)


def _starts(world: World, model: str) -> None:
    """An operator ends every hold."""
    supervisor = world.supervisor
    if world.violation is not None or supervisor is None:
        return
    supervisor.process.call_soon(supervisor.command, model, True, Verb.START, 0)
    _go_on(world, world.now + 0.1)
    _until(world, lambda: _idle(world), SETTLED_WITHIN, f"the start of {model} is never answered")
    if world.violation is None and supervisor.last_answer != "done" and not _tight(world):
        world.fail("liveness", f"nothing is wrong any more, and the start of {model} ended '{supervisor.last_answer}'")


def _answers(world: World, model: str) -> None:
    """A model answers; a client that is told to come again does, more often where models take turns on a GPU."""
    supervisor = world.supervisor
    for _ in range(20 if _tight(world) else 4):
        if world.violation is not None or supervisor is None:
            return
        client = Client(model, 0.05, 0.1, 3600.0)
        supervisor.knock(client)
        _go_on(world, world.now + 0.1)
        _until(world, lambda: _idle(world), SETTLED_WITHIN, f"a request for {model} is never answered")
        if client.answers == ["answered"]:
            return
        _go_on(world, world.now + max(client.retry_after or 1.0, 10.0))
    world.fail("liveness", f"nothing is wrong any more, and {model} answers {client.answers}")


def _tight(world: World) -> bool:
    """GPU memory is a budget, so replicas may take turns."""
    return world.config.supervisor.gpu_memory is not None


def _check_rest(world: World, happenings: Happenings) -> None:
    supervisor = world.supervisor
    unanswered = [client for client in happenings.clients if len(client.answers) != 1]
    if unanswered:
        world.fail("3", f"{len(unanswered)} requests have no answer at all")
    if world.violation is not None or supervisor is None:
        return
    fleet = supervisor.checks.fleet
    for model in fleet.models.values():
        policy = supervisor.clients.policy(model.name)
        if isinstance(policy, Prefill) and (policy.held or policy.under_way):
            world.fail("3", f"the policy of {model.name} counts {policy.held} held, {policy.under_way} under way")
    if fleet.leases:
        world.fail("3", f"{len(fleet.leases)} leases are never returned")
    for replica in fleet.replicas.values():
        if replica.life in OPERATING or replica.life is Life.DRAINING:
            world.fail("liveness", f"{replica.name} is {replica.life} for ever")
        unit = world.units[replica.spec.unit]
        good = unit.engine is not None and unit.engine.good_since is not None
        if replica.life is Life.READY and replica.health is Health.SUSPECT and good:
            world.fail("liveness", f"{replica.name} is suspected for ever")
        model = fleet.model_of(replica)
        if model is None or replica.hold is not Hold.NONE:
            continue
        deepest = _deepest(model.spec.idle, sleeps=replica.sleeps_well, can=replica.can_sleep)
        if replica.rung < deepest:
            world.fail("liveness", f"{replica.name} is {replica.life} {replica.level}, and idle for ever")


def _deepest(ladder: IdleLadder, *, sleeps: bool, can: bool) -> Rung:
    """Where an idle replica ends up; one whose sleep does not work is stopped instead."""
    rung = rung_due(ladder, 1e12, can_sleep=can)
    return Rung.STOPPED if rung is not Rung.AWAKE and not sleeps else rung
