"""A real start: the launcher becomes the engine, and READY=1 comes when the right model answers, not before."""

import os
import signal
import socket
from pathlib import Path

import pytest


def test_ready_comes_after_health_and_the_right_name(configured, start, manager, ended, tmp_path) -> None:
    started = start(configured())
    hello = started.hear()
    first = manager.until("STATUS")
    assert first.fields["STATUS"] == "loading, 0 s"
    assert int(first.fields["EXTEND_TIMEOUT_USEC"]) == 60_000_000
    watcher = first.sender

    # The unit's main process is the engine itself, and has nothing of the launcher: no child, no file, no socket.
    assert hello["pid"] == started.process.pid != watcher
    assert hello["fds"] == ["0", "1", "2"]
    assert Path(f"/proc/{hello['pid']}/task/{hello['pid']}/children").read_text() == ""
    assert "NOTIFY_SOCKET" not in hello["env"]
    assert hello["argv"] == [
        *("org/chat", "--served-model-name", "chat", "default"),
        *("--uds", f"{tmp_path}/vllm/chat-a/engine.sock"),
    ]
    # The watcher holds neither the engine's input nor its output.
    assert Path(f"/proc/{watcher}/comm").read_text() == "vllm-watch\n"
    assert [str(Path(f"/proc/{watcher}/fd/{fd}").readlink()) for fd in (0, 1)] == ["/dev/null", "/dev/null"]

    started.say("listen")
    for _ in range(3):
        started.hear_of(path="/health", status=503)
    assert not [message for message in manager.waiting() if "READY" in message.fields]

    started.say("healthy")
    ready = manager.until("READY")
    assert (ready.fields, ready.sender) == ({"READY": "1", "STATUS": "serving chat"}, watcher)
    assert manager.until("BARRIER").sender == watcher
    assert ended(watcher) == 0
    started.say("exit 0")
    assert started.end() == (0, "")


def test_another_model_is_never_ready(configured, start, manager) -> None:
    started = start(configured(serve="args = ['--lie-about-name']"))
    started.say("healthy")
    started.say("listen")
    for _ in range(2):
        started.hear_of(path="/v1/models")
    started.say("exit 3")
    status, errors = started.end()
    assert status == 3
    assert errors == "vllm-replica: chat-a: not ready: serves something-else instead of chat\n"
    assert not [message for message in manager.waiting() if "READY" in message.fields]


def test_an_engine_that_dies_while_loading_takes_the_watcher_with_it(configured, start, manager, ended) -> None:
    started = start(configured())
    watcher = manager.until("STATUS").sender
    started.say("exit 1")
    assert started.process.wait(20) == 1
    assert ended(watcher) == 0
    assert not [message for message in manager.waiting() if "READY" in message.fields]


def test_loopback_port_and_api_key(configured, start, manager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = start(configured(serve="api-key = 'k'", replica=f"endpoint = 'http://127.0.0.1:{port}'"))
    started.say("healthy")
    started.say("listen")
    manager.until("READY")
    manager.until("BARRIER")
    assert started.hear_of(path="/v1/models")["key"] == "Bearer k"


def test_abstract_notify_socket(configured, start, manager_at, tmp_path) -> None:
    manager = manager_at(f"@{tmp_path}/abstract")
    started = start(configured(), NOTIFY_SOCKET=manager.address)
    started.say("healthy")
    started.say("listen")
    manager.until("READY")
    manager.until("BARRIER")


def test_without_a_notify_socket_there_is_no_watcher(configured, start) -> None:
    started = start(configured(), NOTIFY_SOCKET="")
    pid = started.hear()["pid"]
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text().split() == [str(pid)]


def test_stale_socket_is_removed(configured, start, manager, tmp_path) -> None:
    folder = tmp_path / "vllm" / "chat-a"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "engine.sock"))
    started = start(configured())
    started.say("healthy")
    started.say("listen")
    manager.until("READY")
    manager.until("BARRIER")


def test_socket_folder_is_made_for_the_owner_only(configured, start, tmp_path) -> None:
    start(configured()).hear()
    assert (tmp_path / "vllm" / "chat-a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_endpoint_in_use_is_not_taken_over(configured, start, tmp_path, kind: str) -> None:
    if kind == "unix":
        (tmp_path / "vllm" / "chat-a").mkdir(parents=True)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / "vllm" / "chat-a" / "engine.sock"))
        server.listen()
        replica = ""
    else:
        server = socket.create_server(("127.0.0.1", 0))
        replica = f"endpoint = 'http://127.0.0.1:{server.getsockname()[1]}'"
    with server:
        status, errors = start(configured(replica=replica)).end()
        assert status == 75
        assert "cannot start the engine: another process listens on" in errors
        assert kind == "tcp" or (tmp_path / "vllm" / "chat-a" / "engine.sock").exists()


def test_another_process_that_answers_later_is_not_taken_for_the_engine(configured, start, manager) -> None:
    """The port was free when the launcher looked; then another copy took it, and serves the very same name."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = configured(replica=f"endpoint = 'http://127.0.0.1:{port}'")
    loading = start(config)
    manager.until("STATUS")
    stranger = start(config, NOTIFY_SOCKET="")
    stranger.say("healthy")
    stranger.say("listen")
    stranger.hear_of(path="/health")
    stranger.hear_of(path="/health")
    loading.say("exit 1")
    status, errors = loading.end()
    assert status == 1
    assert f"another process answers on http://127.0.0.1:{port}: {stranger.process.pid} (" in errors
    assert not [message for message in manager.waiting() if "READY" in message.fields]


@pytest.mark.parametrize(
    ("serve", "error"),
    [
        ("model = '/no/such/folder'\ncommand = ['/bin/vllm']", "cannot start the engine: /bin/vllm does not exist"),
        ("command = 'no-such-program serve'", "cannot start the engine: no 'no-such-program' in PATH="),
        ("command = '/etc/passwd'", "cannot start the engine: /etc/passwd is not executable"),
        ("prot = [1]\nport = 1", "[models.chat.serve] port: is set by the launcher from the replica's endpoint"),
    ],
)
def test_what_only_a_person_can_mend_exits_78(start, tmp_path, serve: str, error: str) -> None:
    text = serve if "model" in serve else f"model = 'm'\n{serve}"
    (tmp_path / "config.toml").write_text(f"[models.chat.serve]\n{text}\n[models.chat.replicas.chat-a]\n")
    status, errors = start(tmp_path / "config.toml").end()
    assert status == 78
    assert error in errors
    assert "Traceback" not in errors


def test_missing_model_folder_exits_78(start, tmp_path) -> None:
    vllm = tmp_path / "vllm-bin" / "vllm"
    vllm.parent.mkdir()
    vllm.symlink_to("/bin/true")
    (tmp_path / "config.toml").write_text(
        f"[models.chat.serve]\nmodel = '/no/such/folder'\ncommand = '{vllm}'\n[models.chat.replicas.chat-a]\n"
    )
    assert start(tmp_path / "config.toml").end() == (
        78,
        "vllm-replica: cannot find the model: there is no /no/such/folder\n",
    )


def test_a_file_in_the_sockets_place_is_left_alone(configured, start, tmp_path) -> None:
    file = tmp_path / "vllm" / "chat-a" / "engine.sock"
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    status, errors = start(configured()).end()
    assert (status, file.read_text()) == (78, "precious")
    assert "there is something that is no socket" in errors


def test_print_runs_nothing(configured, start, manager, tmp_path) -> None:
    started = start(configured(replica="gpus = [1]", serve="max-model-len = 0"), "--print")
    output, errors = started.process.communicate(timeout=20)
    assert (started.process.returncode, errors) == (0, "")
    assert output.startswith("env VLLM_SERVER_DEV_MODE=1 CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1 ")
    assert output.endswith(f"--uds {tmp_path}/vllm/chat-a/engine.sock --max-model-len 0\n")
    assert not manager.waiting()
    assert not (tmp_path / "vllm").exists()


def test_watcher_ends_with_the_unit(configured, start, manager, ended) -> None:
    """systemd signals the whole control group; the watcher must not ignore it."""
    start(configured())
    watcher = manager.until("STATUS").sender
    os.kill(watcher, signal.SIGTERM)
    assert ended(watcher) == -signal.SIGTERM
