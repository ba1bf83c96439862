"""One look at an engine that may be loading: is it there, is it the right model, is it our own process?"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass

from supervisord.config.endpoints import Endpoint
from supervisord.launcher.processes import group_of, listener, name_of

#: Seconds that one answer may take; bytes of it that are read.
TIMEOUT, LIMIT = 5.0, 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """``ready``, or what is still missing in plain words. ``wrong``: something answers, but not what was started."""

    ready: bool
    text: str
    wrong: bool = False


def look(endpoint: Endpoint, served_name: str, main: int, api_key: str = "") -> Answer:
    """Ask once. ``main`` is the engine's process: nobody else may answer for it."""
    try:
        status, _, strangers = _get(endpoint, "/health", main, api_key)
    except OSError:
        return Answer(False, "loading")
    if strangers:
        who = ", ".join(f"{pid} ({name_of(pid)})" for pid in sorted(strangers))
        return Answer(False, f"another process answers on {endpoint}: {who}", wrong=True)
    if status != 200:
        return Answer(False, f"loading (/health answers {status})")
    try:
        status, body, _ = _get(endpoint, "/v1/models", main, api_key)
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return Answer(False, f"/v1/models gives no list of models: {error}", wrong=True)
    if served_name not in names:
        return Answer(False, f"serves {', '.join(names) or 'nothing'} instead of {served_name}", wrong=True)
    return Answer(True, f"serving {served_name}")


def _get(endpoint: Endpoint, path: str, main: int, api_key: str) -> tuple[int, bytes, set[int]]:
    """Status and body of one GET, and the listener's processes where none of them is the engine's. Raises OSError."""
    deadline = time.monotonic() + TIMEOUT
    family = socket.AF_UNIX if endpoint.path else socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(endpoint.path or (endpoint.host, endpoint.port))
        holders = listener(endpoint, connection)
        # One that has ended (a wrapper that passed its socket on) tells nothing.
        strangers = set() if holders & group_of(main) else {pid for pid in holders if name_of(pid)}
        host = str(endpoint).removeprefix("http://") if endpoint.host else "localhost"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        # HTTP/1.0: the answer ends with the connection, and cannot be chunked.
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n{key}\r\n".encode())
        received = b""
        while len(received) < LIMIT:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (piece := connection.recv(65536)):
                break
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ConnectionError("not an HTTP answer")
    return int(words[1]), body, strangers
