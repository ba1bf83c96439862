"""Responses that engines keep, and adapters, on real units: who is asked, who is woken and who is left asleep."""

import asyncio
import json

import pytest
from product import model, until

CONFIG = "\n".join(
    [
        model("keeper", "ka", "kb", top={"routing": "roundrobin"}, lora_modules=["org/sql=/adapters/sql"]),
        '[models.keeper.serve.env]\nVLLM_ENABLE_RESPONSES_API_STORE = "1"\n',
        model("napping", idle={"sleep1": "300ms"}, sim_tpot_base=0.1),
        '[models.napping.serve.env]\nVLLM_ENABLE_RESPONSES_API_STORE = "1"\n',
    ]
)


@pytest.fixture
def ask(clients):
    """One request; status, replica, body."""

    async def request(method, path, body=None):
        answer = await clients.request(method, path, body)
        return answer.status, answer.replica, json.loads(answer.body)

    return request


@pytest.fixture
async def both(product, fleet):
    """Both replicas of the keeper, awake."""
    await product.vllmctl("up", "keeper")
    for name in ("ka", "kb"):
        await fleet.becomes(name, "ready")


async def made(ask, **fields):
    status, replica, body = await ask("POST", "/v1/responses", {"model": "keeper", "input": "hi", **fields})
    assert (status, body["status"]) in ((200, "completed"), (200, "queued")), body
    return body["id"], replica


@pytest.mark.usefixtures("both")
async def test_a_response_is_asked_of_its_replica_asleep_as_it_is_and_after_a_restart_of_the_daemon(
    product, fleet, ask
):
    kept = [await made(ask) for _ in range(4)]
    assert {replica for _, replica in kept} == {"ka", "kb"}
    for name in ("ka", "kb"):
        await product.vllmctl("sleep", name)
        await fleet.becomes(name, "asleep", 1)
    for attempt in range(2):
        for response, replica in kept:
            status, asked, body = await ask("GET", f"/v1/responses/{response}")
            assert (status, asked, body["id"]) == (200, replica, response)
        if attempt == 0:
            product.kill()  # and what it remembered is gone
            await fleet.leaves()
            await fleet.returns()
            for name in ("ka", "kb"):
                await fleet.becomes(name, "asleep", 1)
    async with product.engine("ka") as one, product.engine("kb") as other:
        assert [(await engine.state())["wakes"] for engine in (one, other)] == [{}, {}]


@pytest.mark.usefixtures("both")
async def test_going_on_from_a_response_wakes_its_replica_and_no_other(product, fleet, ask):
    response, owner = await made(ask)
    (sibling,) = {"ka", "kb"} - {owner}
    await product.vllmctl("sleep", owner)
    await fleet.becomes(owner, "asleep", 1)
    _, replica = await made(ask, previous_response_id=response)
    assert replica == owner
    assert (await product.states())[owner] == "ready"
    # And what was lost with its process is lost: the engine says so itself.
    await product.vllmctl("restart", owner)
    status, _, body = await ask(
        "POST", "/v1/responses", {"model": "keeper", "input": "x", "previous_response_id": response}
    )
    assert (status, body["error"]["message"]) == (404, f"Response with id '{response}' not found.")
    status, _, body = await ask("GET", f"/v1/responses/{response}")
    assert (status, body["error"]["param"]) == (404, "response_id")
    assert (await product.states())[sibling] == "ready"


async def test_a_replica_is_not_put_to_sleep_while_it_computes_in_the_background(product, fleet, ask):
    body = {"model": "napping", "input": "hi", "background": True, "max_output_tokens": 20}  # 2 s at most
    status, _, queued = await ask("POST", "/v1/responses", body)
    assert (status, queued["status"]) == (200, "queued")
    await fleet.until(lambda: fleet["napping"].in_flight == 1, "it is in flight")
    states, began = [], asyncio.get_running_loop().time()

    async def done():
        states.append((fleet["napping"].state, fleet["napping"].in_flight))
        return (await ask("GET", f"/v1/responses/{queued['id']}"))[2]["status"] not in ("queued", "in_progress")

    await until(done, "the response is computed")
    assert set(states) == {("ready", 1)}
    assert asyncio.get_running_loop().time() - began > 0.3, "it was not longer than the idle tier"
    await fleet.becomes("napping", "asleep", 1)
    status, _, after = await ask("GET", f"/v1/responses/{queued['id']}")
    assert (status, after["status"] in ("completed", "incomplete")) == (200, True)
    assert (await product.states())["napping"] == "asleep"


@pytest.mark.usefixtures("both")
async def test_an_adapter_is_listed_and_a_request_for_it_wakes_its_model_and_is_answered_by_it(product, clients):
    rows = {row["id"]: row["parent"] for row in (await clients.get("/v1/models"))["data"]}
    assert rows["org/sql"] == "keeper"
    await product.vllmctl("sleep", "keeper")
    answers = await asyncio.gather(*(clients.ask("org/sql") for _ in range(3)))
    assert all(answer.whole for answer in answers)
    assert {json.loads(answer.body)["model"] for answer in answers} == {"org/sql"}
