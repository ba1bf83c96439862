"""The process of a pull, and the engine's Python that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisord.pull.job import Repository, Weights
from supervisord.pull.main import Tool, pull_weights


def test_python_that_is_killed_is_told_with_the_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nkill -KILL $$\n")
    python.chmod(0o755)
    assert pull_weights(Weights((Repository("org/chat", "model"),), (str(python),)), Tool(), {}) != 0
    assert capsys.readouterr().err == f"the engine's Python, {python}, was killed by SIGKILL\n"


def test_python_that_ends_before_it_has_read_its_job_is_its_own_failure(tmp_path: Path):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    python.chmod(0o755)
    more_than_a_pipe_holds = tuple(f"{number}.bin" for number in range(20_000))
    repository = Repository("org/chat", "model", ignore=more_than_a_pipe_holds)
    assert pull_weights(Weights((repository,), (str(python),)), Tool(), {}) == 3
