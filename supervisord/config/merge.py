"""Reading TOML files and laying them over each other: later win, tables merge, every key remembers its file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from supervisord.config.problems import Path, Problem


@dataclass(slots=True)
class Merged:
    """One document out of many files."""

    document: dict[str, Any] = field(default_factory=dict)
    #: The file in which each key and table was said last (a table that merged: first).
    origins: dict[Path, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    #: Files that could not be read or are not TOML.
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: Path) -> str:
        """The file to name for ``path``: its own, else that of the nearest table around it, else the first file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.files[0] if self.files else ""


def read_all(files: Sequence[FilePath]) -> Merged:
    """Read and merge ``files`` in their order. Never raises; see ``problems``."""
    merged = Merged()
    for file in files:
        merged.files.append(str(file))
        try:
            document = _read(file)
        except FileNotFoundError:
            reason = (
                "cannot read: there is no such file ('make install' writes one to begin with; the Debian package has"
                " /usr/share/doc/vllm-supervisord/config.first.toml)"
            )
            merged.problems.append(Problem(str(file), "", "", reason))
        except OSError as error:
            merged.problems.append(Problem(str(file), "", "", f"cannot read: {error.strerror or error}"))
        except UnicodeDecodeError as error:
            merged.problems.append(Problem(str(file), "", "", f"cannot read: not UTF-8 at byte {error.start}"))
        except RecursionError:
            merged.problems.append(Problem(str(file), "", "", "cannot parse: nested too deeply"))
        except ValueError as error:  # TOMLDecodeError says line and column itself
            merged.problems.append(Problem(str(file), "", "", f"cannot parse: {error}"))
        else:
            _lay_over(merged, merged.document, document, (), str(file))
    return merged


def _read(file: FilePath) -> dict[str, Any]:
    # Some editors begin files with a byte order mark, which tomllib refuses; read_text makes one line end of both.
    return tomllib.loads(file.read_text(encoding="utf-8-sig"))


def _lay_over(merged: Merged, below: dict[str, Any], above: Mapping[str, Any], path: Path, file: str) -> None:
    for name, value in above.items():
        here = (*path, name)
        known = below.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            _lay_over(merged, known, value, here, file)
            continue
        if name in below:
            for stale in [p for p in merged.origins if p[: len(here)] == here]:
                del merged.origins[stale]
        merged.origins[here] = file
        if isinstance(value, dict):
            below[name] = {}
            _lay_over(merged, below[name], value, here, file)
        else:
            below[name] = value
