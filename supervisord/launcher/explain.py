"""Why a replica ended: for ``ExecStopPost=``, which gets the result from systemd (systemd.exec(5), $SERVICE_RESULT)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

#: A file with the engine's output, where it does not go to the journal.
LOG_VARIABLE = "VLLM_REPLICA_LOG"
_LINES, _TAIL, _JOURNAL_SECONDS = 200, 128 * 1024, 5.0

# A line that names what went wrong, and vLLM's own lines that only point to such a line.
_TELLING = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b|\berror:|\bfatal\b", re.IGNORECASE)
_POINTING = re.compile(r"root cause above|^\s*raise |^\s*File \"")
_PREFIX = "vllm-replica: "
#: What this program and the watcher said about an earlier or this end.
_OWN = re.compile(r"^vllm-replica: \S+: (?:engine|systemd|the launcher|not ready)")


def explanation(replica: str, env: Mapping[str, str], lines: Sequence[str]) -> str:
    """One sentence with the engine's own reason, or empty when it ended well. ``lines``: its output, oldest first."""
    result, code, status = (env.get(name, "") for name in ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS"))
    if result in ("", "success"):
        return ""
    how = f"was killed by SIG{status}" if code in ("killed", "dumped") else f"exited with status {status}"
    match result:
        case "exit-code" | "signal" if not code:
            what = "a command that its unit runs before the engine failed"  # an ExecStartPre= of somebody's drop-in
        case "exit-code" | "signal":
            what = f"engine {how}"
        case "core-dump":
            what = f"engine crashed with SIG{status}"
        case "protocol":
            what = f"engine {how} before it was ready"
        case "timeout":
            what = f"engine took too long to start or stop, and {how}"
        case "oom-kill":
            what = "engine was killed because the machine ran out of memory"
        case "watchdog":
            what = "engine gave no sign of life, and was killed"
        case _:
            what = f"systemd ended it: {result}"
    reason = telling_line(lines)
    if reason.startswith(_PREFIX):
        what, reason = "the launcher did not start the engine", reason.removeprefix(_PREFIX).strip()
    return f"{_PREFIX}{replica}: {what}{f': {reason}' if reason else ''}"


def telling_line(lines: Sequence[str]) -> str:
    """The last line that names a cause (the launcher's own first), else simply the last; empty when there is none."""
    said = [line.strip() for line in lines if line.strip() and not _OWN.match(line)]
    if said and said[-1].startswith(_PREFIX):
        return said[-1][:500]
    telling = [line for line in said if _TELLING.search(line) and not _POINTING.search(line)]
    return (telling or said or [""])[-1][:500]


def output_of(unit: str, env: Mapping[str, str], *, system: bool) -> list[str]:
    """The newest lines of ``unit``, from ``$VLLM_REPLICA_LOG`` or the journal; none when neither can be read."""
    if file := env.get(LOG_VARIABLE):
        try:
            with Path(file).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
                return log.read().decode(errors="replace").splitlines()[-_LINES:]
        except OSError:
            return []
    # The field, not --user-unit: that would add the manager's own lines about the unit.
    field = "_SYSTEMD_UNIT" if system else "_SYSTEMD_USER_UNIT"
    command = ["journalctl", f"{field}={unit}", f"--lines={_LINES}", "--output=cat", "--no-pager", "--quiet", "--all"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_JOURNAL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode(errors="replace").splitlines()
