"""Jobs: a result is never missed, whichever of the two connections is first."""

import asyncio

import pytest

from supervisord.core.readings import UnitStatus
from supervisord.sd.jobs import Job, Jobs

JOB = Job("/job/1", "start", "a.service")


async def test_a_result_after_the_answer() -> None:
    jobs = Jobs()
    with jobs.dispatching() as expect:
        result = expect(JOB)
    assert jobs.waited_for() == [JOB]
    jobs.removed("/job/2", "failed")
    assert not result.done()
    jobs.removed("/job/1", "done")
    assert await result == "done"
    assert jobs.waited_for() == []


async def test_a_result_before_the_answer() -> None:
    jobs = Jobs()
    with jobs.dispatching() as expect:
        jobs.removed("/job/1", "failed")
        assert await expect(JOB) == "failed"
    assert jobs.waited_for() == []


async def test_a_result_before_the_answer_is_kept_while_any_command_is_on_its_way() -> None:
    jobs = Jobs()
    with jobs.dispatching() as first:
        with jobs.dispatching():
            jobs.removed("/job/1", "done")
        assert await first(JOB) == "done"


async def test_results_of_nobodys_jobs_are_not_kept_for_later() -> None:
    jobs = Jobs()
    jobs.removed("/job/1", "failed")
    with jobs.dispatching():
        jobs.removed("/job/1", "failed")
    with jobs.dispatching() as expect:
        assert not expect(JOB).done()


async def test_one_job_may_be_waited_for_twice_and_be_left_by_one() -> None:
    jobs = Jobs()
    with jobs.dispatching() as expect:
        leaves, stays = expect(JOB), expect(JOB)
    leaves.cancel()
    await asyncio.wait([leaves])
    assert jobs.waited_for() == [JOB]
    jobs.removed("/job/1", "done")
    assert await stays == "done"


async def test_nobody_waits_for_a_manager_that_is_gone() -> None:
    jobs = Jobs()
    with jobs.dispatching() as expect:
        results = [expect(JOB), expect(Job("/job/2", "stop", "b.service"))]
    jobs.fail("the bus is gone")
    for result in results:
        with pytest.raises(ConnectionError, match="the bus is gone"):
            await result
    assert jobs.waited_for() == []


@pytest.mark.parametrize(
    ("verb", "state", "result", "outcome"),
    [
        ("start", "active", "success", "done"),
        ("restart", "reloading", "success", "done"),
        ("start", "failed", "exit-code", "failed"),
        ("start", "activating", "exit-code", "failed"),  # waiting for its automatic restart
        ("start", "inactive", "success", "canceled"),
        ("stop", "inactive", "success", "done"),
        ("stop", "failed", "timeout", "done"),
        ("stop", "active", "success", "canceled"),
    ],
)
def test_an_unheard_result_is_told_by_the_units_state(verb: str, state: str, result: str, outcome: str) -> None:
    status = UnitStatus("a.service", "loaded", state, "", result=result)
    assert Job("/job/1", verb, "a.service").result_seen_in(status) == outcome
