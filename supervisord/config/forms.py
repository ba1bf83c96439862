"""How the texts of the configuration may look, and the words that some of them are limited to."""

from __future__ import annotations

from supervisord.config.kinds import Form

# A NUL cannot be in a program's arguments or environment.
PLAIN = Form(r"[^\x00]*", "a text")
NOT_EMPTY = Form(r"[^\x00]+", "a text that is not empty")
MODEL_NAME = Form(
    r"[A-Za-z0-9_][!-~]*",
    "a model's name: letters, digits and punctuation without spaces, beginning with a letter or digit",
)
REPLICA_NAME = Form(
    r"[A-Za-z0-9][A-Za-z0-9_.-]*",
    "a replica's name: letters, digits, '_', '.' and '-', beginning with a letter or digit",
)
#: With "-" in front systemd would take it too, but its tools would take it for an option.
UNIT = Form(
    r"[A-Za-z0-9:_.\\][A-Za-z0-9:_.\\-]*(?:@[A-Za-z0-9:_.@\\-]+)?\.service",
    "the name of a systemd service (one that does not begin with '-'), e.g. chat-a.service",
)
ENDPOINT = Form(
    r"(?:http://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}|unix:/[^\x00]+)",
    "an endpoint: http://HOST:PORT or unix:/ABSOLUTE/PATH, without a path after the port",
)
LISTEN = Form(
    r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}", "an address: HOST:PORT, e.g. 127.0.0.1:8000 or [::1]:8000"
)
NETWORK = Form(
    r"[0-9A-Fa-f:.]+(?:/[0-9]{1,3})?", "an IP address or a network: ADDRESS/PREFIX, e.g. 192.168.1.0/24 or fd00::/8"
)
PRIVATE_FILE = Form(
    r"(?:/[^\x00]+|credential:[A-Za-z0-9_-][A-Za-z0-9_.-]*)",
    "a file: an absolute path, or credential:NAME for a credential of the unit",
)
ORIGIN = Form(
    r"\*|[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?",
    "an origin in lower case and without a path, e.g. https://chat.example or http://localhost:3000, or *",
)
STATUS_LISTEN = Form(
    rf"(?:{LISTEN.pattern}|unix:/[^\x00]+)", "an address: HOST:PORT, e.g. 127.0.0.1:9100, or unix:/ABSOLUTE/PATH"
)
VARIABLE = Form(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
OPTION_NAME = Form(
    r"[A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*", "an option's name as vLLM spells it, without the leading dashes"
)

ENGINES = ("vllm", "simulator")
FORWARDED = ("off", "x-forwarded", "forwarded", "both")
ADMISSIONS = ("kv", "all")
ROUTINGS = ("prefill", "adaptive", "roundrobin", "affinity")
