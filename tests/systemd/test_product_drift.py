"""What others do with systemctl, kill and an engine's own socket: the supervisor sees it, requests keep working."""

import asyncio
import signal

import pytest
from product import codes, model, run, show, systemctl

MODELS = ("stopped", "restarted", "started", "masked", "crashed", "slept1", "slept2", "woken1", "woken2", "left-alone")
CONFIG = "\n".join([*(model(name) for name in MODELS), model("pair", "pair-a", "pair-b")])


def unit(name: str) -> str:
    return f"vllm@{name}.service"


async def by_hand(*args: str) -> None:
    """As a person at a terminal, while the test's loop goes on."""
    status, _, err = await run("systemctl", "--user", *args)
    assert status == 0, err


@pytest.fixture
async def up(product):
    """Bring a model up: awake and ready."""

    async def up(name: str) -> None:
        await product.vllmctl("up", name)

    return up


async def test_a_unit_stopped_by_hand_is_seen_and_the_next_request_starts_it(product, clients, fleet, up):
    await up("stopped")
    await by_hand("stop", unit("stopped"))
    await fleet.becomes("stopped", "stopped")
    assert (await product.states())["stopped"] == "stopped"
    assert "was stopped by somebody" in product.log()
    assert (await clients.ask("stopped")).whole
    assert show(unit("stopped"), "ActiveState") == {"ActiveState": "active"}


async def test_a_unit_restarted_by_hand_is_seen_and_requests_wait_for_it(product, clients, fleet, up):
    await up("restarted")
    restart = asyncio.create_task(by_hand("restart", unit("restarted")))
    await fleet.becomes("restarted", "starting")
    assert codes(await clients.many(5, "restarted")) == {"whole": 5}
    await restart
    assert (await product.states())["restarted"] == "ready"
    # Which readings systemd's restart leaves of itself is a matter of moments: a restart, or a stop and a start.
    drifts = [line for line in product.log().splitlines() if "event=drift" in line and "replica=restarted" in line]
    assert any("restarts (not asked for by us)" in line or "was started by somebody" in line for line in drifts)
    assert show(unit("restarted"), "NRestarts") == {"NRestarts": "0"}


async def test_a_unit_started_by_hand_is_taken_over(product, clients, fleet):
    assert fleet["started"].state == "stopped"
    await by_hand("start", unit("started"))
    await fleet.becomes("started", "ready")
    assert (await product.states())["started"] == "ready"
    async with product.engine("started") as engine:
        run_before = engine.run()
        assert (await clients.ask("started")).whole
        assert engine.run() == run_before


async def test_a_masked_unit_is_refused_with_the_reason_and_works_again_when_unmasked(product, clients, fleet, up):
    await up("masked")
    await by_hand("stop", unit("masked"))
    await by_hand("mask", "--runtime", unit("masked"))
    await fleet.becomes("masked", "stopped")
    answer = await clients.ask("masked")
    assert (answer.status, answer.code) == (503, "wake_failed")
    assert "masked" in answer.message
    assert int(answer.headers["Retry-After"]) >= 1
    assert "masked" in await product.vllmctl("up", "masked", code=1)
    await by_hand("unmask", "--runtime", unit("masked"))
    await product.vllmctl("up", "masked")
    assert (await clients.ask("masked")).whole


async def test_an_engine_that_is_killed_comes_back_by_itself_and_requests_wait_for_it(product, clients, fleet, up):
    await up("crashed")
    async with product.engine("crashed") as engine:
        invocation, _ = engine.run()
    product.kill(unit("crashed"))
    assert codes(await clients.many(5, "crashed")) == {"whole": 5}
    shown = show(unit("crashed"), "NRestarts", "InvocationID")
    assert shown["NRestarts"] == "1"
    assert shown["InvocationID"] != invocation
    assert (await product.states())["crashed"] == "ready"


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_slept_by_hand_is_seen_and_woken_whole_by_a_request(product, clients, fleet, up, level):
    name = f"slept{level}"
    await up(name)
    async with product.engine(name) as engine:
        await engine.post(f"/sleep?level={level}&mode=wait")
        # Nobody told us the level: it is woken as from level 2, which is right for both.
        await fleet.becomes(name, "asleep", 2)
        assert (await product.states())[name] == "asleep"
        assert codes(await clients.many(5, name)) == {"whole": 5}
        state = await engine.state()
        assert (state["garbage_answers"], state["weights_whole"], state["reloads"]) == (0, True, 1)


async def test_a_request_sent_before_a_sleep_by_hand_was_seen_is_answered_whole(product, clients, fleet, up):
    await up("slept2")
    async with product.engine("slept2") as engine:
        await engine.post("/sleep?level=2&mode=wait")
        answer = await clients.ask("slept2")
        assert answer.whole, answer
        assert (await engine.state())["garbage_answers"] == 0


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_woken_by_hand_is_made_whole_before_it_gets_a_request(product, clients, fleet, up, level):
    name = f"woken{level}"
    await up(name)
    await product.vllmctl("sleep", name, "--level", str(level))
    async with product.engine(name) as engine:
        await engine.post("/wake_up")
        assert codes(await clients.many(5, name)) == {"whole": 5}
        await fleet.becomes(name, "ready")
        assert (await product.states())[name] == "ready"
        state = await engine.state()
        assert (state["garbage_answers"], state["weights_whole"]) == (0, True)


async def test_a_daemon_reload_changes_nothing(product, clients, fleet, up):
    await up("left-alone")
    async with product.engine("left-alone") as engine:
        run_before, seen_before = engine.run(), list(fleet.history["left-alone"])
        async with clients.stream("left-alone", tokens=200) as stream:
            await stream.first_token()
            for _ in range(3):
                await by_hand("daemon-reload")
            assert (await stream.rest()).whole
        await by_hand("daemon-reexec")
        assert (await clients.ask("left-alone")).whole
        assert (await product.states())["left-alone"] == "ready"
        assert engine.run() == run_before
        assert fleet.history["left-alone"] == seen_before


async def test_one_replica_stopped_by_hand_under_load_costs_no_answer(product, clients, fleet, up):
    await up("pair")
    async with clients.load("pair", 4) as load:
        await load.more(8)
        await by_hand("stop", unit("pair-a"))
        await load.more(8)
        await by_hand("start", unit("pair-a"))
        await fleet.becomes("pair-a", "ready")
        await by_hand("stop", unit("pair-b"))
        await load.more(8)
    assert codes(load.answers) == {"whole": len(load.answers)}


async def test_an_engine_that_is_frozen_for_a_moment_is_not_restarted(product, clients, fleet, up):
    await up("left-alone")
    async with product.engine("left-alone") as engine:
        run_before = engine.run()
        product.kill(engine.unit, signal.SIGSTOP)
        asked = asyncio.create_task(clients.ask("left-alone"))
        await fleet.until(lambda: fleet["left-alone"].health == "suspect", "the frozen engine is under suspicion")
        product.kill(engine.unit, signal.SIGCONT)
        assert (await asked).whole
        await fleet.until(lambda: fleet["left-alone"].health == "ok", "it answers again")
        assert engine.run() == run_before


@pytest.fixture(autouse=True, scope="module")
def rested(product):
    """Nothing stays masked, whatever failed."""
    yield
    systemctl("unmask", "--runtime", unit("masked"), check=False)
