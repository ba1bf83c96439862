"""Every table and key of the configuration, once: loader, JSON schema and docs/configuration.md come from here."""

from __future__ import annotations

from supervisord.config.forms import (
    ADMISSIONS,
    ENDPOINT,
    ENGINES,
    FORWARDED,
    LISTEN,
    MODEL_NAME,
    NETWORK,
    NOT_EMPTY,
    OPTION_NAME,
    ORIGIN,
    PLAIN,
    PRIVATE_FILE,
    REPLICA_NAME,
    ROUTINGS,
    STATUS_LISTEN,
    UNIT,
)
from supervisord.config.kinds import (
    CommandLine,
    Duration,
    EngineOption,
    Environment,
    Flag,
    Key,
    ListOf,
    Named,
    Size,
    Table,
    Text,
    Whole,
)
from supervisord.core.spec import ProxySpec, SupervisorSpec, WakeLimits

_PROXY, _SUPERVISOR, _WAKE = ProxySpec(), SupervisorSpec(), WakeLimits()

_BY_ENDPOINT = "is set by the launcher from the replica's endpoint"
_BY_NAMES = "is set by the launcher from the model's name and aliases"
_NO_TLS = "cannot be used: the supervisor talks plain HTTP to its engines, over loopback or a Unix socket"
#: Options of the engine that are not the person's to set, in vLLM's spelling, and why.
TAKEN_OPTIONS = {
    "host": _BY_ENDPOINT,
    "port": _BY_ENDPOINT,
    "uds": _BY_ENDPOINT,
    "served-model-name": _BY_NAMES,
    "ssl-keyfile": _NO_TLS,
    "ssl-certfile": _NO_TLS,
    "headless": "cannot be used: an engine without an HTTP server can serve nobody",
    "grpc": "cannot be used: the supervisor talks HTTP to its engines",
}

PROXY = Table(
    doc="The public port.",
    keys=(
        Key(
            "listen",
            Text(LISTEN),
            "Where clients connect. Ignored when systemd hands over a socket named `proxy` (then the socket unit "
            "decides).",
            _PROXY.listen,
        ),
        Key(
            "allow_clients",
            ListOf(Text(NETWORK), unique=True),
            'Networks whose clients may connect, e.g. `["127.0.0.0/8", "::1", "192.168.1.0/24"]`. Anybody else is '
            "answered 403 and disconnected, before a byte is read. Unix sockets are always allowed: who may "
            "reach one, its folder decides.",
            (),
            shown="everybody who can connect",
        ),
        Key(
            "trusted_proxies",
            ListOf(Text(NETWORK), unique=True),
            'Networks of reverse proxies whose word on their clients is believed, e.g. `["127.0.0.1", "::1"]`: a '
            "request of theirs counts as that of the right-most address in `Forwarded` or `X-Forwarded-For` that is in "
            "none of these, for `allow_clients`, `max_connections_per_client`, the log, and `forwarded`. Of all others "
            "these fields are dropped. See security.md.",
            (),
            shown="nobody's",
        ),
        Key(
            "api_keys",
            Text(PRIVATE_FILE),
            "The file of the keys of which clients must show one: `NAME:KEY` or `KEY` a line, as an absolute path that "
            "only you can read, or `credential:NAME` (`LoadCredential=` of the unit). `/health` asks for none. Read "
            "again with every reload. See security.md.",
            "",
            shown="no keys are asked for",
        ),
        Key(
            "tls_certificate",
            Text(PRIVATE_FILE),
            "The certificate, and after it its chain, in PEM form: an absolute path or `credential:NAME`. With it the "
            "port speaks TLS, and TLS only. Looked at again every minute: a renewed one holds for new connections.",
            "",
            shown="plain HTTP",
        ),
        Key(
            "tls_key",
            Text(PRIVATE_FILE),
            "Its private key in PEM form, without a password: a file that only you can read, or `credential:NAME`.",
            "",
            shown="none",
        ),
        Key(
            "status_listen",
            Text(STATUS_LISTEN),
            "Where Prometheus and its like find `/metrics`, `/health`, `/ready` and `/status` (monitoring.md), never on"
            " the public port. There is no authentication, so keep it on this machine or a network of your own. Ignored"
            " when systemd hands over a socket named `status`. An address that is taken is an error in the journal and"
            " keeps nothing else from running; a reload tries again.",
            _PROXY.status_listen,
            shown="no such listener",
        ),
        Key("max_body", Size(minimum=1), "Largest request body that is accepted; 413 beyond it.", _PROXY.max_body),
        Key("keepalive", Duration(zero=True), "How long an idle client connection is kept.", _PROXY.keepalive),
        Key(
            "client_header_timeout",
            Duration(),
            "How long a client may take to send the head of a request.",
            _PROXY.client_header_timeout,
        ),
        Key(
            "client_body_timeout",
            Duration(),
            "How long a client may pause within the body of a request; 408 beyond it. On the whole it must send 1 KiB "
            "a second.",
            _PROXY.client_body_timeout,
        ),
        Key(
            "max_connections",
            Whole(minimum=1),
            "How many clients may be connected at a time; one more is answered 503. It has 5 seconds to read that, as "
            "long as not more than an eighth as many are (8 at least): beyond that it is disconnected at once.",
            _PROXY.max_connections,
        ),
        Key(
            "max_connections_per_client",
            Whole(),
            "How many connections one client may have at a time, by its IPv4 address or its IPv6 /64 network; one more "
            "is answered 429. `0`: no limit. Loopback and Unix sockets are never limited: behind a reverse proxy on "
            "this machine all clients are one address, and limiting them is for that proxy, unless it is one of "
            "`trusted_proxies`: then a client's requests in flight count.",
            _PROXY.max_connections_per_client,
        ),
        Key(
            "cors_origins",
            ListOf(Text(ORIGIN), unique=True),
            "Web pages that may use the port from a browser, by their origin as the browser spells it, e.g. "
            '`["https://chat.example", "http://localhost:3000"]`, or `["*"]` for every page that your browser opens. '
            "Preflight requests are answered here, errors can be read too, and what an engine says on the subject is "
            "dropped. A WebSocket (`/v1/realtime`) has no preflight, nor has a POST of a form or a text: of any other "
            "page they are answered 403.",
            (),
            shown="none",
        ),
        Key(
            "forwarded",
            Text(PLAIN, FORWARDED),
            "What engines are told of the client: nothing (`off`, since none needs it), `x-forwarded` "
            "(X-Forwarded-For, -Proto and -Host), `forwarded` (RFC 7239), or `both`. It is the address that the "
            "connection came from, or the client that one of `trusted_proxies` names; what others send in these fields "
            "is always dropped, since vLLM would believe it.",
            _PROXY.forwarded,
        ),
        Key(
            "route_headers",
            Flag(),
            "Tell clients which replica answered (`x-vllmctl-replica`) and why that one (`x-vllmctl-route`).",
            _PROXY.route_headers,
        ),
        Key("connect_timeout", Duration(), "How long a connection to a replica may take.", _PROXY.connect_timeout),
        Key(
            "first_byte_timeout",
            Duration(),
            "How long a replica may take until its first byte. A long prefill is legitimate, so this is long, and "
            "there is no limit on the whole answer.",
            _PROXY.first_byte_timeout,
        ),
        Key(
            "wait_comment_after",
            Duration(never=True),
            "A streaming request that waits for a wake gets an SSE comment after this much silence, and again after"
            ' as much, so that nothing in between gives the connection up. `"infinity"`: never.',
            _PROXY.wait_comment_after,
        ),
        Key(
            "realtime_idle_timeout",
            Duration(never=True),
            "A session of `/v1/realtime` keeps its replica awake for as long as it is open. After this long without an "
            "event from either side it is taken for forgotten, and closed: a microphone that is on sends several a "
            "second, and one that is off long enough for a model to nap can connect anew. Pings are no events. "
            '`"infinity"`: never.',
            _PROXY.realtime_idle_timeout,
        ),
    ),
)

SUPERVISOR = Table(
    doc="The daemon itself.",
    keys=(
        Key(
            "probe_interval", Duration(), "Between two liveness probes of a ready replica.", _SUPERVISOR.probe_interval
        ),
        Key("probe_timeout", Duration(), "How long one probe may take.", _SUPERVISOR.probe_timeout),
        Key(
            "suspect_interval",
            Duration(),
            "Between two probes of a replica that missed one, or whose requests failed. Short, because requests go "
            "elsewhere meanwhile, and cheap: three small requests.",
            _SUPERVISOR.suspect_interval,
        ),
        Key(
            "dead_after",
            Duration(),
            "How long an engine may refuse connections, cut them or answer 5xx to every probe before its unit is "
            "restarted. An engine that dies takes 1 to 3 s to exit, and then systemd restarts it without us: longer "
            "than this only one stays that will not come back.",
            _SUPERVISOR.dead_after,
        ),
        Key(
            "hung_after",
            Duration(),
            "How long an engine with requests in flight may leave probes unanswered without getting anywhere (its "
            "counters of tokens stand still) before its unit is restarted. Long, because a kernel that is compiled "
            "for its first use, or the step of a very long prompt, takes tens of seconds, and a restart ends every "
            "request.",
            _SUPERVISOR.hung_after,
        ),
        Key(
            "hung_idle_after",
            Duration(),
            "The same for one with nothing in flight, which has no reason to be silent and nothing to lose. Three "
            "times `probe_timeout`, so that one stall of the machine is not enough.",
            _SUPERVISOR.hung_idle_after,
        ),
        Key(
            "backoff_min",
            Duration(),
            "A failed start or wake is tried again after this, then after twice as long, and so on.",
            _SUPERVISOR.backoff_min,
        ),
        Key("backoff_max", Duration(), "The longest such pause.", _SUPERVISOR.backoff_max),
        Key(
            "start_timeout",
            Duration(),
            "How long one start of an engine may take. The launcher extends systemd's own start timeout up to this,"
            " as long as the engine makes progress.",
            _SUPERVISOR.start_timeout,
        ),
        Key("wake_step_timeout", Duration(), "How long one step of a wake may take.", _SUPERVISOR.wake_step_timeout),
        Key("sleep_timeout", Duration(), "How long falling asleep may take.", _SUPERVISOR.sleep_timeout),
        Key("stop_timeout", Duration(), "How long one stop of a unit may take.", _SUPERVISOR.stop_timeout),
        Key(
            "gpu_memory",
            Size(),
            "GPU memory that replicas may hold together on each GPU. With it, and `memory.gpu` of the replicas, models "
            "that do not fit together take turns: an idle one rests when another is wanted.",
            shown="not known, so everything is taken to fit",
        ),
        Key("nap_memory", Size(), "Host RAM that sleepers at level 1 may hold together.", shown="no limit"),
        Key(
            "min_residency",
            Duration(zero=True),
            "How long a replica that has become ready is not asked to make room, so that two models in turns get "
            "something done.",
            _SUPERVISOR.min_residency,
        ),
        Key(
            "make_room_after",
            Duration(zero=True),
            "How long a model waits for room before a busy one must finish its requests and rest for it.",
            _SUPERVISOR.make_room_after,
        ),
        Key(
            "drain_timeout",
            Duration(zero=True),
            "How long streams in flight may go on after the daemon is told to stop.",
            _SUPERVISOR.drain_timeout,
        ),
    ),
)

IDLE = Table(
    doc="What becomes of a replica that nobody asks. Each rung is optional; the times count from the end of the "
    "last request, and every rung must come later than the one before.",
    keys=(
        Key(
            "sleep1",
            Duration(never=True),
            "Sleep at level 1: weights go to host RAM, the KV cache is dropped. Fast to wake; costs host RAM as "
            "large as the weights.",
            shown="never",
        ),
        Key(
            "sleep2",
            Duration(never=True),
            "Sleep at level 2: the weights are dropped too, and read again from disk on the wake. Leave it out where "
            "they are on a network mount that can go away: nothing looks for them before they are dropped.",
            shown="never",
        ),
        Key(
            "stop",
            Duration(never=True),
            "Stop the unit: the engine's process ends and gives everything back.",
            shown="never",
        ),
    ),
)

WAKE = Table(
    doc="What becomes of requests that come while the model is not awake.",
    keys=(
        Key(
            "timeout",
            Duration(zero=True),
            "How long a request waits for a replica before it is refused with 503 and Retry-After. The wake itself "
            "goes on.",
            _WAKE.timeout,
        ),
        Key(
            "max_waiting",
            Whole(),
            "How many requests of this model may wait at the same time; the next is refused with `queue_full`.",
            _WAKE.max_waiting,
        ),
        Key(
            "canary",
            Flag(),
            "Let an engine answer a short fixed prompt when it is first ready and after every wake, and let requests "
            "in only if both answers are the same: an engine that was woken without its weights answers 200 and "
            "garbage, and nothing else tells. It costs a prompt of a dozen tokens and four tokens of an answer "
            "per wake.",
            _WAKE.canary,
        ),
    ),
)

MEMORY = Table(
    doc="What the replica needs, where you know it.",
    keys=(
        Key("gpu", Size(), "GPU memory while awake.", shown="unknown"),
        Key("nap", Size(), "Host RAM while asleep at level 1.", shown="unknown"),
    ),
)

REPLICA = Table(
    doc="One engine under one systemd unit. Without `unit` it is a bundled replica: `vllm@R.service` runs what "
    "`[models.NAME.serve]` says.",
    keys=(
        Key("unit", Text(UNIT), "Your own unit, e.g. a Quadlet's. Needs `endpoint`.", shown="`vllm@R.service`"),
        Key(
            "endpoint",
            Text(ENDPOINT),
            "Where the engine answers: `http://HOST:PORT` or `unix:/PATH`. A bundled replica may have a Unix socket"
            " or a loopback address; by default it has a Unix socket that only you can reach.",
            shown="`unix:$XDG_RUNTIME_DIR/vllm/R/engine.sock`",
        ),
        Key(
            "gpus",
            ListOf(Whole(maximum=1023), unique=True),
            "The GPUs it occupies, numbered as `nvidia-smi` does. A bundled engine sees only these. Operations on "
            "one GPU exclude each other.",
            (),
            shown="unknown; shared with nobody",
        ),
        Key("memory", MEMORY, MEMORY.doc),
    ),
)

SERVE = Table(
    doc="How a bundled replica starts its engine. Any key that is not in this table is an option of vLLM by its own"
    " name: `max-model-len = 8192` (or `max_model_len`) becomes `--max-model-len 8192`, `enable-prefix-caching "
    "= false` becomes `--no-enable-prefix-caching`, a list becomes several values, a table becomes JSON. An "
    "explicit `0` or `false` is passed on; only what is not there is left to vLLM.",
    keys=(
        Key("model", Text(NOT_EMPTY), "A model id, or the path of a directory.", required=True),
        Key("engine", Text(PLAIN, ENGINES), "`vllm`, or `simulator` (needs no GPU, and says so).", "vllm"),
        Key(
            "command",
            CommandLine(),
            "The command before the model: a list of words, or one text that is split as a shell does. For a vLLM "
            'in its own virtual environment: `"/opt/vllm/bin/vllm serve"`.',
            (),
            shown="`vllm serve`",
        ),
        Key("args", ListOf(Text(PLAIN)), "Further arguments, passed on as they are after everything else.", ()),
        Key("env", Environment(), "Environment variables of the engine.", {}),
    ),
    others=EngineOption(),
    others_form=OPTION_NAME,
    taken=tuple(
        (spelling, why)
        for name, why in TAKEN_OPTIONS.items()
        for spelling in dict.fromkeys((name, name.replace("-", "_")))
    ),
)

MODEL = Table(
    doc="One name that clients ask for, served by interchangeable replicas.",
    keys=(
        Key("aliases", ListOf(Text(MODEL_NAME), unique=True), "Other names that clients may ask for.", ()),
        Key(
            "routing",
            Text(PLAIN, ROUTINGS),
            "How requests are spread: `prefill` (where the first token is predicted soonest; a conversation stays "
            "where its prefix is cached unless that costs too much), `adaptive` (a conversation goes on where its "
            "prefix is cached, anything else takes turns), `roundrobin`, or `affinity` (everything of one prefix to "
            "one replica). What each is good for: routing.md.",
            "prefill",
        ),
        Key(
            "admission",
            Text(PLAIN, ADMISSIONS),
            "What `prefill` does where long conversations do not all fit into the KV caches, which its engines tell: "
            "`kv` lets no more of them in than fit and has the others wait for a seat (at most two minutes, or half "
            "of `wake.timeout`; then they go all the same), so that those that are in find their context cached; "
            "short requests pass. `all` lets everybody in at once, and all of them are slow. It matters only where "
            "conversations come back within seconds, and was measured both ways: routing.md.",
            "kv",
        ),
        Key("idle", IDLE, IDLE.doc),
        Key("wake", WAKE, WAKE.doc),
        Key("serve", SERVE, SERVE.doc),
        Key(
            "replicas",
            Named("R", REPLICA_NAME, REPLICA),
            REPLICA.doc,
            shown="one bundled replica of the model's name, if there is a `serve` table",
        ),
    ),
)

ROOT = Table(
    keys=(
        Key("proxy", PROXY, PROXY.doc),
        Key("supervisor", SUPERVISOR, SUPERVISOR.doc),
        Key("models", Named("NAME", MODEL_NAME, MODEL), MODEL.doc),
    ),
)
