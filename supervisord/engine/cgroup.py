"""Which processes a unit has: read from the control group, so that no child escapes the count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
#: Where cgroup v2 is mounted: everywhere, or beside v1 on hosts of the older, hybrid layout.
MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def unit_group(unit: str, main_pid: int, proc: Path = PROC) -> str | None:
    """The control group of ``unit``, as its ControlGroup= has it, found from its main process; None when it has none.

    A main process may sit below its unit's group (podman splits a container's in two): the path is cut at the unit.
    """
    if main_pid <= 0:
        return None
    try:
        lines = (proc / str(main_pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            parts = PurePosixPath(line.removeprefix("0::")).parts
            if unit in parts:
                return str(PurePosixPath(*parts[: parts.index(unit) + 1]))
    return None


def processes(group: str | None, mounts: tuple[Path, ...] = MOUNTS) -> frozenset[int]:
    """Every process in ``group`` and below it; none when there is no group, and never those of the root group."""
    pids: set[int] = set()
    if group is None or not group.strip("/"):
        return frozenset()
    for mount in mounts:
        root = mount / group.lstrip("/")
        for directory in (root, *_below(root)):
            with suppress(OSError):  # gone meanwhile, or a threaded group, which lists none
                pids.update(int(pid) for pid in (directory / "cgroup.procs").read_text().split())
        if pids:
            break
    return frozenset(pids)


def _below(root: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                yield entry
                yield from _below(entry)
