"""The whole product on the private user manager, and the ways of its users into it.

Units are made from the repository's own templates by `packaging/render`; engines are simulators; configuration, state,
logs and port belong to one test module. Nothing in here knows the daemon from the inside, but for the typed D-Bus
client, whose signals are what the tests wait for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from productclients import LIMIT, Answer, Clients

from supervisord.bus.address import session_bus_address
from supervisord.bus.client import Client, Watch
from supervisord.bus.snapshot import FailoverSeen, FleetStatus, ReplicaStatus

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".venv" / "bin"
SERVICE, SOCKET = "vllm-supervisord.service", "vllm-supervisord.socket"
#: The engines' own seconds are short, so that those that nothing sets (the last one of a stop, say) are short as well.
CLOCK_FACTOR = 0.2
#: What a test's engines do unless it says otherwise: everything quickly. Seconds, real ones.
QUICK: Mapping[str, object] = {
    "enable-sleep-mode": True,
    "sim-load-time": 0.1,
    "sim-sleep": 0.05,
    "sim-wake1": 0.1,
    "sim-wake2": 0.2,
    "sim-tpot-base": 0.01,
    "sim-tpot-per-seq": 0.0,
}
_TIMES = ("sim-load-time", "sim-sleep", "sim-wake1", "sim-wake2", "sim-tpot-base", "sim-tpot-per-seq")
#: Looks and back-offs as quick as the engines.
SUPERVISOR = """\
[supervisor]
probe_interval = "300ms"
probe_timeout = "2s"
backoff_min = "300ms"
drain_timeout = "20s"
"""
#: What no supervisor may write, whatever is done to it.
_TROUBLE = re.compile(r"^Traceback|^\S.*\b\w+Warning: |nobody foresaw|never awaited|never retrieved", re.MULTILINE)


def model(
    name: str,
    *replicas: str,
    idle: Mapping[str, str] | None = None,
    wake: Mapping[str, object] | None = None,
    top: Mapping[str, object] | None = None,
    **serve: object,
) -> str:
    """The TOML of one model with bundled, simulated replicas (by default one, of the model's name)."""
    options: dict[str, Any] = {**QUICK, **{key.replace("_", "-"): value for key, value in serve.items()}}
    options |= {key: options[key] / CLOCK_FACTOR for key in _TIMES} | {"sim-clock-factor": CLOCK_FACTOR}
    tables = {
        f"models.{name}": dict(top or {}),
        f"models.{name}.idle": dict(idle or {}),
        f"models.{name}.wake": dict(wake or {}),
        f"models.{name}.serve": {"engine": "simulator", "model": "simulated", **options},
        **{f"models.{name}.replicas.{replica}": {} for replica in replicas or (name,)},
    }
    # JSON's texts, numbers, truths and lists are TOML's too.
    written = {table: "\n".join(f"{k} = {json.dumps(v)}" for k, v in keys.items()) for table, keys in tables.items()}
    return "\n".join(f"[{table}]\n{keys}" for table, keys in written.items() if keys or "replicas" in table) + "\n"


async def until(condition: Callable[[], Any | Awaitable[Any]], what: str, limit: float = LIMIT) -> Any:
    """Look until ``condition`` is true, where no event tells; returns what it was. ``what``: for the failure."""
    try:
        async with asyncio.timeout(limit):
            while True:
                found = condition()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not seen within {limit:g} s: {what}") from None


def systemctl(*args: str, check: bool = True) -> str:
    """Run ``systemctl --user``; returns what it printed."""
    done = subprocess.run(["systemctl", "--user", "--no-pager", *args], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"systemctl --user {' '.join(args)} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def show(unit: str, *properties: str) -> dict[str, str]:
    """Properties of a unit."""
    lines = systemctl("show", f"--property={','.join(properties)}", unit).splitlines()
    return dict(line.split("=", 1) for line in lines)


async def run(*command: str, timeout: float = LIMIT) -> tuple[int, str, str]:
    """Run a program to its end: exit status, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end: {out.decode()}{err.decode()}") from None
    assert process.returncode is not None
    return process.returncode, out.decode().strip(), err.decode().strip()


async def busctl(*args: str) -> tuple[int, str, str]:
    return await run("busctl", "--user", *args)


class Engine:
    """The back door of one simulated engine: its own socket."""

    def __init__(self, name: str, session: aiohttp.ClientSession) -> None:
        self.name, self.unit = name, f"vllm@{name}.service"
        self._session = session

    async def state(self) -> dict[str, Any]:
        """What it counted and is."""
        async with self._session.get("http://engine/sim/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def arm(self, fault: str, arg: str = "", count: int | None = 1) -> None:
        """Have something go wrong; count 0: no longer."""
        await self.post("/sim/fault", {"name": fault, "arg": arg, "count": count})

    async def post(self, path: str, body: object = None) -> None:
        """As somebody does who goes past the supervisor."""
        async with self._session.post(f"http://engine{path}", json=body) as response:
            assert response.status == 200, await response.text()

    def run(self) -> tuple[str, str]:
        """What changes with every start: the unit's invocation and its main process."""
        shown = show(self.unit, "InvocationID", "MainPID")
        return shown["InvocationID"], shown["MainPID"]


class Fleet:
    """The fleet as D-Bus signals tell it. ``listen`` must run."""

    def __init__(self, watch: Watch, log: Callable[[], str]) -> None:
        self._watch, self._log = watch, log
        self._told = asyncio.Event()
        self.failovers: list[FailoverSeen] = []
        #: Of each replica: every state (and sleep level) that it was in since the beginning, in order.
        self.history: dict[str, list[tuple[str, int]]] = {}
        self._remember()

    async def listen(self) -> None:
        while True:
            changes = await self._watch.next()
            self.failovers += [change for change in changes if isinstance(change, FailoverSeen)]
            self._remember()
            self._told.set()

    @property
    def there(self) -> bool:
        """The supervisor is on the bus."""
        return self._watch.fleet is not None

    def now(self) -> FleetStatus:
        fleet = self._watch.fleet
        assert fleet is not None, "the supervisor is not on the bus"
        return fleet

    def __getitem__(self, name: str) -> ReplicaStatus:
        return next(replica for replica in self.now().replicas if replica.name == name)

    async def until(self, condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        """Returns when ``condition`` holds, looked at after every signal."""
        try:
            async with asyncio.timeout(limit):
                while not condition():
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            seen = self.there and [(r.name, r.state, r.health, r.last_error) for r in self.now().replicas]
            raise AssertionError(f"not seen within {limit:g} s: {what}; {seen}\n{self._log()[-3000:]}") from None

    async def becomes(self, name: str, state: str, level: int | None = None) -> None:
        """Returns when the replica is in ``state`` (asleep at ``level``), or was since this was called.

        What passes within milliseconds is told, but may be over before anybody has looked.
        """
        before = len(self.history.get(name, ()))

        def reached() -> bool:
            if not self.there:
                return False
            now = [(r.state, r.sleep_level) for r in self.now().replicas if r.name == name]
            since = [*now, *self.history.get(name, [])[before:]]
            return any(found == state and level in (None, asleep) for found, asleep in since)

        await self.until(reached, f"{name} {state} {level or ''}".strip())

    async def leaves(self) -> None:
        """Returns when the supervisor is off the bus."""
        await self.until(lambda: not self.there, "the supervisor left")

    async def returns(self) -> None:
        """Returns when the supervisor is on the bus."""
        await self.until(lambda: self.there, "the supervisor is back")

    def _remember(self) -> None:
        for replica in self.now().replicas if self.there else ():
            states = self.history.setdefault(replica.name, [])
            if (replica.state, replica.sleep_level) not in states[-1:]:
                states.append((replica.state, replica.sleep_level))


class Product:
    """The installed product of one test module."""

    def __init__(self, folder: Path, config: str, supervisor: str | None = None) -> None:
        """``config`` without its table [supervisor], which is ``supervisor``."""
        self.folder = folder
        self._supervisor = SUPERVISOR if supervisor is None else supervisor
        self.port = free_port()
        self.config_file = folder / "config" / "vllm-supervisord" / "config.toml"
        self.state = folder / "state"
        self.runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        self._units = self.runtime / "systemd" / "user"
        self._written: list[Path] = []
        self.config_file.parent.mkdir(parents=True)
        (folder / "log").mkdir()
        self.configure(config)
        self._install()

    def configure(self, text: str) -> None:
        """Write the configuration; who shall read it must be told."""
        self.config_file.write_text(f"{self._supervisor}\n{text}")

    def _install(self) -> None:
        rendered = self.folder / "units"
        render = [str(ROOT / "packaging" / "render"), str(rendered), str(PROGRAMS), f"127.0.0.1:{self.port}"]
        subprocess.run(render, check=True)
        # This checkout's code, what an installation says elsewhere, and (there is no journal here) where output goes.
        python = f"PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1"
        surroundings = f"Environment=XDG_CONFIG_HOME={self.folder}/config {python}\n"
        for unit, log, more in (
            (SERVICE, "supervisor", f"Environment=STATE_DIRECTORY={self.state} PYTHONWARNINGS=default\n"),
            ("vllm@.service", "%i", f"Environment=VLLM_REPLICA_LOG={self.folder}/log/%i.log\nRestartSec=200ms\n"),
        ):
            output = "".join(f"Standard{each}=append:{self.folder}/log/{log}.log\n" for each in ("Output", "Error"))
            text = f"[Unit]\nStartLimitIntervalSec=0\n[Service]\n{surroundings}{output}{more}"
            self.write_unit(f"{unit}.d/test.conf", text, rendered)
        assert show(SOCKET, "ActiveState") == {"ActiveState": "inactive"}, "a test before left the socket behind"
        self._units.mkdir(parents=True, exist_ok=True)
        for file in sorted(rendered.rglob("*")):
            if file.is_file():
                self.write_unit(str(file.relative_to(rendered)), file.read_text())
        systemctl("daemon-reload")

    def write_unit(self, name: str, text: str, folder: Path | None = None) -> Path:
        """Write a unit file or a drop-in (no daemon-reload); it is gone after the module."""
        file = (folder or self._units) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if folder is None and file not in self._written:
            self._written.append(file)
        return file

    @asynccontextmanager
    async def drop_in(self, unit: str, text: str) -> AsyncIterator[None]:
        """Further settings of a unit for the time of the block."""
        file = self.write_unit(f"{unit}.d/zz-block.conf", text)
        await run("systemctl", "--user", "daemon-reload")
        try:
            yield
        finally:
            file.unlink()
            await run("systemctl", "--user", "daemon-reload")

    def start(self) -> None:
        systemctl("start", SOCKET, SERVICE)

    def log(self, name: str = "supervisor") -> str:
        """Everything that the supervisor or a replica wrote."""
        file = self.folder / "log" / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def main_pid(self, unit: str = SERVICE) -> int:
        return int(show(unit, "MainPID")["MainPID"])

    def kill(self, unit: str = SERVICE, number: int = signal.SIGKILL) -> None:
        """A signal to the main process alone."""
        pid = self.main_pid(unit)
        assert pid > 1, f"{unit} has no main process"  # 0 would be everybody in our own process group
        os.kill(pid, number)

    def record(self, replica: str) -> dict[str, Any]:
        """What is on disk about a replica; empty when nothing is."""
        file = self.state / "replicas" / f"{replica}.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text())
        except FileNotFoundError:
            return {}
        return found

    async def vllmctl(self, *args: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run vllmctl, which must exit with ``code``; ``env``: variables besides. Returns what it said."""
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        status, out, err = await run("env", *variables, str(PROGRAMS / "vllmctl"), *args)
        assert status == code, f"vllmctl {' '.join(args)} exited with {status}: {out}\n{err}\n{self.log()[-3000:]}"
        return out if code == 0 else err or out

    async def states(self) -> dict[str, str]:
        """Each replica's state as `vllmctl status --json` says it."""
        found = json.loads(await self.vllmctl("status", "--json"))
        return {replica["name"]: replica["state"] for replica in found["replicas"]}

    @asynccontextmanager
    async def clients(
        self, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Clients]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=True if tls is None else tls)
        timeout = aiohttp.ClientTimeout(LIMIT)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            yield Clients(self.port, session, "http" if tls is None else "https")

    @asynccontextmanager
    async def engine(self, name: str) -> AsyncIterator[Engine]:
        """The back door of a bundled replica's engine."""
        connector = aiohttp.UnixConnector(str(self.runtime / "vllm" / name / "engine.sock"), force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LIMIT)) as session:
            yield Engine(name, session)

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        """The fleet as D-Bus tells it; the supervisor must run at the beginning."""
        async with Client.connect(session_bus_address(os.environ)) as client, client.watch(timeout=LIMIT) as watch:
            fleet = Fleet(watch, self.log)
            listening = asyncio.create_task(fleet.listen())
            try:
                yield fleet
            finally:
                listening.cancel()
                await asyncio.wait([listening])
                if not listening.cancelled():
                    listening.result()

    def rest(self) -> None:
        """Between two tests: engines down, no failures remembered, the supervisor up."""
        systemctl("stop", "vllm@*.service", check=False)
        systemctl("reset-failed", check=False)
        self.start()

    def remove(self) -> list[str]:
        """Stop everything and take it away; returns what is wrong with what was left."""
        wrong = []
        systemctl("stop", SOCKET, SERVICE, check=False)
        result = show(SERVICE, "ActiveState", "Result", "ExecMainStatus")
        if result != {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}:
            wrong.append(f"the supervisor did not end well: {result}")
        systemctl("stop", "vllm@*.service", "vllm.slice", check=False)
        systemctl("reset-failed", check=False)
        for file in self._written:
            file.unlink(missing_ok=True)
            if file.parent != self._units and file.parent.exists() and not any(file.parent.iterdir()):
                file.parent.rmdir()
        systemctl("daemon-reload")
        wrong += [f"left in the runtime directory: {left}" for left in (self.runtime / "vllm").glob("*")]
        shutil.rmtree(self.runtime / "vllm", ignore_errors=True)
        wrong += [f"left running: {line}" for line in processes_of(str(self.folder), str(PROGRAMS / "vllm-"))]
        wrong += [f"left in the state directory: {left}" for left in self.state.rglob("*.tmp")]
        trouble = _TROUBLE.search(self.log())
        if trouble is not None:
            around = slice(max(0, trouble.start() - 1000), trouble.end() + 4000)
            wrong.append(f"{trouble[0]!r} in the supervisor's log:\n{self.log()[around]}")
        return wrong


def running(folder: Path, config: str, supervisor: str | None = None) -> Iterator[Product]:
    """A module's fixture: the product, started; afterwards nothing of it may be left."""
    product = Product(folder, config, supervisor)
    try:
        product.start()
        yield product
    finally:
        wrong = product.remove()
    assert not wrong, "\n".join(wrong)


def processes_of(*words: str) -> Iterator[str]:
    """Command lines of running processes with one of ``words`` in them or in their environment's head."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                unit = (entry / "cgroup").read_text()
            except OSError:
                continue
            if "vllm" in unit or any(word in line for word in words):
                yield line


def free_port() -> int:
    """systemd takes no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def codes(answers: Sequence[Answer]) -> dict[str, int]:
    """How often each outcome came, for a failure's text."""
    found: dict[str, int] = {}
    for answer in answers:
        outcome = "whole" if answer.whole else f"{answer.status} {answer.error or answer.body[:160]}"
        found[outcome] = found.get(outcome, 0) + 1
    return found
