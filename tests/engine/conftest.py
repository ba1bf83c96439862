"""The real engine on the CPU for tests: where it is, how it is started, and when it is ready.

Starting one takes about a minute of two cores, so a module shares one, and only the product's tests have two up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from supervisord.core.readings import EngineState, Probe
from supervisord.engine.vllm import VllmEngine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for vllmproduct
#: Seconds until the engine must be ready. Measured: 35 to 60 on two idle cores; the rest is for a busy machine.
READY_TIMEOUT = 300.0
#: Seconds for one look at it.
PROBE_TIMEOUT = 5.0


@pytest.fixture(scope="session")
def engine_dir() -> Path:
    """Where ``tests/engine/install`` put the engine: $VLLM_CPU_DIR, or its default."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("VLLM_CPU_DIR") or cache / "vllm-supervisord/vllm-cpu")
    if not (path / ".ready").exists():
        pytest.fail(f"no CPU engine in {path}: run tests/engine/install", pytrace=False)
    return path


@pytest.fixture(scope="session")
def model_config(engine_dir: Path) -> str:
    """The configuration of the tiny model with two bundled replicas, as TOML text for a config.d file."""
    return (HERE / "model.toml.in").read_text().replace("@ENGINE@", str(engine_dir))


@dataclass
class RealEngine:
    """A running ``vllm serve``; ``states`` is what every probe saw since its start, repetitions left out."""

    endpoint: str
    process: subprocess.Popen[bytes]
    log: Path
    states: list[EngineState] = field(default_factory=list)

    def processes(self) -> frozenset[int]:
        """Its processes: those of the session that was made for it."""
        return frozenset(_session_members(self.process.pid))

    def core(self) -> int:
        """The engine core, the process that computes."""
        for pid in self.processes():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::EngineCor"):
                    return pid
        raise AssertionError("the engine has no core process")

    def tail(self) -> str:
        return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-30:])

    async def until(self, client: VllmEngine, wanted: EngineState, timeout: float = READY_TIMEOUT) -> Probe:
        """Look until the probe finds ``wanted`` (no event tells); fails when the process ends first."""
        deadline = time.monotonic() + timeout
        while True:
            probe = await client.probe(PROBE_TIMEOUT)
            if not self.states or self.states[-1] is not probe.state:
                self.states.append(probe.state)
            if probe.state is wanted:
                return probe
            ended = self.process.poll()
            assert ended is None, f"the engine exited with {ended} while it should become {wanted}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"still {probe} after {timeout} s:\n{self.tail()}"
            await asyncio.sleep(0.2)

    def http(self) -> aiohttp.ClientSession:
        """A client of its inference routes, to be closed; requests go to ``/v1/...``."""
        if self.endpoint.startswith("unix:"):
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(self.endpoint.removeprefix("unix:"))
            return aiohttp.ClientSession("http://engine", connector=connector)
        return aiohttp.ClientSession(self.endpoint)

    def stop(self) -> None:
        """End all of it at once, as ``KillMode=control-group`` does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 30
        while self.processes():  # children of a killed parent are reaped by init, which tells nobody
            assert time.monotonic() < deadline, f"left behind: {sorted(self.processes())}"
            time.sleep(0.05)


StartEngine = Callable[..., RealEngine]


@pytest.fixture(scope="module")
def start_engine(model_config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Start the engine on a Unix socket or on loopback; starting another, or the module's end, ends it."""
    serve = tomllib.loads(model_config)["models"]["tiny"]["serve"]
    running: list[RealEngine] = []

    def start(kind: str, *arguments: str, **env: str) -> RealEngine:
        while running:
            running.pop().stop()
        directory = tmp_path_factory.mktemp("engine")
        if kind == "uds":
            endpoint, listen = f"unix:{directory}/engine.sock", ["--uds", f"{directory}/engine.sock"]
        else:
            port = _free_port()
            endpoint, listen = f"http://127.0.0.1:{port}", ["--host", "127.0.0.1", "--port", str(port)]
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_command(serve), "--served-model-name", "tiny", "tiny-alias", *listen, *arguments],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **serve["env"], **env},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append(RealEngine(endpoint, process, log))
        return running[-1]

    yield start
    while running:
        running.pop().stop()


def _command(serve: dict[str, object]) -> list[str]:
    """The command line of [serve], for the kinds of option that model.toml.in has."""
    command = serve["command"]
    assert isinstance(command, list)
    words = [*command, str(serve["model"])]
    for name, value in serve.items():
        match value:
            case _ if name in ("command", "model", "env"):
                pass
            case bool():
                words.append(f"--{name}" if value else f"--no-{name}")
            case _:
                words += [f"--{name}", str(value)]
    return words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _session_members(session: int) -> Sequence[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # pid (name) state parent group session ...; the name may hold anything, so read from its end
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after[3]) == session and after[0] != "Z":
                    found.append(int(entry.name))
    return found
