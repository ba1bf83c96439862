"""One life of the real supervisor in a process of the simulated machine: put together as app.py does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sim_checks import Checks
from sim_clients import Client, Clients
from sim_disk import StorePort
from sim_loop import EPOCH, Process
from sim_manager import ManagerPort
from sim_ports import EnginePort, Meter

from supervisord.control import ControlError
from supervisord.core.actions import Action, Note
from supervisord.core.admission import Chooser, Ending, Explanation, Lease, Refuse, Wait
from supervisord.core.events import Event, ShutDown
from supervisord.core.spec import Config, ModelSpec, ReplicaSpec
from supervisord.core.verbs import Verb
from supervisord.effects import Effects
from supervisord.loop import Dispatcher
from supervisord.operate import Operator
from supervisord.reload import Reloader
from supervisord.sd.notify import Notifier

if TYPE_CHECKING:
    from sim_world import World


class WatchedDispatcher(Dispatcher):
    """The real dispatcher; after each step of the core the invariants are checked."""

    def __init__(self, perform, on_note, wall, checks: Checks, process: Process) -> None:
        super().__init__(perform, on_note, wall)
        self._checks, self._process = checks, process
        checks.fleet = self._fleet

    def dispatch(self, event: Event) -> None:
        self._checks.before(event)
        super().dispatch(event)
        self._checks.after(event)

    def admit(
        self,
        model: str,
        choose: Chooser,
        *,
        exclude: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
    ) -> Lease | Wait | Refuse:
        answer = super().admit(model, choose, exclude=exclude, only=only)
        self._checks.after(None)
        if isinstance(answer, Wait) and self._checks.leaves_when_granted():
            # Its client is gone in the very moment in which it is let in.
            task = asyncio.current_task(self._process)
            answer.outcome.add_done_callback(lambda outcome: task.cancel() if task is not None else None)
        return answer

    def finish(self, lease: Lease, ending: Ending, detail: str = "") -> None:
        if self._process.buried:
            return
        super().finish(lease, ending, detail)
        self._checks.after(None)

    def abandon(self, wait: Wait) -> None:
        if self._process.buried:
            return
        super().abandon(wait)
        self._checks.after(None)


def _nothing_to_explain(model: str, route: str, body: bytes) -> Explanation:
    raise AssertionError("nobody asks here where a request would go")


class Supervisor:
    """The parts of one daemon; ``begin`` runs inside its process."""

    dispatcher: WatchedDispatcher
    operator: Operator

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process = world, process
        self.manager = ManagerPort(world, process)
        self.checks = Checks(world, process)
        self.clients = Clients(world, process)
        self.accepting = False
        self.stopping = False
        #: Commands that were not answered yet.
        self.asked = 0
        self.last_answer = ""

    def begin(self) -> None:
        """Build everything that needs the running loop, then go on as a task."""
        self._stop = asyncio.Event()
        self.process.create_task(self._main())

    def terminate(self) -> None:
        """SIGTERM."""
        self._stop.set()

    def knock(self, client: Client) -> None:
        """A client connects. One that is seen too late meets a closed door."""
        self.clients.knock(client)
        self.process.call_soon(lambda: self.clients.arrive(client, accepted=self.accepting or self.stopping))

    def command(self, target: str, whole_model: bool, verb: Verb, level: int) -> None:
        """An operator's command; how it ends is counted."""
        operator = self.operator
        work = operator.command_model if whole_model else operator.command_replica
        self._ask(f"{verb}", lambda: work(target, verb, level))

    def reload(self) -> None:
        self._ask("reload", self.reloader.reload)

    def _ask(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        self.asked += 1
        self.process.create_task(self._answered(what, work))

    async def _answered(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
            answer = "done"
        except ControlError as error:
            answer = str(error.code)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            self.world._error(f"'{what}' failed in a way that nobody foresaw", error)
            return
        self.asked -= 1
        self.world.answers[f"{what}: {answer}"] += 1
        self.last_answer = answer

    async def _main(self) -> None:
        world, config = self.world, self.world.config
        meter = Meter(world, self.manager)
        effects = Effects(self.manager, StorePort(world, self.process), self._engine_for, meter, meter)
        perform = self._performing(effects)
        self.dispatcher = WatchedDispatcher(perform, self._note, lambda: EPOCH + world.now, self.checks, self.process)
        effects.report_to(self.dispatcher.dispatch)
        self.reloader = Reloader(config, lambda: world.config, self.dispatcher, effects, self.manager, Notifier())
        self.reloader.reconfigured.append(self._reconfigured)
        world.say(f"a supervisor starts, with {world.disk.load()}")
        self.reloader.begin(world.disk.load(), world.disk.load_fingerprints())
        await self.reloader.adopted()
        self.operator = Operator(self.dispatcher, self.reloader.reload, _nothing_to_explain)
        self.clients.open(self.dispatcher, self.reloader.config)
        self.accepting = True
        world.say("the supervisor accepts")
        await self._stop.wait()
        self.accepting, self.stopping = False, True
        world.say("the supervisor shuts down")
        self.dispatcher.dispatch(ShutDown())
        await self.clients.drain(self.reloader.config.supervisor.drain_timeout)
        self.reloader.cancel()
        self.dispatcher.close()
        await effects.close()
        world.supervisor_ended()

    def _reconfigured(self, config: Config) -> None:
        self.checks.configured(config)
        self.clients.reconfigure(config)

    def _engine_for(self, model: ModelSpec, spec: ReplicaSpec) -> EnginePort:
        return EnginePort(self.world.units[spec.unit], self.process)

    def _performing(self, effects: Effects):
        def perform(action: Action) -> None:
            self.checks.action(action)
            if self.world.trace is not None:
                self.world.say(f"  -> {action}")
            effects.perform(action)

        return perform

    def _note(self, note: Note) -> None:
        self.checks.note(note)
        if self.world.trace is not None:
            self.world.say(f"  {note.replica} {note.kind}: {note.message}")
