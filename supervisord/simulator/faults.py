"""Faults on demand: what can go wrong, when, and how often. Pure book-keeping; the places that misbehave ask here."""

from __future__ import annotations

from dataclasses import dataclass

#: Every fault, and what it does. ``GET /sim/faults`` lists them.
KNOWN: dict[str, str] = {
    "die": "the engine core dies: streams get an error event and [DONE], the process exits 0. ARG: a moment",
    "crash": "the process kills itself with SIGKILL. ARG: a moment",
    "hang": "the engine core stops answering while /health says 200; disarm it to go on. ARG: a moment",
    "refuse": "the listener closes for ARG seconds (0: until disarmed); connections are refused",
    "lie-health": "/health says 200 although the engine is dead, and the process stays",
    "lie-sleep": "/sleep says 200 but nothing happens; ARG memory: it is asleep, and no memory is freed",
    "garbage": "answers are garbage now (after a level-2 wake without reload they always are)",
    "reset-mid-stream": "TCP reset after ARG chunks of a stream (0: before the status line)",
    "slow-headers": "inference answers start ARG seconds late",
    "slow-looks": "/is_sleeping answers ARG seconds late, as between the long steps of a busy engine core",
    "sleep-fails": "/sleep says 500",
    "wake-fails": "/wake_up says 500 (CUDA cumem allocator). ARG: only for this tag",
    "reload-fails": "reload_weights says 500",
    "start-fails": "exit 1 instead of listening. ARG: a file with a number: that many starts fail, counted down in it",
    "500": "inference says 500",
    "503": "inference says 503. ARG: Retry-After",
    "429": "inference says 429. ARG: Retry-After",
    "ignore-sigterm": "SIGTERM does nothing. ARG loading: only until it listens",
}

#: The moments at which die, crash and hang can strike besides now (no ARG) and after N seconds (a number).
MOMENTS = ("request", "chunk:N", "sleep", "wake_up", "reload_weights", "reset_prefix_cache")
TIMED = ("die", "crash", "hang")


@dataclass(slots=True)
class Fault:
    """An armed fault. ``left``: how many more times it strikes; None: always."""

    name: str
    arg: str
    left: int | None


class UnknownFault(ValueError):
    """There is no fault of that name."""


class Faults:
    """What is armed. At most one fault per name: arming again replaces."""

    def __init__(self) -> None:
        self._armed: dict[str, Fault] = {}

    def arm(self, name: str, arg: str = "", count: int | None = None) -> Fault | None:
        """``count`` None: until disarmed; 0: disarm (returns None). Raises ``UnknownFault``."""
        if name not in KNOWN:
            raise UnknownFault(f"cannot arm fault {name!r}: known faults are {', '.join(sorted(KNOWN))}")
        if count is not None and count <= 0:
            self._armed.pop(name, None)
            return None
        fault = self._armed[name] = Fault(name, arg, count)
        return fault

    def armed(self, name: str) -> Fault | None:
        """Look without striking."""
        return self._armed.get(name)

    def take(self, name: str) -> Fault | None:
        """Strike once: the fault if it is armed, counted down."""
        fault = self._armed.get(name)
        if fault is not None and fault.left is not None:
            fault.left -= 1
            if fault.left <= 0:
                del self._armed[name]
        return fault

    def take_at(self, moment: str) -> Fault | None:
        """Strike with whichever of die, crash, hang waits for ``moment``."""
        for name in TIMED:
            fault = self._armed.get(name)
            if fault is not None and fault.arg == moment:
                return self.take(name)
        return None

    def listing(self) -> list[dict[str, object]]:
        return [{"name": f.name, "arg": f.arg, "left": f.left} for f in self._armed.values()]


def parse(text: str) -> tuple[str, str, int | None]:
    """``NAME[=ARG][*COUNT]`` of the command line; raises ValueError."""
    head, star, count = text.rpartition("*")
    if not star:
        head, count = text, ""
    name, _, arg = head.partition("=")
    if name not in KNOWN:
        raise UnknownFault(f"unknown fault {name!r}, known are {', '.join(sorted(KNOWN))}")
    return name, arg, int(count) if count else None
