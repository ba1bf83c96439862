"""Each check of vllmctl doctor, fed with recorded answers; and all of them on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recordedhost import SOCKET, UNIT_FILES, RecordedHost, config, expect, manager

from supervisord.cli.doctor import exposure, login, service, software
from supervisord.cli.doctor import fleet as fleet_checks
from supervisord.cli.doctor.findings import Level
from supervisord.cli.doctor.host import Ran
from supervisord.cli.doctor.run import CHECKS, examine
from supervisord.core.spec import Config, ProxySpec


@pytest.fixture
def host() -> RecordedHost:
    return RecordedHost()


def test_on_a_healthy_machine_every_check_is_ok(host):
    findings = [examine(host, check) for check in CHECKS]
    assert [finding for finding in findings if finding.level is not Level.OK] == []
    assert len({finding.check for finding in findings}) == len(CHECKS)


def test_a_check_that_breaks_is_a_failure_of_its_own(host):
    def check_something(host):
        raise ZeroDivisionError("by zero")

    expect(examine(host, check_something), Level.FAIL, "cannot check: ZeroDivisionError", "defect")


@pytest.mark.parametrize(("version", "level"), [((3, 10, 9), Level.FAIL), ((3, 13, 0), Level.OK)])
def test_python(host, version, level):
    host.python = version
    assert software.check_python(host).level is level


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("aiohttp", "3.14.4", "aiohttp 3.14.4 is too old (3.14.5 or newer is needed)"),
        ("aiohttp", "3.9", "is too old"),
        ("pystemd", None, "pystemd is not installed"),
    ],
)
def test_packages(host, package, version, said):
    host.packages[package] = version
    expect(software.check_packages(host), Level.FAIL, said)


@pytest.mark.parametrize("version", ["4.0.0", "3.14.10", "3.15.0rc1"])
def test_newer_packages_are_good(host, version):
    host.packages["aiohttp"] = version
    assert software.check_packages(host).level is Level.OK


@pytest.mark.parametrize(
    ("ran", "level"),
    [
        (Ran(0, "systemd 257 (257.5-2)"), Level.OK),
        (Ran(0, "systemd 247 (247.3-7)"), Level.FAIL),
        (Ran(127, err="systemctl: not found"), Level.FAIL),
    ],
)
def test_systemd(host, ran, level):
    host.commands["systemctl --version"] = ran
    assert software.check_systemd(host).level is level


def test_a_daemon_of_another_version_is_to_be_restarted(host):
    host.answers = manager(version="0.0.9")
    expect(software.check_versions_agree(host), Level.WARN, "0.0.9", "systemctl --user restart vllm-supervisord")


@pytest.mark.parametrize(
    ("ran", "level", "said"),
    [
        (Ran(1, "degraded"), Level.WARN, "failed: other.service"),
        (Ran(1, "starting"), Level.OK, "starting"),
        (Ran(1, "", "Failed to connect to bus: No medium found"), Level.FAIL, "No medium found"),
        (Ran(1, "offline"), Level.FAIL, "loginctl enable-linger ada"),
    ],
)
def test_user_manager(host, ran, level, said):
    host.commands["systemctl --user is-system-running"] = ran
    host.commands["systemctl --user list-units --failed"] = Ran(0, "other.service loaded failed failed Other")
    expect(login.check_manager(host), level, said)


def test_session_bus(host):
    host.why_no_bus = "cannot find the session bus"
    expect(login.check_bus(host), Level.FAIL, "cannot find the session bus", "dbus-user-session")
    host.why_no_bus = ""
    host.env = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    expect(login.check_bus(host), Level.OK, "without DBUS_SESSION_BUS_ADDRESS")


@pytest.mark.parametrize(
    ("shown", "level", "said"),
    [
        ("LoadState=not-found\nActiveState=inactive", Level.FAIL, "apt install dbus-user-session"),
        ("LoadState=loaded\nActiveState=inactive", Level.FAIL, "systemctl --user start dbus.socket"),
        ("", Level.SKIP, "does not answer"),
    ],
)
def test_dbus_user_session(host, shown, level, said):
    host.commands["systemctl --user show -p LoadState -p ActiveState dbus.socket"] = Ran(0, shown)
    expect(login.check_user_bus_socket(host), level, said)


@pytest.mark.parametrize(
    ("ran", "level", "said"),
    [
        (Ran(0, "no"), Level.WARN, "loginctl enable-linger ada"),
        (Ran(1, "", "Failed to get user: User ID 1000 is not logged in or lingering"), Level.WARN, "enable-linger ada"),
        (Ran(1, "", "Failed to connect to bus: No such file or directory"), Level.WARN, "logind does not answer"),
    ],
)
def test_linger(host, ran, level, said):
    host.commands["loginctl"] = ran
    expect(login.check_linger(host), level, said)
    host.files["/var/lib/systemd/linger/ada"] = (0, 0o644)
    assert login.check_linger(host).level is Level.OK


@pytest.mark.parametrize(
    ("files", "level", "said"),
    [
        ({}, Level.FAIL, "does not exist"),
        ({"/run/user/1000": (1000, 0o755)}, Level.FAIL, "chmod 0700 /run/user/1000"),
        ({"/run/user/1000": (0, 0o700)}, Level.FAIL, "belongs to uid 0"),
        ({"/run/user/1000": (1000, 0o700), "/run/user/1000/vllm": (0, 0o700)}, Level.FAIL, "/run/user/1000/vllm"),
    ],
)
def test_runtime_directory(host, files, level, said):
    host.files = files
    expect(login.check_runtime_directory(host), level, said)


def test_runtime_directory_that_is_not_in_the_environment(host):
    host.env = {}
    expect(login.check_runtime_directory(host), Level.WARN, "export XDG_RUNTIME_DIR=/run/user/1000")


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        (
            Ran(0, "", "No journal files were opened due to insufficient permissions."),
            "usermod -a -G systemd-journal ada",
        ),
        (Ran(0, "", "No journal files were found."), "There are no journal files"),
        (Ran(127), "There is no journalctl"),
        (Ran(1, "", "Bad message"), "Bad message"),
    ],
)
def test_journal(host, ran, said):
    host.commands["journalctl"] = ran
    expect(login.check_journal(host), Level.WARN, said)


def test_units_that_are_missing_masked_or_stale(host):
    host.commands["systemctl --user list-unit-files"] = Ran(0, UNIT_FILES.replace("vllm@.service", "other@.service"))
    expect(service.check_units(host), Level.FAIL, "Not installed: vllm@.service")
    host.commands["systemctl --user list-unit-files"] = Ran(0, UNIT_FILES.replace("disabled", "masked"))
    expect(service.check_units(host), Level.FAIL, "systemctl --user unmask vllm@.service")
    host.commands["systemctl --user list-unit-files"] = Ran(0, UNIT_FILES)
    host.commands["systemctl --user show -p Id,NeedDaemonReload"] = Ran(
        0, "Id=vllm-supervisord.service\nNeedDaemonReload=yes"
    )
    expect(service.check_units(host), Level.WARN, "systemctl --user daemon-reload")
    host.commands["systemctl --user list-unit-files"] = Ran(1, "", "Failed to connect to bus")
    expect(service.check_units(host), Level.SKIP)


@pytest.mark.parametrize(
    ("ran", "level"),
    [
        (Ran(0, "", "/x/vllm-supervisord.service:9: Unknown key 'Foo' in section [Service], ignoring."), Level.WARN),
        (Ran(1, "", "vllm-supervisord.service: Command /x/vllm-supervisord is not executable"), Level.FAIL),
        (Ran(0, "", "/lib/systemd/user/other.service:3: Unknown key"), Level.OK),
        (Ran(127), Level.SKIP),
    ],
)
def test_unit_files_are_verified_and_others_faults_are_not_ours(host, ran, level):
    host.commands["systemd-analyze"] = ran
    expect(service.check_units_verify(host), level)


def test_what_is_not_enabled_does_not_start_at_boot(host):
    host.commands["systemctl --user list-unit-files"] = Ran(
        0, UNIT_FILES.replace("enabled enabled", "disabled enabled")
    )
    expect(service.check_enabled(host), Level.WARN, "systemctl --user enable --now vllm-supervisord.socket")


def test_a_daemon_that_does_not_run_is_told_with_its_units_state(host):
    host.answers = "vllm-supervisord is not on the bus."
    expect(
        service.check_daemon(host),
        Level.FAIL,
        "failed/failed, result exit-code",
        "systemctl --user start",
        "vllmctl logs",
    )


def test_a_simulated_fleet_is_told(host):
    host.answers = manager(simulated=True)
    expect(service.check_daemon(host), Level.OK, "simulated")


def test_the_socket_unit_must_hold_the_port_that_the_daemon_listens_on(host):
    socket = "systemctl --user show -p LoadState,ActiveState,Result,Listen"
    host.answers = manager(listen=("127.0.0.1:9000",))
    expect(service.check_socket(host), Level.FAIL, "the daemon listens on 127.0.0.1:9000")
    host.answers = manager(listen=("0.0.0.0:8000",))
    assert service.check_socket(host).level is Level.OK
    host.configured = config(listen="0.0.0.0:9")
    expect(service.check_socket(host), Level.WARN, "proxy.listen = '0.0.0.0:9' is ignored")
    host.commands[socket] = Ran(0, SOCKET.replace("active", "failed").replace("success", "resources"))
    expect(service.check_socket(host), Level.FAIL, "failed (result resources)")
    host.listening = {("127.0.0.1", 8000)}
    expect(service.check_socket(host), Level.WARN, "held by the daemon itself")
    host.answers = "vllm-supervisord is not on the bus."
    expect(service.check_socket(host), Level.FAIL, "held by another program", "ss -ltnp")
    host.commands[socket] = Ran(0, "LoadState=not-found")
    expect(service.check_socket(host), Level.SKIP)


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "192.168.1.2:8000", ":::8000", "[::]:8000"])
def test_a_port_for_other_machines_wants_a_guard(host, listen):
    host.answers = manager(listen=("127.0.0.1:8000", listen))
    expect(exposure.check_exposure(host), Level.WARN, f"reach {listen}, and everybody", "api_keys or allow_clients")
    for spec, guard in (
        (ProxySpec(api_keys="/keys", tls_certificate="/c", tls_key="/k"), "API keys and TLS"),
        (ProxySpec(allow_clients=("10.0.0.0/8",)), "allow_clients"),
    ):
        host.configured = config(proxy=spec)
        expect(exposure.check_exposure(host), Level.OK, f"guarded by {guard}")
    host.configured = config(proxy=ProxySpec(api_keys="/keys"))
    expect(exposure.check_exposure(host), Level.WARN, "API keys go there in the clear", "tls_certificate")
    host.configured = config(proxy=ProxySpec(tls_certificate="/c", tls_key="/k"))
    expect(exposure.check_exposure(host), Level.WARN, "everybody there may use the models")
    host.answers = manager(listen=("127.0.0.1:8000", "::1:8000", "unix:/run/port"))
    expect(exposure.check_exposure(host), Level.OK, "Only this machine")


def test_without_a_daemon_the_configuration_tells_who_could_reach_the_port(host):
    host.answers, host.configured = "not on the bus", config(listen="0.0.0.0:8000")
    assert exposure.check_exposure(host).level is Level.WARN
    host.configured = ["a mistake"]
    assert exposure.check_exposure(host).level is Level.SKIP


def test_configuration(host):
    host.configured = ["a.toml: [proxy] listn: no such key", "another"]
    expect(fleet_checks.check_config(host), Level.FAIL, "a.toml: [proxy] listn", "(and 1 more)", "vllmctl config check")
    host.configured = Config()
    expect(fleet_checks.check_config(host), Level.WARN, "No models")


@pytest.mark.parametrize("state", ["masked", "not-found", "bad-setting"])
def test_replica_units(host, state):
    host.commands["systemctl --user show -p Id,LoadState,LoadError"] = Ran(
        0, f"Id=vllm@chat-a.service\nLoadState={state}"
    )
    said = "missing" if state == "not-found" else state
    expect(fleet_checks.check_replica_units(host), Level.FAIL, f"vllm@chat-a.service of replica chat-a is {said}")


def test_state_directory(host):
    host.unwritable = "/home/ada/.local/state: Read-only file system"
    expect(fleet_checks.check_state_directory(host), Level.FAIL, "Read-only file system")


def test_engines_are_looked_for_on_the_service_managers_path(host):
    expect(fleet_checks.check_engines(host), Level.OK, "/opt/vllm/bin/vllm")
    host.programs = {}
    expect(fleet_checks.check_engines(host), Level.FAIL, "'vllm' of model chat", "command =")
    host.configured = config(engine="simulator")
    expect(fleet_checks.check_engines(host), Level.OK, "the simulator")
    host.configured = ["wrong"]
    expect(fleet_checks.check_engines(host), Level.SKIP)


def test_in_system_mode_nothing_of_a_user_is_asked(host):
    host.system = True
    host.commands = {key.replace(" --user", ""): ran for key, ran in host.commands.items()}
    assert [finding for finding in (examine(host, check) for check in CHECKS) if finding.level is Level.FAIL] == []
    assert login.check_linger(host).level is Level.SKIP


def test_doctor_on_this_machine_makes_every_check_and_exits_7_on_a_failure(vllmctl, supervisor, tmp_path):
    ended = vllmctl("doctor", "--json")
    answer = json.loads(ended.out)
    assert len(answer["findings"]) == len(CHECKS)
    assert not [finding for finding in answer["findings"] if finding["text"].startswith("cannot check")]
    levels = {finding["check"]: finding["level"] for finding in answer["findings"]}
    assert levels["python"] == levels["packages"] == levels["bus"] == levels["daemon"] == "ok"
    assert levels["config"] == "fail"
    assert (ended.code, answer["ok"]) == (7, False)
    shown = vllmctl("doctor")
    assert shown.code == 7
    assert f"{len(CHECKS)} checks: " in shown.out
    assert "FAIL  config " in shown.out


def test_doctor_without_a_bus_still_makes_every_check(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "supervisord.cli.main", "doctor", "--json"],
        env={"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/nonexistent"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (7, "")
    answer = json.loads(ended.stdout)
    assert len(answer["findings"]) == len(CHECKS)
    assert not [finding for finding in answer["findings"] if finding["text"].startswith("cannot check")]
