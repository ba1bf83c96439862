#!python
"""A podman for tests, with the manners of the real one: progress and errors on stderr, the image's identity on stdout,
125 for its own failures, a child in a session of its own. It keeps its images, and what it was asked, in the file that
$FAKE_PODMAN names.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

words = sys.argv[1:]
file = Path(os.environ["FAKE_PODMAN"])
state = json.loads(file.read_text()) if file.exists() else {"ran": [], "images": {}}
state["ran"].append(words)
image = words[-1]

FAILURES = {
    "registry.example/gone:1": "reading manifest 1 in registry.example/gone: manifest unknown",
    "registry.example/secret:1": "reading manifest 1 in registry.example/secret: unauthorized: authentication required",
    "registry.example/large:1": "writing blob: storing blob to file: write /var/tmp/x: no space left on device",
    "nowhere.example/vllm:1": "pinging container registry nowhere.example: dial tcp: lookup nowhere: no such host",
}


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if "inspect" in words:
    file.write_text(json.dumps(state))
    if image not in state["images"]:
        say(f"Error: inspecting object: {image}: image not known")
        sys.exit(125)
    print(state["images"][image])
    sys.exit(0)

if "hang" in image:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    helper = subprocess.Popen(
        [sys.executable, "-c", f"{deaf}; threading.Event().wait()"], start_new_session=True, stdout=subprocess.PIPE
    )
    helper.stdout.readline()
say(f"Trying to pull {image}...")
say("Getting image source signatures")
say("Copying blob sha256:aa\x1b[0m")
if "hang" in image:
    threading.Event().wait()
if image in FAILURES:
    file.write_text(json.dumps(state))
    say(f"Error: initializing source docker://{image}: {FAILURES[image]}")
    sys.exit(125)
say("Copying config sha256:bb")
say("Writing manifest to image destination")
state["images"][image] = "bb" * 32
file.write_text(json.dumps(state))
print(state["images"][image])
