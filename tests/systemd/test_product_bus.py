"""The D-Bus interfaces of the running product, as busctl uses them."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from product import ROOT, SERVICE, SOCKET, busctl, model, show, systemctl

NAME, PATH = "io.github.vllmctl1", "/io/github/vllmctl1"
CONFIG = model("chat", "chat-a", "chat-b", top={"aliases": ["gpt"]}) + model("held-one") + model("failing")
# systemd's bus_label_escape: every byte that is no letter or digit, in hex.
CHAT, CHAT_A = f"{PATH}/models/chat", f"{PATH}/replicas/chat_2da"
HELD = f"{PATH}/models/held_2done"


async def call(path: str, interface: str, method: str, *args: str) -> str:
    """A call that must succeed; returns the reply."""
    status, out, err = await busctl("call", NAME, path, f"{NAME}.{interface}", method, *args)
    assert status == 0, err
    return out


async def refused(path: str, interface: str, method: str, *args: str) -> tuple[str, str]:
    """A call that must fail: the error's name and text, from the reply itself."""
    # busctl says only the text; the reply's name is seen by a monitor.
    monitor = await Monitor.begin("type='error'")
    status, _, err = await busctl("call", NAME, path, f"{NAME}.{interface}", method, *args)
    assert status != 0
    message = await monitor.next(lambda message: str(message.get("error_name", "")).startswith(NAME))
    await monitor.end()
    return str(message["error_name"]).removeprefix(f"{NAME}.Error."), err


async def prop(path: str, interface: str, name: str) -> object:
    status, out, err = await busctl("--json=short", "get-property", NAME, path, f"{NAME}.{interface}", name)
    assert status == 0, err
    return json.loads(out)["data"]


class Monitor:
    """`busctl monitor`, message by message."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def begin(cls, match: str) -> "Monitor":
        process = await asyncio.create_subprocess_exec(
            *("busctl", "--user", "monitor", "--json=short", f"--match={match}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        await process.stderr.readline()  # "Monitoring bus message stream."
        return cls(process)

    async def next(self, wanted) -> dict:
        """The next message for which ``wanted`` is true."""
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            while True:
                message = json.loads(await self._process.stdout.readline())
                if wanted(message):
                    return message

    async def end(self) -> None:
        self._process.terminate()
        await self._process.communicate()


async def test_tree_and_introspection_show_every_object(product):
    _, tree, _ = await busctl("tree", "--list", NAME)
    paths = set(tree.splitlines())
    assert {PATH, CHAT, HELD, f"{PATH}/models/failing", CHAT_A, f"{PATH}/replicas/chat_2db"} <= paths
    for path, interface, member in (
        (PATH, "Manager", ".ListModels"),
        (PATH, "Manager", ".Failover"),
        (CHAT, "Model", ".Sleep"),
        (CHAT_A, "Replica", ".Drain"),
    ):
        _, shown, _ = await busctl("introspect", NAME, path, f"{NAME}.{interface}")
        assert f"\n{member} " in f"\n{shown}", shown
    _, shown, _ = await busctl("introspect", NAME, PATH)
    assert "org.freedesktop.DBus.ObjectManager" in shown


async def test_the_manager_lists_and_finds(product):
    listed = await call(PATH, "Manager", "ListModels")
    assert listed.startswith("a(ssuuo) 3 ")
    assert f'"chat" "stopped" 0 0 "{CHAT}"' in listed
    replicas = await call(PATH, "Manager", "ListReplicas")
    assert f'"chat-a" "chat" "stopped" "ok" "vllm@chat-a.service" "{CHAT_A}"' in replicas
    assert await call(PATH, "Manager", "GetModel", "s", "gpt") == f'o "{CHAT}"'
    assert await prop(PATH, "Manager", "Simulated") is True
    assert await prop(PATH, "Manager", "Listen") == [f"127.0.0.1:{product.port}"]
    assert await prop(PATH, "Manager", "StateDirectory") == str(product.state)
    assert await prop(PATH, "Manager", "ConfigFiles") == [str(product.config_file)]


async def test_every_verb_answers_when_it_is_done(product, clients):
    await call(CHAT, "Model", "Start")
    assert await prop(CHAT, "Model", "State") == "ready"
    assert [await prop(f"{PATH}/replicas/chat_2d{each}", "Replica", "State") for each in "ab"] == ["ready", "ready"]
    for level in (1, 2):
        await call(CHAT, "Model", "Sleep", "u", str(level))
        assert await prop(CHAT, "Model", "State") == "asleep"
        assert await prop(CHAT_A, "Replica", "SleepLevel") == level
    await call(CHAT_A, "Replica", "Wake")
    assert await prop(CHAT_A, "Replica", "State") == "ready"
    assert await prop(CHAT_A, "Replica", "WakeUSec") > 0
    before = show("vllm@chat-a.service", "InvocationID")
    await call(CHAT_A, "Replica", "Restart")
    assert show("vllm@chat-a.service", "InvocationID") != before
    assert await prop(CHAT_A, "Replica", "State") == "ready"
    await call(CHAT_A, "Replica", "Drain")
    assert await prop(CHAT_A, "Replica", "Hold") == "drained"
    assert {(await clients.ask("chat")).replica for _ in range(4)} == {"chat-b"}
    await call(CHAT_A, "Replica", "Start")
    await call(CHAT, "Model", "Stop")
    assert await prop(CHAT, "Model", "State") == "stopped"
    assert show("vllm@chat-a.service", "ActiveState") == {"ActiveState": "inactive"}
    await call(CHAT, "Model", "Start")


async def test_failures_have_names_and_say_why(product):
    await call(HELD, "Model", "Stop")
    for path, interface, method, args, error, words in (
        (PATH, "Manager", "GetModel", ("s", "nobody"), "NoSuchModel", "nobody"),
        (PATH, "Manager", "GetReplica", ("s", "nobody"), "NoSuchReplica", "nobody"),
        (CHAT, "Model", "Sleep", ("u", "3"), "InvalidArgument", "the levels are 1 and 2"),
        (HELD, "Model", "Wake", (), "Held", "held down"),
    ):
        name, text = await refused(path, interface, method, *args)
        assert name == error
        assert words in text
    async with product.drop_in("vllm@failing.service", "[Service]\nExecStartPre=/bin/false\n"):
        name, text = await refused(f"{PATH}/models/failing", "Model", "Start")
        assert name == "StartFailed"
        assert "vllm@failing.service" in text
    product.config_file.rename(product.config_file.with_suffix(".away"))
    product.configure("[models.chat]\nreplica = 1\n")
    name, text = await refused(PATH, "Manager", "Reload")
    assert name == "ConfigInvalid"
    assert "replica" in text
    product.config_file.with_suffix(".away").rename(product.config_file)
    assert await call(PATH, "Manager", "Reload") == "as 0"


async def test_properties_changed_tells_a_wake_step_by_step(product, clients, fleet):
    await call(CHAT, "Model", "Start")
    await call(CHAT, "Model", "Sleep", "u", "2")
    monitor = await Monitor.begin(f"type='signal',member='PropertiesChanged',path='{CHAT_A}'")
    waking = asyncio.create_task(call(CHAT_A, "Replica", "Wake"))
    seen: list[tuple[str, object]] = []
    while ("State", "ready") not in seen:
        message = await monitor.next(lambda message: message["type"] == "signal")
        assert message["payload"]["data"][0] == f"{NAME}.Replica"
        changed = message["payload"]["data"][1]
        seen += [(key, changed[key]["data"]) for key in ("State", "Step") if key in changed]
    await monitor.end()
    await waking
    assert [value for key, value in seen if key == "State"] == ["waking", "ready"]
    steps = [value for key, value in seen if key == "Step" and value]
    assert "reload_weights" in steps  # the longest; steps that end within a moment may be told as one change


async def test_a_held_model_is_refused_until_up(product, clients, fleet):
    await product.vllmctl("up", "held-one")
    assert (await clients.ask("held-one")).whole
    await product.vllmctl("down", "held-one")
    answer = await clients.ask("held-one")
    assert (answer.status, answer.code) == (503, "model_held")
    assert int(answer.headers["Retry-After"]) >= 1
    assert await prop(HELD, "Model", "Held") is True
    # A hold outlives the supervisor.
    systemctl("restart", SERVICE)
    assert (await clients.ask("held-one")).code == "model_held"
    assert "held" in await product.vllmctl("wake", "held-one", code=5)
    await product.vllmctl("up", "held-one")
    assert (await clients.ask("held-one")).whole


@pytest.fixture
def activatable(product):
    """As `systemctl enable` and an installation leave it: the alias and the bus' service file."""
    services = Path(os.environ["XDG_RUNTIME_DIR"], "dbus-1", "services")
    services.mkdir(parents=True, exist_ok=True)
    file = services / f"{NAME}.service"
    file.write_text((ROOT / "packaging" / "dbus" / f"{NAME}.service.in").read_text())
    alias = product.runtime / "systemd" / "user" / f"dbus-{NAME}.service"
    alias.symlink_to(alias.with_name(SERVICE))
    systemctl("daemon-reload")
    reload = ("call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "ReloadConfig")
    subprocess.run(["busctl", "--user", *reload], check=True)
    yield
    file.unlink()
    alias.unlink()
    systemctl("daemon-reload")
    subprocess.run(["busctl", "--user", *reload], check=True)


async def test_a_call_on_the_bus_starts_the_stopped_supervisor_and_its_port(product, clients, activatable):
    systemctl("stop", SOCKET, SERVICE)
    assert "not running" in await product.vllmctl("status", code=3)  # vllmctl only looks, and starts nobody
    assert (await call(PATH, "Manager", "ListModels")).startswith("a(ssuuo) 3 ")
    assert show(SERVICE, "ActiveState") == {"ActiveState": "active"}
    assert show(SOCKET, "ActiveState") == {"ActiveState": "active"}
    assert "chat" in await clients.states()
