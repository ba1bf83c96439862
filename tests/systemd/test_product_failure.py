"""Starts and wakes that fail, and replicas that die under load: who is told what, who never notices."""

import asyncio
from pathlib import Path

import pytest
from product import codes, model, run, show, until

COUNTER = Path("/run/user/test-product-starts")  # a private /run; how many starts of `broken` fail yet

CONFIG = "\n".join(
    [
        model("broken", sim_load_time=0.5, sim_fault=f"start-fails={COUNTER}"),
        model("fine"),
        model("stubborn"),
        model("pair", "pair-a", "pair-b"),
        model("hopeless"),
    ]
)


@pytest.fixture
def failing_starts():
    COUNTER.parent.mkdir(parents=True, exist_ok=True)
    yield COUNTER.write_text
    COUNTER.unlink()


async def test_a_start_that_fails_is_told_at_once_in_the_engines_words_and_tried_again_later(
    product, clients, fleet, failing_starts
):
    failing_starts("1")
    waiting = asyncio.create_task(clients.many(5, "broken"))
    await fleet.becomes("broken", "starting")
    # The other model's start is not held up by it, and neither are its answers.
    assert codes(await clients.many(5, "fine")) == {"whole": 5}
    for answer in await waiting:
        assert (answer.status, answer.code) == (503, "wake_failed"), answer
        assert "torch.OutOfMemoryError: CUDA out of memory" in answer.message
        assert "(simulated)" in answer.message
        assert int(answer.headers["Retry-After"]) >= 1
    assert "torch.OutOfMemoryError" in product.log()

    # Left alone for the back-off; then the next request starts it, and that start succeeds.
    async def answered() -> bool:
        return (await clients.ask("broken")).whole

    await until(answered, "an answer after the back-off")
    assert fleet.history["broken"].count(("starting", 0)) == 2


async def test_a_wake_that_fails_once_is_mended_by_a_restart_and_the_request_is_answered(product, clients, fleet):
    await product.vllmctl("up", "stubborn")
    await product.vllmctl("sleep", "stubborn", "--level", "2")
    async with product.engine("stubborn") as engine:
        run_before = engine.run()
        await engine.arm("wake-fails")
        assert codes(await clients.many(5, "stubborn")) == {"whole": 5}
        assert engine.run()[0] != run_before[0]
        assert (await engine.state())["garbage_answers"] == 0
    assert "restarting vllm@stubborn.service" in product.log()
    assert "out of memory" in product.log()
    assert fleet["stubborn"].state == "ready"


async def test_an_engine_that_dies_with_status_0_is_started_again(product, clients, fleet):
    await product.vllmctl("up", "fine")
    async with product.engine("fine") as engine:
        run_before = engine.run()
        await engine.arm("die")
        await fleet.until(lambda: fleet["fine"].state != "ready", "its death")
        assert (await clients.ask("fine")).whole
        assert engine.run() != run_before


@pytest.mark.parametrize("victim", ["pair-a", "pair-b"])
async def test_a_replica_killed_under_load_costs_no_client_an_answer(product, clients, fleet, victim):
    await product.vllmctl("up", "pair")
    monitor = await asyncio.create_subprocess_exec(
        *("busctl", "--user", "monitor", "--json=short", "--match=interface='io.github.vllmctl1.Manager'"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert monitor.stdout is not None
    assert monitor.stderr is not None
    await monitor.stderr.readline()  # "Monitoring bus message stream."
    lines_before = product.log().count("failover")
    async with clients.load("pair", 6, tokens=40) as load:
        await load.more(30)
        product.kill(f"vllm@{victim}.service")
        await fleet.until(lambda: bool(fleet.failovers), "the signal Failover")
        await fleet.becomes(victim, "starting")
        await load.more(30)
        await fleet.becomes(victim, "ready")
        await load.more(6)
    assert codes(load.answers) == {"whole": len(load.answers)}
    assert {(seen.model, seen.source) for seen in fleet.failovers} == {("pair", victim)}
    assert {seen.target for seen in fleet.failovers} <= {"pair-a", "pair-b"}
    assert product.log().count("failover") > lines_before
    signal = (await monitor.stdout.readline()).decode()
    assert '"member":"Failover"' in signal
    assert f'"{victim}"' in signal
    monitor.terminate()
    await monitor.wait()
    assert show(f"vllm@{victim}.service", "ActiveState") == {"ActiveState": "active"}


async def test_a_model_whose_unit_cannot_be_started_at_all_is_refused_and_others_go_on(product, clients, fleet):
    async with product.drop_in("vllm@hopeless.service", "[Service]\nExecStartPre=/bin/false\n"):
        load_of_others = asyncio.create_task(clients.many(5, "fine"))
        answer = await clients.ask("hopeless")
        assert (answer.status, answer.code) == (503, "wake_failed")
        assert "vllm@hopeless.service" in answer.message
        assert "a command that its unit runs before the engine failed" in answer.message
        assert codes(await load_of_others) == {"whole": 5}
        assert "failed" in (await product.states())["hopeless"]
    await product.vllmctl("up", "hopeless")
    assert (await clients.ask("hopeless")).whole
    status, _, _ = await run("systemctl", "--user", "is-failed", "--quiet", "vllm@hopeless.service")
    assert status != 0
