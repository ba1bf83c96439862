"""The man page and the completions tell what the parser takes, and work."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord import __version__
from supervisord.cli.parser import build_parser

PACKAGING = Path(__file__).parents[2] / "packaging"
MAN = PACKAGING / "man/vllmctl.1"
COMPLETIONS = [PACKAGING / "completions" / name for name in ("vllmctl", "_vllmctl", "vllmctl.fish")]


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and subcommand of ``parser`` with its own parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield name, sub
                yield from ((f"{name} {inner}", each) for inner, each in commands(sub))


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def every_option() -> set[str]:
    return set().union(options(build_parser()), *(options(sub) for _, sub in commands(build_parser())))


def test_the_man_page_renders_without_a_warning():
    ended = subprocess.run(["man", "--warnings", "-l", str(MAN)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_man_page_has_every_command_and_option_and_no_other():
    text = re.sub(r"\\f.", "", MAN.read_text()).replace(r"\-", "-")
    for name, sub in commands(build_parser()):
        if any(isinstance(action, argparse._SubParsersAction) for action in sub._actions):
            continue
        assert re.search(rf"^(\.B )?{name}( |$)", text, re.MULTILINE), f"the man page does not describe {name}"
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert told - {"--user"} == {option for option in every_option() if option.startswith("--")}


def test_the_man_page_is_of_this_version():
    assert f'"vllm-supervisord {__version__}"' in MAN.read_text().replace(r"\-", "-")


def test_help_names_every_command_and_every_command_has_help(capsys):
    for name, _ in commands(build_parser()):
        with pytest.raises(SystemExit) as exited:
            build_parser().parse_args([*name.split(), "--help"])
        assert exited.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: vllmctl {name} ")
        assert all(len(line) <= 90 for line in shown.splitlines())


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--version"])
    assert capsys.readouterr().out == f"vllmctl {__version__}\n"


@pytest.mark.parametrize("file", COMPLETIONS, ids=lambda file: file.name)
def test_each_completion_has_every_command_and_option(file):
    text = file.read_text()
    for name, _ in commands(build_parser()):
        assert re.search(rf"\b{name.split()[-1]}\b", text), f"{file.name} lacks {name}"
    for option in sorted(every_option()):
        spelled = (
            {option} if file.suffix != ".fish" else {f"-l {option[2:]}" if option[1] == "-" else f"-s {option[1:]}"}
        )
        if file.name == "vllmctl" and len(option) == 2:
            continue  # the long one is offered
        assert any(each in text for each in spelled), f"{file.name} lacks {option}"


def complete_in_bash(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words``, with a vllmctl whose list is known."""
    program = folder / "vllmctl"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "list --names" ] && printf "chat\\nchat-a\\nembed\\n"\n')
    program.chmod(0o755)
    script = f"""
        source {COMPLETIONS[0]}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
        COMP_CWORD={len(words) - 1}
        _vllmctl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    ended = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["vllmctl", "st"], ["status"]),
        (["vllmctl", "--json", "dra"], ["drain"]),
        (["vllmctl", "--timeout", "5", "wak"], ["wake"]),
        (["vllmctl", "wake", ""], ["chat", "chat-a", "embed"]),
        (["vllmctl", "wake", "chat"], ["chat", "chat-a"]),
        (["vllmctl", "wake", "chat", "em"], ["embed"]),
        (["vllmctl", "down", "replica", ":", "chat-"], ["chat-a"]),
        (["vllmctl", "sleep", "--le"], ["--level"]),
        (["vllmctl", "sleep", "--level", ""], ["1", "2"]),
        (["vllmctl", "sleep", "--level", "2", "e"], ["embed"]),
        (["vllmctl", "list", "--n"], ["--names", "--no-color"]),
        (["vllmctl", "config", ""], ["check", "show", "schema", "path"]),
        (["vllmctl", "config", "check", "--co"], ["--config"]),
        (["vllmctl", "--timeout", ""], []),
    ],
)
def test_bash_completes_commands_options_and_live_names(tmp_path, words, offered):
    assert complete_in_bash(tmp_path, *words) == offered


@pytest.mark.parametrize(("shell", "file"), [("zsh", COMPLETIONS[1]), ("fish", COMPLETIONS[2])])
def test_the_other_shells_can_read_their_completion(shell, file):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    ended = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
