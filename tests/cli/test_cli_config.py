"""vllmctl config: the configuration on disk, without a daemon."""

from __future__ import annotations

import json
import tomllib

import pytest

VALID = """\
[models.chat]
aliases = ["gpt"]
[models.chat.serve]
engine = "simulator"
model = "m"
max-model-len = 0
[models.chat.replicas.chat-a]
[models.chat.replicas.chat-b]
"""


@pytest.fixture
def config(tmp_path, vllmctl):
    """Writes the user's configuration; the folder that it is in."""
    folder = tmp_path / "home/.config/vllm-supervisord"
    folder.mkdir(parents=True)

    def write(text, name="config.toml"):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    return write


def test_check_of_a_valid_configuration_counts_what_is_in_it(vllmctl, config):
    file = config(VALID)
    ended = vllmctl("config", "check")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"The configuration is valid: 1 model, 2 replicas, from {file}.\n"
    assert json.loads(vllmctl("config", "check", "--json").out) == {
        "valid": True,
        "files": [str(file)],
        "problems": [],
        "warnings": [],
    }


def test_check_tells_every_mistake_at_once_and_exits_6(vllmctl, config):
    file = config(VALID + "\n[proxy]\nlistn = 'x'\nkeepalive = 'soon'\n")
    ended = vllmctl("config", "check")
    assert (ended.code, ended.out) == (6, "")
    assert f"{file}: [proxy] listn:" in ended.err
    assert f"{file}: [proxy] keepalive:" in ended.err
    answer = json.loads(vllmctl("config", "check", "--json").out)
    assert answer["valid"] is False
    assert [(each["file"], each["table"], each["key"]) for each in answer["problems"]] == [
        (str(file), "proxy", "listn"),
        (str(file), "proxy", "keepalive"),
    ]
    assert all(each["reason"] for each in answer["problems"])


def test_check_of_no_configuration_names_the_file_that_is_not_there(vllmctl, config):
    ended = vllmctl("config", "check")
    assert ended.code == 6
    assert "vllm-supervisord/config.toml: cannot read" in ended.err


def test_check_of_a_named_file_reads_the_folder_beside_it(vllmctl, tmp_path):
    (tmp_path / "other.toml").write_text(VALID)
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d/10.toml").write_text("[proxy]\nwhat = 1\n")
    ended = vllmctl("config", "check", "--config", str(tmp_path / "other.toml"))
    assert ended.code == 6
    assert f"{tmp_path}/config.d/10.toml: [proxy] what:" in ended.err


def test_show_prints_the_merged_result_that_loads_to_the_same(vllmctl, config, tmp_path):
    config(VALID)
    config("[proxy]\nlisten = '127.0.0.1:9'\n", "config.d/10.toml")
    shown = vllmctl("config", "show")
    assert shown.code == 0
    assert tomllib.loads(shown.out)["proxy"]["listen"] == "127.0.0.1:9"
    (tmp_path / "again.toml").write_text(shown.out)
    first, second = (
        json.loads(vllmctl("config", "show", "--json", *more).out)
        for more in ([], ["--config", str(tmp_path / "again.toml")])
    )
    assert first.pop("files") != second.pop("files")
    assert first == second
    assert first["models"][0]["serve"]["options"] == {"max-model-len": 0}
    assert first["proxy"]["keepalive"] == 75.0


def test_show_of_an_invalid_configuration_exits_6(vllmctl, config):
    config("[proxy]\nlistn = 'x'\n")
    ended = vllmctl("config", "show", "--json")
    assert ended.code == 6
    assert json.loads(ended.out)["error"]["code"] == "ConfigInvalid"


def test_schema_is_json(vllmctl):
    ended = vllmctl("config", "schema")
    assert ended.code == 0
    assert json.loads(ended.out)["$schema"].startswith("https://json-schema.org/")


def test_path_tells_which_files_are_read(vllmctl, config, tmp_path):
    main = tmp_path / "home/.config/vllm-supervisord/config.toml"
    assert vllmctl("config", "path").out == f"{main} (does not exist)\n"
    config(VALID)
    drop_in = config("", "config.d/10.toml")
    assert vllmctl("config", "path").out == f"{main}\n{drop_in}\n"
    assert json.loads(vllmctl("config", "path", "--json").out) == {
        "main": str(main),
        "exists": True,
        "drop_ins": [str(drop_in)],
    }


def test_path_of_the_system_is_in_etc(vllmctl):
    assert vllmctl("config", "path", "--system").out.startswith("/etc/vllm-supervisord/config.toml")
