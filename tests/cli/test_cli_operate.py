"""What vllmctl asks of the supervisor, what it says meanwhile, and how it exits."""

from __future__ import annotations

import dataclasses
import io
import json
import signal

import pytest

from supervisord.control import ControlError, ErrorCode, Verb
from supervisord.core.states import Life

#: Seconds for what takes milliseconds.
PATIENCE = 20.0


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["up", "chat"], ("model", "chat", Verb.START, 0)),
        (["down", "gpt"], ("model", "chat", Verb.STOP, 0)),
        (["sleep", "chat-a"], ("replica", "chat-a", Verb.SLEEP, 1)),
        (["sleep", "chat", "--level", "2"], ("model", "chat", Verb.SLEEP, 2)),
        (["wake", "replica:embed"], ("replica", "embed", Verb.WAKE, 0)),
        (["wake", "model:embed"], ("model", "embed", Verb.WAKE, 0)),
        (["restart", "ocr-1"], ("replica", "ocr-1", Verb.RESTART, 0)),
        (["drain", "chat-b"], ("replica", "chat-b", Verb.DRAIN, 0)),
    ],
)
def test_each_command_asks_its_verb_of_its_target(vllmctl, control, argv, command):
    ended = vllmctl(*argv)
    assert ended.code == 0
    assert control.commands == [command]
    assert ended.out.startswith(f"{command[1]}: ")
    assert ended.err == ""


def test_success_is_told_in_one_sentence_a_target(vllmctl, control):
    assert vllmctl("down", "chat").out.startswith("chat: down, and held until 'vllmctl up', after 0.")
    assert vllmctl("sleep", "embed", "--level", "2").out.startswith("embed: asleep (level 2), after 0.")
    assert vllmctl("wake", "chat", "--quiet").out == ""


def test_drain_of_a_model_drains_each_of_its_replicas(vllmctl, control):
    assert vllmctl("drain", "chat", "chat-a").code == 0
    assert sorted(control.commands) == [("replica", "chat-a", Verb.DRAIN, 0), ("replica", "chat-b", Verb.DRAIN, 0)]


def test_all_means_every_model(vllmctl, control):
    assert vllmctl("sleep", "--all").code == 0
    assert sorted(name for _, name, _, _ in control.commands) == ["chat", "embed", "ocr"]


@pytest.mark.parametrize("argv", [["down"], ["sleep", "--all", "chat"], ["wake"]])
def test_no_target_and_both_targets_and_all_are_usage_errors_that_ask_nothing(vllmctl, control, argv):
    ended = vllmctl(*argv)
    assert ended.code == 2
    assert ended.err.startswith("vllmctl: ")
    assert control.commands == []


@pytest.mark.parametrize("argv", [["sleep", "chat", "--level", "3"], ["frobnicate"], [], ["status", "--timeout", "0"]])
def test_what_argparse_refuses_exits_2(vllmctl, argv, capsys):
    with pytest.raises(SystemExit) as exited:
        vllmctl(*argv)
    assert exited.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("command", ["sleep", "wake", "up", "down", "restart", "drain"])
def test_a_name_that_looks_like_an_option_is_a_name_behind_two_dashes(vllmctl, control, command):
    ended = vllmctl(command, "--", "-x")
    assert (ended.code, control.commands) == (4, [])
    assert "There is no model or replica named '-x'." in ended.err


def test_a_name_that_is_a_model_and_another_models_replica_is_refused(vllmctl, control, supervisor):
    supervisor.do(lambda: control.set_replica("chat-b", name="ocr"))
    ended = vllmctl("down", "ocr")
    assert ended.code == 2
    assert ended.err == "vllmctl: 'ocr' is a model and a replica: say model:ocr or replica:ocr.\n"
    assert control.commands == []


@pytest.mark.parametrize(
    ("code", "exit"),
    [
        (ErrorCode.NO_SUCH_MODEL, 4),
        (ErrorCode.SUPERSEDED, 5),
        (ErrorCode.HELD, 5),
        (ErrorCode.INVALID_ARGUMENT, 2),
        (ErrorCode.WAKE_FAILED, 1),
        (ErrorCode.START_FAILED, 1),
        (ErrorCode.UNIT_MISSING, 1),
        (ErrorCode.CONFIG_INVALID, 6),
        (ErrorCode.SHUTTING_DOWN, 3),
        (ErrorCode.INTERNAL, 1),
    ],
)
def test_each_error_of_the_supervisor_has_its_exit_code_and_keeps_its_words(vllmctl, control, code, exit):
    control.scripts["chat"] = ControlError(code, "cannot do it: the reason.")
    ended = vllmctl("wake", "chat")
    assert ended.code == exit
    assert ended.err == "vllmctl: chat: cannot do it: the reason.\n"
    answer = json.loads(vllmctl("wake", "chat", "--json").out)
    assert answer["results"][0]["error"] == {"code": code.value, "message": "cannot do it: the reason.", "exit": exit}


def test_one_target_that_fails_does_not_hide_the_one_that_is_done(vllmctl, control):
    control.scripts["embed"] = ControlError(ErrorCode.HELD, "embed is held.")
    ended = vllmctl("wake", "chat", "embed")
    assert ended.code == 5
    assert ended.out.startswith("chat: awake")
    assert ended.err == "vllmctl: embed is held.\n"


def test_a_target_that_a_reload_took_away_in_the_meantime_exits_4(vllmctl, control):
    async def reload():
        fleet = control.fleet
        control.become(dataclasses.replace(fleet, models=fleet.models[:1], replicas=fleet.replicas[:2]))

    control.scripts["chat"] = reload
    ended = vllmctl("wake", "chat", "embed")
    assert ended.code == 4
    assert ended.err == "vllmctl: embed: it is no longer configured.\n"


def test_targets_that_fail_differently_exit_1(vllmctl, control):
    control.scripts["embed"] = ControlError(ErrorCode.HELD, "held.")
    control.scripts["ocr"] = ControlError(ErrorCode.WAKE_FAILED, "failed.")
    assert vllmctl("wake", "--all").code == 1


def test_json_tells_how_each_target_ended(vllmctl, control):
    answer = json.loads(vllmctl("wake", "gpt", "embed", "--json").out)
    assert [(each["kind"], each["name"], each["done"], each["error"]) for each in answer["results"]] == [
        ("model", "chat", True, None),
        ("model", "embed", True, None),
    ]
    assert all(each["seconds"] >= 0 for each in answer["results"])


def waking(control, heard, name="chat-b"):
    """A wake in steps, each begun when the one before was shown."""

    async def wake():
        for step, shown in (("wake_up", "wake up"), ("reload_weights", "reload weights")):
            control.set_replica(name, state=Life.WAKING, step=step, sleep_level=0)
            await heard.until(shown)
        control.set_replica(name, state=Life.READY, step="")
        await heard.until(f"{name}: ready")

    return wake


def test_on_a_pipe_progress_is_one_line_a_change_on_stderr(vllmctl, control, hear):
    err = hear()
    control.scripts["chat"] = waking(control, err)
    ended = vllmctl("wake", "chat", err=err)
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert [line.partition(", after")[0] for line in lines] == [
        "chat-b: waking (wake up)",
        "chat-b: waking (reload weights)",
        "chat-b: ready",
    ]
    assert all(line.endswith(" s") for line in lines)
    assert ended.out.startswith("chat: awake, after")


def test_on_a_terminal_progress_is_one_line_that_is_rewritten_and_taken_away(vllmctl, control, hear):
    err = hear(terminal=True)
    control.scripts["chat"] = waking(control, err)
    text = vllmctl("wake", "chat", err=err).err
    assert "\n" not in text
    assert "chat-b: waking: reload weights, 12 min" in text
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_no_progress(vllmctl, control, hear, terminal):
    async def wake():
        control.set_replica("chat-b", state=Life.WAKING, step="wake_up")
        control.set_replica("chat-b", state=Life.READY, step="")

    control.scripts["chat"] = wake
    assert vllmctl("wake", "chat", "--quiet", err=hear(terminal=terminal)).err == ""


def test_progress_of_other_replicas_is_not_shown(vllmctl, control, hear):
    err = hear()

    async def wake():
        control.set_replica("embed", state=Life.WAKING, step="wake_up")
        control.set_replica("chat-b", state=Life.WAKING, step="wake_up")
        await err.until("chat-b: waking")

    control.scripts["chat"] = wake
    assert "embed" not in vllmctl("wake", "chat", err=err).err


def test_a_time_limit_ends_the_wait_and_says_that_the_work_goes_on(vllmctl, control):
    control.scripts["chat"] = control.wait_for_release
    ended = vllmctl("wake", "chat", "--timeout", "0.2")
    assert ended.code == 1
    assert ended.err == (
        "vllmctl: chat: not done after 0.2 s; the operation goes on in the daemon ('vllmctl status' shows it).\n"
    )
    answer = json.loads(vllmctl("wake", "chat", "--timeout", "0.2", "--json").out)
    assert answer["results"][0]["error"]["code"] == "StillWorking"


def test_the_daemon_vanishing_in_mid_call_exits_3_and_says_that_the_outcome_is_not_known(vllmctl, supervisor, control):
    control.scripts["chat"] = control.wait_for_release
    ended = vllmctl.behind("wake", "chat")
    assert control.begun.acquire(timeout=PATIENCE)
    supervisor.vanish()
    result = ended.result(PATIENCE)
    assert result.code == 3
    assert "went away before it answered" in result.err
    assert "is not known" in result.err


def test_the_daemon_shutting_down_in_mid_call_exits_3_with_its_words(vllmctl, supervisor, control):
    control.scripts["chat"] = control.wait_for_release
    ended = vllmctl.behind("wake", "chat")
    assert control.begun.acquire(timeout=PATIENCE)
    supervisor.stop()
    result = ended.result(PATIENCE)
    assert result.code == 3
    assert "shutting down" in result.err


def test_the_bus_going_away_in_mid_call_exits_3(vllmctl, supervisor, control, bus):
    control.scripts["chat"] = control.wait_for_release
    ended = vllmctl.behind("wake", "chat")
    assert control.begun.acquire(timeout=PATIENCE)
    bus.kill()
    result = ended.result(PATIENCE)
    assert result.code == 3
    assert "the message bus went away" in result.err


def test_ctrl_c_while_waiting_exits_130_and_says_that_the_operation_goes_on(vllmctl, control):
    control.scripts["chat"] = control.wait_for_release
    process = vllmctl.process("wake", "chat")
    assert control.begun.acquire(timeout=PATIENCE)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the operation goes on in the daemon" in err
    assert "Traceback" not in err


def test_reload_says_what_changed(vllmctl, control):
    control.reloaded = ["model chat: routing is roundrobin now.", "model tts is new."]
    ended = vllmctl("reload")
    assert (ended.code, ended.out) == (0, "model chat: routing is roundrobin now.\nmodel tts is new.\n")
    assert json.loads(vllmctl("reload", "--json").out) == {"changes": control.reloaded}
    control.reloaded = ()
    assert vllmctl("reload").out == "Nothing changed.\n"


def test_reload_of_an_invalid_configuration_exits_6_with_every_problem(vllmctl, control):
    control.reloaded = ControlError(ErrorCode.CONFIG_INVALID, "cannot use it:\n  a.toml: [proxy] listn: no such key")
    ended = vllmctl("reload")
    assert ended.code == 6
    assert ended.out == ""
    assert "a.toml: [proxy] listn: no such key" in ended.err
    assert json.loads(vllmctl("reload", "--json", err=io.StringIO()).out)["error"]["code"] == "ConfigInvalid"
