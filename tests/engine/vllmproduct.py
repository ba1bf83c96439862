"""The whole product with real engines under a real user manager, and ways to look at it from outside.

Nothing here knows the product's code: units by systemctl, control by vllmctl and busctl, requests by HTTP, and what an
engine did by its own log and its own routes on its Unix socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv/bin"
SERVICE = "vllm-supervisord.service"
SOCKET = "vllm-supervisord.socket"
#: Seconds until something that starts an engine must be done. Measured: 35 to 90 for one on two cores; two share them.
PATIENCE = 360.0
#: Tokens in a block of the KV cache, as model.toml.in has them.
BLOCK = 32
#: A line of model.toml.in after which others fit.
EAGER = "enforce-eager = true"
#: The engine's routes that a sleep and a wake go through.
CONTROL = re.compile(r'"POST (/(?:sleep|wake_up|collective_rpc|reset_prefix_cache)\S*|/v1/(?:chat/)?completions) HTTP')
#: What its log says of a completion as soon as it has it, where it logs requests.
RECEIVED = re.compile(r"Received request (?:chat)?cmpl-")


def run(*command: str, check: bool = True, timeout: float = PATIENCE) -> str:
    """Run a program; returns its stdout."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    if check and done.returncode != 0:
        raise AssertionError(f"{shlex.join(command)} exited with {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout.strip()


def systemctl(*arguments: str, check: bool = True) -> str:
    return run("systemctl", "--user", "--no-pager", *arguments, check=check)


def busctl(kind: str, *arguments: str) -> str:
    return run("busctl", "--user", f"--timeout={PATIENCE:.0f}", kind, "io.github.vllmctl1", *arguments)


async def until(what: str, condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Look until ``condition`` is true, where nothing outside tells of it; returns what it returned."""
    deadline = time.monotonic() + timeout
    while True:
        found = await asyncio.to_thread(condition)
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        await asyncio.sleep(0.2)


@dataclass
class Replica:
    """One bundled replica as systemd, the bus and its own engine tell of it."""

    name: str
    log: Path

    @property
    def unit(self) -> str:
        return f"vllm@{self.name}.service"

    def shown(self, field: str) -> str:
        """A property of its unit."""
        return systemctl("show", self.unit, "--value", "-p", field)

    @property
    def pid(self) -> int:
        """The engine's main process, 0 when there is none."""
        return int(self.shown("MainPID"))

    def told(self, name: str) -> str:
        """A property of its object on the bus, as busctl prints it: a type and a value."""
        label = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in self.name)
        path = f"/io/github/vllmctl1/replicas/{label}"
        return busctl("get-property", path, "io.github.vllmctl1.Replica", name).partition(" ")[2].strip('"')

    def is_ready(self) -> bool:
        return self.told("State") == "ready"

    def engine(self) -> aiohttp.ClientSession:
        """A client of the engine's own routes, also those that are never public."""
        connector = aiohttp.UnixConnector(f"{os.environ['XDG_RUNTIME_DIR']}/vllm/{self.name}/engine.sock")
        return aiohttp.ClientSession("http://engine", connector=connector)

    async def is_sleeping(self) -> bool:
        async with self.engine() as http, http.get("/is_sleeping") as response:
            assert response.status == 200, await response.text()
            return bool((await response.json())["is_sleeping"])

    async def metrics(self) -> dict[str, float]:
        """The engine's metrics by name, without ``vllm:``; series of one name are added up."""
        async with self.engine() as http, http.get("/metrics") as response:
            text = await response.text()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("vllm:"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0].removeprefix("vllm:")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def mark(self) -> int:
        """Where its log ends now."""
        return self.log.stat().st_size

    def calls(self, mark: int) -> list[str]:
        """What was asked of the engine since ``mark``, in order: the steps of sleeps and wakes, and completions."""
        return CONTROL.findall(self._said(mark))

    def received(self, mark: int) -> int:
        """How many completions have come to it since ``mark``, answered or not; needs ``with_logged_requests``."""
        return len(RECEIVED.findall(self._said(mark)))

    def _said(self, mark: int) -> str:
        with self.log.open("rb") as log:
            log.seek(mark)
            return log.read().decode(errors="replace")


@dataclass
class Product:
    """Two replicas of the tiny model behind one port, everything under one user manager."""

    directory: Path
    port: int
    a: Replica = field(init=False)
    b: Replica = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b = (Replica(name, self.directory / f"{name}.log") for name in ("tiny-a", "tiny-b"))

    @property
    def replicas(self) -> Sequence[Replica]:
        return (self.a, self.b)

    @property
    def log(self) -> Path:
        return self.directory / "supervisor.log"

    # --- setting up and taking away ---

    @property
    def _units(self) -> Path:
        return Path(os.environ["XDG_RUNTIME_DIR"], "systemd/user")

    def install(self, model_config: str) -> None:
        """The units as they are shipped, with the configuration, the state and the logs in our directory; start it."""
        config = self.directory / "config/vllm-supervisord"
        config.mkdir(parents=True)
        (self.directory / "state").mkdir()
        (config / "config.toml").write_text(model_config)
        run(str(ROOT / "packaging/render"), str(self._units), str(BIN), f"127.0.0.1:{self.port}")
        common = f"[Service]\nEnvironment=XDG_CONFIG_HOME={self.directory}/config"
        logs = "StandardOutput=append:{0}\nStandardError=append:{0}\n"
        self._drop_in(SERVICE, f"{common} STATE_DIRECTORY={self.directory}/state\n" + logs.format(self.log))
        log = f"{self.directory}/%i.log"
        self._drop_in("vllm@.service", f"{common} VLLM_REPLICA_LOG={log}\n" + logs.format(log))
        systemctl("daemon-reload")
        systemctl("start", SOCKET, SERVICE)

    def _drop_in(self, unit: str, text: str) -> None:
        folder = self._units / f"{unit}.d"
        folder.mkdir()
        (folder / "test.conf").write_text(text)

    def configure(self, name: str, text: str) -> None:
        """Another file of config.d; ``vllmctl reload`` makes it count."""
        folder = self.directory / "config/vllm-supervisord/config.d"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def remove(self) -> None:
        """End and forget everything; systemd waits for every process."""
        systemctl("stop", SOCKET, SERVICE, "vllm@*.service", "vllm.slice", check=False)
        for file in (SOCKET, SERVICE, "vllm@.service", "vllm.slice"):
            (self._units / file).unlink(missing_ok=True)
            shutil.rmtree(self._units / f"{file}.d", ignore_errors=True)
        systemctl("daemon-reload")

    # --- looking and asking ---

    def vllmctl(self, *arguments: str) -> str:
        return run(str(BIN / "vllmctl"), *arguments)

    def status(self) -> dict[str, Any]:
        return json.loads(self.vllmctl("status", "--json"))

    def model(self, method: str, *arguments: str) -> None:
        """Call a method of the model's object with busctl; returns when the work is done."""
        busctl("call", "/io/github/vllmctl1/models/tiny", "io.github.vllmctl1.Model", method, *arguments)

    @property
    def pid(self) -> int:
        return int(systemctl("show", SERVICE, "--value", "-p", "MainPID"))

    def http(self) -> aiohttp.ClientSession:
        """A client of the one port."""
        return aiohttp.ClientSession(
            f"http://127.0.0.1:{self.port}",
            timeout=aiohttp.ClientTimeout(total=PATIENCE),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def listed(self) -> dict[str, dict[str, Any]]:
        """/v1/models by name."""
        async with self.http() as http, http.get("/v1/models") as response:
            assert response.status == 200, await response.text()
            return {entry["id"]: entry for entry in (await response.json())["data"]}

    async def ask(self, *contents: str, tokens: int = 8, model: str = "tiny") -> tuple[str, str]:
        """One chat completion of messages by turns; returns the replica that answered and the text."""
        async with self.http() as http:
            return await chat(http, *contents, tokens=tokens, model=model)


async def chat(http: aiohttp.ClientSession, *contents: str, tokens: int = 8, model: str = "tiny") -> tuple[str, str]:
    """See ``Product.ask``; fails on anything but an answer of exactly that many tokens."""
    async with http.post("/v1/chat/completions", json=chat_body(*contents, tokens=tokens, model=model)) as response:
        text = await response.text()
        assert response.status == 200, text
        answer = json.loads(text)
        assert answer["usage"]["completion_tokens"] == tokens, text
        assert answer["choices"][0]["finish_reason"] == "length", text
        return response.headers["x-vllmctl-replica"], answer["choices"][0]["message"]["content"]


def chat_body(*contents: str, tokens: int, model: str = "tiny", **more: object) -> dict[str, object]:
    """User and assistant by turns; without chance, and as long as ``tokens`` says."""
    roles = ("user", "assistant")
    return {
        "model": model,
        "messages": [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def in_own_manager() -> None:
    """Fails where the user manager is not one of the tests' own."""
    if os.environ.get("PRIVATE_MANAGER") != "1" or not Path(os.environ["XDG_RUNTIME_DIR"], "systemd/private").exists():
        pytest.fail("these tests need a user manager of their own; run: make test-engine", pytrace=False)


def with_one_replica(model_config: str, kv_tokens: int) -> str:
    """model.toml.in with tiny-a alone, so many tokens of KV cache, and cached tokens told in usage."""
    changes = {
        "[models.tiny.replicas.tiny-b]\n": "",
        "num-gpu-blocks-override = 512": f"num-gpu-blocks-override = {kv_tokens // BLOCK}",
        EAGER: f"{EAGER}\nenable-prompt-tokens-details = true",
    }
    return _changed(model_config, changes)


def with_logged_requests(model_config: str) -> str:
    """model.toml.in with a line in the engine's log for each request that has come (see ``Replica.received``)."""
    return _changed(model_config, {EAGER: f"{EAGER}\nenable-log-requests = true"})


def _changed(model_config: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in model_config, f"model.toml.in has no {old!r} any more"
        model_config = model_config.replace(old, new)
    return model_config


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def free_port() -> int:
    """systemd's sockets take no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
