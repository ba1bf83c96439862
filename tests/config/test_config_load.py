"""What a right configuration becomes: files found, merged, and turned into the spec."""

import os
from pathlib import Path

import pytest

from supervisord.config import ConfigError, default_files, files_beside, load, runtime_directory
from supervisord.core.spec import IdleLadder, ProxySpec, ReplicaSpec, SupervisorSpec, WakeLimits

RUNTIME = Path("/run/user/1000")
CHAT = '[models.chat.serve]\nmodel = "org/chat"\n'


def test_empty_file_is_all_defaults(loaded) -> None:
    config = loaded("")
    assert (config.proxy, config.supervisor, config.models) == (ProxySpec(), SupervisorSpec(), ())
    assert [Path(file).name for file in config.files] == ["config.toml"]


def test_every_table_reaches_the_spec(loaded) -> None:
    config = loaded("""
        [proxy]
        listen = "[::1]:9000"
        max_body = "1G"
        wait_comment_after = "infinity"
        [supervisor]
        start_timeout = "1h"
        drain_timeout = 0
        dead_after = "500ms"
        hung_after = "2min"
        [models.chat]
        aliases = ["default", "org/chat"]
        routing = "affinity"
        admission = "all"
        [models.chat.idle]
        sleep1 = "10min"
        stop = 28800
        [models.chat.wake]
        timeout = "90s"
        max_waiting = 0
        canary = false
        [models.chat.serve]
        model = "org/chat"
        engine = "simulator"
        command = "python -m 'my engine'"
        max_model_len = 8192
        kv-cache-memory-bytes = 0
        enable-prefix-caching = false
        args = ["-O3"]
        env = { OMP_NUM_THREADS = 1, HF_HOME = "/srv" }
        [models.chat.replicas.chat-a]
        gpus = [0, 1]
        memory = { gpu = "30G", nap = "1.5G" }
        [models.chat.replicas.other]
        unit = "frank-medium-b.service"
        endpoint = "http://LOCALHOST:07772"
    """)
    assert config.proxy == ProxySpec(listen="[::1]:9000", max_body=2**30, wait_comment_after=None)
    assert config.supervisor == SupervisorSpec(
        start_timeout=3600.0, drain_timeout=0.0, dead_after=0.5, hung_after=120.0
    )
    (chat,) = config.models
    assert (chat.name, chat.aliases, chat.routing) == ("chat", ("default", "org/chat"), "affinity")
    assert chat.admission == "all"
    assert chat.idle == IdleLadder(sleep1=600.0, sleep2=None, stop=28800.0)
    assert chat.wake == WakeLimits(timeout=90.0, max_waiting=0, canary=False)
    assert chat.replicas == (
        ReplicaSpec(
            name="chat-a",
            model="chat",
            unit="vllm@chat-a.service",
            endpoint="unix:/run/user/1000/vllm/chat-a/engine.sock",
            bundled=True,
            gpus=(0, 1),
            gpu_memory=30 * 2**30,
            nap_memory=3 * 2**29,
        ),
        ReplicaSpec(name="other", model="chat", unit="frank-medium-b.service", endpoint="http://localhost:7772"),
    )
    assert chat.serve is not None
    assert (chat.serve.model, chat.serve.engine) == ("org/chat", "simulator")
    assert chat.serve.command == ("python", "-m", "my engine")
    assert dict(chat.serve.options) == {
        "max-model-len": 8192,
        "kv-cache-memory-bytes": 0,
        "enable-prefix-caching": False,
    }
    assert chat.serve.args == ("-O3",)
    assert dict(chat.serve.env) == {"OMP_NUM_THREADS": "1", "HF_HOME": "/srv"}


def test_model_with_serve_alone_has_one_replica_of_its_name(loaded) -> None:
    (chat,) = loaded(CHAT).models
    assert [(r.name, r.unit, r.bundled) for r in chat.replicas] == [("chat", "vllm@chat.service", True)]


def test_bundled_replica_may_have_a_loopback_port_instead(loaded) -> None:
    (chat,) = loaded(CHAT + '[models.chat.replicas.a]\nendpoint = "http://127.0.0.1:7771"').models
    assert (chat.replicas[0].endpoint, chat.replicas[0].bundled) == ("http://127.0.0.1:7771", True)


def test_infinity_takes_a_rung_away_that_an_earlier_file_set(loaded) -> None:
    config = loaded(CHAT + '[models.chat.idle]\nstop = "8h"', override='[models.chat.idle]\nstop = "infinity"')
    assert config.models[0].idle.stop is None


def test_later_files_win_and_tables_merge(loaded) -> None:
    config = loaded(
        CHAT + "max-model-len = 1\nmax-num-seqs = 2\n[models.chat.replicas.a]\ngpus = [0]\n[models.chat.replicas.b]\n",
        b20="[models.chat.serve]\nmax-model-len = 3\n",
        b10="[models.chat.serve]\nmax-model-len = 4\n[models.chat.replicas.a]\ngpus = [1, 2]\n",
    )
    (chat,) = config.models
    assert chat.serve is not None
    assert dict(chat.serve.options) == {"max-model-len": 3, "max-num-seqs": 2}
    assert [r.gpus for r in chat.replicas] == [(1, 2), ()]
    assert [Path(file).name for file in config.files] == ["config.toml", "b10.toml", "b20.toml"]


def test_hidden_and_other_files_are_not_drop_ins(tmp_path: Path) -> None:
    (tmp_path / "config.d").mkdir()
    for name in ("10.toml", ".20.toml", "30.toml~", "40.toml.bak", "05.toml"):
        (tmp_path / "config.d" / name).touch()
    assert [file.name for file in files_beside(tmp_path / "config.toml")] == ["config.toml", "05.toml", "10.toml"]


def test_byte_order_mark_and_crlf_are_read(loaded) -> None:
    assert loaded("\ufeff[proxy]\r\nlisten = '127.0.0.1:1'\r\n").proxy.listen == "127.0.0.1:1"


@pytest.mark.parametrize(
    ("env", "system", "main"),
    [
        ({"HOME": "/home/me"}, False, "/home/me/.config/vllm-supervisord/config.toml"),
        ({"HOME": "/home/me", "XDG_CONFIG_HOME": "/elsewhere"}, False, "/elsewhere/vllm-supervisord/config.toml"),
        ({"HOME": "/home/me", "XDG_CONFIG_HOME": "relative"}, False, "/home/me/.config/vllm-supervisord/config.toml"),
        ({"HOME": "/home/me", "XDG_CONFIG_HOME": "/elsewhere"}, True, "/etc/vllm-supervisord/config.toml"),
    ],
)
def test_where_the_main_file_is(env: dict[str, str], system: bool, main: str) -> None:
    assert default_files(env, system=system)[0] == Path(main)


def test_runtime_directory() -> None:
    assert runtime_directory({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7")
    assert runtime_directory({}) == Path(f"/run/user/{os.getuid()}")
    assert runtime_directory({"XDG_RUNTIME_DIR": "/run/user/7"}, system=True) == Path("/run")


def test_missing_main_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/c/vllm-supervisord/config.toml: cannot read: there is no such file"
    ):
        load(env={"XDG_CONFIG_HOME": f"{tmp_path}/c"}, runtime_dir=RUNTIME)


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "config.d" / "folder.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"folder\.toml: cannot read: Is a directory"):
        load(files_beside(tmp_path / "config.toml"), runtime_dir=RUNTIME)


def test_config_d_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.d").touch()
    with pytest.raises(ConfigError, match=r"config\.d: cannot read: Not a directory"):
        files_beside(tmp_path / "config.toml")
