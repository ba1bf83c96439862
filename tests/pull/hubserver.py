"""A hub on loopback that speaks as much of the hub's protocol as huggingface_hub needs to fetch a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repo:
    """One repository: revision -> files. ``gated``/``private``: only with one of the hub's tokens."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    private: bool = False

    @staticmethod
    def commit(files: dict[str, bytes]) -> str:
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a branch, tag or commit."""
        for name, files in self.revisions.items():
            if revision in (name, self.commit(files)):
                return self.commit(files), files
        return None


@dataclass
class Hub:
    """What the hub has, and what it was asked."""

    address: str
    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    #: ``METHOD path`` of every request, in order.
    asked: list[str] = field(default_factory=list)
    #: Files (by name) whose second half is held back until ``release``; ``held`` says that one is.
    hold: set[str] = field(default_factory=set)
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> list[str]:
        """The files whose contents were sent, each ``org/name/file``."""
        found = [line.removeprefix("GET /").partition("/resolve/") for line in self.asked if "/resolve/" in line]
        return sorted(f"{repo}/{rest.partition('/')[2]}" for repo, _, rest in found if not repo.startswith("HEAD"))


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub for the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An idle connection must not keep the server's end waiting.
    timeout = 1.0

    def log_message(self, *words: object) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.asked.append(f"{self.command} {unquote(self.path)}")
        url = urlsplit(self.path)
        parts = unquote(url.path).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api(parts, parse_qs(url.query))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "", "no such route")

    def _repo(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """What may be seen, or None when it was refused."""
        repo = self.hub.repos.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = token in self.hub.tokens
        if token and not known:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not known):
            self._refuse(401 if not known else 404, "RepoNotFound", "Repository not found")
        elif repo.gated and not known:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        elif (found := repo.files(revision)) is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def _api(self, parts: list[str], query: dict[str, list[str]]) -> None:
        name = "/".join(parts[2:4])
        what, revision = (parts[4], "/".join(parts[5:])) if len(parts) > 5 else ("revision", "main")
        if (found := self._repo(name, revision)) is None:
            return
        commit, files = found
        entries = [{"path": file, **_described(file, data)} for file, data in files.items()]
        if what == "tree":
            self._json([{"type": "file", **entry} for entry in entries])
            return
        siblings = [
            {"rfilename": e["path"], **({k: e[k] for k in e if k != "path"} | {"blobId": e["oid"]} if query else {})}
            for e in entries
        ]
        self._json({"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def _file(self, name: str, revision: str, file: str) -> None:
        if (found := self._repo(name, revision)) is None:
            return
        commit, files = found
        if file not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        data, described = files[file], _described(file, files[file])
        etag = described["lfs"]["oid"] if "lfs" in described else described["oid"]
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(data) // 2
        try:
            self.wfile.write(data[:half])
            self.wfile.flush()
            if file in self.hub.hold:
                self.hub.held.set()
                self.hub.release.wait()
            self.wfile.write(data[half:])
        except OSError:
            self.close_connection = True  # whoever asked is gone

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str, message: str) -> None:
        data = json.dumps({"error": message}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _described(file: str, data: bytes) -> dict[str, object]:
    """As the hub's API does it: weights are in LFS, under their SHA-256, the rest under git's SHA-1."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    described: dict[str, object] = {"size": len(data), "oid": blob}
    if file.endswith((".safetensors", ".bin")):
        sha = hashlib.sha256(data).hexdigest()
        described["lfs"] = {"oid": sha, "sha256": sha, "size": len(data), "pointerSize": 130}
    return described
