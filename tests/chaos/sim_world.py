"""The simulated machine: its units and engines, its disk, its clock, and one supervisor after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sim_choices import Choices
from sim_clients import Client
from sim_disk import Disk
from sim_loop import Process, Scheduler
from sim_supervisor import Supervisor
from sim_systemd import Unit

from supervisord.core.spec import Config

#: Points within a callback of the supervisor's own: it is killed at the end of that one at the earliest.
OWN_POINTS = ("call asked", "answer", "job asked", "write asked")


@dataclass(frozen=True)
class Violation:
    """What must not happen, happened."""

    invariant: str
    text: str
    when: float

    def __str__(self) -> str:
        return f"invariant {self.invariant} at {self.when:.6f} s: {self.text}"


class World:
    """Everything outside the supervisor, and the switch that ends and starts it."""

    def __init__(self, choices_for: Callable[[Callable[[], float]], Choices]) -> None:
        self.scheduler = Scheduler()
        self.choices = choices_for(lambda: self.scheduler.now)
        self.process = Process(self.scheduler, self._error)
        self.disk = Disk()
        self.units: dict[str, Unit] = {}
        self._unit_names: dict[str, str] = {}
        self._endpoints: dict[str, Unit] = {}
        self.config = Config()
        self.supervisor: Supervisor | None = None
        self._past: list[Process] = []
        self.bus_back = 0.0
        #: Where the supervisor is to be killed: the point, so many callbacks later, and what the choice is called.
        self.trap: tuple[str, int, str] | None = None
        self.violation: Violation | None = None
        self.steps = 0
        #: The files changed, and the supervisor was not there to be told.
        self.untold = False
        self.started_by_hand: set[str] = set()
        self.jobs_by_verb: Counter[str] = Counter()
        self.kills = self.starts = self.failovers = 0
        #: Of one model, at the same time, until there was room in a KV cache.
        self.most_held = 0
        #: Requests by what their senders saw in the end.
        self.outcomes: Counter[str] = Counter()
        #: Operators' commands by how they ended.
        self.answers: Counter[str] = Counter()
        #: What happened, in words, when somebody wants to read it.
        self.trace: Callable[[str], None] | None = None

    @property
    def now(self) -> float:
        return self.scheduler.now

    @property
    def bus_away(self) -> bool:
        return self.now < self.bus_back

    def later(self, seconds: float, work: Callable[..., object], *args: object) -> None:
        """The world's own timers: no kill touches them."""
        self.process.call_later(seconds, work, *args)

    def fail(self, invariant: str, text: str) -> None:
        """A violation ends the history."""
        if self.violation is None:
            self.violation = Violation(invariant, text, self.now)
            self.scheduler.stopped = True

    def _error(self, message: str, error: BaseException | None) -> None:
        self.fail("no defect", f"{message}: {error!r}{_where(error)}")

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:14.6f} {text}")

    def outcome(self, client: Client, answer: str) -> None:
        """What a client saw in the end: one thing."""
        client.answers.append(answer)
        self.outcomes[answer] += 1
        if len(client.answers) > 1:
            self.fail("3", f"a request was answered twice: {client.answers}")

    # --- units ---

    def know(self, config: Config) -> None:
        """Make units for the replicas of ``config`` that are new."""
        configured = {spec.unit for model in config.models for spec in model.replicas}
        for unit in self.units.values():
            unit.left_alone = unit.left_alone or unit.name not in configured
        for model in config.models:
            for spec in model.replicas:
                if spec.unit not in self.units:
                    self.units[spec.unit] = Unit(self, spec.unit, spec.name, len(self.units))
                names = self.units[spec.unit].names
                if spec.name not in names:
                    names.append(spec.name)
                self._unit_names[spec.name] = spec.unit
                self._endpoints[spec.endpoint] = self.units[spec.unit]

    def command_of(self, unit: str, config: Config | None = None) -> object:
        """What a bundled engine is started with according to the files, or to ``config``."""
        for model in (config or self.config).models:
            for spec in model.replicas:
                if spec.unit == unit:
                    return spec, model.serve, model.aliases
        return None

    def unit_of(self, replica: str) -> str:
        return self._unit_names.get(replica, "")

    def unit_at(self, endpoint: str) -> Unit:
        return self._endpoints[endpoint]

    def unit_changed(self, unit: Unit) -> None:
        self.say(f"    {unit.name} is {unit.active}/{unit.sub} run {unit.run}")
        if self.supervisor is not None:
            self.supervisor.manager.unit_changed(unit)

    def commanded(self, unit: Unit, verb: str) -> None:
        self.jobs_by_verb[verb] += 1

    # --- systemd and its bus ---

    def lose_bus(self, seconds: float, *, jobs_too: bool) -> None:
        """systemd is off the bus for a while; ``jobs_too``: who waits for a job is told that it is lost."""
        self.bus_back = max(self.bus_back, self.now + seconds)
        if jobs_too and self.supervisor is not None:
            self.supervisor.manager.lose_jobs()
        self.later(self.bus_back - self.now + 0.02, self._bus_is_back)

    def _bus_is_back(self) -> None:
        if not self.bus_away and self.supervisor is not None:
            self.supervisor.manager.look_again()

    # --- the supervisor's life ---

    def start_supervisor(self) -> None:
        """systemd starts the daemon, unless it runs."""
        if self.supervisor is None:
            process = Process(self.scheduler, self._error)
            self._past.append(process)
            self.starts += 1
            self.supervisor = Supervisor(self, process)
            process.call_soon(self.supervisor.begin)

    def kill_supervisor(self, callbacks: int) -> None:
        """SIGKILL after so many more of its callbacks."""
        if self.supervisor is not None:
            self.supervisor.process.kill_after(callbacks, self._killed)

    def at(self, point: str) -> None:
        """Something is just being done; a trap set for it closes."""
        if self.trap is not None and self.trap[0] == point and self.supervisor is not None:
            _, callbacks, name = self.trap
            self.trap = None
            self.choices.record("", name, f"kill at: {point}")
            if point in OWN_POINTS:
                self.supervisor.process.kill_after(callbacks, self._killed)
            elif callbacks:
                self.supervisor.process.kill_after(callbacks - 1, self._killed)
            else:
                self.supervisor.process.kill()
                self._killed()

    def _killed(self) -> None:
        self.kills += 1
        self.say("the supervisor is killed")
        self.supervisor_ended()

    def supervisor_ended(self) -> None:
        """Its process is gone; its connections are closed; systemd starts the next one soon."""
        old, self.supervisor = self.supervisor, None
        if old is None:
            return
        old.process.kill()
        old.clients.cut()
        for unit in self.units.values():
            if unit.engine is not None:
                for request in [r for r in unit.engine.requests if r.owner is old.process]:
                    unit.engine.drop(request)
        pause = self.choices.latency("the daemon's restart", 0.1, 5.0)
        if not self.choices.quiet and self.choices.chance(f"the daemon stays away {self.starts}", 0.15):
            pause *= 60.0
        self.later(pause, self.start_supervisor)

    def end(self) -> None:
        """The history is over: nothing of it may linger."""
        for process in (*self._past, self.process):
            process.bury()


def _where(error: BaseException | None) -> str:
    """The innermost place of ours that raised."""
    trace = error.__traceback__ if error is not None else None
    place = ""
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
