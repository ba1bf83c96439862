"""TLS on the port: everything that holds without it holds with it, and an end is only an end when it was said."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl

import pytest
from pki import pair
from proxyrig import PATIENCE, STREAM, Connection, chunk, event_stream_head, reply_bytes, request_bytes
from tlsrig import FIRST

from proxy.credentials import Credentials
from supervisord.core.admission import Ending

SECOND = pair("second", old=True)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a ClientHello begins


async def lost(rig):
    """Returns when no client is connected any more."""
    assert await rig.proxy._server._closed_within(PATIENCE)


def beneath(client) -> socket.socket:
    """The socket of a client, under its TLS."""
    return socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno()))


async def test_a_plain_answer_a_stream_and_the_next_request(secure):
    async def answer(request, connection):
        if b'"stream": true' in request.body:
            await connection.send(event_stream_head() + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
        else:
            await connection.send(reply_bytes(b'{"ok":true}'))

    await secure.engine("a", answer)
    client = await secure.connect(ssl=FIRST.client())
    for body in (None, STREAM, None):
        await client.send(request_bytes(body))
        assert (await client.response()).body == (b"data: 1\n\n" if body else b'{"ok":true}')
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() is None  # none was asked for


async def test_an_engine_is_told_that_the_client_came_by_tls(secure):
    secure.reconfigure(forwarded="x-forwarded")
    engine = await secure.engine()
    client = await secure.connect(ssl=FIRST.client())
    await client.send(request_bytes())
    await client.response()
    assert engine.requests[0].header("x-forwarded-proto") == "https"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions_and_the_protocol_within(secure, version):
    context = FIRST.client(version)
    context.set_alpn_protocols(["h2", "http/1.1"])
    client = await secure.connect(ssl=context)
    await client.send(HEALTH)
    assert (await client.response()).status == 200
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_are_refused(secure):
    context = FIRST.client()
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await secure.connect(ssl=context)


async def test_every_event_goes_out_when_it_comes(secure):
    async def one_by_one(request, connection):
        await connection.send(event_stream_head())
        for number in range(3):
            await connection.send(chunk(b"data: %d\n\n" % number))
            await read.get()
        await connection.send(b"0\r\n\r\n")

    read: asyncio.Queue[None] = asyncio.Queue()
    await secure.engine("a", one_by_one)
    client = await secure.connect(ssl=FIRST.client())
    await client.send(request_bytes(STREAM))
    await client.head()
    for number in range(3):
        assert await client.chunk() == b"data: %d\n\n" % number
        read.put_nowait(None)
    assert await client.chunk() == b""


async def test_megabytes_go_both_ways_and_arrive_as_they_were(secure):
    async def echo(request, connection):
        await connection.send(reply_bytes(request.body))

    await secure.engine("a", echo)
    text = json.dumps({**STREAM, "stream": False, "padding": "".join(chr(32 + n % 90) for n in range(5_000_000))})
    client = await secure.connect(ssl=FIRST.client())
    await client.send(request_bytes(text.encode()))
    assert (await client.response()).body == text.encode()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_records_in_any_pieces(secure, version):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = FIRST.client(version).wrap_bio(incoming, outgoing, server_hostname="localhost")
    client = await secure.connect()

    async def exchange(step):
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                done = None
            for byte in outgoing.read():
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            if done is not None:
                return done
            incoming.write(await asyncio.wait_for(client.reader.read(7), PATIENCE))

    await exchange(lambda: tls.do_handshake() or True)
    await exchange(lambda: tls.write(HEALTH))
    assert (await exchange(lambda: tls.read(1000))).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_what_comes_with_the_end_of_the_handshake_is_read(secure):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = FIRST.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    client = await secure.connect()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    await client.send(outgoing.read())
    while True:
        incoming.write(await asyncio.wait_for(client.reader.read(65536), PATIENCE))
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            break
    tls.write(HEALTH + HEALTH)
    await client.send(outgoing.read())  # Finished and two requests in one
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < 2:
        incoming.write(await asyncio.wait_for(client.reader.read(65536), PATIENCE))
        with contextlib.suppress(ssl.SSLWantReadError):
            while True:
                received += tls.read(65536)


async def test_a_whole_answer_ends_with_a_goodbye(secure, blocking):
    await secure.engine()
    client = await blocking()
    await asyncio.to_thread(client.send, request_bytes(headers="Connection: close\r\n"))
    assert (await asyncio.to_thread(client.read_to_the_end)).endswith(b'{"ok":true}')


async def test_a_broken_answer_ends_without_one(secure, blocking):
    async def die(request, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"some of it"))
        await read.wait()
        connection.reset()
        raise ConnectionResetError

    read = asyncio.Event()
    await secure.engine("a", die)
    client = await blocking()
    raw = request_bytes().replace(b"HTTP/1.1", b"HTTP/1.0")  # so that nothing but the end tells the end
    await asyncio.to_thread(client.send, raw)
    received = b""
    while not received.endswith(b"some of it"):
        received += await asyncio.to_thread(client.socket.recv, 1000)
    read.set()
    with pytest.raises(OSError, match=r"EOF|reset by peer"):
        await asyncio.to_thread(client.read_to_the_end)


async def test_a_refused_upload_gets_its_whole_answer_and_a_goodbye(secure, blocking):
    secure.reconfigure(max_body=1000)
    client = await blocking()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n"

    def upload() -> None:
        with contextlib.suppress(OSError):  # it is no longer listened to in the end
            client.send(head + b"x" * 2_000_000)

    await asyncio.to_thread(upload)
    answer = await asyncio.to_thread(client.read_to_the_end)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


async def test_a_kept_connection_is_closed_with_a_goodbye_at_the_end(secure, blocking):
    client = await blocking()
    await asyncio.to_thread(client.send, HEALTH)
    assert (await asyncio.to_thread(client.socket.recv, 65536)).startswith(b"HTTP/1.1 200")
    await secure.proxy.stop()
    assert await asyncio.to_thread(client.read_to_the_end) == b""


@pytest.mark.parametrize("way", ["goodbye", "end", "reset"])
async def test_a_client_that_leaves_is_seen_however_it_leaves(secure, way):
    async def stream(request, connection):
        await connection.send(event_stream_head() + chunk(b"data: 1\n\n"))
        await connection.closed()

    engine = await secure.engine("a", stream)
    client = await secure.connect(ssl=FIRST.client())
    await client.send(request_bytes(STREAM))
    await client.head()
    transport = client.writer.transport
    if way == "goodbye":
        transport.close()
    elif way == "reset":
        transport.abort()
    else:
        with beneath(client) as sock:
            sock.shutdown(socket.SHUT_WR)
    await asyncio.wait_for(engine.lost.wait(), PATIENCE)
    await secure.until(lambda: secure.admission.endings == [("a", Ending.CLIENT_GONE)])


async def test_a_client_that_asks_and_leaves_in_one_go_has_its_line_in_the_log(secure, caplog):
    caplog.set_level(logging.INFO)
    await secure.engine()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = FIRST.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    client = await secure.connect()
    for _ in range(3):
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            break
        await client.send(outgoing.read())
        incoming.write(await client.reader.read(65536))
    tls.write(request_bytes())
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.unwrap()
    await client.send(outgoing.read())
    await client.closed()
    await lost(secure)
    assert [line.fields["status"] for line in caplog.records if line.name == "proxy.access"] == [499]


async def test_stalled_clients_and_a_flooding_engine_are_bounded_memory(secure):
    piece = chunk(b"data: " + b"x" * 16_000 + b"\n\n")

    async def flood(request, connection):
        await connection.send(event_stream_head())
        while True:
            await connection.send(piece)

    await secure.engine("a", flood)
    slow = []
    for _ in range(20):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", secure.port))
        client = Connection(*await asyncio.open_connection(sock=sock, ssl=FIRST.client(), server_hostname="localhost"))
        secure.clients.append(client)
        await client.send(request_bytes(STREAM))
        client.writer.transport.pause_reading()
        slow.append(client)
    await secure.until(lambda: len(secure.admission.open) == 20)
    connections, held, quiet = secure.proxy._server.connections, 0, 0
    async with asyncio.timeout(3 * PATIENCE):
        while quiet < 50:  # until nothing moves any more
            now = sum(connection.transport.get_write_buffer_size() for connection in connections)
            held, quiet = now, quiet + 1 if now == held else 0
            await asyncio.sleep(0.01)
    assert all(connection.write_paused for connection in connections)
    assert held < 20 * (64 * 1024 + 300_000)  # the limit, and one read above it, as without TLS
    assert all(c.transport._outgoing.pending == c.transport._incoming.pending == 0 for c in connections)
    for client in slow:
        client.reset()
    await secure.until(lambda: secure.admission.endings == [("a", Ending.CLIENT_GONE)] * 20)


@pytest.mark.parametrize("sent", [b"", HELLO])
async def test_a_handshake_that_does_not_come_to_its_end_is_ended(secure, sent):
    secure.reconfigure(client_header_timeout=0.05)
    client = await secure.send(sent)
    assert await client.closed() == b""
    assert not secure.proxy._server.connections


async def test_plain_http_is_told_so_in_plain_http_and_in_one_line(secure, caplog):
    caplog.set_level(logging.INFO)
    client = await secure.send(HEALTH)
    answer = await client.response()
    assert (answer.status, answer.json()["error"]["code"]) == (400, "https_required")
    assert await client.closed() == b""
    assert [record.name for record in caplog.records] == ["proxy.access"]


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x00\x05hello", b"\x00" * 100, bytes(range(22, 255))])
async def test_what_is_no_handshake_ends_the_connection_in_one_line(secure, caplog, sent):
    caplog.set_level(logging.INFO)
    client = await secure.send(sent)
    await client.closed()
    await lost(secure)
    (record,) = caplog.records
    assert record.getMessage().startswith("the handshake of 127.0.0.1 fails: ")


async def test_a_client_that_does_not_trust_the_certificate_is_at_most_one_line(secure, caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(ssl.SSLCertVerificationError):
        await secure.connect(ssl=SECOND.client())
    await lost(secure)
    assert len(caplog.records) <= 1  # the alert may be overtaken by the client's end


async def test_damage_on_the_way_ends_the_connection_and_the_request(secure):
    async def wait(request, connection):
        await connection.closed()

    engine = await secure.engine("a", wait)
    client = await secure.connect(ssl=FIRST.client())
    await client.send(request_bytes(STREAM))
    await asyncio.wait_for(engine.arrived.wait(), PATIENCE)
    with beneath(client) as sock:
        sock.send(b"\x17\x03\x03\x00\x20" + bytes(32))
    await asyncio.wait_for(engine.lost.wait(), PATIENCE)
    await secure.until(lambda: secure.admission.endings == [("a", Ending.CLIENT_GONE)])
    secure.clients.remove(client)
    client.reset()


async def subject(rig, trusted):
    client = await rig.connect(ssl=trusted.client())
    await client.send(HEALTH)
    assert (await client.response()).status == 200
    return client


async def test_a_new_certificate_is_for_new_connections_and_the_old_ones_go_on(secure):
    old = await subject(secure, FIRST)
    secure.proxy.guard(Credentials(tls=SECOND.server()))
    await subject(secure, SECOND)
    with pytest.raises(ssl.SSLCertVerificationError):
        await subject(secure, FIRST)
    await old.send(HEALTH)
    assert (await old.response()).status == 200


async def test_tls_is_switched_on_and_off_for_new_connections(rig):
    plain = await rig.send(HEALTH)
    assert (await plain.response()).status == 200
    rig.proxy.guard(Credentials(tls=FIRST.server()))
    await subject(rig, FIRST)
    await plain.send(HEALTH)
    assert (await plain.response()).status == 200
    rig.proxy.guard(Credentials())
    assert (await rig.get("/health")).status == 200


async def test_a_stranger_gets_no_handshake(secure):
    secure.reconfigure(allow_clients=("192.0.2.0/24",))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await secure.connect(ssl=FIRST.client())
    assert not secure.proxy._server.connections
    assert await (await secure.connect()).closed() == b""


async def test_one_connection_too_many_is_told_so(secure):
    secure.reconfigure(max_connections=1)
    first = await subject(secure, FIRST)
    second = await secure.connect(ssl=FIRST.client())
    assert (await second.response()).json()["error"]["code"] == "too_many_connections"
    assert await second.closed() == b""
    await first.send(HEALTH)
    assert (await first.response()).status == 200
