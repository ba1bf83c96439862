"""vllmctl logs: which units, and from where; with recorded journalctl and systemctl on the PATH."""

from __future__ import annotations

import json
import os

import pytest

#: Seconds for what takes milliseconds.
PATIENCE = 20.0

CONFIG = """\
[models.chat]
aliases = ["gpt"]
[models.chat.serve]
engine = "simulator"
model = "m"
[models.chat.replicas.chat-a]
[models.chat.replicas.chat-b]
"""


class Machine:
    """Programs that answer as recorded, and what they were asked."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = folder / "asked"
        self.units = {}
        self.journal("")

    def program(self, name, body):
        file = self.folder / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.asked}\n{body}\n')
        file.chmod(0o755)

    def journal(self, complaint):
        self.program("journalctl", f'case "$*" in *"-n 0"*) echo "{complaint}" >&2;; *) echo "a journal line";; esac')

    def unit(self, unit, output="journal", file="", pid=0):
        self.units[unit] = (output, file, pid)
        shown = "".join(
            f'*" {name}"*) printf "Id={name}\\nStandardOutput={out}\\nMainPID={pid}\\n\\n";;\n'
            for name, (out, _, pid) in self.units.items()
        )
        cats = "".join(
            f'*"cat {name}"*) printf "[Service]\\nStandardOutput={out}:{text}\\n";;\n'
            for name, (out, text, _) in self.units.items()
        )
        # systemctl show answers for each unit it was given, in that order.
        self.program(
            "systemctl",
            f'case "$*" in {cats} *" show "*) for unit in "$@"; do case " $unit" in {shown} esac; done;; esac',
        )

    def commands(self, program):
        lines = self.asked.read_text().splitlines() if self.asked.exists() else []
        return [line for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def machine(tmp_path, vllmctl):
    folder = tmp_path / "bin"
    folder.mkdir()
    vllmctl.env["PATH"] = f"{folder}:{vllmctl.env['PATH']}"
    return Machine(folder)


def run(vllmctl, *argv):
    process = vllmctl.process("logs", *argv)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_a_models_logs_are_those_of_its_replicas_units(vllmctl, supervisor, machine):
    machine.unit("vllm@chat-a.service")
    machine.unit("vllm@chat-b.service")
    assert run(vllmctl, "gpt", "-n", "7") == (0, "a journal line\n", "")
    assert machine.commands("journalctl")[-1] == (
        "journalctl --user-unit=vllm@chat-a.service --user-unit=vllm@chat-b.service --lines=7 --no-pager"
    )


def test_without_a_target_the_daemons_log_is_shown_with_all_others(vllmctl, supervisor, machine):
    code, _, _ = run(vllmctl, "--follow")
    assert code == 0
    assert machine.commands("journalctl")[-1] == (
        "journalctl --user-unit=vllm-supervisord.service --user-unit=vllm@chat-a.service "
        "--user-unit=vllm@chat-b.service --user-unit=vllm@embed.service --user-unit=vllm@ocr-1.service "
        "--lines=100 --follow --no-pager"
    )


def test_json_is_the_journals_own(vllmctl, supervisor, machine):
    assert run(vllmctl, "chat-a", "--json")[0] == 0
    assert "--output=json" in machine.commands("journalctl")[-1]


def test_system_units_are_asked_of_the_system(vllmctl, supervisor, machine):
    vllmctl.env["DBUS_SYSTEM_BUS_ADDRESS"] = vllmctl.env["DBUS_SESSION_BUS_ADDRESS"]
    assert run(vllmctl, "chat-a", "--system")[0] == 0
    assert "--unit=vllm@chat-a.service" in machine.commands("journalctl")[-1]
    assert "--user" not in "".join(machine.commands("systemctl"))


def test_an_unknown_target_exits_4(vllmctl, supervisor, machine):
    code, _, err = run(vllmctl, "nix")
    assert code == 4
    assert "no model or replica named 'nix'" in err


def test_without_the_daemon_the_units_are_those_of_the_configuration(vllmctl, bus, machine, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    assert run(vllmctl, "chat-b", "--config", str(file))[0] == 0
    assert "--user-unit=vllm@chat-b.service" in machine.commands("journalctl")[-1]
    assert run(vllmctl, "nix", "--config", str(file))[0] == 4


def test_without_the_daemon_a_word_means_what_it_means_with_it(vllmctl, bus, machine, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(CONFIG + "[models.other.serve]\nengine = 'simulator'\nmodel = 'm'\n[models.other.replicas.chat]\n")
    assert run(vllmctl, "replica:chat", "--config", str(file))[0] == 0
    assert machine.commands("journalctl")[-1].startswith("journalctl --user-unit=vllm@chat.service --lines")
    code, _, err = run(vllmctl, "chat", "--config", str(file))
    assert code == 2
    assert "say model:chat or replica:chat" in err


def test_without_the_daemon_and_a_valid_configuration_the_daemons_own_log_is_still_shown(vllmctl, bus, machine):
    assert run(vllmctl)[0] == 0
    assert machine.commands("journalctl")[-1].startswith("journalctl --user-unit=vllm-supervisord.service --lines")
    code, _, err = run(vllmctl, "chat")
    assert code == 3
    assert "the units are not known" in err


@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        ("No journal files were found.", "there is no journal on this machine"),
        ("No journal files were opened due to insufficient permissions.", "may not read the journal"),
    ],
)
def test_where_there_is_no_journal_it_says_so(vllmctl, supervisor, machine, complaint, said):
    machine.journal(complaint)
    code, out, err = run(vllmctl, "chat")
    assert (code, out) == (1, "")
    assert said in err


def test_a_unit_that_appends_to_a_file_is_shown_from_there_its_specifiers_replaced(
    vllmctl, supervisor, machine, tmp_path
):
    machine.journal("No journal files were found.")
    (tmp_path / "home/chat-a.log").write_text("".join(f"line {number}\n" for number in range(200)))
    machine.unit("vllm@chat-a.service", "append", "%%h/%%i.log")
    code, out, err = run(vllmctl, "chat-a", "-n", "2")
    assert (code, out, err) == (0, "line 198\nline 199\n", "")
    assert len(run(vllmctl, "chat-a", "-n", "all")[1].splitlines()) == 200


def test_of_files_json_is_an_object_a_line(vllmctl, supervisor, machine, tmp_path):
    file = tmp_path / "a.log"
    file.write_text('one\n"two"\n')
    machine.unit("vllm@chat-a.service", "append", str(file))
    code, out, _ = run(vllmctl, "chat-a", "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"_SYSTEMD_USER_UNIT": "vllm@chat-a.service", "MESSAGE": "one"},
        {"_SYSTEMD_USER_UNIT": "vllm@chat-a.service", "MESSAGE": '"two"'},
    ]


def test_following_a_file_shows_what_is_appended(vllmctl, supervisor, machine, tmp_path):
    file = tmp_path / "a.log"
    file.write_text("one\n")
    machine.unit("vllm@chat-a.service", "append", str(file))
    process = vllmctl.process("logs", "-f", "chat-a")
    assert process.stdout.readline() == "one\n"
    with file.open("a") as more:
        more.write("two\n")
    assert process.stdout.readline() == "two\n"
    process.terminate()
    process.communicate(timeout=PATIENCE)


def test_a_journal_and_a_file_together_are_both_shown(vllmctl, supervisor, machine, tmp_path):
    (tmp_path / "a.log").write_text("a file's line\n")
    machine.unit("vllm@chat-a.service", "append", str(tmp_path / "a.log"))
    machine.unit("vllm@chat-b.service")
    code, out, _ = run(vllmctl, "chat")
    assert code == 0
    assert sorted(out.splitlines()) == ["a file's line", "a journal line"]


def test_a_unit_that_throws_its_output_away_is_told(vllmctl, supervisor, machine):
    machine.unit("vllm@chat-a.service", "null")
    code, _, err = run(vllmctl, "chat-a")
    assert code == 1
    assert "vllm@chat-a.service: throws its output away" in err


def test_without_a_session_the_service_manager_is_looked_for_where_logind_has_it(vllmctl, supervisor, machine):
    machine.unit("vllm@chat-a.service")
    with (machine.folder / "systemctl").open("a") as program:
        program.write(f'echo "told $XDG_RUNTIME_DIR" >> {machine.asked}\n')
    for given, told in ((None, f"/run/user/{os.getuid()}"), ("", f"/run/user/{os.getuid()}"), ("/x", "/x")):
        vllmctl.env.pop("XDG_RUNTIME_DIR", None)
        if given is not None:
            vllmctl.env["XDG_RUNTIME_DIR"] = given
        assert run(vllmctl, "chat-a") == (0, "a journal line\n", "")
        assert machine.commands("told")[-1] == f"told {told}"


def test_where_the_service_manager_cannot_be_asked_it_says_what_is_not_shown(vllmctl, supervisor, machine):
    machine.program("systemctl", "echo Failed to connect to bus: No medium found >&2; exit 1")
    code, out, err = run(vllmctl, "chat-a")
    assert (code, out) == (0, "a journal line\n")
    assert err == (
        "vllmctl: vllm@chat-a.service: cannot ask the service manager where they log to, so what is not in the journal "
        f"is not shown (is XDG_RUNTIME_DIR that of their user, as /run/user/{os.getuid()} is?).\n"
    )
