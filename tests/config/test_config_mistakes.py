"""Every mistake names file, table, key and reason, with the nearest valid key, and all are told at once."""

# ruff: noqa: E501

import pytest

from supervisord.config import ConfigError

SERVE = '[models.chat.serve]\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SERVE + "[models.chat.idle]\nslep1 = 1", "[models.chat.idle] slep1: unknown key (did you mean sleep1?)"),
        (
            "[models.chat]\nsleep1 = 1\n" + SERVE,
            "[models.chat] sleep1: unknown key (did you mean [models.NAME.idle] sleep1?)",
        ),
        ("[model.chat]", "model: unknown key (did you mean models?)"),
        ("[proxy]\nzzz = 1", "[proxy] zzz: unknown key"),
        ("proxy = 1", "proxy: must be a table, not the number 1"),
        (
            '[proxy]\nlisten = "8000"',
            "[proxy] listen: '8000' is not an address: HOST:PORT, e.g. 127.0.0.1:8000 or [::1]:8000",
        ),
        ('[proxy]\nlisten = "127.0.0.1:70000"', "[proxy] listen: '127.0.0.1:70000': the port must not be above 65535"),
        (
            '[proxy]\nstatus_listen = "9100"',
            "[proxy] status_listen: '9100' is not an address: HOST:PORT, e.g. 127.0.0.1:9100, or unix:/ABSOLUTE/PATH",
        ),
        (
            '[proxy]\nstatus_listen = "127.0.0.1:8000"',
            "[proxy] status_listen: is the public port's address: this listener is not for clients",
        ),
        (
            "[proxy]\nstatus_listen = 'unix:/%s'" % ("x" * 107),
            f"[proxy] status_listen: the socket's path is 108 bytes long, the most is 107: /{'x' * 107}",
        ),
        ('[proxy]\nlisten = "1.2.3:80"', "[proxy] listen: '1.2.3:80': '1.2.3' is not an IPv4 address"),
        (
            "[proxy]\nkeepalive = true",
            '[proxy] keepalive: must be a duration ("10min", "1h 30min", or a number of seconds), not true',
        ),
        ('[proxy]\nkeepalive = "10 mins"', "[proxy] keepalive: 'mins' is no unit of time (did you mean min?)"),
        ('[proxy]\nkeepalive = "infinity"', "[proxy] keepalive: must have an end, infinity is not allowed here"),
        (
            "[proxy]\nkeepalive = inf",
            '[proxy] keepalive: must be a duration ("10min", "1h 30min", or a number of seconds), not the number inf',
        ),
        (
            "[proxy]\nallow_clients = []",
            "[proxy] allow_clients: is empty, so nobody could connect: leave it out to let everybody",
        ),
        (
            '[proxy]\nallow_clients = ["192.168.1.7/24"]',
            "[proxy] allow_clients: '192.168.1.7/24' is an address within a network: write 192.168.1.0/24 for all of it, or 192.168.1.7 for that one alone",
        ),
        (
            '[proxy]\ntrusted_proxies = ["127.0.0.1/8"]',
            "[proxy] trusted_proxies: '127.0.0.1/8' is an address within a network: write 127.0.0.0/8 for all of it, or 127.0.0.1 for that one alone",
        ),
        (
            '[proxy]\nallow_clients = ["10.0.0.0/33"]',
            "[proxy] allow_clients: '10.0.0.0/33' is not an IP address or a network",
        ),
        (
            '[proxy]\nallow_clients = ["::1", "home.lan"]',
            "[proxy] allow_clients: item 2: 'home.lan' is not an IP address or a network: ADDRESS/PREFIX, e.g. 192.168.1.0/24 or fd00::/8",
        ),
        (
            '[proxy]\ntls_certificate = "/c.pem"',
            "[proxy] tls_key: is required but missing: tls_certificate is nothing without it",
        ),
        (
            '[proxy]\ntls_key = "credential:key"',
            "[proxy] tls_certificate: is required but missing: tls_key is nothing without it",
        ),
        (
            '[proxy]\napi_keys = "keys.txt"',
            "[proxy] api_keys: 'keys.txt' is not a file: an absolute path, or credential:NAME for a credential of the unit",
        ),
        (
            '[proxy]\ncors_origins = ["*", "https://a.example"]',
            "[proxy] cors_origins: '*' means every origin: list either it alone, or origins",
        ),
        (
            '[proxy]\ncors_origins = ["https://a.example/"]',
            "[proxy] cors_origins: item 1: 'https://a.example/' is not an origin in lower case and without a path, e.g. https://chat.example or http://localhost:3000, or *",
        ),
        (
            '[proxy]\nforwarded = "on"',
            "[proxy] forwarded: 'on' is not one of off, x-forwarded, forwarded, both",
        ),
        ("[proxy]\nconnect_timeout = 0", "[proxy] connect_timeout: must be longer than 0"),
        ('[proxy]\nconnect_timeout = "0min"', "[proxy] connect_timeout: must be longer than 0"),
        (
            '[proxy]\nmax_body = "1GB"',
            "[proxy] max_body: '1GB' is not a size (32G, 1.5G, 512M; base 1024; a plain number is bytes)",
        ),
        ("[proxy]\nmax_body = 0", "[proxy] max_body: 0 is too small, the least is 1"),
        ("[supervisor]\nbackoff_min = 400", "[supervisor] backoff_min: must not be longer than backoff_max (5min)"),
        (
            SERVE + "[models.chat.wake]\nmax_waiting = -1",
            "[models.chat.wake] max_waiting: -1 is too small, the least is 0",
        ),
        (
            SERVE + "[models.chat.wake]\ncanary = 1",
            "[models.chat.wake] canary: must be true or false, not the number 1",
        ),
        (
            SERVE + '[models.chat.wake]\ncanary = "yes"',
            "[models.chat.wake] canary: must be true or false, not the text 'yes'",
        ),
        (
            SERVE + "[models.chat.wake]\nmax_waiting = 1.5",
            "[models.chat.wake] max_waiting: must be a whole number, not the number 1.5",
        ),
        (
            '[models.chat]\nrouting = "afinity"\n' + SERVE,
            "[models.chat] routing: 'afinity' is not one of prefill, adaptive, roundrobin, affinity (did you mean affinity?)",
        ),
        (
            '[models."a b".serve]\nmodel = "m"\n[models."a b".replicas.a]',
            '[models] "a b": is not a model\'s name: letters, digits and punctuation without spaces, beginning with a letter or digit',
        ),
        ("[models.chat]", "[models] chat: has neither replicas nor serve, so nothing can answer for it"),
        (
            '[models."org/chat".serve]\nmodel = "m"',
            "[models] \"org/chat\": is no name for a replica: add a table [models.\"org/chat\".replicas.NAME] with a NAME of letters, digits, '_', '.', '-'",
        ),
        ("[models.chat.serve]\nmodle = 'm'", "[models.chat.serve] model: is required but missing (is modle misspelt?)"),
        (
            SERVE + "engine = 'vlm'",
            "[models.chat.serve] engine: 'vlm' is not one of vllm, simulator (did you mean vllm?)",
        ),
        (SERVE + "port = 8000", "[models.chat.serve] port: is set by the launcher from the replica's endpoint"),
        (
            SERVE + "served_model_name = 'x'",
            "[models.chat.serve] served_model_name: is set by the launcher from the model's name and aliases",
        ),
        (
            SERVE + "args = ['--port=1']",
            "[models.chat.serve] args: '--port=1': port is set by the launcher from the replica's endpoint",
        ),
        (
            SERVE + "max-model-len = 1\nmax_model_len = 2",
            "[models.chat.serve] max_model_len: is the same option as max-model-len, which is given too",
        ),
        (
            SERVE + "--seed = 1",
            "[models.chat.serve] --seed: is not an option's name as vLLM spells it, without the leading dashes",
        ),
        (
            SERVE + "no-enable-prefix-caching = true",
            "[models.chat.serve] no-enable-prefix-caching: write enable-prefix-caching = false",
        ),
        (
            SERVE + "seed = 2024-01-01",
            "[models.chat.serve] seed: must be a text, a number, true or false, a list or a table, not the date or time 2024-01-01",
        ),
        (SERVE + "x = {y = [1, inf]}", "[models.chat.serve] x: y[1]: must be a finite number"),
        (SERVE + 'x = "a\\u0000b"', "[models.chat.serve] x: must not contain a NUL"),
        (SERVE + "args = ['a', 1]", "[models.chat.serve] args: item 2: must be a text, not the number 1"),
        (
            SERVE + 'command = "vllm \'serve"',
            '[models.chat.serve] command: cannot split "vllm \'serve" as a shell does: no closing quotation',
        ),
        (SERVE + "env = {A = true}", "[models.chat.serve.env] A: must be a text or a number, not true"),
        (SERVE + 'env = {"A-B" = "1"}', "[models.chat.serve.env] A-B: is not the name of an environment variable"),
        (SERVE + "[models.chat.replicas.a]\ngpus = [0, 0]", "[models.chat.replicas.a] gpus: 0 is listed twice"),
        (
            SERVE + "[models.chat.replicas.a]\ngpus = [0, -1]",
            "[models.chat.replicas.a] gpus: item 2: -1 is too small, the least is 0",
        ),
        (
            SERVE + '[models.chat.replicas."-a"]',
            "[models.chat.replicas] -a: is not a replica's name: letters, digits, '_', '.' and '-', beginning with a letter or digit",
        ),
        (
            "[models.chat.replicas.a]",
            "[models.chat.replicas] a: has neither a unit nor a serve table in its model, so nothing can start it",
        ),
        (
            "[models.chat.replicas.a]\nunit = 'a.service'",
            "[models.chat.replicas.a] endpoint: is required but missing: a replica with its own unit must say where it answers",
        ),
        (
            "[models.chat.replicas.a]\nunit = 'a'\nendpoint = 'unix:/a'",
            "[models.chat.replicas.a] unit: 'a' is not the name of a systemd service (one that does not begin with '-'), e.g. chat-a.service",
        ),
        (
            "[models.chat.replicas.a]\nunit = '-.service'\nendpoint = 'unix:/a'",
            "[models.chat.replicas.a] unit: '-.service' is not the name of a systemd service (one that does not begin with '-'), e.g. chat-a.service",
        ),
        (
            "[models.chat.replicas.a]\nunit = 'vllm@a.service'\nendpoint = 'unix:/a'",
            "[models.chat.replicas.a] unit: 'vllm@a.service' is a unit of ours: leave unit out, and a serve table says what it runs",
        ),
        (
            SERVE + "[models.chat.replicas.a]\nendpoint = 'http://0.0.0.0:1'",
            "[models.chat.replicas.a] endpoint: 'http://0.0.0.0:1' can be reached from outside: a bundled replica needs unix:/PATH or http://127.0.0.1:PORT",
        ),
        (
            SERVE + "[models.chat.replicas.a]\nendpoint = 'http://localhost:1/v1'",
            "[models.chat.replicas.a] endpoint: 'http://localhost:1/v1' is not an endpoint: http://HOST:PORT or unix:/ABSOLUTE/PATH, without a path after the port",
        ),
        (
            SERVE + "[models.chat.replicas.a]\nendpoint = 'http://localhost:0'",
            "[models.chat.replicas.a] endpoint: 'localhost:0': the port must be from 1 to 65535",
        ),
        (
            SERVE + "[models.chat.idle]\nsleep1 = '1h'\nstop = '10min'",
            "[models.chat.idle] stop: must come later than sleep1: 10min is not later than 1h",
        ),
        (
            SERVE + "[models.chat.idle]\nsleep1 = 60\nsleep2 = '1min'",
            "[models.chat.idle] sleep2: must come later than sleep1: 1min is not later than 1min",
        ),
        (
            SERVE + "[models.chat.replicas.a]\nunit = 'a.service'\nendpoint = 'unix:/a'",
            "[models.chat] serve: is used by nobody: every replica has its own unit",
        ),
        ("[models.chat]\naliases = ['chat']\n" + SERVE, "[models.chat] aliases: 'chat' is the model's own name"),
        ("[models.chat]\naliases = ['b', 'b']\n" + SERVE, "[models.chat] aliases: 'b' is listed twice"),
        ("[proxy]\nlisten =", "cannot parse: Invalid value (at end of document)"),
        ("[proxy]\nlisten = x\n", "cannot parse: Invalid value (at line 2, column 10)"),
    ],
)
def test_one_mistake(mistakes, text: str, expected: str) -> None:
    assert mistakes(text) == [f"config.toml: {expected}"]


TWO_MODELS = '[models.a.serve]\nmodel = "m"\n[models.b.serve]\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TWO_MODELS + "[models.a]\naliases = ['b']", "[models.a] aliases: 'b' is a name of [models.b] already"),
        (
            TWO_MODELS + "[models.a]\naliases = ['c']\n[models.b]\naliases = ['c']",
            "[models.b] aliases: 'c' is a name of [models.a] already",
        ),
        (
            TWO_MODELS + "[models.a.replicas.x]\n[models.b.replicas.x]\nendpoint = 'unix:/b'",
            "[models.b.replicas] x: the name 'x' is used already, by [models.a.replicas.x]",
        ),
        (
            "[models.a.replicas.x]\nunit = 'u.service'\nendpoint = 'unix:/x'\n"
            "[models.b.replicas.y]\nunit = 'u.service'\nendpoint = 'unix:/y'",
            "[models.b.replicas] y: the unit 'u.service' is used already, by [models.a.replicas.x]",
        ),
        (
            TWO_MODELS + "[models.a.replicas.x]\nendpoint = 'http://localhost:1'\n"
            "[models.b.replicas.y]\nendpoint = 'http://127.0.0.1:01'",
            "[models.b.replicas] y: the endpoint http://127.0.0.1:1 is used already, by [models.a.replicas.x]",
        ),
        (
            TWO_MODELS + "[models.a.replicas.x]\nendpoint = 'http://localhost:8000'",
            "[proxy] listen: is the endpoint of [models.a.replicas.x]: the proxy would talk to itself",
        ),
        (
            "[proxy]\nstatus_listen = 'unix:/e'\n" + TWO_MODELS + "[models.a.replicas.x]\nendpoint = 'unix:/e'",
            "[proxy] status_listen: is the endpoint of [models.a.replicas.x]",
        ),
    ],
)
def test_names_units_and_endpoints_are_unique(mistakes, text: str, expected: str) -> None:
    assert [line.removeprefix("config.toml: ") for line in mistakes(text) if expected in line] == [expected]


def test_all_mistakes_at_once_in_the_order_of_the_files(mistakes) -> None:
    assert mistakes(
        '[proxy]\nlisten = 1\nkeepaliv = 2\n[models.chat.serve]\nmodel = ""\n',
        b10="[models.chat.idle]\nsleep1 = '2h'\n[models.chat]\nrooting = 1",
        b20="[models.chat.idle]\nstop = '1h'",
    ) == [
        "config.toml: [proxy] listen: must be a text, not the number 1",
        "config.toml: [proxy] keepaliv: unknown key (did you mean keepalive?)",
        "config.toml: [models.chat.serve] model: '' is not a text that is not empty",
        "config.d/b10.toml: [models.chat] rooting: unknown key (did you mean routing?)",
        "config.d/b20.toml: [models.chat.idle] stop: must come later than sleep1: 1h is not later than 2h",
    ]


def test_a_file_that_cannot_be_parsed_hides_no_mistake_elsewhere_and_invents_none(mistakes) -> None:
    lines = mistakes(
        "[models.chat.serve]\nseed = 1\n[models.chat.replicas.a]\n[proxy]\nx = 1", b10="[models.chat.serve\n"
    )
    assert len(lines) == 2
    assert lines[0] == "config.toml: [proxy] x: unknown key"
    assert lines[1].startswith(
        "config.d/b10.toml: cannot parse: Expected ']' at the end of a table declaration (at line 1"
    )


def test_a_value_replaced_by_a_later_file_is_blamed_on_that_file(mistakes) -> None:
    assert mistakes("[proxy]\nlisten = 'a:1'", b10="[proxy]\nlisten = 5") == [
        "config.d/b10.toml: [proxy] listen: must be a text, not the number 5"
    ]


def test_a_table_that_was_replaced_is_blamed_on_the_file_that_has_it_now(mistakes) -> None:
    serve = SERVE + "[models.chat.replicas.a]"
    assert mistakes(serve, b10="[models.chat]\nserve = 5", b20="[models.chat.serve]\nseed = 1") == [
        "config.d/b20.toml: [models.chat.serve] model: is required but missing"
    ]


def test_a_wrong_value_is_not_taken_for_a_missing_one(mistakes) -> None:
    lines = mistakes("[models.chat.replicas.a]\nunit = 'a.service'\nendpoint = 7")
    assert lines == ["config.toml: [models.chat.replicas.a] endpoint: must be a text, not the number 7"]


@pytest.mark.parametrize("text", ["x = " + "[" * 3000, "x = " + "9" * 5000])
def test_a_hostile_file_is_a_mistake_and_no_crash(mistakes, text: str) -> None:
    (line,) = mistakes(text)
    assert line.startswith("config.toml: cannot parse:")


def test_a_file_that_is_not_utf8(loaded, tmp_path) -> None:
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "x.toml").write_bytes(b'x = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 5"):
        loaded("")


def test_a_socket_path_too_long_for_the_kernel(mistakes) -> None:
    (line,) = mistakes(f"[models.chat.replicas.a]\nunit = 'a.service'\nendpoint = 'unix:/{'x' * 107}'")
    assert "endpoint: the socket's path is 108 bytes long, the most is 107" in line
