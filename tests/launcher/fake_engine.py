"""An engine of a few lines, as ``vllm serve`` looks from outside. Standard library only: tests start many.

It tells what it does on its standard output, one JSON object a line, and goes on when told on its standard input:
``listen``, ``healthy``, ``exit N``.
"""

import json
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def tell(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


class Engine(BaseHTTPRequestHandler):
    healthy = False
    names: list[str]

    def do_GET(self) -> None:
        status = 200 if self.path != "/health" or Engine.healthy else 503
        body = json.dumps({"data": [{"id": name} for name in Engine.names]}).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
        tell(path=self.path, status=status, key=self.headers.get("Authorization"))

    def address_string(self) -> str:
        return "local"

    def log_message(self, *_: object) -> None:
        pass


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


def main() -> None:
    words = sys.argv[1:]
    start = words.index("--served-model-name") + 1
    rest = [index for index in range(start, len(words)) if words[index].startswith("--")]
    Engine.names = words[start : rest[0]]
    if "--lie-about-name" in words:
        Engine.names = ["something-else"]
    tell(
        pid=os.getpid(),
        argv=words,
        env=dict(os.environ),
        fds=sorted((link.name for link in Path("/proc/self/fd").iterdir()), key=int)[:-1],
    )
    server: ThreadingHTTPServer | None = None
    for line in sys.stdin:
        match line.split():
            case ["listen"]:
                if "--uds" in words:
                    server = UnixServer(words[words.index("--uds") + 1], Engine)  # type: ignore[arg-type]
                else:
                    address = (words[words.index("--host") + 1], int(words[words.index("--port") + 1]))
                    server = ThreadingHTTPServer(address, Engine)
                threading.Thread(target=server.serve_forever, daemon=True).start()
                tell(listening=True)
            case ["healthy"]:
                Engine.healthy = True
                tell(healthy=True)
            case ["exit", status]:
                os._exit(int(status))
    # A unit has no standard input: ready at once, until it is told to stop.
    if server is None and "--alone" in words:
        Engine.healthy = True
        server = UnixServer(words[words.index("--uds") + 1], Engine)  # type: ignore[arg-type]
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        server.serve_forever()
    os._exit(0)


if __name__ == "__main__":
    main()
