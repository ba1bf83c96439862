"""The newest lines that a unit wrote: from the journal, or from the file that its StandardOutput= names."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: How much of a file's end is looked at, bytes, and how long journalctl may take, seconds.
_TAIL, _JOURNAL_LIMIT = 256 * 1024, 10.0
#: StandardOutput= as D-Bus tells it, where the output goes to a file. It does not tell which.
TO_A_FILE = ("append", "file", "truncate")


async def journal_lines(unit: str, count: int, *, system: bool = False) -> list[str]:
    """The newest ``count`` lines of ``unit`` in the journal; none where there is no journal, or it may not be read."""
    # --user would look in the user's own journal only, and a machine with a volatile journal has none.
    which = f"--unit={unit}" if system else f"--user-unit={unit}"
    command = ("journalctl", which, f"--lines={count}", "--output=cat", "--no-pager", "--quiet", "--all")
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=pipe, stderr=nothing)
    except OSError:
        return []
    try:
        async with asyncio.timeout(_JOURNAL_LIMIT):
            output, _ = await process.communicate()
    except TimeoutError:
        return []
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
    return output.decode(errors="replace").splitlines()[-count:]


def output_file(unit: str, files: Sequence[Path], env: Mapping[str, str]) -> Path | None:
    """The file that ``unit`` logs to, from its unit file and drop-ins in their order; None when that cannot be told.

    ``env`` is the service manager's: XDG_RUNTIME_DIR, HOME, XDG_STATE_HOME ...
    """
    setting = ""
    for file in files:
        section = ""
        for line in _logical_lines(file):
            if line.startswith("["):
                section = line
            key, equals, value = line.partition("=")
            if section == "[Service]" and equals and key.strip() == "StandardOutput":
                setting = value.strip()
    kind, _, path = setting.partition(":")
    if kind not in TO_A_FILE:
        return None
    expanded = expand(path, unit, env)
    return Path(expanded) if expanded is not None else None


def expand(text: str, unit: str, env: Mapping[str, str]) -> str | None:
    """``text`` with systemd's specifiers replaced (systemd.unit(5)); None when it has one that is not known here."""
    prefix, _, instance = unit.rpartition(".")[0].partition("@")
    home = env.get("HOME", "")
    known: dict[str, Callable[[], str]] = {
        "%": lambda: "%",
        "n": lambda: unit,
        "N": lambda: unit.rpartition(".")[0],
        "p": lambda: prefix,
        "P": lambda: _unescape(prefix),
        "i": lambda: instance,
        "I": lambda: _unescape(instance),
        "j": lambda: prefix.rpartition("-")[2],
        "h": lambda: home,
        "t": lambda: env.get("XDG_RUNTIME_DIR", ""),
        "S": lambda: env.get("XDG_STATE_HOME", f"{home}/.local/state"),
        "C": lambda: env.get("XDG_CACHE_HOME", f"{home}/.cache"),
        "E": lambda: env.get("XDG_CONFIG_HOME", f"{home}/.config"),
        "U": lambda: str(os.getuid()),
    }
    result, rest = "", text
    while rest:
        before, percent, rest = rest.partition("%")
        result += before
        if percent:
            if not rest or rest[0] not in known:
                return None
            result += known[rest[0]]()
            rest = rest[1:]
    return result


def file_lines(path: Path, count: int) -> list[str]:
    """The newest ``count`` lines of a file; none when it cannot be read. Blocks for as long as the file system does."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            text = file.read(_TAIL).decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    return (lines[1:] if size > _TAIL else lines)[-count:]


def _logical_lines(file: Path) -> list[str]:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return []
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and line[0] not in "#;"]


def _unescape(text: str) -> str:
    """systemd-escape's escaping undone."""
    raw, rest = b"", text.replace("-", "/")
    while rest:
        before, backslash, rest = rest.partition("\\x")
        raw += before.encode()
        if backslash:
            raw += bytes.fromhex(rest[:2])
            rest = rest[2:]
    return raw.decode(errors="replace")
