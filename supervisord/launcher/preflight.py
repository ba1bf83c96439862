"""What must hold before the engine is started, looked at here so that the reason is one clear line."""

from __future__ import annotations

import shutil
import socket
import stat
from pathlib import Path

from supervisord.config.endpoints import Endpoint
from supervisord.launcher.command import Launch, LaunchError


class Busy(Exception):
    """Another process answers on the endpoint; a later try may find it free."""


def preflight(launch: Launch) -> str:
    """The path of the program to execute, after everything was checked and a stale socket removed.

    Raises ``LaunchError`` for what only a person can put right, ``Busy`` when the endpoint is taken.
    """
    program = executable(launch)
    if launch.model_path and not Path(launch.model_path).exists():
        raise LaunchError(f"cannot find the model: there is no {launch.model_path}")
    clear(launch.endpoint)
    return program


def executable(launch: Launch) -> str:
    """Where the command's first word is, by the engine's own PATH."""
    word, path = launch.argv[0], launch.env.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    found = shutil.which(word, path=path)
    if found:
        return found
    if "/" in word:
        state = "is not executable" if Path(word).exists() else "does not exist"
        raise LaunchError(f"cannot start the engine: {word} {state}")
    advice = f'give its full path in serve: command = "/.../{word} serve"'
    raise LaunchError(f"cannot start the engine: no {word!r} in PATH={path}; {advice}")


def clear(endpoint: Endpoint) -> None:
    """See that nobody listens there, and remove the socket file that a killed engine left (vLLM exits 1 over it)."""
    if _answers(endpoint):
        raise Busy(f"cannot start the engine: another process listens on {endpoint} already")
    if not endpoint.path:
        return
    path = Path(endpoint.path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise LaunchError(f"cannot listen on {endpoint}: there is something that is no socket")
            path.unlink()
    except OSError as error:
        raise LaunchError(f"cannot prepare {endpoint}: {error.strerror or error}: {error.filename}") from error


def _answers(endpoint: Endpoint) -> bool:
    family = socket.AF_UNIX if endpoint.path else socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(endpoint.path or (endpoint.host, endpoint.port))
        except TimeoutError:
            return True  # a full backlog: somebody listens and does not accept
        except OSError:
            return False
    return True
