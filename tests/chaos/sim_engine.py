"""A simulated engine process: what is true of it, which it need not tell. The quirks are vLLM's.

Level 2 drops the weights; only ``reload_weights`` makes them whole again. A sleeper that is asked to sleep answers 200
and does nothing. Requests that reach a sleeper wait for its wake. The calls of one engine run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from supervisord.core.actions import Call
from supervisord.core.record import Phase, Record

if TYPE_CHECKING:
    from sim_loop import Process
    from sim_systemd import Unit

#: What is answered to a control call: an error text, empty for a 200; None: nothing, ever.
Reply = Callable[[str | None], None]

GARBAGE = "garbage: an answer from an engine whose weights are not whole"
CALL_FAULTS = ("refused", "error", "error after", "no answer", "late", "half", "lie", "crash", "hang")


class Request:
    """A request inside an engine, of the supervisor process ``owner``."""

    def __init__(self, owner: Process, first_after: float, length: float, on_head: Reply, on_end: Reply) -> None:
        self.owner, self.first_after, self.length = owner, first_after, length
        self.on_head, self.on_end = on_head, on_end
        self.headed = self.over = False
        self.stage = 0


class EngineProcess:
    """One run of a unit's engine, from exec to exit."""

    def __init__(self, unit: Unit, invocation: str) -> None:
        self.unit, self.world, self.invocation = unit, unit.world, invocation
        self.listening = False
        self.dead = False
        self.hung = False
        self.level = 0
        self.weights_on = self.cache_on = True
        self.whole = True
        self.memory_kept = False
        self.busy_until = 0.0
        self.requests: dict[Request, None] = {}
        #: Who waits for the answer to a call; an engine that dies closes their connections.
        self._unanswered: dict[Reply, None] = {}
        self._stalled: list[Callable[[], None]] = []
        #: Since when it is healthy: answering, awake, whole, with nothing injected. None: it is not.
        self.good_since: float | None = None

    @property
    def asleep(self) -> bool:
        return not (self.weights_on and self.cache_on)

    @property
    def blocked(self) -> bool:
        return self.hung or self.asleep

    def judge(self, *, fault: bool = False) -> None:
        """After any change: is it healthy, and since when?"""
        good = self.listening and not self.dead and not self.blocked and self.whole
        if not good:
            self.good_since = None
        elif self.good_since is None or fault:
            self.good_since = self.world.now

    # --- life ---

    def listen(self) -> None:
        if not self.dead:
            self.listening = True
            self.judge()
            self.unit.engine_ready(self)

    def die(self, code: int = 0) -> None:
        """The process is gone, whatever it was doing; every connection of it is closed."""
        if self.dead:
            return
        self.dead, self.listening = True, False
        self.judge()
        for request in list(self.requests):
            self._close(request)
        self._go_on()
        for reply in self._unanswered:
            reply("the connection was closed without an answer")
        self.unit.engine_gone(self, code)

    def hang(self, seconds: float | None) -> None:
        """Stop doing anything, for some time or for ever; the socket goes on accepting."""
        if self.dead or self.hung:
            return
        self.hung = True
        self.judge()
        if seconds is not None:
            self.world.later(seconds, self._unhang)

    def _unhang(self) -> None:
        self.hung = False
        self.judge()
        self._go_on()

    def _go_on(self) -> None:
        stalled, self._stalled = self._stalled, []
        for work in stalled:
            work()
        if not self.blocked:
            for request in list(self.requests):
                self._pump(request)

    # --- requests ---

    def take(self, request: Request) -> None:
        """A request arrived."""
        self.requests[request] = None
        self._pump(request)

    def drop(self, request: Request) -> None:
        """Its connection was cut by the other side; generation stops."""
        request.over = True
        self.requests.pop(request, None)

    def reset(self, request: Request) -> None:
        """The connection breaks for a reason of its own."""
        if not request.over:
            self._close(request)

    def _pump(self, request: Request) -> None:
        if self.blocked or request.over:
            return
        request.stage += 1
        stage = request.stage
        if not request.headed:
            self.world.later(request.first_after, self._first, request, stage)
        else:
            self.world.later(request.length, self._end, request, stage)

    def _first(self, request: Request, stage: int) -> None:
        if request.over or request.headed or stage != request.stage or self.dead or self.blocked:
            return
        self._answered(request)
        request.headed = True
        request.on_head("")
        self.world.later(request.length, self._end, request, stage)

    def _end(self, request: Request, stage: int) -> None:
        if request.over or stage != request.stage or self.dead or self.blocked:
            return
        self._answered(request)
        self.drop(request)
        request.on_end("")

    def _answered(self, request: Request) -> None:
        if not self.whole and request.owner.alive:
            self.world.fail("4", f"{GARBAGE}: {self.unit.name}")

    def _close(self, request: Request) -> None:
        self.drop(request)
        if request.headed:
            request.on_end("the connection was closed")
        else:
            request.on_head("the connection was closed without an answer")

    # --- control calls ---

    def call(self, call: Call, level: int, tags: tuple[str, ...], fault: str, takes: float, reply: Reply) -> None:
        """A control call arrived."""
        if self.dead or not self.listening:
            reply("connection refused")
            return
        if self.hung:
            self._stalled.append(lambda: self.call(call, level, tags, fault, takes, reply))
            return
        begin = max(self.world.now, self.busy_until)
        self.busy_until = begin + takes
        self._unanswered[reply] = None
        self.world.later(begin + takes - self.world.now, self._do, call, level, tags, fault, reply)

    def by_hand(self, call: Call, level: int, may: Callable[[], bool]) -> None:
        """Somebody's own call, in its turn; ``may`` is asked when it takes effect."""
        begin = max(self.world.now, self.busy_until)
        self.busy_until = begin + 0.5
        self.world.later(begin + 0.5 - self.world.now, self._do_by_hand, call, level, may)

    def _do_by_hand(self, call: Call, level: int, may: Callable[[], bool]) -> None:
        if self.listening and not self.hung and may():
            self._change(call, level, (), "")
            self.judge()
            self._go_on()

    def _do(self, call: Call, level: int, tags: tuple[str, ...], fault: str, reply: Reply) -> None:
        if self.dead:
            return  # who waited was told when it died
        self._unanswered.pop(reply, None)
        if self.hung:
            self._unanswered[reply] = None
            self._stalled.append(lambda: self._do(call, level, tags, fault, reply))
            return
        match fault:
            case "error":
                reply("500: CUDA error: out of memory")
                return
            case "crash":
                reply("the connection was closed without an answer")
                self.die(1)
                return
            case "hang":
                self.hang(self.world.choices.between(1.0, 600.0, f"{self.unit.name} hangs {self.world.now}"))
                self._unanswered[reply] = None
                self._stalled.append(lambda: self._do(call, level, tags, "", reply))
                return
        error = "" if fault == "lie" and call is not Call.RELOAD_WEIGHTS else self._change(call, level, tags, fault)
        self.judge(fault=bool(fault))
        if fault == "no answer":
            self._unanswered[reply] = None
            return
        reply("500: half done" if fault in ("error after", "half") else error)
        self._go_on()

    def _change(self, call: Call, level: int, tags: tuple[str, ...], fault: str) -> str:
        match call:
            case Call.SLEEP:
                if not self.asleep:
                    self.level, self.memory_kept = level, fault == "half"
                    self.weights_on = self.cache_on = False
                    self.whole = self.whole and level == 1
            case Call.WAKE_UP:
                if not tags or "weights" in tags:
                    self.weights_on = True
                if (not tags or "kv_cache" in tags) and fault != "half":
                    self.cache_on = True
                if not self.asleep:
                    self.level, self.memory_kept = 0, False
            case Call.RELOAD_WEIGHTS:
                if not self.weights_on:
                    return "500: cannot reload weights that are asleep"
                self.whole = fault != "half"
            case Call.RESET_PREFIX_CACHE:
                pass
        return ""

    # --- what must hold when a call of the supervisor's arrives ---

    def check_call(self, owner: Process, call: Call, level: int) -> None:
        """Invariants 2 and 6, as the engine sees them."""
        if self.dead or not self.listening or not owner.alive:
            return
        name = self.unit.name
        records = [record for each in self.unit.names if (record := self.world.disk.get(each)) is not None]
        if call is Call.SLEEP:
            if any(request.owner is owner for request in self.requests):
                self.world.fail("2", f"sleep reached {name} with requests of ours inside")
            if not any(self._is_intent_to_sleep(record, level) for record in records):
                self.world.fail("6", f"sleep {level} reached {name} with {records} on disk")
        elif not any(record.phase is Phase.WAKING for record in records):
            self.world.fail("6", f"{call} reached {name} with {records} on disk")

    def _is_intent_to_sleep(self, record: Record, level: int) -> bool:
        mine = record.invocation == self.invocation
        return record.phase is Phase.FALLING_ASLEEP and (record.level == level or not mine)
