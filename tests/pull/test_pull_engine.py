"""Finding the Python that an engine runs in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from supervisord.pull.engine import NoPython, python_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``bin`` with a Python, and ``path`` with nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "path").mkdir()
    (tmp_path / "bin/python3.12").symlink_to(sys.executable)
    return tmp_path


def program(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


def env(*folders: Path) -> dict[str, str]:
    return {"PATH": ":".join(str(folder) for folder in folders)}


@pytest.mark.parametrize(
    "first",
    [
        "#!{bin}/python3.12\n",
        "#!{bin}/python3.12 -sE\n",
        "#!/usr/bin/env python3.12\n",
        "#!/usr/bin/env -S python3.12 -s\n",
        "#!/bin/sh\n'''exec' \"{bin}/python3.12\" \"$0\" \"$@\"\n' '''\n",
        "#!/bin/sh\n'''exec' {bin}/python3.12 \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_installed_script_names_its_python(folder, first):
    program(folder / "path/vllm", first.format(bin=folder / "bin") + "import vllm\n")
    found = python_of(("vllm", "serve"), env(folder / "path", folder / "bin"))
    assert found == str(folder / "bin/python3.12")


def test_link_to_a_program_of_an_environment_leads_to_the_python_beside_it(folder):
    program(folder / "bin/vllm", "\x7fELF")
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "path/vllm").symlink_to(folder / "bin/vllm")
    assert python_of(("vllm", "serve"), env(folder / "path")) == str(folder / "bin/python")


def test_python_itself_and_wrappers_before_it_are_understood(folder):
    python = str(folder / "bin/python3.12")
    assert python_of((python, "-m", "vllm.entrypoints.openai.api_server"), {}) == python
    program(folder / "bin/vllm", f"#!{python}\n")
    assert python_of(("numactl", "-N", "0", str(folder / "bin/vllm"), "serve"), {}) == python


def test_command_in_ones_home_is_found_there(folder):
    program(folder / "bin/vllm", f"#!{folder}/bin/python3.12\n")
    assert python_of(("~/bin/vllm", "serve"), {"HOME": str(folder)}) == str(folder / "bin/python3.12")


def test_program_that_is_not_there_is_named_with_the_path(folder):
    with pytest.raises(NoPython, match=rf"there is no program vllm in PATH={folder}/path; give its full path"):
        python_of(("vllm", "serve"), env(folder / "path"))


def test_program_without_a_python_is_told(folder):
    wrapper = program(folder / "path/start", "#!/bin/sh\nexec whatever\n")
    with pytest.raises(NoPython, match="does not say which Python"):
        python_of((str(wrapper),), env(folder / "path"))
