"""Wake on request and the idle ladder, on real units: how often an engine is woken or started, and what clients get."""

import pytest
from product import Product, codes, model, show, until

CLIENTS = 200

CONFIG = "\n".join(
    [
        model("sleeper1", top={"aliases": ["nap"]}),
        model("sleeper2", top={"aliases": ["offloaded"]}),
        model("starter"),
        model("ladder", idle={"sleep1": "1s", "sleep2": "3s", "stop": "6s"}),
        model("long", idle={"sleep1": "200ms", "sleep2": "400ms", "stop": "600ms"}, sim_tpot_base=0.02),
    ]
)


def starts(product: Product, replica: str) -> int:
    """How often the engine's process began, by its own log."""
    return product.log(replica).count("Starting vLLM API server")


@pytest.mark.parametrize(
    ("level", "alias", "wakes", "reloads"),
    [(1, "nap", {"all": 1}, 0), (2, "offloaded", {"weights": 1, "kv_cache": 1}, 1)],
)
async def test_many_requests_to_a_sleeper_wake_it_once_and_are_all_answered(
    product, clients, fleet, level, alias, wakes, reloads
):
    name = f"sleeper{level}"
    await product.vllmctl("up", name)
    async with product.engine(name) as engine:
        run = engine.run()
        await product.vllmctl("sleep", name, "--level", str(level))
        await fleet.becomes(name, "asleep", level)
        answers = await clients.many(CLIENTS, alias)
        assert codes(answers) == {"whole": CLIENTS}
        state = await engine.state()
        assert (state["wakes"], state["reloads"], state["garbage_answers"]) == (wakes, reloads, 0)
        assert state["finished"] == CLIENTS + 2  # the canary, at the first readiness and after the wake
        assert engine.run() == run


async def test_many_requests_to_a_stopped_model_start_it_once_and_are_all_answered(product, clients, fleet):
    assert fleet["starter"].state == "stopped"
    answers = await clients.many(CLIENTS, "starter")
    assert codes(answers) == {"whole": CLIENTS}
    assert starts(product, "starter") == 1


async def test_an_idle_model_walks_down_the_ladder_whoever_looks_at_it_and_a_request_brings_it_back(
    product, clients, fleet
):
    assert (await clients.ask("ladder")).whole

    async def listed_as_stopped() -> bool:
        # Looking, in every way that clients have, again and again: none of it is use.
        assert (await clients.get("/v1/models/ladder"))["id"] == "ladder"
        return (await clients.states())["ladder"] == "stopped"

    await until(listed_as_stopped, "the model is stopped")
    await fleet.becomes("ladder", "stopped")
    rests = [step for step in fleet.history["ladder"] if step[0] in ("asleep", "stopped")]
    assert rests == [("stopped", 0), ("asleep", 1), ("asleep", 2), ("stopped", 0)]
    assert show("vllm@ladder.service", "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert not (product.runtime / "vllm" / "ladder").exists()
    assert starts(product, "ladder") == 1
    assert (await clients.ask("ladder")).whole
    assert starts(product, "ladder") == 2


async def test_a_stream_longer_than_every_idle_tier_is_whole(product, clients, fleet):
    async with clients.stream("long", tokens=100) as stream:  # about 2 s
        await stream.first_token()
        await fleet.until(lambda: fleet["long"].in_flight == 1, "a request in flight")
        answer = await stream.rest()
    assert answer.whole
    assert answer.body.count('"content"') >= 100
    await fleet.becomes("long", "stopped")
