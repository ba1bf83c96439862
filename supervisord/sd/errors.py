"""What systemd's refusals mean to a person."""

from __future__ import annotations

from supervisord.ports import UnitError

NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
UNIT_MASKED = "org.freedesktop.systemd1.UnitMasked"
DISCONNECTED = "org.freedesktop.DBus.Error.Disconnected"
TIMEOUT = "org.freedesktop.DBus.Error.Timeout"
#: Not systemd's: it reports a start that was refused for the start limit as a job that failed.
START_LIMIT_HIT = "io.github.vllmctl1.Error.StartLimitHit"

#: The bus or the manager is not there, at the moment at least.
NOT_THERE = (
    DISCONNECTED,
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.NoReply",
)


def unit_error(verb: str, unit: str, name: str, text: str) -> UnitError:
    """``UnitError`` for a ``verb`` ("start") that was refused with the D-Bus error ``name`` and systemd's ``text``."""
    text = text.rstrip(".")
    if name == NO_SUCH_UNIT:
        reason = "there is no such unit"
    elif name == UNIT_MASKED:
        reason = f"the unit is masked (`systemctl --user unmask {unit}` ends that)"
    elif name == START_LIMIT_HIT:
        reason = "it was started too often in a short time (its StartLimitBurst=); resetting its failure ends that"
    elif name in NOT_THERE:
        name, reason = DISCONNECTED, f"the service manager cannot be reached ({text})"
    else:
        reason = text or name
    return UnitError(unit, name, f"cannot {verb} {unit}: {reason}")
