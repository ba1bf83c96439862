"""vllmctl pull where there is no service manager; with one, see tests/systemd/test_pull.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = """\
[models.chat]
aliases = ["gpt"]
[models.chat.serve]
model = "org/chat"
[models.chat.replicas.chat-a]
[models.other.serve]
model = "org/other"
[models.other.replicas.chat]
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return str(file)


def test_without_a_service_manager_it_says_so_and_exits_with_3(vllmctl, config):
    ended = vllmctl("pull", "gpt", "--json", "--config", config)
    assert ended.code == 3
    error = json.loads(ended.out)["error"]
    assert (error["code"], error["exit"]) == ("NoManager", 3)
    assert error["message"].startswith("cannot ask the service manager: ")


def test_without_a_bus_it_says_what_usually_mends_that(vllmctl, config, tmp_path):
    del vllmctl.env["DBUS_SESSION_BUS_ADDRESS"]
    vllmctl.env["XDG_RUNTIME_DIR"] = str(tmp_path)
    ended = vllmctl("pull", "--all", "--config", config)
    assert ended.code == 3
    assert "cannot find the session bus" in ended.err
    assert "loginctl enable-linger" in ended.err


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("chat", 2, "say model:chat or replica:chat"),
        ("model:nobody", 4, "There is no model named 'nobody'"),
        ("replica:gpt", 4, "There is no replica named 'gpt'"),
        ("caht-a", 4, "config.toml. Did you mean 'chat-a'?"),
    ],
)
def test_a_word_is_looked_up_in_the_configuration(vllmctl, config, word, code, said):
    ended = vllmctl("pull", word, "--config", config)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
