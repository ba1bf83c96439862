"""Finding the files, and from them to one ``Config`` or all mistakes at once."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

from supervisord.config.assemble import Assembler
from supervisord.config.check import read
from supervisord.config.merge import read_all
from supervisord.config.problems import ConfigError, Problem
from supervisord.core.spec import Config

FOLDER = "vllm-supervisord"
MAIN_FILE = "config.toml"
DROP_INS = "config.d"


def load(
    files: Sequence[Path] | None = None,
    *,
    runtime_dir: Path,
    env: Mapping[str, str] | None = None,
    system: bool = False,
) -> Config:
    """Read and check the configuration.

    ``files``: the main file and what is laid over it, in this order; None: ``default_files(env, system)``.
    ``runtime_dir``: where bundled replicas have their sockets, see ``runtime_directory``.
    Raises ``ConfigError`` with every mistake of every file.
    """
    if files is None:
        files = default_files(os.environ if env is None else env, system=system)
    merged = read_all(files)
    values, problems = read(merged)
    problems = [*merged.problems, *problems]
    assembler = Assembler(merged, runtime_dir)
    config = assembler.config(values)
    if not merged.problems:
        problems += assembler.problems
    if problems:
        order = {file: index for index, file in enumerate(merged.files)}
        raise ConfigError(sorted(problems, key=lambda problem: order.get(problem.file, -1)))
    return config


def default_files(env: Mapping[str, str], system: bool = False) -> list[Path]:
    """``config.toml`` (there or not) and the drop-ins beside it: the user's, or with ``system`` those in /etc."""
    if system:
        return files_beside(Path("/etc") / FOLDER / MAIN_FILE)
    # A relative XDG_CONFIG_HOME is to be ignored, says the XDG base directory specification.
    home = Path(env.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    given = env.get("XDG_CONFIG_HOME", "")
    base = Path(given) if Path(given).is_absolute() else home / ".config"
    return files_beside(base / FOLDER / MAIN_FILE)


def files_beside(main: Path) -> list[Path]:
    """``main`` and the ``config.d/*.toml`` beside it in the order of their names.

    Raises ``ConfigError`` if the folder is there but cannot be read.
    """
    folder = main.parent / DROP_INS
    try:
        names = sorted(file.name for file in folder.iterdir())
    except FileNotFoundError:
        return [main]
    except OSError as error:
        raise ConfigError([Problem(str(folder), "", "", f"cannot read: {error.strerror or error}")]) from None
    # Hidden files are editors' leftovers.
    return [main, *(folder / name for name in names if name.endswith(".toml") and not name.startswith("."))]


def runtime_directory(env: Mapping[str, str], system: bool = False) -> Path:
    """The folder under which systemd makes ``RuntimeDirectory=``: ``$XDG_RUNTIME_DIR``, with ``system`` /run."""
    if system:
        return Path("/run")
    return Path(env.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
