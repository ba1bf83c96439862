"""`vllmctl bench routing` and `vllmctl route explain` with two real units and simulated engines."""

import json
import re
from collections import Counter as Tally

import aiohttp
import pytest
from product import model

pytestmark = pytest.mark.systemd
CONFIG = model("chat", "chat-a", "chat-b") + model("single")
SMALL = ("--tokens", "600", "--burst", "6", "--turns", "3", "--output", "2")


async def test_every_policy_is_measured_as_itself_and_one_is_named(product, fleet):
    said = json.loads(await product.vllmctl("bench", "routing", "chat", *SMALL, "--rounds", "2", "--json"))
    assert said["simulated"] is True
    assert said["replicas"] == ["chat-a", "chat-b"]
    assert [each["policy"] for each in said["policies"]] == ["prefill", "adaptive", "roundrobin", "affinity"]
    for each in said["policies"]:
        assert each["errors"] == []
        assert (len(each["burst_seconds"]), len(each["burst_first_token_seconds"])) == (2, 12)
        assert len(each["warm_first_token_seconds"]) == 2 * 3 * 2  # rounds, conversations, turns after the first
    assert said["choose"] in {each["policy"] for each in said["policies"]}

    # What the port itself says of these requests: each policy gave its own reasons, and spread as it does.
    lines = [line for line in product.log().splitlines() if "route=/v1/chat/completions" in line]
    assert {"roundrobin", "pinned", "spread"} <= {
        found for line in lines for found in re.findall(r"reason=(\w+)", line)
    }
    roundrobin = Tally(re.findall(r"replica=(\S+) reason=\"?roundrobin", "\n".join(lines)))
    assert set(roundrobin) == {"chat-a", "chat-b"}
    assert abs(roundrobin["chat-a"] - roundrobin["chat-b"]) <= 1
    # It would make the conversations of the next policy cheap, if policies were asked for the same texts.
    by_policy = {each["policy"]: each for each in said["policies"]}
    assert by_policy["prefill"]["cached_share"] > by_policy["roundrobin"]["cached_share"]


async def test_a_table_names_the_choice_and_says_that_it_is_simulated(product, fleet):
    said = await product.vllmctl("bench", "routing", "chat", *SMALL, "--policies", "roundrobin,prefill")
    assert re.search(r"^prefill +[0-9.]+ s ", said, re.MULTILINE)
    assert re.search(r'^routing = "(prefill|roundrobin)": ', said, re.MULTILINE)
    assert "These replicas are simulated" in said


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        ((), 2, "say which model is to be measured: chat, single."),
        (("chat", "--policies", "best"), 2, "'best' is no policy: there are prefill"),
        (("nobody",), 4, "There is no model named 'nobody'."),
        (("single",), 1, "between fewer than two there is nothing to choose"),
        (("chat", "--tokens", "900000"), 2, "choose fewer --tokens"),
        (("chat", "--url", "http://127.0.0.1:1"), 1, "cannot ask the model"),
    ],
)
async def test_what_cannot_be_measured_is_said_before_anything_is_asked(product, fleet, args, code, why):
    assert why in await product.vllmctl("bench", "routing", *args, code=code)


async def chat(port: int, messages: list[dict[str, str]]) -> tuple[str, str]:
    """One turn: who answered, and what."""
    body = {"model": "chat", "messages": messages, "max_tokens": 4}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        return response.headers["x-vllmctl-replica"], (await response.json())["choices"][0]["message"]["content"]


async def test_an_explanation_tells_where_the_next_turn_goes_and_wakes_nobody(product, fleet, tmp_path):
    question = [{"role": "user", "content": "a question " * 200}]
    home, said = await chat(product.port, question)
    turns = [*question, {"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    file = tmp_path / "next.json"
    file.write_text(json.dumps({"model": "chat", "messages": turns}))
    told = json.loads(await product.vllmctl("route", "explain", "chat", str(file), "--json"))
    assert told["replica"] == home
    assert told["reason"].startswith(f"continuation of {home}, stays")
    assert home in await product.vllmctl("route", "explain", "chat", str(file))
    assert (await chat(product.port, turns))[0] == home

    await product.vllmctl("sleep", "chat")
    asleep = json.loads(await product.vllmctl("route", "explain", "chat", str(file), "--json"))
    assert asleep["replica"] is None
    states = {state for name, state in (await product.states()).items() if name.startswith("chat")}
    assert states <= {"asleep", "stopped"}
    file.write_text("[]")
    assert "must be a JSON object" in await product.vllmctl("route", "explain", "chat", str(file), code=2)
