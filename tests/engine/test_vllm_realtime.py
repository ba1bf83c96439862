"""vLLM's own realtime handler says what the simulator says, and the same again through the port."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from conftest import HERE, READY_TIMEOUT
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from proxy.server import PublicProxy
from supervisord.core.spec import ProxySpec
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

sys.path.insert(0, str(HERE.parent / "proxy"))
from proxyrig import MODEL, FakeAdmission

pytestmark = pytest.mark.vllm

PATIENCE = 20.0
UPDATE = '{"type":"session.update","model":"m"}'
AUDIO = base64.b64encode(b"\0\1" * 1000).decode()
MISTAKES = (
    "nonsense",
    "[1]",
    '{"type":"x"}',
    '{"type":"session.update"}',
    '{"type":"session.update","session":{"model":"m"}}',
    '{"type":"session.update","model":"q"}',
    '{"type":"input_audio_buffer.append","audio":"!"}',
    '{"type":"input_audio_buffer.append"}',
)


@pytest.fixture(scope="module")
def handler(engine_dir: Path) -> Iterator[str]:
    """vLLM's handler: ``http://127.0.0.1:PORT``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = engine_dir / "venv/bin/python"
    with subprocess.Popen([python, HERE / "realtime_server.py", str(port)]) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture
async def engine(handler: str) -> str:
    """The same, once it answers."""
    async with asyncio.timeout(READY_TIMEOUT):
        while True:
            try:
                async with connect(f"{handler.replace('http', 'ws')}/v1/realtime", proxy=None):
                    return handler
            except OSError:
                await asyncio.sleep(0.5)


@asynccontextmanager
async def port(endpoint: str) -> AsyncIterator[str]:
    """A port in front of it."""
    admission = FakeAdmission()
    admission.endpoints["a"], admission.served_names = endpoint, ("m",)
    proxy = PublicProxy(admission, ProxySpec(), [MODEL], lambda failover: None)
    listener = socket.create_server(("127.0.0.1", 0))
    await proxy.start([listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await proxy.stop()
    assert not admission.open


async def told(session: ClientConnection) -> dict:
    return json.loads(await asyncio.wait_for(session.recv(), PATIENCE))


async def says_too_much(session: ClientConnection) -> None:
    await session.send("x" * (17 * 1024 * 1024))  # may be interrupted, once the engine has heard how long it is
    await told(session)


async def conversation(endpoint: str, query: str = "") -> list[tuple[str, str | None]]:
    """The kinds of what is said to a client that makes every mistake, and then transcribes."""
    said = []
    async with connect(f"{endpoint.replace('http', 'ws')}/v1/realtime{query}", proxy=None) as session:
        created = await told(session)
        said.append((created["type"], str(sorted(created))))
        await session.send(UPDATE)
        for mistake in MISTAKES:
            await session.send(mistake)
            error = await told(session)
            said.append((error["type"], error["code"]))
        await session.send('{"type":"input_audio_buffer.commit"}')
        for _ in range(2):
            await session.send(json.dumps({"type": "input_audio_buffer.append", "audio": AUDIO}))
            delta = await told(session)
            said.append((delta["type"], str(sorted(delta))))
        await session.send('{"type":"input_audio_buffer.commit","final":true}')
        done = await told(session)
        said.append((done["type"], str(sorted(done))))
    return said


async def test_the_port_and_the_simulator_say_what_vllm_says(engine: str):
    direct = await conversation(engine)
    assert [kind for kind, _ in direct[-3:]] == ["transcription.delta", "transcription.delta", "transcription.done"]
    async with port(engine) as relayed:
        assert await conversation(relayed) == direct
        assert await conversation(relayed, "?model=alias") == direct
    words = ["m", "--host", "127.0.0.1", "--port", "0", "--sim-clock-factor", "0.001"]
    async with Simulator(parse(words, {})) as simulator:
        assert await conversation(simulator.endpoint) == direct


async def test_its_closes_pass_as_they_are(engine: str):
    async with port(engine) as relayed:
        session = await connect(f"{relayed.replace('http', 'ws')}/v1/realtime", proxy=None)
        await told(session)
        await session.send(UPDATE)
        with pytest.raises(ConnectionClosedError) as closed:
            await says_too_much(session)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def test_a_model_without_the_route_is_403(engine: str):
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"{engine.replace('http', 'ws')}/v1/nothing", proxy=None)
    assert refused.value.response.status_code == 403
