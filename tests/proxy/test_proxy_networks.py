"""Who may connect: networks of clients, at the door and, after a reload, with the next request."""

import asyncio
import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxyrig import MODEL, PATIENCE, Connection, FakeAdmission, request_bytes

from proxy.clients.networks import ClientNetworks
from proxy.server import PublicProxy
from supervisord.core.spec import ProxySpec

#: TEST-NET-1 of RFC 5737: nobody's.
ELSEWHERE = ("192.0.2.0/24",)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("networks", "inside", "outside"),
    [
        (
            ["127.0.0.0/8"],
            ["127.0.0.1", "127.255.255.255", "::ffff:127.0.0.1"],
            ["128.0.0.0", "126.255.255.255", "::1"],
        ),
        (["::1"], ["::1"], ["::2", "::", "127.0.0.1", "::ffff:127.0.0.1"]),
        (["fe80::/10"], ["fe80::1%eth0", "febf::1"], ["fec0::"]),
        (["::ffff:10.0.0.0/104"], ["10.1.2.3", "::ffff:10.9.9.9"], ["11.0.0.0", "::10.1.2.3"]),
        (["::/0"], ["::1", "2001:db8::1"], ["10.0.0.1", "::ffff:10.0.0.1"]),
        (["0.0.0.0/0"], ["10.0.0.1", "::ffff:10.0.0.1"], ["::1"]),
        (["10.0.0.0/8", "10.1.0.0/16", "9.0.0.0/8"], ["10.200.0.0", "9.1.1.1"], ["8.255.255.255", "11.0.0.0"]),
        (["127.0.0.1"], ["127.0.0.1"], ["", "localhost", "127.1", "1::2::3", "%"]),
    ],
)
def test_a_client_is_in_the_networks_or_not(networks, inside, outside):
    found = ClientNetworks(networks)
    assert [address for address in inside if not found.has(address)] == []
    assert [address for address in outside if found.has(address)] == []


_V4 = st.integers(0, 2**12).map(lambda n: ipaddress.IPv4Address((10 << 24) + (n << 8)))
_NETWORKS = st.lists(
    st.tuples(_V4, st.integers(8, 32)).map(lambda p: ipaddress.ip_network(p, strict=False)), max_size=9
)


@given(_NETWORKS, _V4)
def test_many_networks_are_the_same_as_one_after_the_other(networks, address):
    expected = any(address in network for network in networks)
    found = ClientNetworks(str(network) for network in networks)
    assert found.has(str(address)) is found.has(f"::ffff:{address}") is expected


async def test_a_stranger_is_told_so_before_it_asks_and_holds_nothing(rig):
    rig.reconfigure(allow_clients=ELSEWHERE)
    client = await rig.connect()
    answer = await client.response()
    assert (answer.status, answer.header("connection")) == (403, "close")
    assert answer.json()["error"]["code"] == "client_not_allowed"
    assert "127.0.0.1" in answer.json()["error"]["message"]
    assert await client.closed() == b""
    assert not rig.proxy._server.connections
    assert rig.admission.admitted == []


async def test_strangers_take_no_place_of_those_who_may_come(rig):
    await rig.engine()
    rig.reconfigure(allow_clients=ELSEWHERE, max_connections=2)
    for _ in range(3):
        await (await rig.connect()).closed()  # and stays open on its own side
    rig.reconfigure(allow_clients=("127.0.0.0/8",))
    assert (await rig.post()).status == 200


async def test_a_kept_connection_is_refused_with_its_next_request_and_not_before(rig):
    go = asyncio.Event()

    async def wait(request, connection):
        await go.wait()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    await rig.engine("a", wait)
    client = await rig.send(request_bytes())
    await rig.until(lambda: rig.admission.open)
    rig.reconfigure(allow_clients=ELSEWHERE)
    go.set()
    assert (await client.response()).status == 200
    await client.send(request_bytes())
    assert (await client.response()).json()["error"]["code"] == "client_not_allowed"
    assert await client.closed() == b""
    assert len(rig.admission.admitted) == 1


async def test_a_kept_connection_goes_on_where_the_new_networks_have_it(rig):
    client = await rig.send(HEALTH)
    assert (await client.response()).status == 200
    rig.reconfigure(allow_clients=("127.0.0.1",))
    await client.send(HEALTH)
    assert (await client.response()).status == 200


@pytest.fixture
async def guarded():
    """A port on any socket, which lets nobody in by network."""
    proxies = []

    async def guarded(listener, allow_clients=ELSEWHERE):
        proxy = PublicProxy(FakeAdmission(), ProxySpec(allow_clients=allow_clients), [MODEL], lambda failover: None)
        proxies.append(proxy)
        await proxy.start([listener])

    yield guarded
    for proxy in proxies:
        await proxy.stop()


async def _status(streams):
    client = Connection(*streams)
    await client.send(HEALTH)
    status = (await client.response()).status
    await client.close()
    return status


async def test_a_unix_socket_is_for_whoever_can_reach_it(guarded, tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "port"))
    await guarded(listener)
    assert await _status(await asyncio.open_unix_connection(str(tmp_path / "port"))) == 200


@pytest.mark.parametrize(("allowed", "status"), [("127.0.0.0/8", 200), ("::/0", 403)])
async def test_an_ipv4_client_of_a_socket_for_both_is_an_ipv4_client(guarded, allowed, status):
    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("::ffff:127.0.0.1", 0))
    await guarded(listener, (allowed,))
    async with asyncio.timeout(PATIENCE):
        assert await _status(await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])) == status
