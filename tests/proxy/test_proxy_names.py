"""Names of models: with slashes, aliases, and adapters that only some engines have."""

import json
import logging
from dataclasses import replace

import pytest
from proxyrig import CHAT, MODEL, answer_ok, listed

from proxy.reading.facts import Facts

ADAPTER = {**CHAT, "model": "org/sql-lora"}


@pytest.fixture
def adapted(rig):
    """The engine of replica b has an adapter besides."""
    rig.admission.adapters = {"org/sql-lora": frozenset({"b"})}
    rig.admission.served_names = ("base", "org/sql-lora")
    rig.admission.models = (replace(listed("m", ("alias",)), adapters=("org/sql-lora",)),)
    return rig


async def test_a_request_for_an_adapter_reaches_an_engine_that_has_it_byte_for_byte(adapted):
    a, b = await adapted.engine("a"), await adapted.engine("b")
    for _ in range(3):
        answer = await adapted.post(ADAPTER)
        assert (answer.status, answer.header("x-vllmctl-replica")) == (200, "b")
    assert a.requests == []
    assert all(b'"model": "org/sql-lora"' in request.body for request in b.requests)


async def test_an_alias_beside_it_is_spliced_to_the_base_model(adapted):
    engine = await adapted.engine("b")
    await adapted.post({**CHAT, "model": "alias"})
    assert json.loads(engine.requests[0].body)["model"] == "base"


async def test_an_adapter_is_never_answered_by_the_base_model(adapted):
    engine = await adapted.engine("b")
    adapted.admission.served_names = ("base",)  # it did not load
    await adapted.post(ADAPTER)
    assert json.loads(engine.requests[0].body)["model"] == "org/sql-lora"


async def test_an_adapter_is_routed_by_its_models_policy_and_by_a_prefix_of_its_own(adapted, monkeypatch):
    adapted.proxy.reconfigure(adapted.spec, [replace(MODEL, routing="adaptive")])
    adapted.admission.adapters["org/sql-lora"] = frozenset({"a", "b"})
    for name in ("a", "b"):
        await adapted.engine(name)
    turns = [{"role": "user", "content": f"{n}"} for n in range(3)]
    first = await adapted.post({**ADAPTER, "messages": turns[:1]})
    again = await adapted.post({**ADAPTER, "messages": turns[:2]})
    assert again.header("x-vllmctl-route") == "continuation"
    assert again.header("x-vllmctl-replica") == first.header("x-vllmctl-replica")
    base = await adapted.post({**CHAT, "messages": [*turns[:2], turns[2]]})
    assert base.header("x-vllmctl-route") == "spread"  # the same text, and nothing of it in the base model's cache


def test_the_keys_of_an_adapter_are_others_and_stay_the_same():
    facts = Facts("m", keys=(b"1", b"2"))
    one, other = facts.with_adapter("x"), facts.with_adapter("y")
    assert facts.with_adapter("x") == one
    assert len({*facts.keys, *one.keys, *other.keys}) == 6


async def test_an_adapter_is_listed_with_its_parent(adapted):
    rows = {row["id"]: row for row in (await adapted.get("/v1/models")).json()["data"]}
    assert list(rows) == ["m", "alias", "org/sql-lora"]
    assert (rows["org/sql-lora"]["root"], rows["org/sql-lora"]["parent"]) == ("org/sql-lora", "m")
    one = await adapted.get("/v1/models/org%2Fsql-lora")
    assert one.json() == rows["org/sql-lora"]


async def test_an_adapter_of_nobody_is_404(adapted):
    await adapted.engine("a", answer_ok)
    answer = await adapted.post({**CHAT, "model": "org/other-lora"})
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["org/name", "org/name:8b-q4", "a/b/c", "名前"])
async def test_a_name_is_admitted_and_spliced_as_it_is(rig, name):
    engine = await rig.engine()
    rig.admission.adapters = {name: frozenset({"a"})}
    for served, sent in (((name,), name), (("base/model",), "base/model")):
        rig.admission.served_names = served
        assert (await rig.post({**CHAT, "model": name})).status == 200
        assert engine.requests[-1].body.count(b"model") == 1 + sent.count("model")
        assert json.loads(engine.requests[-1].body)["model"] == sent
    assert rig.admission.admitted == [name, name]


@pytest.mark.parametrize("name", ["z" * 4097, "\u00e9" * 4097], ids=["plain", "escaped"])
async def test_a_name_longer_than_any_is_refused_without_being_told_to_client_and_log(rig, caplog, name):
    caplog.set_level(logging.INFO)
    answer = await rig.post({**CHAT, "model": name})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "model")
    assert len(answer.body) < 1000
    assert (await rig.post({**CHAT, "model": name[1:]})).status == 404
    assert all(len(record.getMessage()) < 15_000 for record in caplog.records)
