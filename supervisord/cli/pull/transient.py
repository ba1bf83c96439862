"""Runs one pull as a transient unit, in the surroundings of the replica's own unit, tied to this process.

A unit, and not a child of this process: systemd itself puts the replica's environment together (the manager's, the
unit's Environment= and EnvironmentFile=, drop-ins and all, its user), whatever shell, ssh or cron job vllmctl was
called from; and all that a pull starts is in one cgroup, which ends as a whole. It is tied to us by its stdin: when
we are gone, however we went, that ends, and so does the unit.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO

from supervisord.cli.pull.units import Surroundings
from supervisord.launcher.explain import telling_line
from supervisord.pull.job import Event, Failed, Job, read_event, to_line

#: Seconds for a unit whose stdin ended to be gone; its processes are killed 5 s after they were told to end.
PATIENCE = 15.0
#: What systemd-run itself goes by: not to be changed under it. None of it is secret.
_ITS_OWN = ("LD_", "SYSTEMD_", "DBUS_", "XDG_RUNTIME_DIR", "PATH")


@contextmanager
def pulling(
    job: Job, surroundings: Surroundings, name: str, env: Mapping[str, str], *, system: bool
) -> Iterator[Iterator[Event]]:
    """Start the unit ``name`` and give its events; at the end of the block, however that comes, the unit is gone."""
    ours = dict(env)
    with tempfile.TemporaryFile() as errors:
        command = _command(surroundings, name, ours, system=system)
        try:
            # A group of its own: Ctrl-C on a terminal is for us, and we end it in our way.
            process = subprocess.Popen(
                command,
                env=ours,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                process_group=0,
            )
        except OSError as error:
            yield iter([Failed(job.title, "NoManager", f"cannot run systemd-run: {error.strerror}")])
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdout:
                unspoken = partial(_unspoken, surroundings=surroundings, name=name, system=system)
                yield _events(job, process, errors, unspoken)
        finally:
            _end(process, name, env, system=system)


def _events(
    job: Job, process: subprocess.Popen[str], errors: IO[bytes], unspoken: Callable[[int], str]
) -> Iterator[Event]:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it ended at once, and says why below
        process.stdin.write(to_line(job))
        process.stdin.flush()
    settled = False
    for line in process.stdout:
        event = read_event(line)
        if event is not None:
            settled = settled or isinstance(event, Failed)
            yield event
    if process.wait() != 0 and not settled:
        errors.seek(0)
        why = telling_line(errors.read().decode(errors="replace").splitlines())
        yield Failed(job.title, "Failed", why or unspoken(process.returncode))


def _unspoken(status: int, surroundings: Surroundings, name: str, *, system: bool) -> str:
    """What is known where nobody said a word. Statuses of systemd itself: systemd.exec(5), "Process exit codes"."""
    for its_own, key, value in (
        (200, "WorkingDirectory", surroundings.directory),
        (216, "Group", surroundings.group),
        (217, "User", surroundings.user),
    ):
        if status == its_own and value:
            return f"systemd cannot run anything with the replica's {key}={value}"
    journal = f"journalctl {'--unit' if system else '--user-unit'}={name}"
    return f"the pull ended with status {status}, and said nothing ('{journal}' may say more)"


def _end(process: subprocess.Popen[str], name: str, env: Mapping[str, str], *, system: bool) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        manager = [] if system else ["--user"]
        for verb in (["kill", "--signal=SIGKILL"], ["stop"]):
            subprocess.run(["systemctl", *manager, *verb, name], env=dict(env), capture_output=True, check=False)
        process.kill()
        process.wait()


def _command(surroundings: Surroundings, name: str, env: dict[str, str], *, system: bool) -> list[str]:
    """systemd-run's words. Everybody on the machine can read them, so the values of the environment go through ``env``,
    which is systemd-run's own."""
    properties = ["TimeoutStopSec=5s", *(f"EnvironmentFile={file}" for file in surroundings.environment_files)]
    properties += [f"UnsetEnvironment={name}" for name in surroundings.unset]
    for key, value in (
        # systemd tells a directory that need not be there with "!", and wants to be told with "-".
        ("WorkingDirectory", re.sub("^!", "-", surroundings.directory)),
        ("User", surroundings.user),
        ("Group", surroundings.group),
    ):
        if value:
            properties.append(f"{key}={value}")
    variables = []
    for variable in surroundings.environment:
        key, _, value = variable.partition("=")
        if key.startswith(_ITS_OWN):
            variables.append(f"--setenv={variable}")
        else:
            variables.append(f"--setenv={key}")
            env[key] = value
    return [
        "systemd-run",
        "--system" if system else "--user",
        f"--unit={name}",
        "--description=vllmctl pull",
        "--service-type=exec",
        "--collect",
        "--wait",
        "--pipe",
        "--no-ask-password",
        # What it would say on stderr of the unit's end (its runtime, its memory) would pass for the reason.
        "--quiet",
        *(f"--property={each}" for each in properties),
        *variables,
        "--",
        sys.executable,
        # Not what happens to lie in the working directory.
        "-P",
        "-m",
        "supervisord.pull.main",
    ]
