"""The supervisor killed in the middle of sleeping and waking an engine, at every step: what the next one makes of it.

Whatever it finds, no client may get a byte from weights that are not whole. The engine is made to hang at the step, so
that the kill strikes exactly there, and let go again afterwards: the step itself then ends, as a real one would.
"""

import asyncio
import json

import pytest
from product import SERVICE, codes, model, systemctl, until

CONFIG = model("crash", sim_wake1=0.4, sim_wake2=0.8, sim_sleep=0.2)

#: The step that the supervisor dies in: sleep level, the last call that the engine got, what had been counted by then.
WAKE_STEPS = [
    pytest.param(1, "wake_up", 0, id="level 1, wake_up"),
    pytest.param(2, "wake_up?tags=weights", 0, id="level 2, wake_up weights"),
    pytest.param(2, "reload_weights", 1, id="level 2, reload_weights"),
    pytest.param(2, "wake_up?tags=kv_cache", 1, id="level 2, wake_up kv_cache"),
    pytest.param(2, "reset_prefix_cache", 2, id="level 2, reset_prefix_cache"),
]


@pytest.fixture
async def engine(product, fleet):
    """The engine, awake."""
    systemctl("reset-failed", SERVICE, check=False)
    await product.vllmctl("up", "crash")
    async with product.engine("crash") as engine:
        yield engine


async def called(engine, call: str) -> bool:
    """The engine's newest control call is ``call``."""
    return (await engine.state())["calls"][-1:] == [call]


async def killed_at(product, engine, call: str, doing) -> object:
    """The supervisor is killed while the engine is in ``call``, which ``doing`` leads to; returns what came of that."""
    moment, second = call.partition("?")[0], call.endswith("kv_cache")
    if not second:
        await engine.arm("hang", moment)
    done = asyncio.create_task(doing)
    if second:  # of two calls with one name: armed when the first has been made
        await until(lambda: called(engine, "reload_weights"), "the weights are awake")
        await engine.arm("hang", moment)
    await until(lambda: called(engine, call), call)
    product.kill()
    await engine.arm("hang", count=0)
    return await done


async def everything_is_whole(product, clients, fleet, engine, run_before) -> dict:
    """Requests from before the next daemon is up, and later ones, are answered by the same, whole engine."""
    early = await clients.many(5, "crash")
    assert codes(early) == {"whole": 5}
    await fleet.returns()
    await fleet.becomes("crash", "ready")
    state = await engine.state()
    assert (state["weights_whole"], state["is_sleeping"], state["garbage_answers"]) == (True, False, 0)
    assert engine.run() == run_before
    return state


@pytest.mark.parametrize(("level", "call", "wakes_before"), WAKE_STEPS)
async def test_a_wake_broken_off_is_finished_by_the_next_supervisor(
    product, clients, fleet, engine, level, call, wakes_before
):
    run_before, before = engine.run(), await engine.state()
    await product.vllmctl("sleep", "crash", "--level", str(level))
    assert (await killed_at(product, engine, call, clients.ask("crash"))).status == 0
    # On disk before the first step: what was under way.
    assert product.record("crash")["phase"] == "waking"
    assert product.record("crash")["level"] == level
    state = await everything_is_whole(product, clients, fleet, engine, run_before)
    assert sum(state["wakes"].values()) - sum(before["wakes"].values()) > wakes_before
    assert state["reloads"] - before["reloads"] >= level - 1


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_broken_off_is_seen_through_by_the_next_supervisor(product, clients, fleet, engine, level):
    run_before = engine.run()
    sleep = product.vllmctl("sleep", "crash", "--level", str(level), code=3)
    await killed_at(product, engine, f"sleep?level={level}&mode=wait", sleep)
    assert product.record("crash")["phase"] == "falling_asleep"
    await fleet.leaves()
    await fleet.returns()
    await everything_is_whole(product, clients, fleet, engine, run_before)


@pytest.mark.parametrize(
    ("level", "phase"), [(1, "waking"), (2, "waking"), (1, "falling_asleep"), (2, "falling_asleep")]
)
async def test_an_intent_whose_first_call_was_never_made_is_carried_on(product, clients, fleet, engine, level, phase):
    """Killed between the record and the call: made by hand, since nothing can be made to hang there."""
    run_before = engine.run()
    if phase == "waking":
        await product.vllmctl("sleep", "crash", "--level", str(level))
    await asyncio.to_thread(systemctl, "stop", SERVICE)
    record = {"replica": "crash", "version": 1, "level": level, "phase": phase, "invocation": run_before[0]}
    (product.state / "replicas" / "crash.json").write_text(json.dumps({**record, "hold": "none", "since": 1.0}))
    await fleet.leaves()
    await everything_is_whole(product, clients, fleet, engine, run_before)


async def test_a_second_kill_in_the_same_wake_changes_nothing(product, clients, fleet, engine):
    run_before = engine.run()
    await product.vllmctl("sleep", "crash", "--level", "2")
    await killed_at(product, engine, "reload_weights", clients.ask("crash"))
    await killed_at(product, engine, "reset_prefix_cache", fleet.leaves())
    await everything_is_whole(product, clients, fleet, engine, run_before)


async def test_an_engine_that_ended_with_the_supervisor_starts_whole_and_its_record_is_void(
    product, clients, fleet, engine
):
    """As after a reboot: the record is of a run that is no more."""
    run_before = engine.run()
    await product.vllmctl("sleep", "crash", "--level", "2")
    await killed_at(product, engine, "reload_weights", clients.ask("crash"))
    product.kill(engine.unit)
    assert product.record("crash")["phase"] == "waking"
    assert codes(await clients.many(5, "crash")) == {"whole": 5}
    assert (await engine.state())["reloads"] == 0
    assert engine.run() != run_before
