"""What ``vllmctl pull`` brings is what a real vLLM wants: one that never asks a hub starts from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllmproduct import Product, free_port, in_own_manager

sys.path.insert(0, str(Path(__file__).parents[1] / "pull"))

from hubserver import Hub, Repo, serving

pytestmark = pytest.mark.vllm


@pytest.fixture
def hub(engine_dir: Path) -> Iterator[Hub]:
    with serving() as hub:
        files = {file.name: file.read_bytes() for file in (engine_dir / "tiny").iterdir()}
        hub.repos["org/tiny"] = Repo(
            {"main": {**files, "pytorch_model.bin": b"a second copy, in a format that is not wanted"}}
        )
        yield hub


@pytest.fixture
def product(
    hub: Hub, engine_dir: Path, model_config: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    """As everywhere, but the model is a repository of the hub, and the cache is empty. HF_HUB_OFFLINE is set."""
    in_own_manager()
    folder = tmp_path_factory.mktemp("product")
    config = model_config.replace(f'model = "{engine_dir}/tiny"', 'model = "org/tiny"').replace(
        "[models.tiny.serve.env]\n",
        f'[models.tiny.serve.env]\nHF_ENDPOINT = "{hub.address}"\nHF_HOME = "{folder}/hf"\n',
    )
    assert config.count("org/tiny") == config.count("HF_HOME") == config.count("HF_HUB_OFFLINE") == 1
    product = Product(folder, free_port())
    try:
        product.install(config)
        yield product
    finally:
        product.remove()


async def test_an_engine_that_is_offline_starts_from_what_was_pulled(hub: Hub, product: Product) -> None:
    config = str(product.directory / "config/vllm-supervisord/config.toml")
    results = json.loads(product.vllmctl("pull", "tiny", "--json", "--config", config))["results"]
    assert [(result["name"], result["result"]) for result in results] == [("tiny-a", "pulled"), ("tiny-b", "pulled")]
    assert not any("pytorch_model" in file for file in hub.fetched())
    pulled = list(hub.asked)
    product.vllmctl("up", "tiny-a")
    replica, _ = await product.ask("hello")
    assert replica == "tiny-a"
    assert hub.asked == pulled
