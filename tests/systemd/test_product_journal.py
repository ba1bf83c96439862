"""What docs/monitoring.md says can be asked of the journal is asked of a journal: with the page's own commands.

There is no journal under the private manager, so one is started, and the supervisor writes to it.
"""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from product import ROOT, SERVICE, model, run, systemctl, until

JOURNALD = Path("/lib/systemd/systemd-journald")
UNIT = "test-journal.service"
SOCKETS, RECORDS = Path("/run/systemd/journal"), Path("/run/log/journal")  # a private /run
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
CONFIG = model("chat", "chat-a", "chat-b", top={"routing": "roundrobin"}) + model("nap")


@pytest.fixture(scope="module", autouse=True)
def journal(_private_manager):
    """A journal for the time of the module."""
    SOCKETS.mkdir(parents=True)
    RECORDS.mkdir(parents=True)
    start = ["systemd-run", "--user", "--quiet", "--collect", f"--unit={UNIT}", "--property=StandardError=null"]
    subprocess.run([*start, JOURNALD], check=True)
    yield
    systemctl("stop", UNIT)
    for left in (SOCKETS, RECORDS):
        shutil.rmtree(left)


@pytest.fixture
async def journalled(journal, product):
    """The product with its supervisor's output in the journal."""
    await until((SOCKETS / "stdout").exists, "the journal listens")
    async with product.drop_in(SERVICE, "[Service]\nStandardOutput=journal\nStandardError=journal\n"):
        await run("systemctl", "--user", "restart", SERVICE)
        yield product
    await run("systemctl", "--user", "restart", SERVICE)


def commands() -> list[str]:
    return re.findall(r"^    (journalctl .*?)(?: +#.*)?$", PAGE, re.MULTILINE)


async def asked(command: str, **names: str) -> list[str]:
    """The lines that a command of the page prints, with other names in it; one journal, so not the user's alone."""
    assert command in commands(), command
    words = [word for word in shlex.split(command) if word != "--user"]
    for field, value in names.items():
        words = [f"{field}={value}" if word.startswith(f"{field}=") else word for word in words]
    status, out, err = await run(*words, "--no-pager", "--quiet")
    assert status == 0, err
    return out.splitlines()


async def test_the_pages_commands_find_what_it_says(journalled, clients, fleet):
    await journalled.vllmctl("up", "chat")
    await journalled.vllmctl("up", "nap")
    async with journalled.engine("chat-a") as engine:
        await engine.arm("reset-mid-stream", "0")
        for _ in range(2):  # they take turns
            assert (await clients.ask("chat", stream=True)).whole
    await journalled.vllmctl("sleep", "nap")
    async with journalled.engine("nap") as engine:
        await engine.arm("hang", "wake_up")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clients.ask("nap"), 0.5)
        await engine.arm("hang", count=0)
    await fleet.becomes("nap", "ready")
    assert (await clients.ask("nap")).whole
    await journalled.vllmctl("down", "chat")
    assert (await clients.ask("chat")).code == "model_held"
    await until(lambda: gone_in_the_queue(), "the client that left has its line")

    (failover,) = await asked("journalctl --user VLLMCTL_EVENT=failover")
    assert "failover: chat-a -> chat-b" in failover
    assert any("awake after" in line for line in await asked("journalctl --user VLLMCTL_EVENT=woken --output=cat"))
    (refused,) = await asked("journalctl --user VLLMCTL_MODEL=chat VLLMCTL_STATUS=503")
    assert "code=model_held" in refused
    everything = await asked("journalctl --user VLLMCTL_MODEL=chat")
    assert len(everything) > len(await asked("journalctl --user VLLMCTL_REPLICA=chat-a --priority=warning")) >= 2
    answered = [json.loads(line) for line in await asked(commands()[-1])]
    assert {"chat", "nap"} == {line["VLLMCTL_MODEL"] for line in answered}
    assert any(float(line["VLLMCTL_TTFT"]) > 0 for line in answered if "VLLMCTL_TTFT" in line)
    identity = re.search(r"request_id=(\S+)", failover + refused)
    assert identity is not None
    assert refused in await asked("journalctl --user VLLMCTL_REQUEST_ID=ID", VLLMCTL_REQUEST_ID=identity[1])


async def gone_in_the_queue() -> bool:
    return bool(await asked("journalctl --user VLLMCTL_STATUS=499 VLLMCTL_GONE_IN=queue"))
