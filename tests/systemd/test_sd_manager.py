"""The service manager against a real systemd: every command ends with its job, and every change is seen."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from supervisord.core.actions import RunUnitJob, UnitVerb
from supervisord.core.events import Event, UnitJobDone
from supervisord.effects import Effects
from supervisord.ports import UnitError, UnitStatus
from supervisord.sd.manager import SystemdManager

LIMIT = 30.0
RUNS = "/bin/sleep infinity"


@pytest.fixture
async def manager() -> AsyncIterator[SystemdManager]:
    manager = SystemdManager()
    await manager.open()
    yield manager
    await manager.close()


class Seen:
    """What ``watch`` told, and waiting for it."""

    def __init__(self) -> None:
        self.statuses: list[UnitStatus] = []
        self._more = asyncio.Event()

    def __call__(self, status: UnitStatus) -> None:
        self.statuses.append(status)
        self._more.set()

    async def until(self, wanted: Callable[[UnitStatus], bool]) -> UnitStatus:
        async with asyncio.timeout(LIMIT):
            while not (found := [status for status in self.statuses if wanted(status)]):
                self._more.clear()
                await self._more.wait()
        return found[0]

    async def until_state(self, unit: str, state: str) -> UnitStatus:
        return await self.until(lambda status: status.unit == unit and status.active_state == state)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def test_start_restart_and_stop_end_when_systemd_is_done(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS)
    assert await manager.start(unit) == "done"
    [first] = await manager.status([unit])
    assert (first.active_state, first.sub_state, first.result) == ("active", "running", "success")
    assert len(first.invocation) == 32
    assert exists(first.main_pid)

    assert await manager.restart(unit) == "done"
    [second] = await manager.status([unit])
    assert second.active_state == "active"
    assert second.invocation != first.invocation
    assert second.main_pid != first.main_pid

    assert await manager.stop(unit) == "done"
    [third] = await manager.status([unit])
    assert (third.active_state, third.main_pid) == ("inactive", 0)
    assert not exists(second.main_pid)


async def test_a_start_ends_only_when_the_service_says_ready(manager, unit_dir, tmp_path):
    os.mkfifo(tmp_path / "go")
    script = f"read line <{tmp_path}/go; systemd-notify --ready --status=geladen…; exec sleep infinity"
    unit = unit_dir.service("probe.service", f"/bin/sh -c '{script}'", "Type=notify", "NotifyAccess=all")
    seen = Seen()
    manager.watch([unit], seen)
    start = asyncio.create_task(manager.start(unit))
    await seen.until_state(unit, "activating")
    assert not start.done()
    (tmp_path / "go").write_text("\n")
    assert await start == "done"
    assert (await seen.until_state(unit, "active")).status_text == "geladen…"


async def test_a_status_text_alone_is_a_change(manager, unit_dir, tmp_path):
    os.mkfifo(tmp_path / "go")
    script = (
        f"systemd-notify --ready --status=eins; read line <{tmp_path}/go; systemd-notify --status=zwei; sleep infinity"
    )
    unit = unit_dir.service("probe.service", f"/bin/sh -c '{script}'", "Type=notify", "NotifyAccess=all")
    seen = Seen()
    await manager.start(unit)
    manager.watch([unit], seen)
    await seen.until(lambda status: status.status_text == "eins")
    (tmp_path / "go").write_text("\n")
    await seen.until(lambda status: status.status_text == "zwei")


async def test_a_start_that_fails_says_so_and_why(manager, unit_dir):
    unit = unit_dir.service("probe.service", "/bin/sh -c 'exit 7'", "Type=notify")
    assert await manager.start(unit) == "failed"
    [status] = await manager.status([unit])
    assert (status.active_state, status.result, status.exec_main_status) == ("failed", "exit-code", 7)


async def test_a_start_may_run_into_the_units_timeout(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, "Type=notify", "TimeoutStartSec=100ms")
    assert await manager.start(unit) in ("timeout", "failed")
    [status] = await manager.status([unit])
    assert status.result == "timeout"


async def test_a_stop_ends_a_start_under_way(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, "Type=notify")
    seen = Seen()
    manager.watch([unit], seen)
    start = asyncio.create_task(manager.start(unit))
    await seen.until_state(unit, "activating")
    assert await manager.stop(unit) == "done"
    assert await start == "canceled"


async def test_a_missing_unit(manager, unit_dir):
    for command in (manager.start, manager.restart):
        with pytest.raises(UnitError, match=r"cannot (re)?start nowhere.service: there is no such unit") as caught:
            await command("nowhere.service")
        assert (caught.value.unit, caught.value.code) == ("nowhere.service", "org.freedesktop.systemd1.NoSuchUnit")
    [status] = await manager.status(["nowhere.service"])
    assert (status.load_state, status.active_state) == ("not-found", "inactive")
    await manager.reset_failed("nowhere.service")


async def test_a_masked_unit(manager, unit_dir):
    unit_dir.mask("probe.service")
    with pytest.raises(UnitError, match=r"cannot start probe.service: the unit is masked") as caught:
        await manager.start("probe.service")
    assert caught.value.code == "org.freedesktop.systemd1.UnitMasked"
    [status] = await manager.status(["probe.service"])
    assert status.load_state == "masked"


async def test_a_broken_unit_file(manager, unit_dir):
    unit_dir.write("probe.service", "[Service]\nType=oneshot\n")
    with pytest.raises(UnitError, match=r"cannot start probe.service: Unit probe.service has a bad unit file setting"):
        await manager.start("probe.service")


async def test_a_name_that_cannot_be_a_unit(manager):
    with pytest.raises(UnitError, match=r"cannot start no name: Unit name no name is "):
        await manager.start("no name")


async def test_a_start_limit_is_told_and_ends_with_reset_failed(manager, unit_dir):
    limit = "StartLimitBurst=2\nStartLimitIntervalSec=1h"
    unit = unit_dir.service("probe.service", "/bin/false", "Type=oneshot", unit=limit)
    assert await manager.start(unit) == "failed"
    assert await manager.start(unit) == "failed"
    with pytest.raises(UnitError, match=r"cannot start probe.service: it was started too often"):
        await manager.start(unit)
    await manager.reset_failed(unit)
    [status] = await manager.status([unit])
    assert status.active_state == "inactive"
    assert await manager.start(unit) == "failed"


async def test_a_start_limit_that_ends_a_crash_loop_is_told_at_the_next_start(manager, unit_dir):
    limit = "StartLimitBurst=3\nStartLimitIntervalSec=1h"
    unit = unit_dir.service("probe.service", "/bin/false", "Restart=always", "RestartSec=0", unit=limit)
    seen = Seen()
    manager.watch([unit], seen)
    await manager.start(unit)
    assert (await seen.until_state(unit, "failed")).result in ("exit-code", "start-limit-hit")
    with pytest.raises(UnitError, match=r"cannot restart probe.service: it was started too often"):
        await manager.restart(unit)


async def test_starts_and_stops_in_order_do_not_add_up_to_a_start_limit(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, unit="StartLimitBurst=2\nStartLimitIntervalSec=1h")
    ended: asyncio.Queue[Event] = asyncio.Queue()
    effects = Effects(manager, None, None, None, None)
    effects.report_to(ended.put_nowait)
    start, stop, restart = UnitVerb.START, UnitVerb.STOP, UnitVerb.RESTART
    for verb in (start, stop, start, stop, start, restart, restart, restart):
        effects.perform(RunUnitJob("a", 1, unit, verb, LIMIT))
        event = await ended.get()
        assert isinstance(event, UnitJobDone)
        assert (event.result, event.detail) == ("done", "")
    await effects.close()


async def test_restarts_of_an_engine_that_breaks_again_and_again_end_at_its_units_start_limit(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, unit="StartLimitBurst=2\nStartLimitIntervalSec=1h")
    ended: asyncio.Queue[Event] = asyncio.Queue()
    effects = Effects(manager, None, None, None, None)
    effects.report_to(ended.put_nowait)

    async def job(verb: UnitVerb, *, counted: bool = False) -> str:
        effects.perform(RunUnitJob("a", 1, unit, verb, LIMIT, counted))
        event = await ended.get()
        assert isinstance(event, UnitJobDone)
        return event.result

    assert await job(UnitVerb.START) == "done"
    assert [await job(UnitVerb.RESTART, counted=True) for _ in range(2)] == ["done", "error"]
    # The back-off that follows is the supervisor's.
    assert await job(UnitVerb.START) == "done"
    await effects.close()


async def test_a_failed_assertion_is_no_start_limit(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, unit="AssertPathExists=/nowhere")
    assert await manager.start(unit) == "assert"


async def test_a_job_that_ends_before_its_name_is_known_is_not_missed(manager, unit_dir):
    unit = unit_dir.service("probe.service", "/bin/true", "Type=oneshot", unit="StartLimitIntervalSec=0")
    for _ in range(50):
        async with asyncio.timeout(LIMIT):
            assert await manager.start(unit) == "done"


async def test_twenty_starts_at_once(manager, unit_dir):
    unit_dir.service("probe@.service", RUNS)
    units = [f"probe@{number}.service" for number in range(20)]
    async with asyncio.timeout(LIMIT):
        assert await asyncio.gather(*map(manager.start, units)) == ["done"] * 20
        statuses = await manager.status(units)
        assert [status.unit for status in statuses] == units
        assert {status.active_state for status in statuses} == {"active"}
        assert await asyncio.gather(*map(manager.stop, units)) == ["done"] * 20


async def test_two_starts_of_one_unit_both_end(manager, unit_dir):
    unit = unit_dir.service("probe.service", "/bin/sleep 0.2", "Type=oneshot")
    async with asyncio.timeout(LIMIT):
        assert await asyncio.gather(manager.start(unit), manager.start(unit)) == ["done", "done"]


async def test_whoever_stops_waiting_leaves_the_start_to_systemd(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, "Type=notify")
    seen = Seen()
    manager.watch([unit], seen)
    start = asyncio.create_task(manager.start(unit))
    await seen.until_state(unit, "activating")
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    [status] = await manager.status([unit])
    assert status.active_state == "activating"


async def test_kill_reaches_every_process_of_the_unit(manager, unit_dir):
    unit = unit_dir.service("probe.service", "/bin/sh -c 'sleep infinity & exec sleep infinity'")
    seen = Seen()
    await manager.start(unit)
    manager.watch([unit], seen)
    await manager.kill(unit, signal.SIGKILL)
    status = await seen.until_state(unit, "failed")
    assert (status.result, status.exec_main_status) == ("signal", signal.SIGKILL)


async def test_a_watch_begins_with_the_present_state_and_tells_no_change_twice(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS)
    other = unit_dir.service("other.service", RUNS)
    seen = Seen()
    manager.watch([unit, "nowhere.service"], seen)
    await seen.until_state(unit, "inactive")
    assert (await seen.until(lambda status: status.unit == "nowhere.service")).load_state == "not-found"
    await manager.start(other)
    await manager.start(unit)
    await seen.until_state(unit, "active")
    assert len(seen.statuses) == len({*seen.statuses})
    seen.statuses.clear()
    await manager.stop(unit)
    await seen.until_state(unit, "inactive")
    assert len(seen.statuses) == len({*seen.statuses})
    assert {status.unit for status in seen.statuses} == {unit}


async def test_what_others_do_is_seen(manager, unit_dir, systemctl):
    unit = unit_dir.service("probe.service", RUNS)
    seen = Seen()
    manager.watch([unit], seen)
    await asyncio.to_thread(systemctl, "start", unit)
    assert (await seen.until_state(unit, "active")).main_pid > 0
    seen.statuses.clear()
    await asyncio.to_thread(systemctl, "stop", unit)
    assert (await seen.until_state(unit, "inactive")).main_pid == 0


async def test_a_main_process_killed_by_somebody_is_seen_and_counted(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS, "Restart=always", "RestartSec=0")
    await manager.start(unit)
    [before] = await manager.status([unit])
    seen = Seen()
    manager.watch([unit], seen)
    os.kill(before.main_pid, signal.SIGKILL)
    after = await seen.until(lambda status: status.n_restarts == 1 and status.active_state == "active")
    assert after.invocation != before.invocation
    assert 0 < before.changed < after.changed  # which of two readings is the newer one


async def test_a_unit_that_is_masked_or_comes_or_goes_is_seen(manager, unit_dir, systemctl):
    seen = Seen()
    manager.watch(["probe.service"], seen)
    await seen.until(lambda status: status.load_state == "not-found")
    unit_dir.service("probe.service", RUNS)
    await seen.until(lambda status: status.load_state == "loaded")
    unit_dir.mask("probe.service")
    await seen.until(lambda status: status.load_state == "masked")


async def test_a_unit_that_is_watched_by_an_alias_is_seen(manager, unit_dir, systemctl):
    unit_dir.service("probe.service", RUNS, reload=False)
    (unit_dir.path / "alias.service").symlink_to("probe.service")
    try:
        systemctl("daemon-reload")
        seen = Seen()
        manager.watch(["alias.service"], seen)
        await seen.until_state("alias.service", "inactive")
        await asyncio.to_thread(systemctl, "start", "probe.service")
        await seen.until_state("alias.service", "active")
    finally:
        (unit_dir.path / "alias.service").unlink()


async def test_a_start_outlives_a_daemon_reload(manager, unit_dir, systemctl, tmp_path):
    os.mkfifo(tmp_path / "go")
    script = f"read line <{tmp_path}/go; systemd-notify --ready; exec sleep infinity"
    unit = unit_dir.service("probe.service", f"/bin/sh -c '{script}'", "Type=notify", "NotifyAccess=all")
    seen = Seen()
    manager.watch([unit], seen)
    start = asyncio.create_task(manager.start(unit))
    await seen.until_state(unit, "activating")
    await asyncio.to_thread(systemctl, "daemon-reload")
    assert not start.done()
    (tmp_path / "go").write_text("\n")
    async with asyncio.timeout(LIMIT):
        assert await start == "done"


async def test_a_daemon_reexec_is_survived(manager, unit_dir, systemctl, tmp_path):
    os.mkfifo(tmp_path / "go")
    script = f"read line <{tmp_path}/go; systemd-notify --ready; exec sleep infinity"
    unit = unit_dir.service("probe.service", f"/bin/sh -c '{script}'", "Type=notify", "NotifyAccess=all")
    other = unit_dir.service("other.service", RUNS)
    seen = Seen()
    manager.watch([unit, other], seen)
    start = asyncio.create_task(manager.start(unit))
    await seen.until_state(unit, "activating")
    await asyncio.to_thread(systemctl, "daemon-reexec")
    (tmp_path / "go").write_text("\n")
    async with asyncio.timeout(LIMIT):
        assert await start == "done"
        assert await manager.start(other) == "done"
    await seen.until_state(other, "active")
    seen.statuses.clear()
    await asyncio.to_thread(systemctl, "stop", other)
    await seen.until_state(other, "inactive")


async def test_the_worker_is_replaced_when_it_dies(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS)
    await manager.start(unit)
    [child] = children()
    os.kill(child, signal.SIGKILL)
    assert await manager.stop(unit) == "done"
    assert children() not in ([], [child])


async def test_a_signal_is_not_sent_twice_when_the_worker_dies(manager, unit_dir):
    unit = unit_dir.service("probe.service", RUNS)
    await manager.start(unit)
    [child] = children()
    os.kill(child, signal.SIGSTOP)
    sending = asyncio.create_task(manager.kill(unit, signal.SIGTERM))
    await asyncio.sleep(0)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(UnitError, match=r"cannot signal probe.service: the service manager cannot be reached"):
        await sending


async def test_last_lines_of_a_unit_that_logs_to_a_file(manager, unit_dir, tmp_path):
    log = f"StandardOutput=append:{tmp_path}/%p-%i.log"
    unit_dir.service("probe@.service", "/bin/sh -c 'seq 30; echo größer'", "Type=oneshot", log)
    await manager.start("probe@a.service")
    assert await manager.last_lines("probe@a.service", 3) == ["29", "30", "größer"]


async def test_last_lines_without_a_journal_are_none(manager, unit_dir):
    unit = unit_dir.service("probe.service", "/bin/echo lost", "Type=oneshot")
    await manager.start(unit)
    assert await manager.last_lines(unit) == []
    assert await manager.last_lines("nowhere.service") == []
