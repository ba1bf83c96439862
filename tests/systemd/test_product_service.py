"""The supervisor as a unit: what READY=1 means, status, watchdog, reload by systemctl, clean stops, refused starts."""

import asyncio
import os
import signal

import pytest
from product import PROGRAMS, SERVICE, SOCKET, busctl, model, run, show, systemctl, until

NAME = "io.github.vllmctl1"
CONFIG = model("first") + model("second")


@pytest.fixture
def stopped(product):
    """The supervisor is down; afterwards it is up again, with the module's configuration."""
    systemctl("stop", SOCKET, SERVICE)
    yield product
    product.configure(CONFIG)
    product.rest()


async def owned() -> bool:
    """Somebody has the bus name. (Asking the bus daemon starts nobody.)"""
    call = ["org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "NameHasOwner", "s", NAME]
    return (await busctl("call", *call))[1] == "b true"


async def test_ready_means_name_owned_port_accepting_and_engines_adopted(stopped, clients):
    systemctl("start", SOCKET, "vllm@first.service")
    async with stopped.engine("first") as engine:
        run_before = engine.run()
        # An engine that cannot be looked at yet: the first reconciliation waits for it, and so does everything else.
        stopped.kill(engine.unit, signal.SIGSTOP)
        starting = asyncio.create_task(run("systemctl", "--user", "start", SERVICE))
        early = asyncio.create_task(clients.states())
        await until(lambda: "adopted" in stopped.log(), "the unit was seen running")
        assert show(SERVICE, "ActiveState") == {"ActiveState": "activating"}
        assert not await owned()
        assert not early.done()
        stopped.kill(engine.unit, signal.SIGCONT)
        assert (await starting)[0] == 0
        assert await owned()
        assert set(await early) == {"first", "second"}
        # Taken over as it is; the first token that it generates to prove itself may still be under way.
        assert (await clients.ask("first")).whole
        assert await stopped.states() == {"first": "ready", "second": "stopped"}
        await until(lambda: show(SERVICE, "StatusText")["StatusText"] == "1/2 awake, 0 in flight", "its status")
        assert engine.run() == run_before


async def test_status_says_in_plain_words_what_goes_on(product, clients, fleet):
    await product.vllmctl("up", "first")
    async with clients.stream("first", tokens=300) as stream:  # about 3 s
        await stream.first_token()
        await until(lambda: show(SERVICE, "StatusText")["StatusText"] == "1/2 awake, 1 in flight", "a request in it")
    await until(lambda: show(SERVICE, "StatusText")["StatusText"] == "1/2 awake, 0 in flight", "it ended")
    assert 'Status: "1/2 awake, 0 in flight"' in systemctl("status", SERVICE)


async def test_a_supervisor_that_is_stuck_is_killed_and_started_again(product, clients, fleet):
    await product.vllmctl("up", "first")
    async with product.drop_in(SERVICE, "[Service]\nWatchdogSec=2s\n"), product.engine("first") as engine:
        systemctl("restart", SERVICE)
        run_before, stuck = engine.run(), product.main_pid()
        os.kill(stuck, signal.SIGSTOP)
        await until(lambda: show(SERVICE, "NRestarts")["NRestarts"] == "1", "systemd started it again")
        assert (await clients.ask("first")).whole
        assert product.main_pid() != stuck
        assert engine.run() == run_before
    systemctl("restart", SERVICE)  # without the drop-in


async def test_systemctl_reload_takes_a_new_configuration_and_a_bad_one_changes_nothing(product, clients):
    pid = product.main_pid()
    product.configure(CONFIG + model("third"))
    systemctl("reload", SERVICE)

    async def third_is_listed() -> bool:
        return "third" in await clients.states()

    await until(third_is_listed, "the new model")
    product.configure(CONFIG.replace("sim-sleep", "sim_slepp") + "[proxy]\nlistne = 'x'\n")
    systemctl("reload", SERVICE)
    await until(lambda: "was not taken over" in product.log(), "the refusal in the log")
    said = product.log().partition("was not taken over")[2]
    assert f"{product.config_file}" in said
    assert "listne" in said
    assert "did you mean" in said
    assert set(await clients.states()) == {"first", "second", "third"}
    assert show(SERVICE, "ActiveState") == {"ActiveState": "active"}
    # The same through vllmctl, which says it to the person.
    assert "listne" in await product.vllmctl("reload", code=6)
    product.configure(CONFIG)
    assert "third" in await product.vllmctl("reload")
    assert set(await clients.states()) == {"first", "second"}
    assert product.main_pid() == pid


async def test_a_stop_is_clean_and_leaves_the_engines_alone(product, clients):
    assert (await clients.ask("first")).whole
    async with product.engine("first") as engine:
        run_before = engine.run()
        systemctl("stop", SERVICE)
        assert show(SERVICE, "ActiveState", "Result", "ExecMainStatus", "NRestarts") == {
            "ActiveState": "inactive",
            "Result": "success",
            "ExecMainStatus": "0",
            "NRestarts": "0",
        }
        assert not await owned()
        # The socket is still there, and so the next client starts the supervisor.
        assert (await clients.ask("first")).whole
        assert show(SERVICE, "ActiveState") == {"ActiveState": "active"}
        assert engine.run() == run_before


async def test_an_unwritable_state_directory_is_a_loud_failure(stopped):
    state = stopped.state
    state.rename(state.with_name("away"))
    state.write_text("no directory")
    try:
        await refused_start(stopped, f"cannot write the state directory {state}: ")
    finally:
        state.unlink()
        state.with_name("away").rename(state)


async def test_a_corrupt_record_is_a_loud_failure(stopped):
    file = stopped.state / "replicas" / "first.json"
    file.write_text('{"replica": "first", "level": 2')
    try:
        await refused_start(stopped, f"cannot understand the state file {file}: ")
    finally:
        file.unlink()


async def test_a_bad_configuration_is_a_loud_failure(stopped):
    stopped.configure("[models.first]\naliases = 5\n")
    await refused_start(stopped, f"{stopped.config_file}: [models.first] aliases: ")


async def refused_start(product, reason: str) -> None:
    """The unit fails with 78, is not tried again, and says why where people look."""
    code, _, _ = await run("systemctl", "--user", "start", SOCKET, SERVICE)
    assert code != 0
    shown = show(SERVICE, "ActiveState", "SubState", "ExecMainStatus", "NRestarts", "StatusText")
    status = shown.pop("StatusText")
    assert shown == {"ActiveState": "failed", "SubState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    assert status.startswith("cannot start: ")
    assert reason in status
    assert reason in product.log()
    assert reason.split(": ")[0] in systemctl("status", SERVICE, check=False)


async def test_a_daemon_beside_the_active_socket_says_whose_the_port_is(stopped):
    """Started by hand, it is handed no socket; the address that it would listen on instead is the socket unit's."""
    systemctl("start", SOCKET)
    stopped.configure(f'{CONFIG}[proxy]\nlisten = "127.0.0.1:{stopped.port}"\n')
    options = ("--config", str(stopped.config_file), "--state-dir", str(stopped.folder / "by-hand"))
    code, _, said = await run(str(PROGRAMS / "vllm-supervisord"), *options)
    assert code == 69
    assert f"cannot listen on 127.0.0.1:{stopped.port}: Address already in use; {SOCKET} is active" in said
    assert "start that instead of the program" in said


async def test_a_replicas_start_by_hand_ends_when_its_model_answers(stopped):
    stopped.configure(model("first", sim_load_time=1.0))
    systemctl("start", "vllm@first.service")
    async with stopped.engine("first") as engine:
        body = {"model": "first", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        await engine.post("/v1/chat/completions", body)
    assert show("vllm@first.service", "StatusText") == {"StatusText": "serving first"}


async def test_a_replicas_failed_start_shows_the_engines_last_lines(stopped):
    stopped.configure(model("first", sim_fault="start-fails"))
    code, _, _ = await run("systemctl", "--user", "start", "vllm@first.service")
    assert code != 0
    assert "torch.OutOfMemoryError: CUDA out of memory" in show("vllm@first.service", "StatusText")["StatusText"]
    assert "torch.OutOfMemoryError: CUDA out of memory" in systemctl("status", "vllm@first.service", check=False)
