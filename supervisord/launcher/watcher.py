"""The small process beside a starting engine: tells systemd how it goes, says READY=1 when the model answers, ends."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from supervisord.launcher.answer import Answer, look
from supervisord.launcher.command import Launch
from supervisord.launcher.notify import Notifier
from supervisord.launcher.processes import Work, group_of, work_of


@dataclass(frozen=True, slots=True)
class Pace:
    """All in seconds."""

    #: Between two looks at the engine, first and at most.
    look_first: float = 0.05
    look_most: float = 0.5
    #: Between two reports to systemd, and how much time each asks for.
    report: float = 10.0
    extension: float = 60.0
    #: Without progress for this long, no more time is asked for.
    stall: float = 120.0


@dataclass(slots=True)
class Patience:
    """Decides whether a start may take longer. ``limit``: ``[supervisor] start_timeout``, counted from ``started``."""

    started: float
    limit: float
    pace: Pace
    _work: Work = field(default_factory=Work)
    _asked_at: float = field(init=False)
    _worked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._asked_at = self._worked_at = self.started

    def extension(self, now: float, work: Work) -> float:
        """Seconds to ask for from now on, 0 for none.

        Progress is work of the engine's processes since the last question: 2% of one CPU, or a MiB read. A loop that
        only waits is below that, and so is a file server that went away; a hang that burns CPU is ended by the limit.
        """
        busy = work.cpu_seconds - self._work.cpu_seconds >= 0.02 * max(1.0, now - self._asked_at)
        if busy or work.read_bytes - self._work.read_bytes >= 1 << 20:
            self._worked_at = now
        self._work, self._asked_at = work, now
        if now - self._worked_at >= self.pace.stall:
            return 0.0
        return max(0.0, min(self.pace.extension, self.started + self.limit - now))


def watch(launch: Launch, main: int, main_fd: int, notifier: Notifier, limit: float, pace: Pace) -> None:
    """Until the engine is ready or gone. ``main_fd`` is a pidfd of ``main``."""
    started = time.monotonic()
    patience = Patience(started, limit, pace)
    gone = select.poll()
    gone.register(main_fd, select.POLLIN)
    reported, said, delay = -pace.report, "", pace.look_first
    while True:
        answer = look(launch.endpoint, launch.served_name, main, launch.api_key)
        if gone.poll(0):
            return
        if answer.ready:
            notifier.send("READY=1", f"STATUS={answer.text}")
            notifier.barrier(5.0)
            return
        now = time.monotonic()
        if answer.wrong and answer.text != said:
            said = answer.text
            sys.stderr.write(f"vllm-replica: {launch.replica}: not ready: {said}\n")
            sys.stderr.flush()
        if now - started - reported >= pace.report:
            reported = now - started
            _report(notifier, answer, reported, patience.extension(now, work_of(group_of(main))))
        if gone.poll(delay * 1000):
            return
        delay = min(delay * 1.3, pace.look_most)


def _report(notifier: Notifier, answer: Answer, elapsed: float, extension: float) -> None:
    lines = [f"STATUS={answer.text}, {elapsed:.0f} s"]
    if extension:
        lines.append(f"EXTEND_TIMEOUT_USEC={round(extension * 1_000_000)}")
    # The next report comes soon; only READY=1 must arrive.
    with contextlib.suppress(OSError):
        notifier.send(*lines)


def start_watcher(launch: Launch, notifier: Notifier, limit: float, pace: Pace) -> None:
    """Begin to watch the calling process, which is about to become the engine.

    The watcher is no child of the engine's (which would never wait for it): its parent ends at once, and the service
    manager takes it.
    """
    main = os.getpid()
    main_fd = os.pidfd_open(main)
    middle = os.fork()
    if middle == 0:
        status = 1
        try:
            if os.fork() == 0:
                _let_go(keep=(2, main_fd))
                watch(launch, main, main_fd, notifier, limit, pace)
            status = 0
        except Exception as error:  # noqa: BLE001 - the last stop of this process: it must end here, and say why
            sys.stderr.write(f"vllm-replica: {launch.replica}: cannot watch the start: {error!r}\n")
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(main_fd)
    os.waitpid(middle, 0)


def _let_go(keep: Iterable[int]) -> None:
    """Close what was inherited, so that nobody waits for our end of it, and take a name of our own."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for fd in {int(link.name) for link in Path("/proc/self/fd").iterdir()} - {0, 1, *keep}:
        with contextlib.suppress(OSError):
            os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("vllm-watch")
