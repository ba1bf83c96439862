"""What vllmctl shows of a fleet: status and list, for people and for programs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from supervisord.core.states import Health, Hold, Life


def test_status_shows_each_replica_in_words_and_within_80_columns(vllmctl, supervisor):
    ended = vllmctl("status")
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    assert lines[0] == "1/4 awake, 3 in flight, 2 waiting, failed: ocr-1, listening on 127.0.0.1:8000"
    assert max(len(line) for line in lines) <= 80
    rows = {
        line.split()[1] if line.startswith(("chat ", "embed ", "ocr ")) else line.split()[0]: line
        for line in lines[3:7]
    }
    assert "ready" in rows["chat-a"]
    assert "2 waiting" in rows["chat-a"]
    assert "asleep (level 1) for 12 min" in rows["chat-b"]
    assert "last wake took 3.1 s" in rows["chat-b"]
    assert "asleep (level 2) for 12 min" in rows["embed"]
    assert "failed for 12 min" in rows["ocr-1"]
    assert "tried again in 1 h" in rows["ocr-1"]


def test_status_shows_why_a_replica_failed_without_its_control_characters(vllmctl, supervisor):
    ended = vllmctl("status")
    assert "ocr-1: CUDA out of memory [31m" in ended.out
    assert "\x1b" not in ended.out


def test_status_says_simulated_where_an_engine_is(vllmctl, supervisor, control):
    supervisor.do(lambda: control.set_replica("chat-a", simulated=True))
    ended = vllmctl("status")
    [row] = [line for line in ended.out.splitlines() if "chat-a" in line]
    assert row.endswith("simulated")
    assert "no real engines" in ended.out
    assert "the simulator, no real engine" in vllmctl("status", "chat-a").out


def test_status_shows_the_step_and_its_time_while_a_replica_wakes(vllmctl, supervisor, control):
    supervisor.do(lambda: control.set_replica("chat-b", state=Life.WAKING, sleep_level=0, step="reload_weights"))
    [row] = [line for line in vllmctl("status").out.splitlines() if "chat-b" in line]
    assert "waking: reload weights, 12 min" in row


def test_status_shows_holds_and_health(vllmctl, supervisor, control):
    supervisor.do(lambda: control.set_replica("chat-a", hold=Hold.DRAINED, health=Health.SUSPECT))
    supervisor.do(lambda: control.set_replica("chat-b", hold=Hold.DOWN, state=Life.STOPPED, sleep_level=0))
    out = vllmctl("status").out
    assert "held drained, suspect" in out
    assert "stopped for 12 min" in out
    assert "held down" in out


def test_status_of_a_model_and_a_replica_tells_every_fact(vllmctl, supervisor):
    ended = vllmctl("status", "gpt", "chat-b")
    assert ended.code == 0
    model, replica = ended.out.split("\n\n")
    assert model.splitlines()[0] == "model chat"
    assert "aliases     gpt" in model
    assert "in flight   3, 2 waiting" in model
    assert "context     32768 tokens" in model
    assert replica.splitlines()[0] == "replica chat-b of model chat"
    assert "unit        vllm@chat-b.service" in replica
    assert "wake time   3.1 s when last woken" in replica
    assert "start time  41 s when last started" in replica


def test_status_json_has_the_documented_shape(vllmctl, supervisor, control):
    answer = json.loads(vllmctl("status", "--json").out)
    assert answer["daemon"] == {
        "version": "0.1.0",
        "status": "1/4 awake, 3 in flight, 2 waiting, failed: ocr-1",
        "draining": False,
        "simulated": False,
        "listen": ["127.0.0.1:8000"],
        "config_files": ["/home/u/.config/vllm-supervisord/config.toml"],
        "state_directory": "/home/u/.local/state/vllm-supervisord",
    }
    [chat, embed, ocr] = answer["models"]
    assert chat == {
        "name": "chat",
        "aliases": ["gpt"],
        "state": "ready",
        "held": False,
        "routing": "adaptive",
        "in_flight": 3,
        "waiting": 2,
        "waiting_for_kv": 0,
        "idle_since": None,
        "wake_seconds": 3.1,
        "max_model_len": 32768,
        "replicas": ["chat-a", "chat-b"],
    }
    assert embed["idle_since"] == pytest.approx(control.fleet.models[1].idle_since, abs=1e-5)
    assert ocr["max_model_len"] is None
    assert [replica["name"] for replica in answer["replicas"]] == ["chat-a", "chat-b", "embed", "ocr-1"]
    assert answer["replicas"][0] == {
        "name": "chat-a",
        "model": "chat",
        "state": "ready",
        "sleep_level": 0,
        "step": "",
        "health": "ok",
        "hold": "none",
        "unit": "vllm@chat-a.service",
        "endpoint": "unix:/run/user/1000/vllm/chat-a/engine.sock",
        "gpus": [0],
        "in_flight": 3,
        "last_error": "",
        "state_since": pytest.approx(control.fleet.replicas[0].state_since, abs=1e-5),
        "idle_since": None,
        "wake_seconds": 3.1,
        "start_seconds": 41.0,
        "retry_at": None,
        "max_model_len": 32768,
        "served_names": ["chat"],
        "simulated": False,
        "can_sleep": True,
    }


def test_options_may_stand_before_and_after_the_command(vllmctl, supervisor):
    assert json.loads(vllmctl("--json", "status").out) == json.loads(vllmctl("status", "--json").out)


def test_status_of_an_unknown_name_exits_4_and_knows_a_better_one(vllmctl, supervisor):
    ended = vllmctl("status", "ocr1")
    assert ended.code == 4
    assert ended.err == "vllmctl: There is no model or replica named 'ocr1'. Did you mean 'ocr-1'?\n"
    answer = json.loads(vllmctl("status", "replica:chat", "--json").out)
    assert answer["error"]["code"] == "NoSuchReplica"
    assert answer["error"]["exit"] == 4


def test_a_reader_who_had_enough_is_no_failure_that_prints(vllmctl, supervisor):
    process = vllmctl.process("status")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, "")


def test_status_of_an_empty_fleet_says_so(vllmctl, supervisor, control):
    supervisor.do(lambda: control.become(dataclasses.replace(control.fleet, models=(), replicas=())))
    ended = vllmctl("status")
    assert ended.code == 0
    assert "No models are configured." in ended.out


def test_list_shows_one_line_a_model(vllmctl, supervisor):
    ended = vllmctl("list")
    assert ended.code == 0
    assert [line.split() for line in ended.out.splitlines()] == [
        ["MODEL", "STATE", "REPLICAS", "CONTEXT", "ALIASES"],
        ["chat", "ready", "2", "32768", "gpt"],
        ["embed", "asleep", "1", "32768"],
        ["ocr", "failed", "1", "-"],
    ]
    assert [model["name"] for model in json.loads(vllmctl("list", "--json").out)] == ["chat", "embed", "ocr"]


def test_list_names_are_every_word_that_a_target_may_be_each_once(vllmctl, supervisor):
    assert vllmctl("list", "--names").out.split() == ["chat", "embed", "ocr", "gpt", "chat-a", "chat-b", "ocr-1"]
    assert json.loads(vllmctl("list", "--names", "--json").out)[0] == "chat"
