"""What is fetched from a hub, and what is said when it cannot be: the real huggingface_hub against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hubserver import Hub, Repo, serving

from supervisord.pull import hub as script

pytest.importorskip("huggingface_hub")

SAFE = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        hub.repos["org/m"] = Repo({"main": SAFE})
        yield hub


class Pull:
    """Runs the script; ``env`` may be changed before."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self.home = home
        self.env = {"HOME": str(home), "HF_ENDPOINT": hub.address, "PATH": os.environ["PATH"]}
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, name: str = "org/m", *, token: str = "", **changes: object) -> list[dict]:
        """Its events but for progress."""
        process = self.start(name, token=token, **changes)
        out, err = process.communicate()
        events = [json.loads(line) for line in out.splitlines()]
        assert events, err
        assert process.returncode == (1 if events[-1]["event"] == "failed" else 0)
        return [event for event in events if event["event"] != "progress"]

    def start(self, name: str = "org/m", *, token: str = "", **changes: object) -> subprocess.Popen[str]:
        """One that is under way, and has its job."""
        repository = {"name": name, "revision": "", "weights": "auto", "directory": "", "ignore": []} | changes
        process = subprocess.Popen(
            [sys.executable, script.__file__],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process.stdin as stdin:
            stdin.write(json.dumps({"repositories": [repository], "token": token}))
        process.stdin = None
        self.started.append(process)
        return process

    def failure(self, *words: str, **changes: object) -> tuple[str, str]:
        [event] = self(*words, **changes)
        return event["code"], event["message"]


@pytest.fixture
def pull(hub: Hub, tmp_path: Path) -> Iterator[Pull]:
    pull = Pull(hub, tmp_path)
    yield pull
    for process in pull.started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("files", "load_format", "weights"),
    [
        (["model.safetensors", "pytorch_model.bin"], "auto", ["model.safetensors"]),
        (["pytorch_model.bin", "x.pt", "tf_model.h5", "model.onnx"], "auto", ["pytorch_model.bin"]),
        (["x.pt", "x.pth"], "auto", ["x.pt"]),
        (["model.safetensors", "consolidated.safetensors"], "auto", ["consolidated.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], "hf", ["model.safetensors", "consolidated.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], "npcache", ["pytorch_model.bin"]),
        (["model.safetensors"], "dummy", []),
        (["model.safetensors"], "none", []),
        (["a.safetensors", "b.gguf"], "sharded_state", ["a.safetensors", "b.gguf"]),
        (["a.safetensors", "b.bin"], "*", ["a.safetensors", "b.bin"]),
        (["model.safetensors", "original/x.safetensors"], "auto", ["model.safetensors"]),
        (["model.safetensors", "1_Pooling/config.json", "2_Dense/pytorch_model.bin"], "auto",
         ["model.safetensors", "2_Dense/pytorch_model.bin"]),
    ],
)  # fmt: skip
def test_weights_are_those_that_the_engine_would_load(files, load_format, weights):
    others = ["config.json", "tokenizer.model", *(file for file in files if file.endswith(".json"))]
    found = script.chosen(dict.fromkeys([*others, *files]), load_format, ["original/**/*", "original/*"], None)
    assert found == (weights, others)


def test_only_weights_of_the_repositorys_own_index_are_fetched(hub, pull):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {name: name.encode() for name in ("model-1.safetensors", "model-2.safetensors", "duplicate.safetensors")}
    hub.repos["org/m"] = Repo({"main": {**files, "model.safetensors.index.json": json.dumps(index).encode()}})
    pull()
    assert not any("duplicate" in name for name in hub.fetched())
    assert "org/m/model-2.safetensors" in hub.fetched()


def test_branch_that_has_moved_brings_only_what_changed(hub, pull):
    pull()
    hub.asked.clear()
    hub.repos["org/m"] = Repo({"main": {**SAFE, "config.json": b'{"new": 1}'}})
    assert pull() == [{"event": "pulled", "name": "org/m", "new": True, "fetched": 10, "total": 17}]
    assert hub.fetched() == ["org/m/config.json"]


def test_token_of_the_environment_of_a_login_and_of_the_options_opens_what_is_gated(hub, pull):
    hub.repos["org/m"].gated = True
    hub.tokens.add("good")
    assert pull(token="good")[0]["event"] == "pulled"
    pull.env["HF_TOKEN"] = "good"
    assert pull()[0]["event"] == "pulled"
    del pull.env["HF_TOKEN"]
    (pull.home / ".cache/huggingface/token").write_text("good\n")
    assert pull()[0]["event"] == "pulled"


def test_a_pull_that_is_ended_takes_its_own_half_file_away_and_nobody_elses(hub, pull):
    hub.repos["org/m"] = Repo({"main": {"model.safetensors": b"weights"}})
    hub.hold.add("model.safetensors")
    first = pull.start()
    assert hub.held.wait(10)
    [own] = pull.home.rglob("*.incomplete")
    # Of another pull of the same thing, or of the engine, that began later.
    others = own.with_name(f"{own.name.split('.')[0]}.01234567.incomplete")
    others.write_bytes(b"half")
    first.terminate()
    first.communicate()
    assert first.returncode == 128 + signal.SIGTERM
    assert list(pull.home.rglob("*.incomplete")) == [others]


def test_of_two_pulls_of_the_same_thing_one_that_is_ended_costs_the_other_nothing(hub, pull):
    hub.hold.add("model.safetensors")
    first = pull.start()
    assert hub.held.wait(10)
    second = pull.start()  # waits for the first, for as long as that has the file
    first.terminate()
    first.communicate()
    hub.release.set()
    out, err = second.communicate()
    assert json.loads(out.splitlines()[-1])["event"] == "pulled", err
    assert hub.fetched().count("org/m/model.safetensors") == 2
    assert not list(pull.home.rglob("*.incomplete"))


def test_each_refusal_of_the_hub_has_its_code_and_says_whether_a_token_was_sent(hub, pull):
    hub.tokens.add("good")
    hub.repos |= {"org/gated": Repo({"main": {}}, gated=True), "org/private": Repo({"main": {}}, private=True)}
    code, text = pull.failure("org/gated")
    assert code == "Gated"
    assert "org/gated is gated" in text
    assert "no token was sent" in text
    assert pull.failure("org/private")[0] == "NoRepository"
    assert pull.failure("org/none", token="good")[0] == "NoRepository"
    assert "the token that was sent has no access" in pull.failure("org/none", token="good")[1]
    assert pull.failure(token="bad") == ("BadToken", f"{hub.address} does not take the token that was sent")
    assert pull.failure(revision="v9") == ("NoRevision", "org/m has no revision 'v9'")
    assert pull.failure("no name!")[0] == "NoRepository"


def test_hub_that_is_away_is_told_and_that_an_earlier_copy_is_here(pull):
    pull()
    pull.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    code, text = pull.failure()
    assert code == "NoHub"
    assert text.startswith("cannot reach http://127.0.0.1:9: ")
    assert text.endswith("(a copy that an earlier pull or start brought is in the cache)")
    assert "earlier" not in pull.failure("org/other")[1]


def test_what_cannot_fit_is_refused_before_a_byte_of_it_comes(hub, pull, monkeypatch):
    monkeypatch.setattr("hubserver._described", lambda file, data: {"size": 10**18, "oid": "0" * 40})
    code, text = pull.failure()
    assert code == "NoSpace"
    assert "1000000000.0 GB are missing, and " in text
    assert hub.fetched() == []


def test_room_is_asked_of_the_disk_on_which_a_file_will_lie(tmp_path, monkeypatch):
    for name in ("cache", "weights"):
        (tmp_path / name).mkdir()
    free = {tmp_path / "cache": 10, tmp_path / "weights": 1000}
    monkeypatch.setattr(script.shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    wanted = [(tmp_path / "weights/m/blobs", 999, "a"), (tmp_path / "cache/m/blobs", 9, "b")]
    script.Here(wanted).check_room()
    with pytest.raises(OSError, match=f"{tmp_path}/cache has"):
        script.Here([*wanted, (tmp_path / "cache/m/blobs", 2, "c")]).check_room()


def test_cache_that_is_a_file_is_told(pull):
    pull.env["HF_HOME"] = str(pull.home / "file/hf")
    (pull.home / "file").write_text("")
    code, text = pull.failure()
    assert code == "NotWritable"
    assert "file" in text
