"""An ordinary user's way from a fresh Debian 13 to a working endpoint and back.

One boot; each test looks at some of the steps of ``scenario``.
"""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.machine
Steps = Any  # what conftest.py has under this name


@pytest.fixture(scope="module")
def steps(play: Callable[[str], Steps]) -> Steps:
    return play("as_tester bash $source/tests/machine/scenario")


def test_runs_from_the_checkout_under_the_running_user_manager_and_leaves_nothing(steps: Steps) -> None:
    shown = steps.output("run")
    assert "Runs under your user manager" in shown
    assert "60 x 200" in shown
    assert {replica["name"] for replica in steps.data("run-status")["replicas"]} == {"demo-a", "demo-b"}
    assert "/run/user/1000/systemd/user/" in steps.output("run-unit")
    steps.output("stop")
    assert steps.output("after-stop") == ""
    assert steps.output("files-after-stop") == steps.output("files-before")


def test_does_not_run_over_an_installation_in_use(steps: Steps) -> None:
    assert steps.status("run-beside") != 0
    assert "is installed and in use" in steps.errors("run-beside")


def test_installs_without_root_and_says_how_to_go_on(steps: Steps) -> None:
    text = steps.output("install")
    assert "systemctl --user enable --now vllm-supervisord.socket vllm-supervisord.service" in text
    assert "vllmctl.1" in steps.output("man")


def test_systemd_257_knows_every_line_of_the_installed_units(steps: Steps) -> None:
    assert steps.output("verify") + steps.errors("verify") == ""


def test_every_restriction_restricts_an_ordinary_users_units_too(steps: Steps) -> None:
    assert {line for line, (_, with_it) in steps.data("hardening").items() if not with_it} == set()


def test_the_example_quadlet_becomes_a_unit(steps: Steps) -> None:
    text = steps.output("quadlet")
    assert "---replica-a.service---" in text
    assert "--sdnotify=healthy" in text


def test_enabling_the_units_is_all_it_takes(steps: Steps) -> None:
    steps.output("enable")
    assert "active (running)" in steps.output("status")
    assert [model["id"] for model in steps.data("models")["data"]] == ["simulated"]
    assert "status 200" in steps.output("chat")
    stream = steps.output("stream")
    assert "data: [DONE]" in stream
    assert "status 200" in stream


def test_vllmctl_and_busctl_find_it_without_a_bus_address(steps: Steps) -> None:
    replicas = {replica["name"]: replica for replica in steps.data("vllmctl")["replicas"]}
    assert set(replicas) == {"sim-a", "sim-b"}
    assert all(replica["simulated"] for replica in replicas.values() if replica["state"] == "ready")
    assert steps.output("cron").split()[0] == "simulated"
    assert '"simulated"' in steps.output("busctl")
    assert steps.status("doctor") == 0, steps.output("doctor")


def test_the_engines_words_are_in_the_journal(steps: Steps) -> None:
    assert "simulated" in steps.output("journal")
    assert steps.output("logs").strip()


def test_sleeps_when_told_and_wakes_on_a_request(steps: Steps) -> None:
    steps.output("sleep")
    assert "asleep" in steps.output("asleep")
    assert "data: [DONE]" in steps.output("wake")


@pytest.mark.parametrize("step", ["restart-under-load", "reload-under-load", "failover-under-load"])
def test_clients_see_no_error(steps: Steps, step: str) -> None:
    seen = steps.data(step)
    assert seen["command"] == 0
    assert set(seen["answers"]) == {"200"}, seen


def test_a_restart_of_the_supervisor_restarts_no_engine(steps: Steps) -> None:
    assert steps.output("invocations-before").count("InvocationID=") == 2
    assert steps.output("invocations-after") == steps.output("invocations-before")


def test_an_upgrade_keeps_the_engines_and_the_configuration(steps: Steps) -> None:
    assert "The old version still runs" in steps.output("upgrade")
    assert "wrote a first configuration" not in steps.output("upgrade")
    steps.output("restart")
    assert steps.output("invocations-upgraded") == steps.output("invocations-upgrading")
    assert "status 200" in steps.output("chat-upgraded")


def test_images_of_real_quadlets_are_pulled_by_the_real_podman_and_nothing_is_started(steps: Steps) -> None:
    steps.output("quadlets")
    results = {result["name"]: result for result in steps.data("pull")["results"]}
    assert set(results) == {"boxed", "based"}
    assert {result["result"] for result in results.values()} == {"pulled", "present"}
    assert steps.output("pull-again").endswith("127.0.0.1:5055/vllm:1: all of it is here\n")
    assert steps.output("pulled").startswith("127.0.0.1:5055/vllm:1 1")
    assert steps.status("pull-gone") == 1
    assert "vllmctl: gone: cannot pull 127.0.0.1:5055/vllm:2: " in steps.errors("pull-gone")
    assert "manifest unknown" in steps.errors("pull-gone")
    assert set((steps.folder / "not-started.out").read_text().split()) == {"inactive"}
    steps.output("no-quadlets")


def test_clients_and_the_bus_start_a_stopped_supervisor(steps: Steps) -> None:
    assert "status 200" in steps.output("client-starts-it")
    assert '"simulated"' in steps.output("bus-starts-it")


def test_uninstalling_leaves_nothing(steps: Steps) -> None:
    steps.output("uninstall")
    assert steps.output("files-after") == steps.output("files-before")
    assert steps.output("units-after") == ""
    assert "vllm" not in steps.output("processes-after")
