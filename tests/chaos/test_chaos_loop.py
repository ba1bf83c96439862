"""The event loop of the simulated machine: asyncio works in it, time is virtual, and a kill is a kill."""

import asyncio

from sim_loop import Process, Scheduler


def _process(scheduler, errors=None):
    return Process(scheduler, lambda message, error: errors.append(error) if errors is not None else None)


def test_time_jumps_to_the_next_timer_and_hours_take_no_time():
    scheduler, seen = Scheduler(), []
    process = _process(scheduler)

    async def main():
        await asyncio.sleep(10_000.0)
        seen.append(process.time())

    process.create_task(main())
    scheduler.run(20_000.0)
    assert 10_000.0 <= seen[0] < 10_000.1
    assert scheduler.now == 20_000.0


def test_asyncio_timeout_works_in_virtual_time():
    scheduler, seen = Scheduler(), []
    process = _process(scheduler)

    async def main():
        try:
            async with asyncio.timeout(30.0):
                await process.create_future()
        except TimeoutError:
            seen.append(round(process.time(), 2))

    process.create_task(main())
    scheduler.run(60.0)
    assert seen == [30.0]


def test_a_killed_process_runs_no_finally_and_no_callback_any_more():
    scheduler, seen = Scheduler(), []
    process, world = _process(scheduler), _process(scheduler)

    async def main():
        try:
            await asyncio.sleep(5.0)
            seen.append("woke")
        finally:
            seen.append("finally")

    process.create_task(main())
    world.call_later(1.0, process.kill)
    scheduler.run(60.0)
    assert seen == []
    process.buried = True
    process.bury()


def test_a_fuse_kills_after_so_many_callbacks():
    scheduler, seen = Scheduler(), []
    process = _process(scheduler)
    for number in range(5):
        process.call_soon(seen.append, number)
    process.kill_after(2, lambda: seen.append("killed"))
    scheduler.run(1.0)
    assert seen == [0, 1, 2, "killed"]


def test_an_exception_of_a_callback_is_reported():
    scheduler, errors = Scheduler(), []
    process = _process(scheduler, errors)
    process.call_soon(lambda: 1 / 0)
    scheduler.run(1.0)
    assert isinstance(errors[0], ZeroDivisionError)
