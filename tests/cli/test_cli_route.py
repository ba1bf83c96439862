"""vllmctl route explain: what a person and a program are told, and every way in which there is nothing to tell."""

import io
import json
import sys

import pytest

from supervisord.control import ControlError, ErrorCode
from supervisord.core.admission import Bid, Explanation

BIDS = (Bid("chat-a", 0.31, 0.0, 0.27, 89_700), Bid("chat-b", 5.42, 1.0, 4.4, 0))
HOME = Explanation("chat-a", "continuation of chat-a, stays: chat-a 0.31s, chat-b 5.42s", BIDS)


@pytest.fixture
def request_file(tmp_path):
    file = tmp_path / "request.json"
    file.write_text('{"messages": []}')
    return str(file)


def test_it_says_where_and_why_and_what_each_replica_would_cost(vllmctl, supervisor, control, request_file):
    supervisor.do(lambda: setattr(control, "explained", HOME))
    ended = vllmctl("route", "explain", "gpt", request_file)
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == f"chat (routing adaptive): it would go to chat-a: {HOME.reason}"
    assert lines[3].split() == ["chat-a", "0.31", "s", "0.00", "s", "0.27", "s", "0.04", "s", "89700"]
    assert control.asked == [("chat", "/v1/chat/completions", b'{"messages": []}')]


def test_programs_get_the_same(vllmctl, supervisor, control, request_file):
    supervisor.do(lambda: setattr(control, "explained", HOME))
    said = json.loads(vllmctl("route", "explain", "chat", request_file, "--json").out)
    assert (said["model"], said["replica"], said["reason"]) == ("chat", "chat-a", HOME.reason)
    assert said["bids"][1] == {
        "replica": "chat-b",
        "seconds": 5.42,
        "pending_seconds": 1.0,
        "prefill_seconds": 4.4,
        "cached_tokens": 0,
    }


def test_a_request_that_would_wait_goes_to_nobody_yet(vllmctl, supervisor, control, request_file):
    supervisor.do(lambda: setattr(control, "explained", Explanation("", "held for KV: 4 long conversations")))
    assert "it would go to no replica yet: held for KV" in vllmctl("route", "explain", "chat", request_file).out
    assert json.loads(vllmctl("route", "explain", "chat", request_file, "--json").out)["replica"] is None


def test_the_request_may_come_on_standard_input_and_go_to_another_path(vllmctl, control, supervisor, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}')))
    assert vllmctl("route", "explain", "chat", "-", "--path", "/v1/completions").code == 0
    assert control.asked == [("chat", "/v1/completions", b'{"prompt": "x"}')]


def test_what_is_no_request_is_told_as_the_daemon_tells_it(vllmctl, supervisor, control, request_file):
    wrong = ControlError(ErrorCode.INVALID_ARGUMENT, "the request body must be a JSON object")
    supervisor.do(lambda: setattr(control, "explained", wrong))
    ended = vllmctl("route", "explain", "chat", request_file)
    assert ended.code != 0
    assert "the request body must be a JSON object" in ended.err


def test_a_missing_file_and_a_missing_model_are_named(vllmctl, supervisor, request_file):
    ended = vllmctl("route", "explain", "chat", "/nowhere/request.json")
    assert (ended.code, ended.err) == (1, "vllmctl: cannot read /nowhere/request.json: No such file or directory.\n")
    ended = vllmctl("route", "explain", "nobody", request_file)
    assert ended.code == 4
