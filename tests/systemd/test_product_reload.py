"""A configuration that is edited while the product runs: only what changed is touched, and nobody notices."""

import pytest
from product import PROGRAMS, ROOT, codes, free_port, model, show, systemctl, until

BASE = model("kept", "kept-a", "kept-b")
CONFIG = BASE


@pytest.fixture
async def reloaded(product, fleet):
    """Take a configuration; returns what vllmctl says about it."""

    async def reloaded(text: str) -> str:
        product.configure(text)
        return await product.vllmctl("reload")

    yield reloaded
    await reloaded(BASE)
    await fleet.until(lambda: {r.name for r in fleet.now().replicas} == {"kept-a", "kept-b"}, "the first configuration")


@pytest.fixture
async def kept(product, clients, fleet):
    """Two replicas at work; afterwards neither was restarted, and no request failed."""
    await product.vllmctl("up", "kept")
    async with product.engine("kept-a") as a, product.engine("kept-b") as b, clients.load("kept", 2) as load:
        runs = a.run(), b.run()
        await load.more(4)
        yield
        await load.more(4)
        assert (a.run(), b.run()) == runs
    assert codes(load.answers) == {"whole": len(load.answers)}


async def test_a_model_comes_and_goes_without_touching_the_others(product, clients, fleet, kept, reloaded):
    assert "new" in await reloaded(BASE + model("guest"))
    assert (await clients.ask("guest")).whole
    assert show("vllm@guest.service", "ActiveState") == {"ActiveState": "active"}
    async with clients.stream("guest", tokens=300) as stream:
        await stream.first_token()
        assert "gone" in await reloaded(BASE)
        # Gone for whoever comes now; the stream ends in its own time, then the unit goes.
        assert (await clients.ask("guest")).status == 404
        assert (await stream.rest()).whole
    await until(lambda: show("vllm@guest.service", "ActiveState")["ActiveState"] == "inactive", "its unit is down")
    assert "guest" not in await clients.states()


async def test_a_replica_is_added_and_removed_under_load(product, clients, fleet, kept, reloaded):
    await reloaded(model("kept", "kept-a", "kept-b", "kept-c"))
    await product.vllmctl("up", "replica:kept-c")
    async with clients.load("kept", 6) as load:
        await until(lambda: any(answer.replica == "kept-c" for answer in load.answers), "it gets requests")
        await reloaded(BASE)
        await until(lambda: show("vllm@kept-c.service", "ActiveState")["ActiveState"] == "inactive", "it is down")
        await load.more(6)
    assert codes(load.answers) == {"whole": len(load.answers)}


async def test_an_idle_tier_is_changed_without_a_restart(product, clients, fleet, reloaded):
    await product.vllmctl("up", "kept")
    async with product.engine("kept-a") as engine:
        run_before = engine.run()
        assert "idle changed" in await reloaded(model("kept", "kept-a", "kept-b", idle={"sleep1": "500ms"}))
        await fleet.becomes("kept-a", "asleep", 1)
        await fleet.becomes("kept-b", "asleep", 1)
        assert engine.run() == run_before
        await reloaded(BASE)
        assert (await clients.ask("kept")).whole


async def test_a_serve_option_restarts_that_models_replicas_one_by_one_and_no_other(
    product, clients, fleet, kept, reloaded
):
    await reloaded(BASE + model("edited", "edited-a", "edited-b", max_model_len=4096))
    await product.vllmctl("up", "edited")
    async with product.engine("edited-a") as a, product.engine("edited-b") as b:
        before = a.run(), b.run()
    seen = len(fleet.history["edited-a"])
    async with clients.load("edited", 4, tokens=20) as load:
        await load.more(4)
        await reloaded(BASE + model("edited", "edited-a", "edited-b", max_model_len=8192))
        for name in ("edited-a", "edited-b"):
            await fleet.until(lambda name=name: fleet[name].max_model_len == 8192, f"{name} has the new option")
        await load.more(4)
    assert codes(load.answers) == {"whole": len(load.answers)}
    async with product.engine("edited-a") as a, product.engine("edited-b") as b:
        assert [old != new for old, new in zip(before, (a.run(), b.run()), strict=True)] == [True, True]
    # Drained first: not restarted under somebody's answer.
    assert ("draining", 0) in fleet.history["edited-a"][seen - 1 :]
    assert show("vllm@edited-a.service", "NRestarts") == {"NRestarts": "0"}
    assert (await clients.get("/v1/models/edited"))["max_model_len"] == 8192


async def test_quick_edits_one_after_the_other_end_in_the_last_one(product, clients, fleet, kept, reloaded):
    for context in (1024, 2048, 3072):
        product.configure(BASE + model("guest", max_model_len=context))
        product.kill(number=1)
    assert await product.vllmctl("reload")
    await product.vllmctl("up", "guest")
    await fleet.until(lambda: fleet["guest"].max_model_len == 3072, "the last edit")
    assert product.log("guest").count("Starting vLLM API server") <= 3


async def test_a_replica_under_a_unit_of_ones_own_is_started_watched_and_stopped(product, clients, fleet, reloaded):
    port = free_port()
    command = f"{PROGRAMS}/vllm-simulator serve simulated --host 127.0.0.1 --port {port} --served-model-name own"
    product.write_unit(
        "my-engine.service",
        f"""[Service]
ExecStart={command} --enable-sleep-mode --sim-clock-factor 0.01
Environment=VLLM_SERVER_DEV_MODE=1 PYTHONPATH={ROOT}
StandardOutput=append:{product.folder}/log/own.log
StandardError=append:{product.folder}/log/own.log
Restart=always
RestartSec=200ms
""",
    )
    own = f"""[models.own.replicas.mine]
unit = "my-engine.service"
endpoint = "http://127.0.0.1:{port}"
"""
    await reloaded(BASE + own)
    assert show("my-engine.service", "ActiveState") == {"ActiveState": "inactive"}
    assert codes(await clients.many(5, "own")) == {"whole": 5}
    assert show("my-engine.service", "ActiveState") == {"ActiveState": "active"}
    await product.vllmctl("sleep", "own", "--level", "2")
    assert (await clients.ask("own")).whole
    product.kill("my-engine.service")
    assert codes(await clients.many(5, "own")) == {"whole": 5}
    await product.vllmctl("down", "own")
    assert show("my-engine.service", "ActiveState") == {"ActiveState": "inactive"}
    await product.vllmctl("up", "own")
    # What is no longer configured is no longer ours: a unit that we did not write runs on.
    await reloaded(BASE)
    await fleet.until(lambda: "mine" not in {r.name for r in fleet.now().replicas}, "it is forgotten")
    assert show("my-engine.service", "ActiveState") == {"ActiveState": "active"}
    systemctl("stop", "my-engine.service")
