"""A simulated systemd: units with jobs, restarts, start limits and stop timeouts. What it told is another matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim_engine import EngineProcess

from supervisord.core.readings import EngineState, UnitStatus

if TYPE_CHECKING:
    from sim_world import World

START_FAULTS = ("exits", "exits later", "start-pre never ends", "never listens", "slow")
STOP_FAULTS = ("ignores SIGTERM", "slow")
#: Automatic restarts in a row until systemd gives the unit up.
START_LIMIT = 5
#: How long systemd lets a start or a stop take, and the pause before a restart of its own. Seconds.
TIMEOUT_START, TIMEOUT_STOP, RESTART_PAUSE = 300.0, 45.0, 2.0


class Unit:
    """One service unit and the engine that it runs."""

    def __init__(self, world: World, name: str, replica: str, number: int) -> None:
        choose = world.choices
        self.world, self.name, self.number = world, name, number
        #: What its replica was called, the first name first.
        self.names = [replica]
        #: Type=notify rather than exec: active only when the engine is ready.
        self.notify = choose.chance(f"{name} notify", 0.3)
        self.restarts = choose.chance(f"{name} Restart=always", 0.8)
        self.can_sleep = choose.chance(f"{name} dev mode", 0.9)
        self.measured = choose.chance(f"{name} memory is measured", 0.7)
        self.answers_canary = choose.chance(f"{name} answers a fingerprint", 0.9)
        self.load_seconds = choose.between(0.5, 40.0, f"{name} loads")
        self.call_seconds = choose.between(0.02, 8.0, f"{name} calls")
        self.load_state = "loaded"
        self.active, self.sub, self.result = "inactive", "dead", "success"
        self.run = self.restarted = 0
        self.engine: EngineProcess | None = None
        #: For some time nobody was to know what became of it.
        self.left_alone = False
        #: What it was started with.
        self.runs: object = None
        #: The job under way, and who waits for it.
        self.job = ""
        self._waiting: list[Callable[[str], None]] = []
        self._start_after_stop = False
        #: Outdates timers of an earlier state.
        self._epoch = 0
        #: When it came into the present one, microseconds.
        self._changed = 0
        #: What the last two looks at its engine answered, true or not; looks may overlap.
        self.said: EngineState | None = None
        self.said_before: EngineState | None = None

    @property
    def invocation(self) -> str:
        return f"{self.number + 1:04x}{self.run:028x}" if self.run else ""

    @property
    def down(self) -> bool:
        return self.active in ("inactive", "failed")

    def status(self) -> UnitStatus:
        if self.load_state != "loaded" and self.down:
            return UnitStatus(self.name, self.load_state, "inactive", "dead")
        return UnitStatus(
            self.name,
            self.load_state,
            self.active,
            self.sub,
            self.invocation,
            self.result,
            n_restarts=self.restarted,
            changed=self._changed,
        )

    # --- jobs ---

    def start(self, done: Callable[[str], None]) -> None:
        if self.active in ("active", "reloading"):
            done("done")
        elif self.job == "start":
            self._waiting.append(done)
        elif self.active == "deactivating":
            self._replace("start", done)
            self._start_after_stop = True
        else:
            self._replace("start", done)
            self.restarted = 0
            self._exec()

    def stop(self, done: Callable[[str], None]) -> None:
        self.restarted = 0
        if self.down:
            done("done")
        elif self.active == "deactivating":
            self._start_after_stop = False
            self._replace("stop", done, keep_same=True)
        elif self.sub == "auto-restart":
            self._replace("stop", done)
            self._become("inactive", "dead")
            self._end_job("done")
        else:
            self._replace("stop", done)
            self._terminate()

    def restart(self, done: Callable[[str], None]) -> None:
        if self.down or self.sub == "auto-restart":
            self.start(done)
            return
        self._replace("restart", done, keep_same=True)
        self._start_after_stop = True
        if self.active != "deactivating":
            self._terminate()

    def _replace(self, job: str, done: Callable[[str], None], *, keep_same: bool = False) -> None:
        if not (keep_same and self.job == job):
            self._end_job("canceled")
        self.job = job
        self._waiting.append(done)

    def _end_job(self, result: str) -> None:
        waiting, self._waiting, self.job = self._waiting, [], ""
        for done in waiting:
            done(result)

    # --- what happens to it ---

    def _become(self, active: str, sub: str, result: str = "success") -> None:
        self._epoch += 1
        # No two states at one time: systemd's clock is finer than this world's.
        self._changed = max(round(self.world.now * 1e6), self._changed + 1)
        self.active, self.sub, self.result = active, sub, result
        if self.engine is not None:
            self.engine.judge()
        self.world.unit_changed(self)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        epoch = self._epoch
        self.world.later(seconds, lambda: work() if epoch == self._epoch else None)

    def _exec(self) -> None:
        """Start the process, as ExecStart does."""
        self.run += 1
        self.runs = self.world.command_of(self.name)
        fault = self.world.choices.fault(self.name, "start", START_FAULTS)
        engine = self.engine = EngineProcess(self, self.invocation)
        if fault == "start-pre never ends" or self.notify:
            self._become("activating", "start-pre" if fault else "start")
            self._later(TIMEOUT_START, lambda: self._start_timed_out(engine))
        else:
            self._become("active", "running")
            self._end_job("done")
        seconds = self.world.choices.latency(f"{self.name} load", self.load_seconds / 2, self.load_seconds)
        match fault:
            case "exits":
                self.world.later(0.2, engine.die, 1)
            case "exits later":
                self.world.later(seconds * 0.9, engine.die, 1)
            case "start-pre never ends" | "never listens":
                pass
            case "slow":
                self.world.later(seconds * 30.0, engine.listen)
            case _:
                self.world.later(seconds, engine.listen)

    def _start_timed_out(self, engine: EngineProcess) -> None:
        engine.die(1)

    def engine_ready(self, engine: EngineProcess) -> None:
        if engine is self.engine and self.active == "activating" and self.notify:
            self._become("active", "running")
            self._end_job("done")

    def engine_gone(self, engine: EngineProcess, code: int) -> None:
        """The main process exited."""
        if engine is not self.engine:
            return
        self.engine = None
        if self.active == "deactivating":
            self._stopped("success")
            return
        result = "success" if code == 0 else "exit-code"
        if self.job == "start":
            self._end_job("failed")
        if not self.restarts:
            self._become("failed" if code else "inactive", "failed" if code else "dead", result)
        elif self.restarted >= START_LIMIT:
            self._become("failed", "failed", "start-limit-hit")
        else:
            self._become("activating", "auto-restart", result)
            self._later(RESTART_PAUSE, self._restart_by_itself)

    def _restart_by_itself(self) -> None:
        self.restarted += 1
        self.world.choices.blame[self.name] = self.world.now
        self._exec()

    def _terminate(self) -> None:
        fault = self.world.choices.fault(self.name, "stop", STOP_FAULTS)
        self._become("deactivating", "stop-sigterm")
        engine = self.engine
        if engine is None:
            self._stopped("success")
            return
        if fault != "ignores SIGTERM" and not engine.hung:
            takes = self.world.choices.latency(f"{self.name} stop", 0.1, 2.0)
            self.world.later(takes * (15.0 if fault == "slow" else 1.0), engine.die)
        self._later(TIMEOUT_STOP, lambda: self._stop_timed_out(engine))

    def _stop_timed_out(self, engine: EngineProcess) -> None:
        self.result = "timeout"
        engine.die(9)

    def _stopped(self, result: str) -> None:
        failed = self.result == "timeout"
        again, self._start_after_stop = self._start_after_stop, False
        if again:
            self._become("inactive", "dead")
            if self.load_state == "loaded":
                self._exec()
            else:
                self._end_job("failed")
            return
        self._become(
            "failed" if failed else "inactive", "failed" if failed else "dead", "timeout" if failed else result
        )
        self._end_job("done")

    def reset_failed(self) -> None:
        self.restarted = 0
        if self.active == "failed":
            self._become("inactive", "dead")
