"""The status listener: what it answers, where, and that nothing depends on it."""

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
import pytest
from monitored import at, fleet, over, replica, samples, spec

from supervisord.bus.objects import ManagerFacts
from supervisord.core.spec import Config, ProxySpec
from supervisord.fleet_events import FleetEvents
from supervisord.monitoring.port import StatusPort

FACTS = ManagerFacts("0.1", ("127.0.0.1:8000",), ("/etc/config.toml",), "/state", True)


def config(listen: str | None) -> Config:
    return Config(proxy=ProxySpec(status_listen=listen), models=(spec(),))


@dataclass
class Rig:
    port: StatusPort
    proxy: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(observer=None, connected=7, in_flight=3))
    #: What the fleet is asked for.
    asked: int = 0
    draining: bool = False

    async def get(self, path: str, address: str = "", method: str = "GET", **headers: str) -> tuple[int, str]:
        """Ask ``address``, ``unix:/path`` or ``host:port``."""
        unix = address.startswith("unix:")
        connector = aiohttp.UnixConnector(address.removeprefix("unix:")) if unix else aiohttp.TCPConnector()
        url = "http://status" if unix else f"http://{address}"
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, url + path, headers=headers) as response,
        ):
            return response.status, await response.text()


@pytest.fixture
async def rig():
    def view():
        made.asked += 1
        return fleet(replica("a"), draining=made.draining)

    made = Rig(StatusPort(view, lambda: FACTS, FleetEvents()))
    yield made
    await made.port.close()


@pytest.fixture
def free() -> Callable[[], str]:
    """An address that nobody listens on."""

    def address() -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return f"127.0.0.1:{server.getsockname()[1]}"

    return address


async def test_four_paths_are_answered_and_nothing_else(rig, free):
    address = free()
    await rig.port.open((), config(address))
    rig.port.feed(rig.proxy)
    over(rig.proxy.observer)
    status, text = await rig.get("/metrics", address)
    assert status == 200
    found = samples(text)
    assert at(found, "request_duration_seconds_count", model="chat", replica="a") == 1
    assert (at(found, "connections"), at(found, "requests_in_progress")) == (7, 3)
    assert await rig.get("/health", address) == (200, "")
    assert await rig.get("/ready", address) == (200, "ready\n")
    assert (await rig.get("/health", address, "HEAD"))[0] == 200
    for path in ("/", "/v1/models", "/v1/chat/completions", "/sleep", "/metrics/", "/metrics/..", "//metrics"):
        assert (await rig.get(path, address))[0] == 404, path
    assert (await rig.get("/metrics", address, "POST"))[0] == 405
    status, text = await rig.get("/metrics", address, Accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


async def test_status_is_what_vllmctl_prints(rig, free):
    address = free()
    await rig.port.open((), config(address))
    told = json.loads((await rig.get("/status", address))[1])
    assert told["daemon"]["config_files"] == ["/etc/config.toml"]
    assert [model["name"] for model in told["models"]] == ["chat"]
    assert told["replicas"][0]["state"] == "ready"


async def test_ready_is_while_requests_are_accepted_and_health_always(rig, free):
    address = free()
    await rig.port.open((), config(address))
    assert await rig.get("/ready", address) == (503, "starting\n")
    rig.port.feed(rig.proxy)
    assert await rig.get("/ready", address) == (200, "ready\n")
    rig.draining = True
    assert await rig.get("/ready", address) == (503, "shutting down\n")
    assert (await rig.get("/health", address))[0] == 200


async def test_without_a_listener_nothing_is_counted_and_nothing_loaded(rig):
    await rig.port.open((), config(None))
    rig.port.feed(rig.proxy)
    assert rig.proxy.observer is None
    # What the daemon loads, in an interpreter of its own.
    code = "import sys, supervisord.app; print(*sorted({'prometheus_client', 'aiohttp.web'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert done.stdout.strip() == ""


async def test_a_taken_address_is_an_error_and_no_more_and_the_next_reload_tries_again(rig, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.ERROR):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        await rig.port.open((), config(address))
        rig.port.feed(rig.proxy)
        (record,) = caplog.records
        assert record.message == f"no status listener: cannot listen on {address}: Address already in use"
        assert await rig.port.reconfigure(config(address)) == (record.message,)
        assert rig.proxy.observer is None
    assert await rig.port.reconfigure(config(address)) == ()
    assert await rig.get("/ready", address) == (200, "ready\n")
    assert rig.proxy.observer is not None


async def test_a_reload_moves_it_and_ends_it_and_what_was_counted_stays(rig, free):
    first, second = free(), free()
    await rig.port.open((), config(first))
    rig.port.feed(rig.proxy)
    over(rig.proxy.observer)
    assert await rig.port.reconfigure(config(second)) == ()
    with pytest.raises(aiohttp.ClientConnectorError):
        await rig.get("/health", first)
    found = samples((await rig.get("/metrics", second))[1])
    assert at(found, "request_duration_seconds_count", model="chat", replica="a") == 1
    await rig.port.reconfigure(config(None))
    with pytest.raises(aiohttp.ClientConnectorError):
        await rig.get("/health", second)
    assert rig.proxy.observer is None


async def test_a_reload_that_changes_something_else_leaves_its_connections_alone(rig, free):
    address = free()
    await rig.port.open((), config(address))
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await rig.port.reconfigure(config(address))
    writer.close()
    await writer.wait_closed()


async def test_a_unix_socket_replaces_what_a_killed_daemon_left_and_is_taken_away_at_the_end(rig, tmp_path):
    path = tmp_path / "status.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    await rig.port.open((), config(f"unix:{path}"))
    assert (await rig.get("/health", f"unix:{path}"))[0] == 200
    await rig.port.close()
    assert not path.exists()


async def test_a_unix_socket_that_somebody_listens_on_and_a_file_are_left_alone(rig, tmp_path, caplog):
    path = tmp_path / "status.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, caplog.at_level(logging.ERROR):
        other.bind(str(path))
        other.listen()
        await rig.port.open((), config(f"unix:{path}"))
    file = tmp_path / "file"
    file.write_text("precious")
    await rig.port.reconfigure(config(f"unix:{file}"))
    assert [record.message for record in caplog.records] == [
        f"no status listener: cannot listen on unix:{path}: Address already in use",
        f"no status listener: cannot listen on unix:{file}: Address already in use",
    ]
    assert file.read_text() == "precious"


async def test_systemds_sockets_are_used_and_the_configurations_wish_ignored(rig, free):
    address = free()
    given = socket.create_server(("127.0.0.1", 0))
    await rig.port.open([given], config(address))
    handed = f"127.0.0.1:{given.getsockname()[1]}"
    assert (await rig.get("/health", handed))[0] == 200
    assert await rig.port.reconfigure(config(free())) == ()
    assert (await rig.get("/health", handed))[0] == 200


async def test_the_lag_of_the_loop_is_sampled(rig, free, monkeypatch):
    monkeypatch.setattr("supervisord.monitoring.lag.INTERVAL", 0.001)
    address = free()
    await rig.port.open((), config(address))
    async with asyncio.timeout(10):
        while not at(samples((await rig.get("/metrics", address))[1]), "loop_lag_seconds_count"):
            pass
