"""``vllm-simulator serve MODEL ...``: one simulated vLLM as a process.

Exit codes are vLLM's: 0 after SIGTERM and, misleadingly, after the engine core's death; 1 when it could not start
(no such model, address busy, stale socket file); 2 for a bad option.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from supervisord.simulator.log import EngineLog
from supervisord.simulator.options import ModelNotFound, Options, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run until it ends; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["serve"]:
        sys.stderr.write("usage: vllm-simulator serve MODEL [options]\n")
        return 0 if words[:1] in (["--help"], ["-h"]) else 2
    log = EngineLog(sys.stderr)
    try:
        options = parse(words[1:])
    except ModelNotFound as error:
        log.error("api_server.py", f"OSError: cannot find model {error}: no such file or directory (simulated)")
        return 1
    ignoring = [arg for name, arg, _ in options.faults if name == "ignore-sigterm"]
    if ignoring:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return asyncio.run(_serve(options, log, loading_only=ignoring == ["loading"]))


async def _serve(options: Options, log: EngineLog, loading_only: bool) -> int:
    # Late: a usage error is answered without importing the web server.
    from supervisord.simulator.server import Simulator, StartFailed

    simulator = Simulator(options, log, own_process=True)
    try:
        simulator.bind()
        await simulator.load()
        if loading_only:
            simulator.faults.arm("ignore-sigterm", count=0)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, simulator.terminate)
        await simulator.listen()
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        log.error("api_server.py", f"OSError: cannot listen on {where}: {error}")
        await simulator.close()
        return 1
    except StartFailed:
        log.error(
            "core.py",
            "EngineCore failed to start.\nTraceback (most recent call last):\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (simulated)\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
        )
        await simulator.close()
        return 1
    code = await simulator.ended
    await simulator.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
