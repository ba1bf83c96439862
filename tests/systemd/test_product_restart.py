"""The supervisor killed and restarted, at rest and under load: engines go on, the port is never closed."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from product import SERVICE, codes, model, run, systemctl

CONFIG = "\n".join(
    [
        model("awake"),
        model("napping"),
        model("offloaded"),
        model("loading", sim_load_time=4.0),
        model("busy", "busy-a", "busy-b"),
    ]
)
RESTARTS = 5


@pytest.fixture(autouse=True)
def patient(product):
    """However often the tests before killed it, it may be started again."""
    systemctl("reset-failed", SERVICE, check=False)


async def test_a_killed_supervisor_restarts_no_engine_and_the_next_one_takes_them_over_as_they_are(
    product, clients, fleet
):
    await asyncio.gather(*(product.vllmctl("up", name) for name in ("awake", "napping", "offloaded")))
    await product.vllmctl("sleep", "napping", "--level", "1")
    await product.vllmctl("sleep", "offloaded", "--level", "2")
    waiting = asyncio.create_task(clients.ask("loading"))
    await fleet.becomes("loading", "starting")
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(product.engine(name))
            for name in ("awake", "napping", "offloaded", "loading")
        ]
        runs = [engine.run() for engine in engines]
        product.kill()
        # Its connections died with it; whoever comes now waits in the socket's queue for the next daemon.
        early = asyncio.create_task(clients.ask("awake"))
        assert (await waiting).status == 0
        await fleet.leaves()
        await fleet.returns()
        assert fleet["loading"].state == "starting"
        await fleet.becomes("awake", "ready")  # when its canary has answered
        assert (fleet["napping"].state, fleet["napping"].sleep_level) == ("asleep", 1)
        assert (fleet["offloaded"].state, fleet["offloaded"].sleep_level) == ("asleep", 2)
        assert (await early).whole
        answers = await asyncio.gather(*(clients.ask(engine.name) for engine in engines))
        assert codes(answers) == {"whole": 4}
        assert [engine.run() for engine in engines] == runs
        states = [await engine.state() for engine in engines]
        assert [state["garbage_answers"] for state in states] == [0, 0, 0, 0]
        assert [state["wakes"] for state in states] == [{}, {"all": 1}, {"weights": 1, "kv_cache": 1}, {}]
        assert [state["reloads"] for state in states] == [0, 0, 1, 0]


async def test_a_supervisor_killed_under_load_refuses_nobody(product, clients, fleet):
    await product.vllmctl("up", "busy")
    async with product.engine("busy-a") as a, product.engine("busy-b") as b:
        runs = a.run(), b.run()
        async with clients.load("busy", 8, tokens=20, stream=True) as load:
            await load.more(16)
            product.kill()
            await fleet.leaves()
            # Only connections that the killed process had accepted are lost; nobody is refused.
            late = await clients.many(20, "busy")
            await load.more(16)
        assert codes(late) == {"whole": 20}
        cut = [answer for answer in load.answers if not answer.whole]
        assert len(cut) <= 8, codes(cut)
        assert not [answer for answer in cut if "Cannot connect" in answer.error], codes(cut)
        assert (a.run(), b.run()) == runs
        assert [(await engine.state())["running"] for engine in (a, b)] == [0, 0]


async def test_five_restarts_under_load_refuse_nobody_and_cut_no_answer(product, clients, fleet):
    await product.vllmctl("up", "busy")
    async with product.engine("busy-a") as a, product.engine("busy-b") as b:
        runs = a.run(), b.run()
        pids = set()
        async with (
            clients.load("busy", 5, tokens=20) as whole_answers,
            clients.load("busy", 5, tokens=60, stream=True) as streams,
        ):
            for _ in range(RESTARTS):
                await asyncio.gather(whole_answers.more(5), streams.more(5))
                status, _, err = await run("systemctl", "--user", "restart", SERVICE)
                assert status == 0, err
                pids.add(product.main_pid())
            await asyncio.gather(whole_answers.more(5), streams.more(5))
        assert len(pids) == RESTARTS
        answers = whole_answers.answers + streams.answers
        assert codes(answers) == {"whole": len(answers)}
        assert (a.run(), b.run()) == runs
