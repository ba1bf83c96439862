"""The last lines that a unit wrote, wherever it writes them."""

import os
from pathlib import Path

import pytest

from supervisord.sd.logs import expand, file_lines, journal_lines, output_file

ENV = {"HOME": "/home/me", "XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/state"}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_last_setting_of_unit_file_and_drop_ins_counts(tmp_path: Path) -> None:
    unit = write(tmp_path / "a.service", "[Service]\nStandardOutput=append:/var/log/one\n")
    drop_in = write(
        tmp_path / "b.conf", "[Service]\n# StandardOutput=null\nStandardOutput = \\\n  truncate:%h/%i log\n"
    )
    assert output_file("vllm@a.service", [unit], ENV) == Path("/var/log/one")
    assert output_file("vllm@a.service", [unit, drop_in], ENV) == Path("/home/me/a log")


def test_output_that_goes_to_no_file(tmp_path: Path) -> None:
    unit = write(tmp_path / "a.service", "[Unit]\nStandardOutput=append:/x\n[Service]\nStandardOutput=journal\n")
    assert output_file("a.service", [unit], ENV) is None
    assert output_file("a.service", [tmp_path / "missing"], ENV) is None


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("/plain", "/plain"),
        ("%t/%p/%i.log", "/run/user/7/vllm/a-b\\x2dc.log"),
        ("%I", "a/b-c"),
        ("%n|%N|%j", "vllm@a-b\\x2dc.service|vllm@a-b\\x2dc|vllm"),
        ("%S %E %C", "/state /home/me/.config /home/me/.cache"),
        ("100%%", "100%"),
        ("%U", str(os.getuid())),
        ("%Z", None),
        ("%", None),
    ],
)
def test_specifiers(text: str, expanded: str | None) -> None:
    assert expand(text, "vllm@a-b\\x2dc.service", ENV) == expanded


def test_the_end_of_a_file(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "".join(f"line {number}\n" for number in range(100_000)))
    assert file_lines(log, 2) == ["line 99998", "line 99999"]
    assert 2 < len(file_lines(log, 1_000_000)) < 100_000
    assert file_lines(log, 1_000_000)[0].startswith("line ")
    assert file_lines(write(tmp_path / "short", "one\ntwo"), 5) == ["one", "two"]
    (tmp_path / "odd").write_bytes(b"bad \xff byte\n")
    assert file_lines(tmp_path / "odd", 5) == ["bad � byte"]
    assert file_lines(tmp_path / "missing", 5) == []


def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = write(tmp_path / "journalctl", f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


async def test_the_journal_of_the_users_unit_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journalctl(tmp_path, monkeypatch, 'printf "%s\\n" "$@"')
    lines = await journal_lines("a.service", 99)
    assert {"--user-unit=a.service", "--lines=99", "--output=cat", "--no-pager"} <= set(lines)
    assert "--unit=a.service" in await journal_lines("a.service", 99, system=True)


async def test_a_journal_that_cannot_be_read_has_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journalctl(tmp_path, monkeypatch, "exit 1")
    assert await journal_lines("a.service", 5) == []
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert await journal_lines("a.service", 5) == []


async def test_a_journalctl_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journalctl(tmp_path, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr("supervisord.sd.logs._JOURNAL_LIMIT", 0.05)
    assert await journal_lines("a.service", 5) == []
