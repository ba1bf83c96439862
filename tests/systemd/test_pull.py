"""vllmctl pull against a real user manager: in a unit of its own with the replica's environment; nothing is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pull"))

from hubserver import Hub, Repo, serving

pytest.importorskip("huggingface_hub")

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": b"w" * 200_000,
    "pytorch_model.bin": b"the same again" * 1000,
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        hub.repos["org/chat"] = Repo({"main": FILES, "v2": {**FILES, "config.json": b'{"v": 2}'}})
        yield hub


class Machine:
    """A configuration, an engine's environment with a real huggingface_hub, and vllmctl."""

    def __init__(self, folder: Path, hub: Hub, unit_dir) -> None:
        self.folder, self.hub, self.unit_dir = folder, hub, unit_dir
        self.cache = folder / "hf"
        self.vllm = folder / "bin/vllm"
        self.vllm.parent.mkdir()
        # As pip writes it. It must not be run: a pull starts no engine.
        self.vllm.write_text(f"#!{sys.executable}\nraise SystemExit('the engine was started')\n")
        self.vllm.chmod(0o755)
        unit_dir.service("vllm@.service", "/bin/false")
        self.config = folder / "config.toml"

    def configure(self, text: str) -> None:
        self.config.write_text(text)

    def chat(self, serve: str = "", replicas: str = "[models.chat.replicas.chat-a]\n", env: str = "") -> None:
        """One model of the hub, and its replicas."""
        self.configure(
            f"[models.chat]\naliases = ['gpt']\n[models.chat.serve]\nmodel = 'org/chat'\n"
            f"command = ['{self.vllm}', 'serve']\n{serve}\n"
            f"env = {{HF_ENDPOINT = '{self.hub.address}', HF_HOME = '{self.cache}' {env}}}\n{replicas}"
        )

    def start(self, *argv: str, **options: object) -> subprocess.Popen[str]:
        # What a cron job has: nothing of the replica's environment, and not even where the bus is.
        env = {name: os.environ[name] for name in ("HOME", "PATH", "XDG_RUNTIME_DIR")}
        return subprocess.Popen(
            [sys.executable, "-m", "supervisord.cli.main", "pull", *argv, "--config", str(self.config)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        process = self.start(*argv)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def results(self, *argv: str) -> tuple[int, dict[str, dict]]:
        code, out, _ = self(*argv, "--json")
        return code, {each["name"]: each for each in json.loads(out)["results"]}

    def snapshot(self, name: str = "org/chat", revision: str = "main", cache: Path | None = None) -> dict[str, bytes]:
        """What an engine that is offline finds in the cache."""
        repo = (cache or self.cache / "hub") / f"models--{name.replace('/', '--')}"
        folder = repo / "snapshots" / (repo / "refs" / revision).read_text()
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def machine(tmp_path: Path, hub: Hub, unit_dir) -> Machine:
    return Machine(tmp_path, hub, unit_dir)


@pytest.fixture(autouse=True)
def no_unit_left(systemctl: Callable[..., str], unit_dir) -> Iterator[None]:
    yield
    assert "vllmctl-pull" not in systemctl("list-units", "--all", "--plain", "--no-legend")


def test_pull_brings_what_an_engine_that_is_offline_needs_and_no_second_copy_of_the_weights(machine):
    machine.chat()
    code, out, err = machine("chat")
    assert (code, out.split(", in ")[0]) == (0, "chat-a: org/chat: fetched, 200.0 kB"), err
    assert machine.snapshot() == {name: data for name, data in FILES.items() if name != "pytorch_model.bin"}


def test_pull_again_says_that_all_of_it_is_here(machine):
    machine.chat()
    machine("chat")
    machine.hub.asked.clear()
    assert machine("chat")[:2] == (0, "chat-a: org/chat: all of it is here\n")
    assert [line for line in machine.hub.asked if "/resolve/" in line] == []


def test_replicas_of_one_model_pull_it_once_and_each_has_its_result(machine):
    own = "[Service]\nEnvironment=VLLM_REPLICA_LOG=/tmp/%i.log CUDA_VISIBLE_DEVICES=%i\n"
    machine.unit_dir.write("vllm@.service.d/own.conf", own)
    machine.chat(replicas="[models.chat.replicas.chat-a]\n[models.chat.replicas.chat-b]\ngpus = [1]\n")
    code, results = machine.results("gpt")
    assert code == 0
    assert set(results) == {"chat-a", "chat-b"}
    assert all((each["done"], each["result"], each["model"]) == (True, "pulled", "chat") for each in results.values())
    assert results["chat-a"]["items"] == [{"name": "org/chat", "new": True, "fetched": 200010, "bytes": 200010}]
    assert machine.hub.fetched().count("org/chat/model.safetensors") == 1


def test_revision_download_dir_tokenizer_draft_and_adapter_are_the_engines_own(machine):
    machine.hub.repos |= {
        "org/tok": Repo({"main": {"tokenizer.json": b"[]", "model.safetensors": b"not wanted"}}),
        "org/draft": Repo({"d1": {"config.json": b"{}", "model.safetensors": b"draft"}}),
        "org/lora": Repo({"main": {"adapter_config.json": b"{}", "adapter_model.bin": b"adapter"}}),
    }
    weights = machine.folder / "weights"
    machine.chat(
        f"revision = 'v2'\ndownload-dir = '{weights}'\ntokenizer = 'org/tok'\nlora-modules = ['a=org/lora']\n"
        'args = [\'--speculative-config\', \'{"model": "org/draft", "revision": "d1"}\']'
    )
    code, out, err = machine("chat-a")
    assert code == 0, err
    assert "org/chat, org/tok, org/draft, org/lora: fetched" in out
    assert machine.snapshot(revision="v2", cache=weights)["model.safetensors"] == FILES["model.safetensors"]
    assert machine.snapshot(revision="v2") == {"config.json": b'{"v": 2}', "tokenizer.json": b'{"a": 1}'}
    assert machine.snapshot("org/tok") == {"tokenizer.json": b"[]"}
    assert machine.snapshot("org/draft", "d1", weights)["model.safetensors"] == b"draft"
    assert machine.snapshot("org/lora")["adapter_model.bin"] == b"adapter"


def test_environment_is_the_units_own_with_drop_ins_and_files_and_its_token_is_on_no_command_line(machine):
    machine.hub.repos["org/chat"].gated = True
    machine.hub.tokens.add("hf_secret$1")
    (machine.folder / "secrets").write_text("HF_TOKEN='hf_secret$1'\n")
    lines = f"EnvironmentFile={machine.folder}/secrets\nEnvironment=HF_HOME={machine.cache} 'HF_HUB_OFFLINE=1'\n"
    machine.unit_dir.write("vllm@.service.d/token.conf", f"[Service]\n{lines}")
    machine.configure(
        f"[models.chat.serve]\nmodel = 'org/chat'\ncommand = '{machine.vllm} serve'\n"
        f"env = {{HF_ENDPOINT = '{machine.hub.address}'}}\n[models.chat.replicas.chat-a]\n"
    )
    machine.hub.hold.add("model.safetensors")
    process = machine.start("chat-a")
    assert machine.hub.held.wait(PATIENCE)
    words = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    machine.hub.release.set()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert any(b"supervisord.pull.main" in each for each in words)
    assert not any(b"hf_secret" in each for each in words)
    assert machine.snapshot()["model.safetensors"] == FILES["model.safetensors"]


def test_gated_repository_without_a_token_names_replica_repository_and_what_is_missing(machine):
    machine.hub.repos["org/chat"].gated = True
    machine.chat()
    code, out, err = machine("chat")
    assert (code, out) == (1, "")
    assert "vllmctl: chat-a: cannot pull org/chat: org/chat is gated" in err
    assert "no token was sent (HF_TOKEN" in err


def test_one_that_fails_keeps_no_other_from_being_pulled(machine):
    machine.chat(
        "revision = 'v9'", "[models.chat.replicas.chat-a]\n[models.own.serve]\nengine = 'simulator'\nmodel = 'm'\n"
    )
    code, results = machine.results("--all")
    assert code == 1
    assert results["chat-a"]["error"]["code"] == "NoRevision"
    assert results["chat-a"]["error"]["message"] == "cannot pull org/chat: org/chat has no revision 'v9'"
    assert (results["own"]["result"], results["own"]["text"]) == ("nothing", "nothing to fetch: it is simulated")


def test_hub_that_cannot_be_reached_is_told(machine):
    machine.chat()
    machine.config.write_text(machine.config.read_text().replace(machine.hub.address, "http://127.0.0.1:9"))
    code, _, err = machine("chat")
    assert code == 1
    assert "chat-a: cannot pull org/chat: cannot reach http://127.0.0.1:9: " in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_vllmctl_ends_its_pull_ends_with_it_and_leaves_no_half_file(machine, how, systemctl):
    machine.hub.hold.add("model.safetensors")
    machine.chat()
    process = machine.start("chat")
    assert machine.hub.held.wait(PATIENCE)
    [unit] = [word for word in systemctl("list-units", "--plain", "--no-legend").split() if "vllmctl-pull" in word]
    handles = processes(systemctl, unit)
    assert len(handles) == 2  # the pull, and the hub's client in the engine's Python
    process.send_signal(how)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if how is signal.SIGINT else -how)
    if how is signal.SIGINT:
        assert "stopped; every file that has come as a whole stays" in err
    assert all_end(handles)
    assert not list(machine.cache.rglob("*.incomplete"))
    systemctl("stop", unit, check=False)  # the manager hears of the last end a moment after it; this waits for that


def processes(systemctl: Callable[..., str], unit: str) -> list[int]:
    """A pidfd for each process of ``unit``."""
    group = Path("/sys/fs/cgroup" + systemctl("show", "-P", "ControlGroup", unit))
    return [os.pidfd_open(int(pid)) for pid in (group / "cgroup.procs").read_text().split()]


def all_end(handles: list[int]) -> bool:
    """Whether the processes of these pidfds end; closes them."""
    ended = [bool(select.select([handle], [], [], PATIENCE)[0]) for handle in handles]
    for handle in handles:
        os.close(handle)
    return all(ended)


def test_engine_without_a_hub_client_is_told_with_its_python(machine, tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    machine.vllm.write_text(f"#!{bare}/bin/python\n")
    machine.chat()
    code, _, err = machine("chat")
    assert code == 1
    assert f"the engine's Python, {bare}/bin/python, has no huggingface_hub" in err


def test_engine_whose_python_ends_without_a_word_is_a_failure_and_not_explained_by_systemds_figures(machine):
    python = machine.folder / "bin/python3"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    machine.vllm.write_text(f"#!{python}\n")
    machine.chat()
    code, _, err = machine("chat")
    assert code == 1
    assert err.startswith("vllmctl: chat-a: cannot pull org/chat: the pull ended with status 3, and said nothing ('")
    assert "journalctl --user-unit=vllmctl-pull-" in err


def test_replicas_working_directory_that_is_not_there_is_told(machine):
    machine.unit_dir.write("vllm@.service.d/own.conf", "[Service]\nWorkingDirectory=/no/such\n")
    machine.chat()
    said = "cannot pull org/chat: systemd cannot run anything with the replica's WorkingDirectory=/no/such"
    assert machine("chat") == (1, "", f"vllmctl: chat-a: {said}\n")


def test_local_model_simulator_container_and_own_unit_have_nothing_to_pull_and_say_so(machine):
    machine.unit_dir.service("pull-own.service", "/bin/true")
    (machine.folder / "weights").mkdir()
    machine.configure(
        f"[models.disk.serve]\nmodel = '{machine.folder}/weights'\n"
        "[models.box.serve]\nmodel = 'org/x'\ncommand = 'podman run vllm'\n"
        "[models.own.replicas.own]\nunit = 'pull-own.service'\nendpoint = 'http://127.0.0.1:9'\n"
    )
    code, out, err = machine("--all")
    assert (code, err) == (0, "")
    disk, box, own = out.splitlines()
    assert disk == f"disk: nothing to fetch: {machine.folder}/weights is on this machine"
    assert box.startswith("box: nothing known to fetch: its command is podman")
    assert own.startswith("own: nothing known to fetch: pull-own.service is a unit of your own")


def test_local_model_that_is_not_there_is_an_error_before_the_night(machine):
    machine.configure("[models.disk.serve]\nmodel = '/srv/no/such'\n")
    code, _, err = machine("disk")
    assert (code, err) == (1, "vllmctl: disk: cannot find /srv/no/such: there is nothing there to load\n")


@pytest.fixture
def quadlet(machine: Machine) -> Callable[..., None]:
    """Write a Quadlet with the unit that podman's generator makes of it, and a podman that does as a test says."""
    podman = machine.folder / "bin/podman"
    podman.write_text((ROOT / "tests/pull/fake_podman.py").read_text().replace("#!python", f"#!{sys.executable}"))
    podman.chmod(0o755)

    def write(image: str, run: str, *, drop_in: str = "", more: str = "", env: str = "") -> None:
        source = machine.folder / "ocr.container"
        source.write_text(f"[Container]\nImage={image}\n")
        if drop_in:
            (machine.folder / "ocr.container.d").mkdir()
            (machine.folder / "ocr.container.d/10.conf").write_text(f"[Container]\n{drop_in}\n")
        machine.unit_dir.service(
            "pull-ocr.service",
            f"{podman} run --name ocr --replace --tls-verify=false {run}",
            f"Environment=FAKE_PODMAN={machine.folder}/podman.json {env}",
            unit=f"SourcePath={source}\n{more}",
        )
        machine.configure("[models.ocr.replicas.ocr-a]\nunit = 'pull-ocr.service'\nendpoint = 'http://127.0.0.1:9'\n")

    return write


def podman_ran(machine: Machine) -> list[list[str]]:
    return [words for words in json.loads((machine.folder / "podman.json").read_text())["ran"] if "pull" in words]


def test_quadlets_image_is_pulled_with_its_units_podman_and_options_and_in_its_environment(machine, quadlet):
    quadlet("registry.example/vllm:1", "registry.example/vllm:2 serve", drop_in="Image=registry.example/vllm:2")
    code, out, err = machine("ocr")
    assert (code, out.split(", in ")[0]) == (0, "ocr-a: registry.example/vllm:2: fetched"), err
    assert podman_ran(machine) == [["pull", "--tls-verify=false", "registry.example/vllm:2"]]
    assert "ocr-a: registry.example/vllm:2: Copying blob sha256:aa" in err
    assert machine("ocr")[1] == "ocr-a: registry.example/vllm:2: all of it is here\n"


def test_quadlets_of_one_image_pull_it_once(machine, quadlet):
    image = "registry.example/vllm:1"
    quadlet(image, image, env="PODMAN_SYSTEMD_UNIT=%n")
    other = (machine.unit_dir.path / "pull-ocr.service").read_text()
    machine.unit_dir.write("pull-ocr-b.service", other)
    replica = "[models.ocr.replicas.ocr-b]\nunit = 'pull-ocr-b.service'\nendpoint = 'http://127.0.0.1:10'\n"
    machine.configure(machine.config.read_text() + replica)
    code, results = machine.results("ocr")
    assert code == 0
    assert [each["result"] for each in results.values()] == ["pulled", "pulled"]
    assert len(podman_ran(machine)) == 1


def test_image_file_of_a_quadlet_is_pulled_as_its_own_unit_would(machine, quadlet):
    podman = machine.folder / "bin/podman"
    (machine.folder / "vllm.image").write_text("[Image]\nImage=registry.example/vllm:3\n")
    machine.unit_dir.service(
        "pull-vllm-image.service",
        f"{podman} image pull --authfile /a.json registry.example/vllm:3",
        unit=f"SourcePath={machine.folder}/vllm.image",
    )
    quadlet("vllm.image", "registry.example/vllm:3", more="Requires=pull-vllm-image.service")
    code, _, err = machine("ocr")
    assert code == 0, err
    assert podman_ran(machine) == [["image", "pull", "--authfile", "/a.json", "registry.example/vllm:3"]]


@pytest.mark.parametrize(
    ("image", "code", "said"),
    [
        ("registry.example/gone:1", "NoImage", "manifest unknown"),
        ("registry.example/secret:1", "Denied", "unauthorized: authentication required"),
        ("registry.example/large:1", "NoSpace", "no space left on device"),
        ("nowhere.example/vllm:1", "NoRegistry", "no such host"),
    ],
)
def test_image_that_cannot_be_pulled_says_why_in_podmans_words(machine, quadlet, image, code, said):
    quadlet(image, image)
    status, results = machine.results("ocr")
    assert status == 1
    assert results["ocr-a"]["error"]["code"] == code
    assert results["ocr-a"]["error"]["message"].startswith(f"cannot pull {image}: ")
    assert said in results["ocr-a"]["error"]["message"]


def test_ctrl_c_ends_a_podman_that_does_not_listen_and_its_children(machine, quadlet, systemctl):
    quadlet("registry.example/hang:1", "registry.example/hang:1")
    process = machine.start("ocr")
    assert process.stderr is not None
    while "Copying blob" not in process.stderr.readline():
        pass
    [unit] = [word for word in systemctl("list-units", "--plain", "--no-legend").split() if "vllmctl-pull" in word]
    handles = processes(systemctl, unit)
    assert len(handles) == 3  # the pull, podman, and its child in a session of its own
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert all_end(handles)


def test_image_that_was_made_here_has_nothing_to_pull(machine, quadlet):
    quadlet("localhost/vllm:latest", "localhost/vllm:latest")
    assert machine("ocr") == (
        0,
        "ocr-a: nothing to fetch: its image localhost/vllm:latest was made on this machine\n",
        "",
    )


def test_unit_that_is_missing_is_an_error(machine):
    machine.configure("[models.own.replicas.own]\nunit = 'pull-gone.service'\nendpoint = 'http://127.0.0.1:9'\n")
    code, _, err = machine("own")
    assert code == 1
    assert "own: its unit pull-gone.service is missing" in err


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ((), 2, "say what to pull"),
        (("chat", "--all"), 2, "not both"),
        (("nobody",), 4, "There is no model or replica named 'nobody'"),
    ],
)
def test_usage_and_unknown_names_have_their_exit_codes(machine, argv, code, said):
    machine.chat()
    ended = machine(*argv)
    assert ended[0] == code
    assert said in ended[2]


def test_invalid_configuration_has_its_exit_code(machine):
    machine.configure("[models.chat]\nnonsense = 1\n")
    assert machine("chat")[0] == 6
