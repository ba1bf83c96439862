"""Another replica before the first byte, nobody after it; a stale kept connection is no failure of the replica."""

import asyncio
import contextlib
import logging
import socket

import pytest
from proxyrig import CHAT, STREAM, Connection, Engine, answer_ok, chunk, event_stream_head, reply_bytes

from proxy.engines.connectors import CONNECTING
from supervisord.control import Failover
from supervisord.core.admission import Ending, RefusalCode, Refuse


def dead_endpoint() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def reset(request, connection):
    connection.reset()
    raise ConnectionResetError


async def close(request, connection):
    await connection.close()
    raise ConnectionResetError


async def test_a_dead_replica_costs_the_client_nothing(rig, caplog):
    rig.admission.endpoints["a"] = dead_endpoint()
    engine = await rig.engine("b")
    with caplog.at_level(logging.WARNING, "proxy.relay"):
        answer = await rig.post()
    assert answer.status == 200
    assert answer.header("x-vllmctl-replica") == "b"
    assert len(engine.requests) == 1
    assert rig.admission.endings == [("a", Ending.CONNECT_FAILED), ("b", Ending.COMPLETED)]
    assert [(f.model, f.source, f.target) for f in rig.failovers] == [("m", "a", "b")]
    assert "cannot reach" in rig.failovers[0].reason
    assert len([r for r in caplog.records if r.message.startswith("failover: a -> b")]) == 1


async def test_a_missing_socket_file_is_a_dead_replica(rig, tmp_path):
    rig.admission.endpoints["a"] = f"unix:{tmp_path}/none.sock"
    await rig.engine("b")
    assert (await rig.post()).status == 200
    assert rig.admission.endings[0] == ("a", Ending.CONNECT_FAILED)


@pytest.mark.parametrize("dies", [reset, close])
async def test_a_new_connection_that_dies_without_a_byte_fails_over_and_is_not_tried_again(rig, dies):
    first = await rig.engine("a", dies)
    second = await rig.engine("b")
    assert (await rig.post()).status == 200
    assert len(first.requests) == 1
    assert len(second.requests) == 1
    assert rig.admission.endings == [("a", Ending.CONNECT_FAILED), ("b", Ending.COMPLETED)]


async def test_when_every_replica_failed_it_is_502_and_each_was_tried_once(rig):
    engines = [await rig.engine(name, reset) for name in "abc"]
    answer = await rig.post()
    assert answer.status == 502
    assert answer.json()["error"]["code"] == "upstream_failed"
    assert answer.header("retry-after") == "8"  # the supervisor's 7.2 s
    assert all(name + ":" in answer.json()["error"]["message"] for name in "abc")
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]
    assert [(f.source, f.target) for f in rig.failovers] == [("a", "b"), ("b", "c"), ("c", "")]


async def test_after_a_failure_a_waking_replica_is_waited_for(rig):
    rig.admission.endpoints["a"] = dead_endpoint()
    await rig.engine("b")
    rig.admission.asleep.add("b")
    answer = asyncio.create_task(rig.post())
    await rig.until(lambda: rig.admission.waiting)
    assert [(f.source, f.target) for f in rig.failovers] == [("a", "")]
    rig.admission.wake("b")
    assert (await answer).status == 200
    assert len(rig.failovers) == 1


async def test_another_refusal_after_a_failure_is_passed_on(rig):
    async def refuse_from_now_on(request, connection):
        rig.admission.refusal = Refuse(RefusalCode.ROUTER_SHUTTING_DOWN, "bye", 3)
        await reset(request, connection)

    await rig.engine("a", refuse_from_now_on)
    answer = await rig.post()
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "router_shutting_down"
    assert rig.failovers == [Failover("m", "a", "", rig.failovers[0].reason)]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "500 Internal Server Error", "503 Service Unavailable"])
async def test_an_engine_s_own_refusal_passes_untouched_and_is_no_failure(rig, status):
    async def refuse(request, connection):
        await connection.send(reply_bytes(b'{"busy": 1}', status, "Retry-After: 17\r\nX-Own: 1\r\n"))

    engine = await rig.engine("a", refuse)
    await rig.engine("b", refuse)
    answer = await rig.post()
    assert answer.first_line == f"HTTP/1.1 {status}"
    assert answer.body == b'{"busy": 1}'
    assert answer.header("retry-after") == "17"
    assert answer.header("x-own") == "1"
    assert rig.admission.endings == [("a", Ending.COMPLETED)]
    assert len(engine.requests) == 1
    assert rig.failovers == []


async def test_a_kept_connection_that_the_engine_closed_costs_nothing(rig):
    engine = await rig.engine("a")
    for _ in range(8):
        assert (await rig.post()).status == 200
        for connection in engine.connections:
            connection.reset()  # as an engine does after its own idle time
    assert rig.admission.endings == [("a", Ending.COMPLETED)] * 8


async def test_a_request_that_dies_on_a_kept_connection_is_sent_once_more_on_a_new_one(rig):
    deaths = []

    async def serve_one_per_connection(request, connection):
        if connection in deaths:
            await reset(request, connection)
        deaths.append(connection)
        await answer_ok(request, connection)

    engine = await rig.engine("a", serve_one_per_connection)
    await rig.engine("b")
    client = await rig.connect()
    for _ in range(3):
        await client.send(_post(b"/v1/embeddings"))
        assert (await client.response()).status == 200
        rig.admission.endpoints.pop("b", None)
    # a, then on the same connection (dies), then on a new one; the third as the second
    assert rig.admission.endings == [("a", Ending.COMPLETED)] * 3
    assert len(engine.requests) >= 4
    assert rig.failovers == []


async def test_a_kept_connection_that_dies_and_a_new_one_that_dies_too_is_a_failed_replica(rig):
    async def once(request, connection):
        engine.behaviour = reset
        await answer_ok(request, connection)

    engine = await rig.engine("a", once)
    assert (await rig.post()).status == 200
    assert (await rig.post()).status == 502
    assert len(engine.requests) == 3
    assert rig.admission.endings == [("a", Ending.COMPLETED), ("a", Ending.CONNECT_FAILED)]


async def test_an_engine_that_restarted_is_reached_over_a_new_connection(rig, tmp_path):
    path = str(tmp_path / "engine.sock")
    engine = await rig.engine("a", path=path)
    assert (await rig.post()).status == 200
    await engine.stop()
    (tmp_path / "engine.sock").unlink(missing_ok=True)
    again = Engine()
    await again.start(path)
    rig.engines["again"] = again
    assert (await rig.post()).status == 200
    assert len(again.requests) == 1


async def test_silence_beyond_the_first_byte_timeout_is_504_and_nobody_else_gets_the_request(rig):
    async def silent(request, connection):
        await connection.closed()

    rig.reconfigure(first_byte_timeout=0.05)
    engine = await rig.engine("a", silent)
    other = await rig.engine("b")
    answer = await rig.post()
    assert answer.status == 504
    assert answer.json()["error"]["code"] == "upstream_timeout"
    assert other.requests == []
    assert rig.admission.endings == [("a", Ending.CONNECT_FAILED)]
    assert "0.05 s" in rig.admission.finished[0][2]
    await asyncio.wait_for(engine.lost.wait(), 10)


@pytest.mark.usefixtures("heads_at_once")
async def test_a_stream_is_under_no_timeout_after_its_first_byte(rig):
    release = asyncio.Event()

    async def slow(request, connection):
        await connection.send(event_stream_head())
        await release.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    rig.reconfigure(first_byte_timeout=0.05)
    await rig.engine("a", slow)
    client = await rig.send(_post(body=STREAM))
    assert (await client.head()).status == 200
    await asyncio.to_thread(lambda: None)
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_later(0.1, passed.set_result, None)  # twice the timeout
    await passed
    release.set()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""


@pytest.mark.parametrize("garbage", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", b"HTTP/1.1 2"])
async def test_an_answer_that_is_no_http_is_502_and_not_sent_elsewhere(rig, garbage):
    async def babble(request, connection):
        await connection.send(garbage)
        await close(request, connection)

    await rig.engine("a", babble)
    other = await rig.engine("b")
    answer = await rig.post()
    assert answer.status == 502
    assert answer.json()["error"]["code"] == "upstream_failed"
    assert other.requests == []
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN)]


@pytest.fixture
def full_backlog(tmp_path):
    """A Unix socket that listens, with a backlog that has no room."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "full.sock"))
    listener.listen(0)
    listener.setblocking(False)
    fillers = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(10):
            fillers.append(socket.socket(socket.AF_UNIX))
            fillers[-1].setblocking(False)
            fillers[-1].connect(str(tmp_path / "full.sock"))
    yield listener
    for filler in (listener, *fillers):
        filler.close()


async def test_a_full_backlog_of_a_unix_socket_is_waited_for(rig, full_backlog):
    rig.admission.endpoints["a"] = f"unix:{full_backlog.getsockname()}"
    answer = asyncio.create_task(rig.post())
    await rig.until(lambda: rig.admission.open)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        filler, _ = await loop.sock_accept(full_backlog)  # the engine gets to its backlog at last
        accepted, _ = await loop.sock_accept(full_backlog)
    filler.close()
    connection = Connection(*await asyncio.open_connection(sock=accepted))
    await connection.head()
    await connection.send(reply_bytes(b"{}"))
    assert (await answer).status == 200
    await connection.close()
    assert rig.admission.endings == [("a", Ending.COMPLETED)]


async def test_a_backlog_that_stays_full_is_a_failed_connection(rig, full_backlog):
    rig.reconfigure(connect_timeout=0.05)
    rig.admission.endpoints["a"] = f"unix:{full_backlog.getsockname()}"
    await rig.engine("b")
    assert (await rig.post()).header("x-vllmctl-replica") == "b"
    assert "its backlog is full" in rig.failovers[0].reason


async def test_a_burst_opens_few_connections_at_a_time(rig, monkeypatch):
    # A thousand at once made a healthy replica time out, because one round of our own loop took seconds.
    loop = asyncio.get_running_loop()
    connect, opening, most = loop.sock_connect, 0, 0

    async def counted(sock, address):
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        await connect(sock, address)
        opening -= 1

    await rig.engine("a")
    clients = [await rig.connect() for _ in range(200)]
    monkeypatch.setattr(loop, "sock_connect", counted)
    for client in clients:
        await client.send(_post())
    assert [(await client.response()).status for client in clients] == [200] * 200
    assert 1 <= most <= CONNECTING


async def test_who_waits_for_a_turn_to_connect_fails_with_those_who_tried(rig, monkeypatch):
    # Behind a replica that hangs, the last of a burst would else wait for one connect timeout after another.
    tries = 0
    failed = asyncio.Event()

    async def fail(sock, path):
        nonlocal tries
        tries += 1
        await failed.wait()
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr("proxy.engines.connectors._connect", fail)
    rig.admission.endpoints["a"] = "unix:/nowhere"
    clients = [await rig.connect() for _ in range(4 * CONNECTING)]
    for client in clients:
        await client.send(_post())
    await rig.until(lambda: len(rig.admission.open) == len(clients))
    await rig.engine("b")
    failed.set()
    assert {(await client.response()).header("x-vllmctl-replica") for client in clients} == {"b"}
    assert tries == CONNECTING


async def test_running_out_of_file_descriptors_blames_no_replica(rig, monkeypatch):
    import errno

    loop = asyncio.get_running_loop()

    async def no_more(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    await rig.engine("a", path=None)
    client = await rig.connect()
    monkeypatch.setattr(loop, "create_connection", no_more)
    monkeypatch.setattr(loop, "sock_connect", no_more)
    await client.send(_post())
    answer = await client.response()
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "out_of_resources"
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]


def _post(path: bytes = b"/v1/chat/completions", body: object = None) -> bytes:
    from proxyrig import request_bytes

    return request_bytes(CHAT if body is None else body, path.decode())


async def test_a_policy_that_fails_at_the_end_costs_no_lease(rig, monkeypatch):
    def fail(*args):
        raise RuntimeError("a defect")

    await rig.engine("a")
    monkeypatch.setattr("proxy.policies.policy.Unobserving.finished", fail)
    await rig.post()
    assert rig.admission.endings == [("a", Ending.COMPLETED)]
    assert not rig.admission.open
