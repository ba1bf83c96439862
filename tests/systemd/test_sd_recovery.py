"""The service manager over losses: of the bus, of the worker, of systemd's attention; and what it costs when idle."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisord.bus.address import session_bus_address
from supervisord.ports import UnitError, UnitStatus
from supervisord.sd.commands import CommandFailed, Commands
from supervisord.sd.manager import SystemdManager, unit_path

LIMIT = 60.0
RUNS = "/bin/sleep infinity"


@pytest.fixture
async def manager() -> AsyncIterator[SystemdManager]:
    manager = SystemdManager()
    await manager.open()
    yield manager
    await manager.close()


@pytest.fixture
async def commands() -> AsyncIterator[Commands]:
    commands = Commands(lambda: session_bus_address(os.environ), idle_limit=0.01)
    yield commands
    await commands.close()


class Latest:
    """The newest status that was told, and waiting for one."""

    def __init__(self) -> None:
        self._status: UnitStatus | None = None
        self._told = asyncio.Event()

    def __call__(self, status: UnitStatus) -> None:
        self._status = status
        self._told.set()

    async def becomes(self, state: str) -> None:
        async with asyncio.timeout(LIMIT):
            while self._status is None or self._status.active_state != state:
                self._told.clear()
                await self._told.wait()


async def test_a_bus_that_dies_is_found_again(manager, unit_dir, systemctl, caplog):
    unit = unit_dir.service("probe.service", RUNS)
    slow = unit_dir.service("slow.service", RUNS, "Type=notify")
    latest = Latest()
    manager.watch([unit, slow], lambda status: latest(status) if status.unit == unit else None)
    await manager.start(unit)
    waiting = asyncio.create_task(manager.start(slow))
    await latest.becomes("active")
    await asyncio.to_thread(systemctl, "kill", "--signal=KILL", "dbus.service")
    async with asyncio.timeout(LIMIT):
        assert await manager.stop(unit) == "done"
    await latest.becomes("inactive")
    await asyncio.to_thread(systemctl, "start", unit)
    await latest.becomes("active")
    assert not waiting.done()
    assert await manager.stop(slow) == "done"
    assert await waiting == "canceled"
    assert "systemd cannot be reached: the connection to the bus was lost" in caplog.text


async def test_waiting_ends_when_the_manager_stays_away(manager, unit_dir, systemctl, monkeypatch):
    unit = unit_dir.service("probe.service", RUNS, "Type=notify")
    latest = Latest()
    manager.watch([unit], latest)
    start = asyncio.create_task(manager.start(unit))
    await latest.becomes("activating")
    monkeypatch.setattr("supervisord.sd.bus._ABSENCE_LIMIT", 0.05)
    await asyncio.to_thread(systemctl, "stop", "dbus.service", "dbus.socket")
    try:
        async with asyncio.timeout(LIMIT):
            with pytest.raises(UnitError, match=r"cannot start probe.service: the service manager cannot be reached"):
                await start
    finally:
        await asyncio.to_thread(systemctl, "start", "dbus.socket")


async def test_what_happens_while_the_bus_is_away_is_seen_afterwards(manager, unit_dir, systemctl):
    unit = unit_dir.service("probe.service", RUNS)
    latest = Latest()
    await manager.start(unit)
    manager.watch([unit], latest)
    await latest.becomes("active")

    def stop_it_behind_the_bus() -> None:
        systemctl("stop", "dbus.service", "dbus.socket")
        systemctl("stop", unit)
        systemctl("start", "dbus.socket")

    await asyncio.to_thread(stop_it_behind_the_bus)
    await latest.becomes("inactive")


async def test_without_a_manager_it_does_not_open(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS")
    monkeypatch.setattr("supervisord.sd.manager._OPEN_LIMIT", 0.1)
    with pytest.raises(
        UnitError, match=f"cannot reach systemd: .*cannot find the session bus: .*{tmp_path}/bus does not"
    ):
        await SystemdManager().open()


async def test_a_forged_signal_is_not_believed(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, "Type=notify")
    latest = Latest()
    manager.watch([unit], latest)
    start = asyncio.create_task(manager.start(unit))
    await latest.becomes("activating")
    [job] = manager._jobs.waited_for()
    names = ["--destination=" + str(manager._signals._connection.unique_name), "/org/freedesktop/systemd1"]
    body = ["1", job.path, unit, "done"]
    signature = ["org.freedesktop.systemd1.Manager", "JobRemoved", "uoss"]
    process = await asyncio.create_subprocess_exec("busctl", "--user", "emit", *names, *signature, *body)
    assert await process.wait() == 0
    await manager._signals.flush()
    assert not start.done()
    assert await manager.stop(unit) == "done"
    assert await start == "canceled"


async def test_a_job_whose_end_nobody_could_hear_is_settled_by_the_units_state(manager, unit_dir, monkeypatch):
    unit = unit_dir.service("probe.service", RUNS)
    monkeypatch.setattr(manager, "job_removed", lambda job, result: None)
    start = asyncio.create_task(manager.start(unit))
    latest = Latest()
    manager.watch([unit], latest)
    await latest.becomes("active")
    manager.look_again()
    async with asyncio.timeout(LIMIT):
        assert await start == "done"


async def test_an_unused_worker_ends_and_the_next_call_has_another(commands):
    first = await call_and_tell_worker(commands)
    assert first is not None
    async with asyncio.timeout(LIMIT):
        await gone(first)
    second = await call_and_tell_worker(commands)
    assert second not in (None, first)


async def call_and_tell_worker(commands: Commands) -> int | None:
    assert (await commands.call("read", unit_path("nowhere.service")))["LoadState"] == "not-found"
    return commands.worker_pid


async def gone(pid: int) -> None:
    """Wait for the end of a process, which ``Commands`` reaps."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


async def test_calls_at_once_share_one_worker_and_are_answered_in_order(commands):
    paths = [unit_path(f"nowhere-{number}.service") for number in range(20)]
    found = await asyncio.gather(*(commands.call("read", path) for path in paths))
    assert [each["Id"] for each in found] == [f"nowhere-{number}.service" for number in range(20)]


async def test_a_systemd_that_does_not_answer_is_given_up(commands, monkeypatch):
    await commands.call("read", unit_path("nowhere.service"))
    worker = commands.worker_pid
    os.kill(worker, signal.SIGSTOP)
    monkeypatch.setattr("supervisord.sd.commands.ANSWER_LIMIT", 0.05)
    with pytest.raises(CommandFailed, match="systemd did not answer within"):
        await commands.call("read", unit_path("nowhere.service"))
    async with asyncio.timeout(LIMIT):
        await gone(worker)


async def test_the_worker_outlives_a_signal_to_the_whole_service_and_ends_with_its_input(commands):
    await commands.call("read", unit_path("nowhere.service"))
    worker = commands.worker_pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(worker, number)
    assert await call_and_tell_worker(commands) == worker
    commands.release()
    async with asyncio.timeout(LIMIT):
        await gone(worker)


async def test_the_daemon_itself_never_loads_pystemd():
    script = "import sys; import supervisord.sd.manager; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    modules = (await process.communicate())[0].decode().split()
    assert "supervisord.sd.manager" in modules
    assert not {"pystemd", "lxml"} & set(modules)
