"""Which Python an engine runs in: the one whose packages it has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Programs whose files are not those of this machine.
CONTAINERS = frozenset({"podman", "docker", "nerdctl", "apptainer", "singularity", "toolbox", "distrobox"})
_PYTHON = re.compile(r"python[0-9.]*")


class NoPython(Exception):
    """It cannot be told; the text says why."""


def python_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The path of the interpreter behind ``command`` (``vllm serve``, ``python -m ...``, or a wrapper around one).

    A ``vllm`` that an installer wrote names its interpreter in its first line.
    """
    path, home = env.get("PATH", "/usr/local/bin:/usr/bin:/bin"), env.get("HOME", "")
    command = [str(Path(home, word[2:])) if word.startswith("~/") else word for word in command]
    word = next((each for each in command if _is(each, "vllm") or _PYTHON.fullmatch(Path(each).name)), command[0])
    program = shutil.which(word, path=path)
    if program is None:
        advice = "" if "/" in word else f'; give its full path in serve: command = "/.../{word} serve"'
        raise NoPython(f"there is no program {word} in PATH={path}{advice}")
    if _PYTHON.fullmatch(Path(program).name):
        return program
    named = _interpreter(Path(program))
    found = shutil.which(named, path=path) if named else None
    if found is None:
        beside = (Path(program).parent, Path(program).resolve().parent)
        found = next(
            (each for folder in beside for name in ("python3", "python") if (each := _at(folder / name))), None
        )
    if found is None:
        raise NoPython(f"{program} does not say which Python it runs in (it is no script of a Python environment)")
    return found


def _is(word: str, name: str) -> bool:
    return Path(word).name == name


def _at(file: Path) -> str | None:
    return shutil.which(str(file))


def _interpreter(script: Path) -> str:
    """The Python of the first line, or of the second: where a path is too long for the first, installers write
    ``#!/bin/sh`` and then ``'''exec' /the/path "$0" "$@"``."""
    try:
        with script.open("rb") as file:
            lines = file.read(4096).decode(errors="replace").splitlines()[:2]
    except OSError as error:
        raise NoPython(f"cannot read {script}: {error.strerror}") from error
    if not lines or not lines[0].startswith("#!"):
        return ""
    words = lines[0][2:].split()
    if words and _is(words[0], "env"):
        words = [word for word in words[1:] if not word.startswith("-")]
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        return words[0]
    if len(lines) > 1 and (found := re.match(r"""'''exec'\s+(?:"([^"]+)"|(\S+))""", lines[1])):
        return found[1] or found[2]
    return ""
