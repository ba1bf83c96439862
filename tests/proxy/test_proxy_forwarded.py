"""What engines and clients are told of each other, by the configuration."""

import asyncio
import socket

import pytest
from proxyrig import Connection, reply_bytes, request_bytes

from proxy.clients.forwarded import forwarded_fields

CLAIMS = (
    "X-Forwarded-For: 10.0.0.1, 192.0.2.1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\n"
    "X-Forwarded-Port: 1\r\nX-Real-IP: 10.0.0.1\r\nForwarded: for=10.0.0.1;proto=https\r\n"
)
TOLD = {"forwarded", "x-real-ip"}


def told(engine) -> dict[str, str]:
    fields = [(name.lower(), value) for name, value in engine.requests[-1].headers]
    found = [(name, value) for name, value in fields if name in TOLD or name.startswith("x-forwarded")]
    assert len(found) == len(dict(found)), "a field twice"
    return dict(found)


X_FORWARDED = {"x-forwarded-for": "127.0.0.1", "x-forwarded-proto": "http", "x-forwarded-host": "proxy.test"}
FORWARDED = {"forwarded": 'for=127.0.0.1;proto=http;host="proxy.test"'}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("off", {}), ("x-forwarded", X_FORWARDED), ("forwarded", FORWARDED), ("both", X_FORWARDED | FORWARDED)],
)
async def test_an_engine_is_told_what_the_configuration_says_and_nothing_that_a_client_claims(rig, mode, expected):
    rig.reconfigure(forwarded=mode)
    engine = await rig.engine()
    for claims in ("", CLAIMS):
        assert (await rig.post(headers=claims)).status == 200
        assert told(engine) == expected


async def test_a_client_on_a_unix_socket_has_no_address(rig, tmp_path):
    rig.reconfigure(forwarded="both")
    engine = await rig.engine()
    path = str(tmp_path / "port.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    await rig.proxy.start([listener])
    client = Connection(*await asyncio.open_unix_connection(path))
    rig.clients.append(client)
    await client.send(request_bytes())
    assert (await client.response()).status == 200
    assert told(engine) == {
        "x-forwarded-proto": "http",
        "x-forwarded-host": "proxy.test",
        "forwarded": 'for=unknown;proto=http;host="proxy.test"',
    }


def test_addresses_are_spelled_as_rfc_7239_wants():
    fields = dict(forwarded_fields("both", "fe80::1%eth0", b"[::1]:8000", secure=True))
    assert fields[b"X-Forwarded-For"] == b"fe80::1"
    assert fields[b"X-Forwarded-Proto"] == b"https"
    assert fields[b"Forwarded"] == b'for="[fe80::1]";proto=https;host="[::1]:8000"'


async def test_clients_are_told_the_replica_unless_the_configuration_says_not(rig):
    await rig.engine()
    answer = await rig.post()
    assert (answer.header("x-vllmctl-replica"), answer.header("x-vllmctl-route")) == ("a", "spread")
    rig.reconfigure(route_headers=False)
    answer = await rig.post()
    assert answer.status == 200
    assert not any(name.lower().startswith("x-vllmctl") for name, _ in answer.headers)


async def test_an_engine_cannot_speak_for_the_port(rig):
    async def talkative(request, connection):
        await connection.send(reply_bytes(b"{}", headers="x-vllmctl-replica: evil\r\n"))

    await rig.engine("a", talkative)
    for tells, expected in ((True, ["a"]), (False, [])):
        rig.reconfigure(route_headers=tells)
        answer = await rig.post()
        assert [value for name, value in answer.headers if name == "x-vllmctl-replica"] == expected
