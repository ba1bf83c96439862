"""What ``vllmctl config show`` prints loads to the same configuration."""

import dataclasses
import math
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisord.config import load
from supervisord.config.show import show
from supervisord.core.spec import (
    Config,
    IdleLadder,
    ModelSpec,
    ProxySpec,
    ReplicaSpec,
    ServeSpec,
    SupervisorSpec,
    WakeLimits,
)

RUNTIME = Path("/run/user/1000")
EXAMPLE = Path(__file__).parents[2] / "packaging" / "config.example.toml"


@pytest.fixture
def reload(tmp_path: Path) -> Callable[[Config], Config]:
    def shown_and_loaded(config: Config) -> Config:
        file = tmp_path / "shown.toml"
        file.write_text(show(config), encoding="utf-8")
        return dataclasses.replace(load([file], runtime_dir=RUNTIME), files=config.files)

    return shown_and_loaded


def test_example_loads_and_shows_itself(reload: Callable[[Config], Config]) -> None:
    config = load([EXAMPLE], runtime_dir=RUNTIME)
    assert [(model.name, [r.name for r in model.replicas]) for model in config.models] == [
        ("chat", ["chat-a", "chat-b"])
    ]
    assert reload(config) == config


def test_example_loads_with_everything_uncommented(tmp_path: Path) -> None:
    lines = [
        line.removeprefix("# ") if line.startswith(("# [", "# ")) and ("=" in line or line.startswith("# [")) else line
        for line in EXAMPLE.read_text(encoding="utf-8").splitlines()
    ]
    (tmp_path / "all.toml").write_text("\n".join(lines), encoding="utf-8")
    config = load([tmp_path / "all.toml"], runtime_dir=RUNTIME)
    assert [model.name for model in config.models] == ["chat", "embed", "simulated"]


def test_shown_text_is_in_the_usual_spelling(loaded) -> None:
    text = show(
        loaded('[models."org/chat".replicas.a]\nunit = "a.service"\nendpoint = "unix:/a"\nmemory.nap = 1073741824')
    )
    assert 'first_byte_timeout = "30min"' in text
    assert '[models."org/chat".replicas.a]' in text
    assert 'memory = { nap = "1G" }' in text
    assert 'stop = "infinity"' in text


SECONDS = st.one_of(st.integers(1, 10**9).map(float), st.floats(1e-9, 1e9, allow_nan=False))
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=8)
NAME = st.text(string.ascii_letters + string.digits, min_size=1, max_size=8)
SCALARS = st.one_of(
    WORDS, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    ladder = sorted(draw(st.sets(SECONDS, max_size=3)))
    idle = IdleLadder(**dict(zip(("sleep1", "sleep2", "stop"), ladder, strict=False)))
    options = draw(st.dictionaries(NAME.filter(lambda n: n[0].isalpha()).map("x-{}".format), VALUES, max_size=3))
    serve = ServeSpec(
        model=draw(WORDS.filter(bool)),
        engine=draw(st.sampled_from(["vllm", "simulator"])),
        command=tuple(draw(st.lists(WORDS, max_size=2))),
        options=options,
        args=tuple(draw(st.lists(WORDS.filter(lambda w: not w.startswith("--")), max_size=2))),
        env=draw(st.dictionaries(st.sampled_from(["A", "B_C"]), WORDS, max_size=2)),
    )
    replicas = [
        ReplicaSpec(
            name=name,
            model="org/model",
            unit=f"vllm@{name}.service",
            endpoint=f"unix:/run/user/1000/vllm/{name}/engine.sock",
            bundled=True,
            gpus=tuple(draw(st.lists(st.integers(0, 1023), unique=True, max_size=3))),
            gpu_memory=draw(st.none() | st.integers(0, 2**45)),
            nap_memory=draw(st.none() | st.integers(0, 2**45)),
        )
        for name in draw(st.lists(NAME, min_size=1, max_size=2, unique=True))
    ]
    model = ModelSpec(
        name="org/model",
        replicas=tuple(replicas),
        aliases=tuple(draw(st.lists(NAME, max_size=2, unique=True))),
        routing=draw(st.sampled_from(["adaptive", "prefill", "roundrobin", "affinity"])),
        admission=draw(st.sampled_from(["kv", "all"])),
        idle=idle,
        wake=WakeLimits(draw(SECONDS), draw(st.integers(0, 2**31 - 1)), canary=draw(st.booleans())),
        serve=serve,
    )
    proxy = ProxySpec(
        **draw(st.sampled_from([{}, {"tls_certificate": "/etc/c.pem", "tls_key": "credential:key"}])),
        api_keys=draw(st.sampled_from(["", "credential:keys", "/etc/my keys"])),
        allow_clients=draw(st.sampled_from([(), ("127.0.0.0/8", "::1")])),
        trusted_proxies=draw(st.sampled_from([(), ("127.0.0.1", "fd00::/8")])),
        cors_origins=draw(st.sampled_from([(), ("*",), ("http://localhost:3000", "https://a.example")])),
        forwarded=draw(st.sampled_from(["off", "both"])),
        route_headers=draw(st.booleans()),
        status_listen=draw(st.sampled_from([None, "127.0.0.1:9100", "unix:/run/user/1000/status.sock"])),
        keepalive=draw(SECONDS),
        max_body=draw(st.integers(1, 2**45)),
        wait_comment_after=draw(st.none() | SECONDS),
    )
    return Config(proxy=proxy, supervisor=SupervisorSpec(start_timeout=draw(SECONDS)), models=(model,))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs())
def test_any_configuration_shows_and_loads_to_itself(reload: Callable[[Config], Config], config: Config) -> None:
    assert not math.isnan(config.proxy.keepalive)
    assert reload(config) == config
