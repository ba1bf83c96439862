"""Connections per client: who is one, and what one too many is told."""

import pytest

from proxy.clients.crowd import Crowd, client_of

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", "::ffff:192.0.2.1"),
        ("2001:db8::1", "2001:db8::ffff:1"),
        ("fe80::1%eth0", "fe80::2%eth1"),
    ],
)
def test_these_are_one_client(one, other):
    assert client_of(one) == client_of(other) != b""


@pytest.mark.parametrize(
    ("one", "other"), [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8:0:1::1"), ("192.0.2.1", "c000:201::")]
)
def test_these_are_two(one, other):
    assert client_of(one) != client_of(other)


@pytest.mark.parametrize("peer", ["unix", "", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_these_tell_nothing_of_their_client(peer):
    assert client_of(peer) == b""


def test_a_client_without_connections_takes_no_memory():
    crowd = Crowd()
    for _ in range(3):
        crowd.add(b"x")
    assert crowd.has(b"x") == 3
    for _ in range(3):
        crowd.remove(b"x")
    assert (crowd.has(b"x"), crowd._counts) == (0, {})


@pytest.fixture
def far_away(monkeypatch):
    """Loopback counts as any address does: a test has no other."""
    monkeypatch.setattr("proxy.clients.connected.client_of", lambda peer: peer.encode())


@pytest.mark.usefixtures("far_away")
async def test_one_connection_too_many_of_a_client_is_429_and_its_others_go_on(rig):
    rig.reconfigure(max_connections_per_client=2)
    first, second = await rig.connect(), await rig.connect()
    for client in (first, second):
        await client.send(HEALTH)
        assert (await client.response()).status == 200
    third = await rig.connect()
    answer = await third.response()
    assert answer.first_line == "HTTP/1.1 429 Too Many Requests"
    assert answer.json()["error"]["code"] == "too_many_connections"
    assert answer.json()["error"]["type"] == "RateLimitError"
    assert (answer.header("retry-after"), answer.header("connection")) == ("1", "close")
    await third.closed()
    await first.send(HEALTH)
    assert (await first.response()).status == 200


@pytest.mark.usefixtures("far_away")
async def test_who_leaves_makes_room(rig):
    rig.reconfigure(max_connections_per_client=1)
    for _ in range(5):
        client = await rig.send(HEALTH)
        assert (await client.response()).status == 200
        await client.close()
        server = rig.proxy._server
        while server.connections:
            await server._closed_within(5.0)
    assert server._crowd._counts == {}


@pytest.mark.usefixtures("far_away")
async def test_a_limit_that_comes_later_counts_from_then_on(rig):
    before = await rig.send(HEALTH)
    assert (await before.response()).status == 200
    rig.reconfigure(max_connections_per_client=1)
    client = await rig.send(HEALTH)
    assert (await client.response()).status == 200
    rig.reconfigure(max_connections_per_client=0)
    await before.close()
    await client.close()


async def test_clients_on_this_machine_are_not_limited(rig):
    rig.reconfigure(max_connections_per_client=1)
    for client in [await rig.send(HEALTH) for _ in range(3)]:
        assert (await client.response()).status == 200
