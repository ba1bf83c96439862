"""vllmctl config check and doctor look into the files that the configuration only points to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pki import Pair, pair
from recordedhost import RecordedHost, config, expect

from supervisord.cli.doctor.exposure import check_credentials
from supervisord.cli.doctor.findings import Level
from supervisord.core.spec import ProxySpec

KEY = "ada:ada-key-0123456789abcdef\n"
FIRST = pair("first")


def private(file: Path, content: bytes | str) -> Path:
    file.touch(0o600)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.fixture
def secured(tmp_path: Path) -> Path:
    """A folder with keys, a certificate and its key, and a configuration that points to them."""
    private(tmp_path / "keys", KEY)
    renew(tmp_path, FIRST)
    files = {"api_keys": "keys", "tls_certificate": "chain.pem", "tls_key": "key.pem"}
    lines = "".join(f"{key} = '{tmp_path / name}'\n" for key, name in files.items())
    (tmp_path / "config.toml").write_text(f"[proxy]\n{lines}")
    return tmp_path


def renew(folder: Path, made: Pair) -> None:
    private(folder / "chain.pem", made.chain)
    private(folder / "key.pem", made.key)


def check(vllmctl, folder, *more):
    return vllmctl("config", "check", "--config", str(folder / "config.toml"), *more)


def test_files_that_can_be_used_are_valid(vllmctl, secured):
    ended = check(vllmctl, secured)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("The configuration is valid")


def test_every_file_that_cannot_be_used_is_named_at_once_with_its_reason(vllmctl, secured):
    (secured / "keys").unlink()
    (secured / "key.pem").write_bytes(pair("second").key)
    ended = check(vllmctl, secured)
    assert (ended.code, ended.out) == (6, "")
    assert "2 mistakes" in ended.err
    assert f"{secured}/keys: [proxy] api_keys: cannot read: No such file or directory" in ended.err
    assert f"{secured}/key.pem: [proxy] tls_key: does not belong to the certificate" in ended.err
    answer = json.loads(check(vllmctl, secured, "--json").out)
    assert answer["valid"] is False
    assert [each["key"] for each in answer["problems"]] == ["api_keys", "tls_key"]


def test_a_file_that_others_can_read_is_a_mistake_that_says_what_mends_it(vllmctl, secured):
    (secured / "keys").chmod(0o644)
    ended = check(vllmctl, secured)
    assert ended.code == 6
    assert "others can read or change it (its mode is 0644): chmod 600" in ended.err


def test_an_expired_certificate_is_a_warning_of_a_valid_configuration(vllmctl, secured):
    renew(secured, pair("old", -30, -1))
    ended = check(vllmctl, secured)
    assert ended.code == 0
    assert ended.err.startswith("vllmctl: warning: [proxy] tls_certificate has expired on ")
    answer = json.loads(check(vllmctl, secured, "--json").out)
    assert answer["valid"] is True
    assert len(answer["warnings"]) == 1


def test_a_credential_of_the_unit_is_no_mistake_where_only_the_unit_can_read_it(vllmctl, secured):
    file = secured / "config.toml"
    file.write_text(file.read_text().replace(f"'{secured}/key.pem'", "'credential:key'"))
    ended = check(vllmctl, secured)
    assert ended.code == 0
    assert "Not looked at, since only the daemon can read their files: tls_certificate, tls_key.\n" in ended.out


@pytest.fixture
def host(secured: Path) -> RecordedHost:
    host = RecordedHost()
    names = {"api_keys": "keys", "tls_certificate": "chain.pem", "tls_key": "key.pem"}
    spec = ProxySpec(**{key: str(secured / name) for key, name in names.items()})
    host.configured = config(proxy=spec)
    return host


def test_doctor_looks_into_the_files(host, secured):
    expect(check_credentials(host), Level.OK, "api_keys, tls_certificate, tls_key can be used")
    renew(secured, pair("old", -30, -1))
    expect(check_credentials(host), Level.WARN, "has expired on", "Renew the certificate")
    (secured / "keys").unlink()
    (secured / "chain.pem").unlink()
    expect(check_credentials(host), Level.FAIL, "keys: [proxy] api_keys: cannot read", "(and 1 more)", "vllmctl reload")


def test_doctor_fails_nothing_that_it_cannot_see(host):
    host.system = True  # as an ordinary user: the files are the machine's
    expect(check_credentials(host), Level.SKIP, "Only the daemon can read the files of api_keys, tls_certificate")
    host.configured = config()
    expect(check_credentials(host), Level.OK, "Neither API keys nor TLS")
    host.configured = ["a mistake"]
    expect(check_credentials(host), Level.SKIP, "not valid")
