"""Seats for long conversations on the real engine: what is held back at the port spares the engine's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agentloops import Loops, Played, counted, held, play
from vllmproduct import SERVICE, Product, chat, free_port, in_own_manager, systemctl, with_one_replica

pytestmark = pytest.mark.vllm

#: Tokens. vLLM keeps a block of 32 for itself.
KV = 5120
#: Eight of 900 and more that come to some 1700: the cache holds four at first and three in the end.
LOOPS = Loops(
    agents=8, turns=8, context=(900, 1000), result=(20, 60), output=4, pause=0.05, within=0.5, instructions=128
)


@pytest.fixture
def product(model_config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    in_own_manager()
    product = Product(tmp_path_factory.mktemp("product"), free_port())
    try:
        product.install(with_one_replica(model_config, KV))
        product.vllmctl("up", "tiny")
        yield product
    finally:
        product.remove()


async def played(product: Product, admission: str) -> tuple[Played, dict[str, int]]:
    """The same agents on an empty cache, through a daemon that has learned nothing yet; and what the engine counted."""
    product.configure("admission.toml", f'[models.tiny]\nadmission = "{admission}"\n')
    systemctl("restart", SERVICE)
    async with product.a.engine() as engine, engine.post("/reset_prefix_cache") as response:
        assert response.status == 200, await response.text()
    async with product.http() as http:
        await chat(http, "Hello.", tokens=1)
        before = await product.a.metrics()
        played = await play(http, LOOPS, seed=1)
        return played, counted(before, await product.a.metrics())


async def test_where_conversations_are_more_than_the_cache_holds_seats_spare_most_of_the_prefill(
    product: Product,
) -> None:
    of_all, counted_of_all = await played(product, "all")
    of_kv, counted_of_kv = await played(product, "kv")
    print(f"all: {counted_of_all}\nkv:  {counted_of_kv}")
    for each in (of_all, of_kv):
        assert each.errors == []
        assert len(each.turns) == LOOPS.agents * LOOPS.turns
    # They asked the same, but for answers, which may depend on who was in the batch.
    assert counted_of_kv["prefix_cache_queries"] == pytest.approx(counted_of_all["prefix_cache_queries"], rel=0.02)
    assert (held(of_all.turns), held(of_kv.turns) > 0) == (0, True)
    assert counted_of_kv["computed"] < 0.75 * counted_of_all["computed"]
    # What usage tells is what the metrics tell, and reaches the client.
    assert sum(turn.cached for turn in of_kv.turns) == counted_of_kv["prefix_cache_hits"]
