"""Clients behind a reverse proxy that is trusted: who they are, and that nobody can pass for another."""

import asyncio
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from proxyrig import PATIENCE, Message, reply_bytes, request_bytes

from proxy.clients.networks import ClientNetworks
from proxy.clients.trusted import Told, told
from proxy.http.headers import HeadError

PROXIES = ("127.0.0.1", "10.0.0.0/8", "fd00::/8")
TRUSTED = ClientNetworks(PROXIES)
#: Of the test networks of RFC 5737: a client, and one that it would like to be.
CLIENT, OTHER = "192.0.2.7", "198.51.100.1"
MANAGED = {"trusted_proxies": PROXIES}


def believed(*fields: tuple[bytes, bytes]) -> Told:
    return told("127.0.0.1", fields, TRUSTED)


def by_list(value: str) -> str:
    return believed((b"x-forwarded-for", value.encode())).client


def by_rfc(value: str) -> Told:
    return believed((b"forwarded", value.encode()))


@pytest.mark.parametrize(
    ("listed", "client"),
    [
        (CLIENT, CLIENT),
        (f"{OTHER}, {CLIENT}", CLIENT),
        (f"{CLIENT}, 10.1.1.1, 10.2.2.2", CLIENT),
        (f"{OTHER},{CLIENT} ,\t10.1.1.1,, ", CLIENT),
        ("10.1.1.1, 10.2.2.2", "10.1.1.1"),
        (f"nonsense, {CLIENT}", CLIENT),
        (f"{CLIENT}:4711", CLIENT),
        ("2001:DB8::7", "2001:db8::7"),
        ("[2001:db8::7]:4711, fd00::1", "2001:db8::7"),
        ("::ffff:192.0.2.7, ::ffff:10.1.1.1", "::ffff:192.0.2.7"),
        (f"{CLIENT}, unknown", "unknown"),
        (" , ", "127.0.0.1"),
    ],
)
def test_the_right_most_address_that_is_no_proxys_is_the_client(listed, client):
    assert by_list(listed) == client
    assert believed(*((b"x-forwarded-for", word.encode()) for word in listed.split(","))).client == client


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"for={CLIENT}", Told(CLIENT)),
        (f"for={OTHER};proto=http, FOR={CLIENT};Proto=HTTPS;host=\"a.example:8\"", Told(CLIENT, True, b"a.example:8")),
        (f'for="{CLIENT}:80";proto=http, for=10.1.1.1;proto=https;host=inner', Told(CLIENT, False)),
        ('for="[2001:db8::7]:_port", for="[fd00::1]"', Told("2001:db8::7")),
        ('for="19\\2.0.2.7"', Told(CLIENT)),
        (f"for={CLIENT};by=_x;secret=\"a,b;c\"", Told(CLIENT)),
        (f"for={CLIENT}, for=_hidden", Told("unknown")),
        (f"for={CLIENT}, proto=https", Told("unknown", True)),
        (f"for={CLIENT};host=\"no host\"", Told(CLIENT)),
        ("for=10.1.1.1;proto=https", Told("10.1.1.1", True)),
    ],
)  # fmt: skip
def test_forwarded_is_read_as_rfc_7239_has_it(value, expected):
    assert by_rfc(value) == expected


@pytest.mark.parametrize(
    "value",
    ["for", "for=", 'for="', f'for="a, for={CLIENT}', "for=a b", f"for={CLIENT};for={OTHER}", "for=1.2.3",
     "for=010.0.0.1", f"for=[{CLIENT}]", 'for="fe80::1%eth0"', 'for=""', "=x"],
)  # fmt: skip
def test_a_forwarded_that_makes_no_sense_is_refused(value):
    with pytest.raises(HeadError):
        by_rfc(value)


@pytest.mark.parametrize("listed", ["nonsense", f"{CLIENT}, 1.2.3", f"{CLIENT}, 10.1.1.1, <x>", "1.2.3.4.5"])
def test_a_list_whose_right_end_makes_no_sense_is_refused(listed):
    with pytest.raises(HeadError):
        by_list(listed)


#: What clients might send to be another.
_WORDS = st.sampled_from(
    [OTHER, "10.1.1.1", "127.0.0.1", "for=", '"', "\\", ",", ";", "=", "[", "]", ":", " ", "proto", "x"]
)
_CLAIMS = st.lists(_WORDS, max_size=8).map("".join) | st.text(st.characters(codec="latin-1"), max_size=20)


@given(_CLAIMS)
@example(f'for="{OTHER}')
@example(f"for={OTHER};")
def test_nobody_passes_for_another_whatever_he_sends(claim):
    """The proxy adds its word behind the client's: that is the client, or the request is refused."""
    for fields in (
        [(b"x-forwarded-for", f"{claim}, {CLIENT}".encode("latin-1"))],
        [(b"x-forwarded-for", claim.encode("latin-1")), (b"x-forwarded-for", CLIENT.encode())],
        [(b"forwarded", f"{claim}, for={CLIENT}".encode("latin-1"))],
        [(b"forwarded", f'{claim}, for="{CLIENT}:1";host="h"'.encode("latin-1"))],
        [(b"forwarded", claim.encode("latin-1")), (b"x-forwarded-for", CLIENT.encode())],
        [(b"x-forwarded-for", claim.encode("latin-1")), (b"forwarded", f"for={CLIENT}".encode())],
    ):
        try:
            client = believed(*fields).client
        except HeadError:
            continue
        assert client == CLIENT, fields


def test_two_fields_that_agree_are_one_word():
    rfc = (b"forwarded", f"for={CLIENT};proto=https;host=a.example".encode())
    listed = (b"x-forwarded-for", f"{OTHER}, {CLIENT}".encode())
    assert believed(rfc, listed, (b"x-forwarded-proto", b"http, https"), (b"x-forwarded-host", b"a.example")) == Told(
        CLIENT, True, b"a.example"
    )


_SAID = st.sampled_from(["", "https", "http", "ftp"]), st.sampled_from(["", "evil.example", "a.example"])


@given(*_SAID, *_SAID)
def test_nobody_chooses_scheme_or_host_with_the_field_that_his_proxy_does_not_set(his_scheme, his_host, scheme, host):
    """It passes that field on, and he gives his own address there, so that the two fields agree on him."""

    def listed(scheme, host):
        fields = [("for", CLIENT), ("proto", scheme), ("host", host)]
        return [(f"x-forwarded-{name}".encode(), value.encode()) for name, value in fields if value]

    def rfc(scheme, host):
        pairs = [("for", CLIENT), ("proto", scheme), ("host", host)]
        return [(b"forwarded", ";".join(f"{name}={value}" for name, value in pairs if value).encode())]

    for proxys, his in ((listed, rfc), (rfc, listed)):
        told_by_proxy = believed(*proxys(scheme, host))
        found = believed(*proxys(scheme, host), *his(his_scheme, his_host))
        assert found.client == CLIENT
        assert found.secure in (None, told_by_proxy.secure)
        assert found.host in (b"", told_by_proxy.host)


def sent(engine, name: str) -> list[str]:
    return [value for key, value in engine.requests[-1].headers if key.lower() == name]


XFF = f"X-Forwarded-For: {OTHER}, {CLIENT}\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: models.example\r\n"
RFC = f"Forwarded: for={OTHER}, for={CLIENT};proto=https;host=models.example\r\n"


@pytest.mark.parametrize("headers", [XFF, RFC])
async def test_the_engine_is_told_of_the_client_that_the_proxy_speaks_for(rig, headers):
    rig.reconfigure(**MANAGED, forwarded="both")
    engine = await rig.engine()
    assert (await rig.post(headers=headers)).status == 200
    assert sent(engine, "x-forwarded-for") == [CLIENT]
    assert sent(engine, "x-forwarded-proto") == ["https"]
    assert sent(engine, "x-forwarded-host") == ["models.example"]
    assert sent(engine, "forwarded") == [f'for={CLIENT};proto=https;host="models.example"']
    assert sent(engine, "host") == ["proxy.test"]


@pytest.mark.parametrize("headers", [XFF, RFC])
async def test_what_anybody_else_says_stays_hearsay(rig, headers):
    rig.reconfigure(trusted_proxies=("192.0.2.0/24",), forwarded="x-forwarded")
    engine = await rig.engine()
    assert (await rig.post(headers=headers)).status == 200
    assert sent(engine, "x-forwarded-for") == ["127.0.0.1"]
    assert sent(engine, "x-forwarded-proto") == ["http"]


async def test_the_log_has_the_client_and_not_the_proxy(rig, caplog):
    caplog.set_level(logging.INFO, "proxy.access")
    rig.reconfigure(**MANAGED)
    for headers, client in ((XFF, CLIENT), ("", "127.0.0.1"), (f"X-Forwarded-For: {OTHER}\r\n", OTHER)):
        caplog.clear()
        raw = f"GET /health HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()
        assert (await (await rig.send(raw)).response()).status == 200
        await rig.proxy.drain(0)
        await asyncio.sleep(0)
        assert [record.fields["client"] for record in caplog.records] == [client]


async def health(rig, client, forwarded_for: str = "") -> Message:
    field = f"X-Forwarded-For: {forwarded_for}\r\n" if forwarded_for else ""
    await client.send(f"GET /health HTTP/1.1\r\nHost: x\r\n{field}\r\n".encode())
    return await client.response()


async def test_the_list_of_networks_is_asked_for_each_client_and_not_for_the_proxy(rig):
    rig.reconfigure(**MANAGED, allow_clients=("192.0.2.0/24",))
    proxy = await rig.connect()
    assert (await health(rig, proxy, f"{OTHER}, {CLIENT}")).status == 200
    assert (await health(rig, proxy, CLIENT)).status == 200
    refused = await health(rig, proxy, f"{CLIENT}, {OTHER}")  # the client claims to be one who may
    assert refused.status == 403
    assert OTHER in refused.json()["error"]["message"]
    for client in ("unknown", "127.0.0.1", ""):
        assert (await health(rig, await rig.connect(), client)).status == 403


async def test_a_word_that_makes_no_sense_is_400_and_reaches_nobody(rig):
    rig.reconfigure(**MANAGED)
    engine = await rig.engine()
    assert (await rig.post(headers="X-Forwarded-For: me\r\n")).status == 400
    assert (await rig.post(headers=f"X-Forwarded-For: {CLIENT}\r\nForwarded: for={OTHER}\r\n")).status == 400
    assert engine.requests == []


async def test_requests_in_flight_are_limited_by_the_client_and_whose_have_ended_count_no_more(rig):
    go = asyncio.Event()

    async def wait(request, connection):
        await go.wait()
        await connection.send(reply_bytes(b"{}"))

    await rig.engine("a", wait)
    rig.reconfigure(**MANAGED, max_connections_per_client=2)
    busy = [await rig.send(request_bytes(headers=XFF)) for _ in range(2)]
    await rig.until(lambda: len(rig.admission.open) == 2)
    refused = await rig.post(headers=XFF)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "too_many_connections")
    proxy = await rig.connect()
    assert (await health(rig, proxy, OTHER)).status == 200  # on the proxy's connection everybody may come
    go.set()
    for client in busy:
        assert (await client.response()).status == 200
    assert (await health(rig, proxy, CLIENT)).status == 200
    assert rig.proxy._server._crowd._counts == {}


async def test_a_client_that_is_cut_in_flight_counts_no_more(rig):
    async def wait(request, connection):
        await connection.closed()

    await rig.engine("a", wait)
    rig.reconfigure(**MANAGED, max_connections_per_client=1)
    client = await rig.send(request_bytes(headers=XFF))
    await rig.until(lambda: rig.admission.open)
    client.reset()
    await rig.until(lambda: not rig.admission.open)
    async with asyncio.timeout(PATIENCE):
        await rig.proxy._server._closed_within(PATIENCE)
    assert rig.proxy._server._crowd._counts == {}


async def test_a_reload_that_trusts_a_proxy_counts_what_it_had_no_more(rig, monkeypatch):
    monkeypatch.setattr("proxy.clients.connected.client_of", lambda peer: peer.encode())
    rig.reconfigure(max_connections_per_client=1)
    proxy = await rig.connect()
    assert (await health(rig, proxy)).status == 200
    assert rig.proxy._server._crowd._counts == {b"127.0.0.1": 1}
    rig.reconfigure(**MANAGED)
    assert (await health(rig, proxy, CLIENT)).status == 200
    assert rig.proxy._server._crowd._counts == {}


async def test_a_reload_that_trusts_a_proxy_no_more_counts_its_connections_from_their_next_request(rig, monkeypatch):
    monkeypatch.setattr("proxy.clients.connected.client_of", lambda peer: peer.encode())
    before = await rig.connect()  # counted, until its network is trusted
    assert (await health(rig, before)).status == 200
    rig.reconfigure(**MANAGED, max_connections_per_client=2)
    quiet, last = await rig.connect(), await rig.connect()
    for connection in (before, last):
        assert (await health(rig, connection, CLIENT)).status == 200
    rig.reconfigure(trusted_proxies=())
    assert rig.proxy._server._crowd._counts == {}
    for connection in (before, quiet, before):
        assert (await health(rig, connection)).status == 200
    assert rig.proxy._server._crowd._counts == {b"127.0.0.1": 2}
    refused = await health(rig, last)
    assert (refused.status, refused.header("connection")) == (429, "close")
    await last.closed()
    rig.reconfigure(**MANAGED)  # and trusted once more
    assert (await health(rig, quiet, CLIENT)).status == 200
    assert rig.proxy._server._crowd._counts == {b"127.0.0.1": 1}
