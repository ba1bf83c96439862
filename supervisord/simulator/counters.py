"""Everything that tests may want to count, in one plain object behind ``GET /sim/state``."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    #: By ``METHOD path``.
    requests: Counter[str] = field(default_factory=Counter)
    #: Completed /sleep calls by level that really put the engine to sleep, and those that found it asleep.
    sleeps: Counter[int] = field(default_factory=Counter)
    noop_sleeps: int = 0
    #: /wake_up calls, by what they named (``all``, ``weights``, ``weights+kv_cache`` ...).
    wakes: Counter[str] = field(default_factory=Counter)
    reloads: int = 0
    prefix_resets: int = 0
    #: Requests ended by the engine (sleep, pause, /abort_requests, shutdown).
    aborted: int = 0
    #: Requests ended because the client left.
    disconnect_aborts: int = 0
    finished: int = 0
    garbage_answers: int = 0
    #: The control calls in order, the newest last: ``sleep?level=1&mode=wait``, ``wake_up``, ``reload_weights`` ...
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=256))
    #: The newest inference requests as they arrived (head, size and hash of the body): is a proxy transparent?
    seen: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=64))
