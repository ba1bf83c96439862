"""How much memory a replica holds, where that can be measured: a sleep counts as reached only when it fell.

Figures are of the replica's own processes, never of the whole GPU: another program may use the same card.
None means "cannot be measured here" and is no evidence of anything.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from supervisord.engine.cgroup import PROC
from supervisord.engine.vllm import VllmEngine

#: What the amdgpu driver tells of every process that computes: one file a GPU, in bytes.
KFD = Path("/sys/class/kfd/kfd/proc")
_MIB, _KIB = 1024 * 1024, 1024
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_RSS = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


class MemoryReader(Protocol):
    """A way to measure a replica's GPU memory."""

    async def read(self, timeout: float) -> int | None:
        """Bytes that the replica holds on all its GPUs together; None where that cannot be told within ``timeout``."""
        ...


class GpuMemory:
    """Of real engines: from the amdgpu driver's files, else through ``nvidia-smi``, which comes with NVIDIA's driver.

    ``processes`` lists the replica's own. None without either, for cards that do not tell a process's memory (MIG,
    WSL), and when none of the replica's is among those told of: its PIDs are another namespace's, or it uses no GPU.
    """

    def __init__(self, processes: Callable[[], Iterable[int]], nvidia: str = "nvidia-smi", kfd: Path = KFD) -> None:
        self._processes, self._nvidia, self._kfd = processes, nvidia, kfd

    async def read(self, timeout: float) -> int | None:
        pids = frozenset(self._processes())
        usage = kfd_usage(pids, self._kfd) or await _nvidia_usage(self._nvidia, timeout) or {}
        told = [usage[pid] for pid in pids if pid in usage]
        return None if not told or any(size is None for size in told) else sum(size or 0 for size in told)


class SimulatedMemory:
    """Of the simulator, which tells its pretended GPU memory. Only for engines whose probe says ``simulated``."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def read(self, timeout: float) -> int | None:
        state = await self._engine.read_json("/sim/state", timeout)
        memory = state.get("memory") if isinstance(state, dict) else None
        used = memory.get("used") if isinstance(memory, dict) else None
        return used if type(used) is int else None


def kfd_usage(pids: Iterable[int], kfd: Path) -> dict[int, int | None]:
    """GPU bytes by process, for those of ``pids`` that the driver knows."""
    usage: dict[int, int | None] = {}
    for pid in pids:
        with suppress(OSError, ValueError):  # the process ended meanwhile
            if files := list((kfd / str(pid)).glob("vram_*")):
                usage[pid] = sum(int(file.read_text()) for file in files)
    return usage


async def _nvidia_usage(command: str, timeout: float) -> Mapping[int, int | None] | None:
    program = shutil.which(command)
    if program is None:
        return None
    query = (program, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    process = await asyncio.create_subprocess_exec(
        *query, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(timeout):
            output, _ = await process.communicate()
    except TimeoutError:  # a wedged driver hangs it
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return parse_nvidia_usage(output.decode("ascii", "replace")) if process.returncode == 0 else None


def parse_nvidia_usage(csv: str) -> dict[int, int | None]:
    """``pid, MiB`` lines to bytes by process, summed over the GPUs; None where a card does not tell (``[N/A]``)."""
    usage: dict[int, int | None] = {}
    for line in csv.splitlines():
        pid, _, size = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            before = usage.get(int(pid), 0)
            usage[int(pid)] = before + int(size) * _MIB if size.isdigit() and before is not None else None
    return usage


def host_memory(processes: Iterable[int], proc: Path = PROC) -> int:
    """Bytes of host RAM that the processes hold; shared pages count once (PSS, or RSS where that may not be read).

    A level-1 sleep moves the weights here, and some engines do not give all of it back on the wake.
    """
    return sum(_pss(proc / str(pid)) for pid in processes)


def _pss(process: Path) -> int:
    for name, pattern in (("smaps_rollup", _PSS), ("status", _RSS)):
        with suppress(OSError):  # gone meanwhile, or another user's
            if found := pattern.search((process / name).read_text()):
                return int(found[1]) * _KIB
    return 0
