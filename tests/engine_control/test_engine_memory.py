"""A replica's memory is that of its own processes; what cannot be measured is None and not 0."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from supervisord.engine.memory import GpuMemory, SimulatedMemory, host_memory, parse_nvidia_usage
from supervisord.engine.vllm import VllmEngine

MIB = 1024 * 1024
NOWHERE = Path("/nonexistent")


def tool(tmp_path: Path, script: str) -> str:
    """An executable in the place of nvidia-smi."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        ("", {}),
        ("11, 520\n12, 30720\n", {11: 520 * MIB, 12: 30720 * MIB}),
        ("11, 100\n11, 200\n", {11: 300 * MIB}),  # one process on two GPUs
        ("11, [N/A]\n12, 5\n11, 6\n", {11: None, 12: 5 * MIB}),
        ("No devices were found\n", {}),
    ],
)
def test_nvidia_smis_lines_are_summed_by_process(text: str, usage: dict[int, int | None]) -> None:
    assert parse_nvidia_usage(text) == usage


async def test_only_the_replicas_own_processes_count(tmp_path: Path) -> None:
    smi = tool(tmp_path, 'echo "$@" >"$0.args"; printf "11, 100\\n12, 200\\n99, 4000\\n"')
    assert await GpuMemory(lambda: {10, 11, 12}, nvidia=smi, kfd=NOWHERE).read(30) == 300 * MIB
    assert (tmp_path / "nvidia-smi.args").read_text() == (
        "--query-compute-apps=pid,used_memory --format=csv,noheader,nounits\n"
    )


@pytest.mark.parametrize("script", ["exit 9", 'echo "11, [N/A]"', 'echo "99, 4000"', 'echo "11, 100"; exit 1'], ids=str)
async def test_what_nvidia_smi_cannot_tell_is_none(tmp_path: Path, script: str) -> None:
    assert await GpuMemory(lambda: {11}, nvidia=tool(tmp_path, script), kfd=NOWHERE).read(30) is None


async def test_without_a_gpu_tool_nothing_is_told() -> None:
    assert await GpuMemory(lambda: {11}, nvidia="no-such-nvidia-smi", kfd=NOWHERE).read(30) is None


async def test_a_wedged_nvidia_smi_is_ended_and_tells_nothing(tmp_path: Path) -> None:
    smi = tool(tmp_path, 'echo $$ >"$0.fifo"; exec cat "$0.fifo"')
    fifo = tmp_path / "nvidia-smi.fifo"
    os.mkfifo(fifo)
    reading = asyncio.create_task(GpuMemory(lambda: {11}, nvidia=smi, kfd=NOWHERE).read(30))
    pid = int(await asyncio.to_thread(fifo.read_text))  # it runs, and will never end by itself
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + 3600.0
    assert await reading is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_amdgpus_figures_are_summed_over_the_gpus(tmp_path: Path) -> None:
    for pid, gpu, size in (
        ("11", "vram_100", 5),
        ("11", "vram_200", 7),
        ("12", "vram_100", 1),
        ("99", "vram_100", 1000),
    ):
        (tmp_path / pid).mkdir(exist_ok=True)
        (tmp_path / pid / gpu).write_text(f"{size}\n")
        (tmp_path / pid / "sdma_100").write_text("123456\n")
    assert await GpuMemory(lambda: {11, 12, 13}, nvidia="no-such-nvidia-smi", kfd=tmp_path).read(30) == 13


async def test_the_simulators_memory_is_read_from_its_state(vllm: Any, engine: VllmEngine) -> None:
    memory = SimulatedMemory(engine)
    assert await memory.read(30) is None
    vllm.faults["/sim/state"] = (200, {"memory": {"total": 9, "used": 7}})
    assert await memory.read(30) == 7
    for nonsense in ([], {"memory": 7}, {"memory": {"used": "7"}}):
        vllm.faults["/sim/state"] = (200, nonsense)
        assert await memory.read(30) is None
    await vllm.stop()
    assert await memory.read(30) is None


def test_host_memory_counts_shared_pages_once(tmp_path: Path) -> None:
    for pid, pss, rss in ((11, "Pss:      100 kB\nPss_Dirty: 9 kB\n", 500), (12, None, 50)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nVmRSS:\t     {rss} kB\n")
        if pss:
            (tmp_path / str(pid) / "smaps_rollup").write_text(f"1-2 ---p 0 00:00 0 [rollup]\nRss: 500 kB\n{pss}")
    assert host_memory([11, 12, 13], tmp_path) == 150 * 1024


def test_host_memory_of_a_real_process_follows_what_it_takes() -> None:
    before = host_memory([os.getpid()])
    ballast = bytearray(os.urandom(32 * MIB))
    grown = host_memory([os.getpid()]) - before
    assert 24 * MIB < grown < 48 * MIB
    del ballast
