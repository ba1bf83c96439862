"""A unit's processes are those of its control group and of every group below it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.engine.cgroup import MOUNTS, processes, unit_group

USER = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    ("unit", "text", "group"),
    [
        ("vllm@a.service", f"0::{USER}/vllm.slice/vllm@a.service\n", f"{USER}/vllm.slice/vllm@a.service"),
        # A hybrid host lists v1's hierarchies too; a Quadlet's main process sits one group deeper.
        (
            "m.service",
            f"9:memory:/m.service\n1:name=systemd:{USER}/m.service\n0::{USER}/m.service/runtime\n",
            f"{USER}/m.service",
        ),
        ("b.service", f"0::{USER}/a.service\n", None),
        ("a.service", "0::/\n", None),
        ("a.service", "", None),
    ],
)
def test_the_units_group_is_found_from_its_main_process(
    tmp_path: Path, unit: str, text: str, group: str | None
) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77/cgroup").write_text(text)
    assert unit_group(unit, 77, tmp_path) == group


def test_a_unit_without_a_main_process_has_no_group(tmp_path: Path) -> None:
    assert unit_group("a.service", 0) is None
    assert unit_group("a.service", 77, tmp_path) is None


def test_processes_below_the_group_are_counted_too(tmp_path: Path) -> None:
    payload = tmp_path / "unified/user.slice/a.service/libpod-payload-1"
    payload.mkdir(parents=True)
    (payload.parent / "cgroup.procs").write_text("10\n")
    (payload / "cgroup.procs").write_text("11\n12\n")
    mounts = (tmp_path / "pure", tmp_path / "unified")
    assert processes("/user.slice/a.service", mounts) == {10, 11, 12}
    assert processes("/user.slice/b.service", mounts) == frozenset()


@pytest.mark.parametrize("group", [None, "", "/"])
def test_no_group_is_not_the_whole_machine(group: str | None) -> None:
    assert processes(group) == frozenset()


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this test's own."""
    mount = next((mount for mount in reversed(MOUNTS) if (mount / "cgroup.controllers").exists()), None)
    path = (mount or Path("/nonexistent")) / f"supervisord-test-{os.getpid()}.service"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error.strerror}")
    yield path
    for directory in (path / "below", path):
        directory.rmdir()


def test_a_real_groups_processes_are_found_with_their_children(group: Path) -> None:
    (group / "below").mkdir()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        (group / "below/cgroup.procs").write_text(str(child.pid))
        found = unit_group(group.name, child.pid)
        assert found is not None
        assert found.endswith(group.name)
        assert processes(found) == {child.pid}
    finally:
        child.communicate()
