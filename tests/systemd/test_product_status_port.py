"""The status listener of the running product: what moves its counters, and that looking at it is no use of a model."""

import asyncio
import json

import aiohttp
import pytest
from product import ROOT, SERVICE, codes, free_port, model, systemctl, until
from prometheus_client.parser import text_string_to_metric_families

FIRST, SECOND = free_port(), free_port()
MODELS = "\n".join(
    [
        model("nap", top={"aliases": ["siesta"]}),
        model("deep"),
        model("pair", "pair-a", "pair-b", top={"routing": "roundrobin"}),
        model("idle", idle={"sleep1": "1s", "sleep2": "3s", "stop": "6s"}),
    ]
)


def listening(port: int) -> str:
    return f'[proxy]\nstatus_listen = "127.0.0.1:{port}"\n{MODELS}'


CONFIG = listening(FIRST)


class Scraper:
    """Asks the status listener."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session, self.port = session, port

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(f"http://127.0.0.1:{self.port}{path}") as response:
            return response.status, await response.text()

    async def samples(self) -> dict[str, float]:
        """``name{label=value,...}`` with the labels in order and without our prefix."""
        status, text = await self.get("/metrics")
        assert status == 200
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name.removeprefix('vllm_supervisord_')}{{{labels}}}"] = sample.value
        return found


@pytest.fixture
async def scraper():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield Scraper(session, FIRST)


def gained(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What grew, without histograms' buckets and sums and what only time moves."""
    quiet = ("_bucket", "_sum", "_since_timestamp_seconds", "loop_lag", "process_", "replica_", "in_flight", "bytes")
    names = [name for name in after if not any(word in name.partition("{")[0] for word in quiet)]
    return {name: after[name] - before.get(name, 0) for name in names if after[name] != before.get(name, 0)}


@pytest.mark.parametrize(("name", "level"), [("nap", 1), ("deep", 2)])
async def test_a_sleep_and_the_wake_for_a_request_are_counted_once_each(product, clients, fleet, scraper, name, level):
    await product.vllmctl("up", name)
    before = await scraper.samples()
    await product.vllmctl("sleep", name, "--level", str(level))
    asleep = await scraper.samples()
    here = f"model={name},replica={name}"
    assert asleep[f"replica_state{{{here},state=asleep}}"] == 1
    assert asleep[f"replica_sleep_level{{{here}}}"] == level
    assert (await clients.ask(name, stream=True)).whole
    after = await scraper.samples()
    events = {"sleeps_begun", "sleeps", "wakes_begun", "wakes"}
    leveled = {f"{event}_total{{level={level},{here}}}": 1.0 for event in events}
    wanted = leveled | {
        f"canary_passes_total{{{here}}}": 1.0,
        f"wake_seconds_count{{level={level},model={name}}}": 1.0,
        f"requests_total{{code=,{here},route=/v1/chat/completions,status=200}}": 1.0,
        f"request_duration_seconds_count{{{here}}}": 1.0,
        f"time_to_first_token_seconds_count{{{here}}}": 1.0,
        f"queue_seconds_count{{model={name}}}": 1.0,
        f"placements_total{{model={name},placement=cold,replica={name}}}": 1.0,
    }
    found = {key: value for key, value in gained(before, after).items() if "tokens" not in key}
    assert found == wanted
    assert after[f"queue_seconds_sum{{model={name}}}"] > before.get(f"queue_seconds_sum{{model={name}}}", 0)
    lines = product.log()
    assert f"event=woken model={name} replica={name} level={level} seconds=" in lines


async def test_every_failover_is_a_line_and_a_count_and_the_replica_is_demoted(product, clients, fleet, scraper):
    await product.vllmctl("up", "pair")
    before, lines = await scraper.samples(), product.log().count("event=failover")
    async with product.engine("pair-a") as engine:
        await engine.arm("reset-mid-stream", "0")
        answers = [await clients.ask("pair", stream=True) for _ in range(2)]  # they take turns
    assert codes(answers) == {"whole": 2}
    found = gained(before, await scraper.samples())
    failed = "{model=pair,replica=pair-a}"
    assert (found[f"failovers_total{failed}"], found[f"demotions_total{failed}"]) == (1, 1)
    assert product.log().count("event=failover") - lines == 1
    assert found["retries_total{model=pair}"] == 1
    assert sum(value for name, value in found.items() if name.startswith("requests_total")) == 2


async def test_refusals_are_counted_by_code_and_never_under_what_clients_write(product, clients, fleet, scraper):
    await product.vllmctl("down", "nap")
    before = await scraper.samples()
    for name in ("siesta", "nap", "made-up-1", "made-up-2"):
        await clients.ask(name)
    after = await scraper.samples()
    chat = "route=/v1/chat/completions"
    held = f"requests_total{{code=model_held,model=nap,replica=,{chat},status=503}}"
    unknown = f"requests_total{{code=model_not_found,model=-,replica=,{chat},status=404}}"
    found = gained(before, after)
    assert {name: value for name, value in found.items() if name.startswith("requests")} == {held: 2.0, unknown: 2.0}
    assert not [name for name in after if "made-up" in name or "siesta" in name]
    await product.vllmctl("up", "nap")


async def test_a_model_that_is_scraped_all_the_time_goes_down_its_ladder_as_if_it_were_not(
    product, clients, fleet, scraper
):
    assert (await clients.ask("idle")).whole
    clocks = set()

    async def stopped() -> bool:
        found = await scraper.samples()
        clocks.add(found["replica_idle_since_timestamp_seconds{model=idle,replica=idle}"])
        assert (await scraper.get("/status"))[0] == 200
        return found["replica_state{model=idle,replica=idle,state=stopped}"] == 1

    await until(stopped, "it is stopped")
    await fleet.becomes("idle", "stopped")
    assert len(clocks) == 1
    rests = [step for step in fleet.history["idle"] if step[0] in ("asleep", "stopped")]
    assert rests[-3:] == [("asleep", 1), ("asleep", 2), ("stopped", 0)]


async def test_a_scrape_reaches_no_engine_and_makes_no_traffic_on_the_bus(product, clients, fleet, scraper):
    await product.vllmctl("up", "nap")
    await product.vllmctl("sleep", "nap")
    async with product.engine("nap") as engine:
        run_before, since = engine.run(), fleet["nap"].state_since
        monitor = await asyncio.create_subprocess_exec(
            *("busctl", "--user", "monitor", "--json=short", "--match=sender='io.github.vllmctl1'"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert monitor.stderr is not None
        await monitor.stderr.readline()  # "Monitoring bus message stream."
        for _ in range(50):
            await scraper.samples()
        monitor.terminate()
        out, _ = await monitor.communicate()
        changed = [json.loads(line) for line in out.splitlines() if b"/replica/nap" in line or b"/model/nap" in line]
        assert not changed
        state = await engine.state()
        assert state["wakes"] == {}
        assert engine.run() == run_before
    await fleet.becomes("nap", "asleep", 1)
    assert fleet["nap"].state_since == since


async def test_status_is_what_vllmctl_says(product, clients, fleet, scraper):
    told = json.loads((await scraper.get("/status"))[1])
    said = json.loads(await product.vllmctl("status", "--json"))
    assert told.keys() == said.keys()
    assert told["daemon"] == said["daemon"] | {"status": told["daemon"]["status"]}
    assert [r["name"] for r in told["replicas"]] == [r["name"] for r in said["replicas"]]
    assert told["models"][0].keys() == said["models"][0].keys()


async def test_nothing_of_it_is_on_the_public_port(product, clients, fleet):
    for path in ("/metrics", "/ready", "/status"):
        assert (await clients.get(path))["error"]["code"] == "unknown_url"


async def test_a_reload_moves_it_and_says_where_it_cannot(product, clients, fleet, scraper):
    product.configure(listening(SECOND))
    assert "status_listen changed" in await product.vllmctl("reload")
    scraper.port = SECOND
    assert await scraper.get("/ready") == (200, "ready\n")
    product.configure(listening(product.port))
    assert f"cannot listen on 127.0.0.1:{product.port}" in await product.vllmctl("reload")
    assert (await clients.ask("nap")).whole
    product.configure(CONFIG)
    await product.vllmctl("reload")
    scraper.port = FIRST
    assert (await scraper.get("/health"))[0] == 200


async def test_an_address_that_is_taken_keeps_no_client_from_being_answered(product, clients, fleet):
    product.configure(listening(product.port))  # the public port's own
    systemctl("restart", SERVICE)
    await fleet.returns()
    assert (await clients.ask("nap")).whole
    assert f"no status listener: cannot listen on 127.0.0.1:{product.port}" in product.log()
    product.configure(CONFIG)
    systemctl("restart", SERVICE)
    await fleet.returns()


async def test_a_socket_of_systemds_named_status_is_used(product, clients, fleet, scraper):
    # The unit of docs/monitoring.md, with another port.
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    unit = page[page.index("    [Socket]") : page.index("Prometheus:\n")].replace("\n    ", "\n").strip()
    assert "ListenStream=127.0.0.1:9100" in unit
    name = "vllm-supervisord-status.socket"
    file = product.write_unit(name, unit.replace("127.0.0.1:9100", f"127.0.0.1:{SECOND}"))
    systemctl("daemon-reload")
    systemctl("stop", SERVICE)  # systemd adds no socket to a service that runs
    systemctl("start", name)
    systemctl("start", SERVICE)
    await fleet.returns()
    scraper.port = SECOND
    assert await scraper.get("/ready") == (200, "ready\n")
    scraper.port = FIRST
    with pytest.raises(aiohttp.ClientConnectorError):  # what the configuration wishes is not listened on
        await scraper.get("/ready")
    systemctl("stop", name, SERVICE)
    file.unlink()
    systemctl("daemon-reload")
    product.start()
    await fleet.returns()
    assert await scraper.get("/ready") == (200, "ready\n")
