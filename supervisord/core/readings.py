"""What was read off the world: one look at a unit, one look at an engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class UnitStatus:
    """One reading of a systemd unit. A level, not an edge: the newest reading replaces the one before."""

    unit: str
    load_state: str  # loaded, not-found, masked, bad-setting, error
    active_state: str  # inactive, activating, active, reloading, deactivating, failed
    sub_state: str  # dead, start, running, auto-restart, stop-sigterm ...
    #: 32 hex digits; changes with every start. Empty when the unit never ran.
    invocation: str = ""
    #: ``success``, ``exit-code``, ``signal``, ``timeout``, ``oom-kill``, ``start-limit-hit`` ...
    result: str = "success"
    main_pid: int = 0
    exec_main_status: int = 0
    n_restarts: int = 0
    #: When its state last changed, microseconds since the boot: of two readings the one that is told later need not be
    #: the newer one. 0: not known.
    changed: int = 0
    #: The service's own STATUS= text.
    status_text: str = ""

    @property
    def between_runs(self) -> bool:
        """systemd is about to start it again by itself (``auto-restart-queued`` besides, from 254 on)."""
        return self.sub_state.startswith("auto-restart")


class EngineState(StrEnum):
    """What one probe of an engine found."""

    UNREACHABLE = "unreachable"  # refused: not listening (stopped or still loading)
    HUNG = "hung"  # connected, no answer in time
    BROKEN = "broken"  # answered, but health or is_sleeping is a 5xx
    AWAKE = "awake"
    ASLEEP = "asleep"
    WRONG_MODEL = "wrong_model"  # something else answers on this endpoint


@dataclass(frozen=True, slots=True)
class Probe:
    """One look at an engine. Looking never wakes it and never counts as activity."""

    state: EngineState
    detail: str = ""
    served_names: tuple[str, ...] = ()
    max_model_len: int | None = None
    #: Tokens that the KV cache holds; None: not asked, 0: not told.
    kv_tokens: int | None = None
    #: False when /is_sleeping is 404 (no dev mode): such an engine can only be stopped.
    can_sleep: bool = True
    simulated: bool = False
    #: Its LoRA adapters, which have names besides.
    adapters: tuple[str, ...] = ()
    #: Tokens that the engine has processed and generated since it began; only told where it is HUNG.
    progress: int | None = None
