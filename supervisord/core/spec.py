"""What the configuration says, as plain values: the only form in which the rest of the code knows it.

Durations are seconds (float), sizes are bytes (int). ``None`` means "not set", never "zero".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: A value of ``[models.NAME.serve]``: what vLLM's option of that name is given. A table becomes JSON.
OptionValue = str | int | float | bool | list["OptionValue"] | Mapping[str, "OptionValue"]


@dataclass(frozen=True, slots=True)
class IdleLadder:
    """``[models.NAME.idle]``: seconds without a request after which a replica goes one rung down."""

    sleep1: float | None = None
    sleep2: float | None = None
    stop: float | None = None


@dataclass(frozen=True, slots=True)
class WakeLimits:
    """``[models.NAME.wake]``."""

    #: How long one request waits for a replica before it is refused with Retry-After. Seconds.
    timeout: float = 300.0
    #: Requests of this model that may wait at the same time; the next is refused with ``queue_full``.
    max_waiting: int = 2048
    #: Compare a short greedy answer after every wake with the one of the first readiness, before any request is let in.
    canary: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """``[models.NAME.replicas.R]``: one engine process (group) under one systemd unit."""

    name: str
    model: str
    #: The systemd unit, e.g. ``vllm@R.service`` (bundled) or a Quadlet's ``frank-medium-a.service``.
    unit: str
    #: ``http://127.0.0.1:7771`` or ``unix:/absolute/path``.
    endpoint: str
    #: True when the unit is ours (``vllm@R.service``) and its command line comes from ``serve``.
    bundled: bool = False
    #: GPU indices that it occupies. Operations on one GPU exclude each other. Empty: unknown, shared with nobody.
    gpus: tuple[int, ...] = ()
    #: Bytes of GPU memory while awake / of host RAM while napping at level 1, where the person declared them.
    gpu_memory: int | None = None
    nap_memory: int | None = None


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """``[models.NAME.serve]``: how the bundled unit starts the engine."""

    #: The positional argument of ``vllm serve``: a model id or a directory.
    model: str
    #: ``vllm`` or ``simulator``.
    engine: str = "vllm"
    #: The command before the model; empty means the engine's usual one (``vllm serve``).
    command: tuple[str, ...] = ()
    #: vLLM options by their own names (``max-model-len`` and ``max_model_len`` are the same key).
    #: An explicit 0 or false is here.
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    #: Raw arguments, appended as they are.
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that the engine is started with."""
        value = self.options.get("lora-modules", ())
        modules = value if isinstance(value, list) else [value]
        names = [
            module.partition("=")[0] if isinstance(module, str) else module.get("name")
            for module in modules
            if isinstance(module, str | Mapping)
        ]
        return tuple(name for name in names if isinstance(name, str) and name)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """``[models.NAME]``: one name that clients ask for, served by interchangeable replicas."""

    name: str
    replicas: tuple[ReplicaSpec, ...]
    aliases: tuple[str, ...] = ()
    #: ``prefill``, ``adaptive``, ``roundrobin`` or ``affinity`` (see proxy/routing.py).
    routing: str = "prefill"
    #: ``kv``: long conversations wait where they would push each other out of the cache; ``all``: nobody does.
    admission: str = "kv"
    idle: IdleLadder = IdleLadder()
    wake: WakeLimits = WakeLimits()
    serve: ServeSpec | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """See ``ServeSpec``."""
        return self.serve.adapters if self.serve is not None else ()


@dataclass(frozen=True, slots=True)
class ProxySpec:
    """``[proxy]``: the public port."""

    #: ``host:port``; ignored when systemd hands over a socket named ``proxy``.
    listen: str = "127.0.0.1:8000"
    #: Networks whose clients may connect, ``ADDRESS`` or ``ADDRESS/PREFIX``; empty: not set, everybody.
    allow_clients: tuple[str, ...] = ()
    #: Networks of reverse proxies whose word on their clients is believed; empty: nobody's.
    trusted_proxies: tuple[str, ...] = ()
    #: The file of the keys that clients must show: an absolute path or ``credential:NAME``; empty: not set, none.
    api_keys: str = ""
    #: The files of the certificate (with its chain) and of its key, as above; both or none. Empty: plain HTTP.
    tls_certificate: str = ""
    tls_key: str = ""
    #: ``host:port`` or ``unix:/path`` of the status listener; None: there is none, unless systemd hands one over.
    status_listen: str | None = None
    #: Largest request body that is accepted, bytes (413 beyond).
    max_body: int = 256 * 1024 * 1024
    #: Seconds an idle client connection is kept.
    keepalive: float = 75.0
    #: Seconds a client may take to send its request head.
    client_header_timeout: float = 30.0
    #: Seconds a client may pause within a request body; on the whole it must send 1 KiB a second.
    client_body_timeout: float = 30.0
    #: Client connections at a time; one more is answered 503.
    max_connections: int = 8192
    #: The same of one client address, loopback and Unix sockets excepted; it is answered 429. 0: no limit.
    max_connections_per_client: int = 0
    #: Origins of web pages that may use the port from a browser, or ``*``; empty: none.
    cors_origins: tuple[str, ...] = ()
    #: What engines are told of the client: ``off``, ``x-forwarded``, ``forwarded`` or ``both``.
    forwarded: str = "off"
    #: Whether answers tell the replica and why it was chosen.
    route_headers: bool = True
    #: Seconds to connect to a replica.
    connect_timeout: float = 2.0
    #: Seconds until a replica's first byte (a long prefill is legitimate; there is no total timeout).
    first_byte_timeout: float = 1800.0
    #: Seconds of silence while a streaming request waits, after which SSE comments are sent; None: never.
    wait_comment_after: float | None = 15.0
    #: Seconds without an event after which a realtime session is closed; None: never.
    realtime_idle_timeout: float | None = 600.0


@dataclass(frozen=True, slots=True)
class SupervisorSpec:
    """``[supervisor]``: the daemon itself. Seconds."""

    #: Between two liveness probes of a ready replica, and how long one may take.
    probe_interval: float = 5.0
    probe_timeout: float = 5.0
    #: Between two looks at a replica under suspicion.
    suspect_interval: float = 0.5
    #: How long an engine that refuses, resets or answers 5xx to every look may do so before its unit is restarted.
    dead_after: float = 3.0
    #: The same for one that does not answer in time and shows no progress: with requests in flight, and without.
    hung_after: float = 60.0
    hung_idle_after: float = 15.0
    #: A failed start or wake is tried again after min * 2**n, at most max.
    backoff_min: float = 2.0
    backoff_max: float = 300.0
    #: How long one start of a unit, one call of a sleep or wake sequence, one stop may take.
    start_timeout: float = 1800.0
    wake_step_timeout: float = 120.0
    sleep_timeout: float = 120.0
    stop_timeout: float = 120.0
    #: GPU memory that replicas may hold together on each GPU; None: not known, so everything is taken to fit.
    gpu_memory: int | None = None
    #: Host RAM that sleepers at level 1 may hold together; None: no limit.
    nap_memory: int | None = None
    #: How long a replica that has become ready is not asked to make room, and how long one waits before a busy one is.
    min_residency: float = 60.0
    make_room_after: float = 30.0
    #: How long streams in flight may go on after SIGTERM.
    drain_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Config:
    """The whole merged configuration."""

    proxy: ProxySpec = ProxySpec()
    supervisor: SupervisorSpec = SupervisorSpec()
    models: tuple[ModelSpec, ...] = ()
    #: The files it came from, in the order in which they were merged.
    files: tuple[str, ...] = ()
