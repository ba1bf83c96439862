"""How each planned thing happens: clients, operators, people at the keyboard, and accidents."""

from __future__ import annotations

from random import Random

from sim_clients import Client
from sim_engine import EngineProcess
from sim_plan import Item, changed
from sim_systemd import Unit
from sim_world import World

from supervisord.control import Verb
from supervisord.core.actions import Call
from supervisord.core.record import Record
from supervisord.core.spec import Config

#: Where a supervisor may be killed exactly: a step is asked for, reaches its engine, is done there, is answered ...
POINTS = (
    "call asked",
    "call arrives",
    "call done",
    "answer",
    "job asked",
    "job done",
    "write asked",
    "written",
    "told",
)


class Happenings:
    """Carries items out in one world."""

    def __init__(self, world: World, first: Config, seed: int) -> None:
        self._world, self._first, self._seed = world, first, seed
        self.clients: list[Client] = []

    def happen(self, item: Item) -> None:
        rng = Random(f"{self._seed} {item.name}")
        self._world.say(f"* {item.kind}")
        match item.kind:
            case "request":
                self._arrive([self._client(rng)])
            case "flood":
                one = self._client(rng)
                self._arrive([self._like(one, rng) for _ in range(rng.choice((5, 20, 80, 200)))])
            case "long request":
                client = self._client(rng)
                client.length, client.patience = rng.uniform(100.0, 6000.0), 7200.0
                self._arrive([client])
            case "agents":
                self._agents(item, rng)
            case "command to a replica" | "command to a model":
                self._command(item, rng)
            case "reload":
                self._world.config = changed(self._world.config, self._first, rng)
                self._world.know(self._world.config)
                self._reload(item)
            case "kill":
                self._note(item, "", "kill")
                self._world.kill_supervisor(rng.choice((0, 1, 2, 3, 5, 8, 20, 50, 300)))
            case "kill at a step":
                self._world.trap = (rng.choice(POINTS), rng.choice((0, 0, 1, 2, 4)), item.name)
            case "terminate":
                self._note(item, "", "terminate")
                supervisor = self._world.supervisor
                if supervisor is not None and supervisor.accepting:
                    supervisor.process.call_soon(supervisor.terminate)
            case "bus away":
                self._note(item, "", "bus away")
                self._world.lose_bus(rng.choice((0.05, 3.0, 8.0, 15.0, 60.0)), jobs_too=rng.random() < 0.5)
            case "disk full":
                self._note(item, "", "disk full")
                self._world.disk.full = True
                self._world.later(rng.choice((0.1, 5.0, 100.0)), self._disk_has_room)
            case _:
                self._to_a_unit(item, rng)

    def _note(self, item: Item, place: str, what: str) -> None:
        self._world.choices.record(place, item.name, what)

    # --- clients ---

    def _client(self, rng: Random) -> Client:
        models = [model.name for model in self._world.config.models]
        name = rng.choice(models) + rng.choice(("", "", "", "-alias"))
        if rng.random() < 0.02:
            name = "nobody"
        patience = rng.choice((0.01, 1.0, 10.0, 120.0, 1000.0, 1000.0))
        stream = rng.random() < 0.5
        return Client(
            name, rng.choice((0.001, 0.05, 1.0)), rng.choice((0.001, 0.1, 2.0, 20.0)), patience, stream=stream
        )

    def _agents(self, item: Item, rng: Random) -> None:
        """Conversations that send all of it again with every turn, whatever became of the turn before."""
        prefill = [model.name for model in self._world.config.models if model.routing == "prefill"]
        one = self._client(rng)
        one.model = rng.choice(prefill or [one.model])
        pause = rng.choice((0.5, 3.0, 3.0, 20.0))
        for number in range(rng.choice((4, 12, 30))):
            begins = rng.uniform(0.0, 10.0)
            for turn in range(rng.choice((1, 3, 8))):
                client = self._like(one, rng)
                client.long = True
                client.keys = tuple(f"{item.name} {number} {message}".encode() for message in range(2 * turn + 1))
                self._world.later(begins + turn * (pause + one.length), self._arrive, [client])

    def _like(self, one: Client, rng: Random) -> Client:
        other = Client(one.model, one.first_after * rng.uniform(0.5, 2.0), one.length, one.patience, stream=one.stream)
        other.keys = one.keys
        return other

    def _arrive(self, clients: list[Client]) -> None:
        self.clients += clients
        supervisor = self._world.supervisor
        for client in clients:
            if supervisor is None or not supervisor.accepting:
                self._world.outcome(client, "nobody listens")
            else:
                supervisor.knock(client)

    # --- operators ---

    def _command(self, item: Item, rng: Random) -> None:
        model = rng.choice(self._first.models)
        verb = rng.choice([*Verb, Verb.START, Verb.WAKE, Verb.SLEEP])
        level = rng.choice((1, 2))
        target = model.name if item.kind == "command to a model" else rng.choice(model.replicas).name
        self._note(item, "", f"operator: {verb}")
        supervisor = self._world.supervisor
        if supervisor is not None and supervisor.accepting:
            supervisor.process.call_soon(supervisor.command, target, item.kind == "command to a model", verb, level)

    def _reload(self, item: Item) -> None:
        self._note(item, "", "reload")
        supervisor = self._world.supervisor
        if supervisor is not None and supervisor.accepting:
            supervisor.process.call_soon(supervisor.reload)
        else:
            self._world.untold = True

    # --- accidents, and people at the keyboard ---

    def _disk_has_room(self) -> None:
        self._world.disk.full = False

    def _to_a_unit(self, item: Item, rng: Random) -> None:
        names = [replica.unit for model in self._first.models for replica in model.replicas]
        unit = self._world.units[rng.choice(names)]
        engine = unit.engine
        match item.kind:
            case "engine dies" if engine is not None:
                self._note(item, unit.name, "engine dies")
                engine.die(rng.choice((0, 1)))
            case "engine hangs" if engine is not None and engine.listening:
                self._note(item, unit.name, "engine hangs")
                engine.hang(rng.choice((1.0, 10.0, 100.0, None)))
            case "sleep by hand" if engine is not None and engine.listening:
                self._sleep_by_hand(item, unit, engine, rng.choice((1, 2)))
            case "wake by hand" if engine is not None and engine.listening:
                self._wake_by_hand(item, unit, engine)
            case "systemctl":
                verb = rng.choice(("start", "stop", "restart"))
                if verb == "stop" or unit.load_state == "loaded":
                    self._note(item, unit.name, f"systemctl {verb}")
                    self._world.started_by_hand.add(unit.name)
                    getattr(unit, verb)(lambda result: None)
            case "unit masked":
                self._note(item, unit.name, "unit masked")
                unit.load_state = rng.choice(("masked", "not-found"))
            case "unit unmasked":
                unit.load_state = "loaded"
            case _:
                pass

    def _sleep_by_hand(self, item: Item, unit: Unit, engine: EngineProcess, level: int) -> None:
        """Left out: level 2 where the disk says that this run sleeps at level 1, or is on its way there.

        Nobody can know of that but by having looked in between, and a kill makes that look undone. Where a canary is
        compared after each wake it is not left out.
        """

        def may() -> bool:
            says_1 = any(record.level == 1 for record in self._records(unit, engine))
            if level == 2 and says_1 and not self._has_canary(unit, engine):
                return False
            self._note(item, unit.name, f"slept by hand, level {level}")
            return True

        engine.by_hand(Call.SLEEP, level, may)

    def _memories(self, unit: Unit) -> list[Record | None]:
        """What is written down about a replica, and what the living supervisor remembers of that."""
        memories = [self._world.disk.get(unit.names[0])]
        supervisor = self._world.supervisor
        fleet = supervisor.checks.fleet if supervisor is not None else None
        if fleet is not None and unit.names[0] in fleet.replicas:
            memories.append(fleet.replicas[unit.names[0]].record)
        return memories

    def _empty(self, unit: Unit) -> bool:
        """The supervisor has sent no request into the engine that is not over."""
        supervisor = self._world.supervisor
        fleet = supervisor.checks.fleet if supervisor is not None else None
        mine = [r for r in fleet.replicas.values() if r.spec.unit == unit.name] if fleet is not None else []
        return not any(replica.in_flight for replica in mine)

    def _records(self, unit: Unit, engine: EngineProcess) -> list[Record]:
        """Those that are about this run."""
        return [r for r in self._memories(unit) if r is not None and r.invocation == engine.invocation]

    def _has_canary(self, unit: Unit, engine: EngineProcess) -> bool:
        name = unit.names[-1]
        kept = len(unit.names) == 1 and self._world.disk.fingerprint_of(name, engine.invocation) is not None
        return kept and any(
            model.wake.canary for model in self._world.config.models for r in model.replicas if r.name == name
        )

    def _wake_by_hand(self, item: Item, unit: Unit, engine: EngineProcess) -> None:
        """Left out: where the weights are gone and the disk does not say so.

        That is where somebody's own sleep was not seen yet, or is not written down: between two looks nobody can know
        of both, and a request may be on its way. (So it is where the replica is believed to be awake, and where
        requests went in while it was: they wait inside, and it is this wake that would answer them.)
        """

        def may() -> bool:
            says_2 = [record.level == 2 for record in self._records(unit, engine)]
            known = all(says_2) and len(says_2) == len(self._memories(unit))
            # A daemon that dies while it takes in another name of a unit need not have the unit's record under that.
            followed = len(unit.names) == 1 and not unit.left_alone
            if not engine.whole and not (known and self._empty(unit) and followed):
                return False
            self._note(item, unit.name, "woken by hand")
            return True

        engine.by_hand(Call.WAKE_UP, 0, may)
