"""registry.py PORT COMMAND ...: run a command while 127.0.0.1:PORT is a registry with one small image, vllm:1."""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def image() -> tuple[bytes, dict[str, bytes]]:
    """A manifest and what it names (the OCI image format)."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        member = tarfile.TarInfo("engine")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(bytes(100_000)))
    layer = gzip.compress(plain.getvalue(), mtime=0)
    rootfs = {"type": "layers", "diff_ids": [digest(plain.getvalue())]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()
    kind = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", "digest": digest(config), "size": len(config)},
        "layers": [{"mediaType": f"{kind}.layer.v1.tar+gzip", "digest": digest(layer), "size": len(layer)}],
    }
    return json.dumps(manifest).encode(), {digest(config): config, digest(layer): layer}


MANIFEST, BLOBS = image()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        _, _, rest = self.path.partition("/v2/vllm/")
        if self.path == "/v2/":
            self.answer(200, b"{}", "application/json")
        elif rest in ("manifests/1", f"manifests/{digest(MANIFEST)}"):
            self.answer(200, MANIFEST, "application/vnd.oci.image.manifest.v1+json")
        elif rest.startswith("blobs/") and rest[6:] in BLOBS:
            self.answer(200, BLOBS[rest[6:]], "application/octet-stream")
        else:
            error = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
            self.answer(404, json.dumps(error).encode(), "application/json")

    def answer(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Content-Digest", digest(data))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = subprocess.run(sys.argv[2:], check=False).returncode
        server.shutdown()
    sys.exit(code)
