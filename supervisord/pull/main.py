"""The process of a pull: ``python -m supervisord.pull.main``, the main process of its unit, with the job on stdin.

It ends when its stdin does: that is whoever asked, and is gone. systemd then ends all that is left in the unit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from supervisord.launcher.command import OURS
from supervisord.pull.engine import NoPython, python_of
from supervisord.pull.job import Failed, Image, Progress, Pulled, Weights, event_line, from_line

#: Seconds for a tool that was told to end to tidy up.
PATIENCE = 3.0
#: A pull is the wish to ask the hub, also for an engine that is told never to.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def main() -> int:
    """Do it; what happens is told on stdout, and what went wrong beyond that on stderr."""
    job = from_line(_first_line(0))
    tool = Tool()
    threading.Thread(target=tool.end_with, args=(0,), name="tie", daemon=True).start()
    return pull_image(job, tool) if isinstance(job, Image) else pull_weights(job, tool, os.environ)


class Tool:
    """The one program that this process runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        with self._lock:
            self._process = subprocess.Popen(
                command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True, errors="replace"
            )
            return self._process

    def end_with(self, descriptor: int) -> None:
        """End everything when the stream of ``descriptor`` does."""
        # Not sys.stdin: a thread that waits in it makes Python's own end fail.
        while os.read(descriptor, 4096):
            pass
        with self._lock:  # never given back: nothing is started any more
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            os._exit(128 + signal.SIGTERM)


def pull_weights(job: Weights, tool: Tool, environ: Mapping[str, str]) -> int:
    env = {name: value for name, value in {**environ, **job.env}.items() if name not in (*OURS, *_OFFLINE)}
    try:
        if env.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
            raise NoPython("VLLM_USE_MODELSCOPE is set, and only the engine itself can ask that hub")
        python = python_of(job.command, env)
    except NoPython as error:
        for repository in job.repositories:
            _tell(Failed(repository.name, "NoClient", str(error)))
        return 1
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    hub = tool.start([python, str(Path(__file__).with_name("hub.py"))], env, stdin=subprocess.PIPE)
    assert hub.stdin is not None
    with suppress(BrokenPipeError), hub.stdin as stdin:  # it ended at once, and says why
        repositories = [asdict(repository) for repository in job.repositories]
        stdin.write(json.dumps({"repositories": repositories, "token": job.token}))
    status = hub.wait()
    if status < 0:  # by the kernel, for its memory, or by a crash in one of its libraries: it said nothing itself
        sys.stderr.write(f"the engine's Python, {python}, was killed by {signal.Signals(-status).name}\n")
    return abs(status)


def pull_image(job: Image, tool: Tool) -> int:
    before = _identity(job, tool)
    last = ""
    try:
        process = tool.start(job.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        _tell(Failed(job.name, "NoPodman", f"cannot run {job.command[0]}: {error.strerror}"))
        return 1
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if said := line.strip():
                last = said
                _tell(Progress(job.name, text=said))
    if process.wait() != 0:
        _tell(Failed(job.name, _code(last), last.removeprefix("Error: ") or f"podman ended with {process.returncode}"))
        return 1
    _tell(Pulled(job.name, new=_identity(job, tool) != before))
    return 0


def _identity(job: Image, tool: Tool) -> str:
    try:
        inspect = tool.start(job.inspect, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    out, _ = inspect.communicate()
    return out.strip() if inspect.returncode == 0 else ""


def _code(said: str) -> str:
    """What podman's last words mean, as far as programs may want to tell apart."""
    text = said.lower()
    for code, words in (
        ("NoSpace", ("no space left", "disk quota exceeded")),
        ("Denied", ("unauthorized", "authentication required", "denied", "403")),
        ("NoImage", ("manifest unknown", "not found", "name unknown")),
        ("NoRegistry", ("no such host", "connection refused", "network is unreachable", "timeout", "dial tcp")),
    ):
        if any(word in text for word in words):
            return code
    return "Failed"


def _first_line(descriptor: int) -> str:
    read = b""
    while not read.endswith(b"\n"):
        if not (byte := os.read(descriptor, 1)):
            break
        read += byte
    return read.decode()


def _tell(event: Progress | Pulled | Failed) -> None:
    sys.stdout.write(event_line(event))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
