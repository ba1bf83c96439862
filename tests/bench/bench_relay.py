"""What the relay costs, beside a direct connection, nginx and other routers, in one run and taking turns.

    .venv/bin/python tests/bench/bench_relay.py [--rounds 3] [--peers direct,ours,nginx,...] [--cache DIR]
        [--checkout NAME=DIR]

Peers that are not in the cache directory (see tests/bench/install-peers) are named and skipped. ``--checkout`` adds the
proxy of another checkout. The proxy under test has one core, two stub engines and the load share another. CPU is what
the kernel counted for the peer's processes, so it does not depend on what else the machine does; latencies do.

``ours`` is the port as it is shipped: on uvloop, with the default routing, the supervisor's own core and dispatcher for
admission and their publication of what changed, metrics, and the access log, formatted, to /dev/null. What is not in
it: systemd and a bus to publish to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from relayload import Load, connected, request
from stubengine import SILENT, TICKS, TOGETHER, engine

SCRIPT = str(Path(__file__).resolve())
REPOSITORY = Path(__file__).resolve().parents[2]


# our proxy


def set_up_heap() -> None:
    """As the daemon does, where the measured checkout has it; an editable installation would take it from its own."""
    import supervisord

    if Path(supervisord.__file__).with_name("heap.py").exists():
        from supervisord.heap import keep_freed_memory

        keep_freed_memory()


async def serve(port: int, engines: list[int]) -> None:
    from awake import awake

    from proxy.server import PublicProxy
    from supervisord.core.spec import ModelSpec, ProxySpec, ReplicaSpec
    from supervisord.sd.journal import set_up_logging

    set_up_logging(logging.INFO, {})
    set_up_heap()
    replicas = tuple(
        ReplicaSpec(f"r{n}", "m", f"u{n}.service", f"http://127.0.0.1:{number}") for n, number in enumerate(engines)
    )
    models = [ModelSpec("m", replicas)]
    proxy = PublicProxy(await awake(models), ProxySpec(), models, lambda failover: None)
    with contextlib.suppress(ImportError):  # a checkout from before there were metrics
        from proxy.tally import RequestTally

        proxy.observer = RequestTally()
    await proxy.start([socket.create_server(("127.0.0.1", port), backlog=4096)])
    print("ready", flush=True)
    await asyncio.Event().wait()


# the peers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


NGINX = """
worker_processes 1; daemon off; pid {dir}/pid; error_log /dev/null; worker_rlimit_nofile 20000;
events {{ worker_connections 10000; }}
http {{
  access_log /dev/null; client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir};
  uwsgi_temp_path {dir}; scgi_temp_path {dir}; client_max_body_size 256m; client_body_buffer_size 1m;
  keepalive_requests 10000000;
  upstream engines {{ {servers} keepalive 512; keepalive_requests 10000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{
    proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_request_buffering on; proxy_read_timeout 600s; }} }}
}}
"""


class Peer:
    """A process between the load and the engines."""

    def __init__(self, name: str, options: argparse.Namespace, engines: list[int], cpu: int | None) -> None:
        self.name, self.port = name, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        cache, python = options.cache, sys.executable
        environment = dict(os.environ)
        pinned = ["taskset", "-c", str(cpu)] if cpu is not None else []
        urls = [f"http://127.0.0.1:{engine}" for engine in engines]
        if name == "direct":
            self.port = engines[0]
            return
        if name in options.checkouts:
            checkout = options.checkouts[name]
            environment["PYTHONPATH"] = str(checkout)
            script = str(Path(__file__).resolve())
            command = [python, script, "serve", str(self.port), ",".join(map(str, engines))]
        elif name == "nginx":
            folder = Path(tempfile.mkdtemp(prefix="bench-nginx-"))
            servers = "".join(f"server 127.0.0.1:{engine};" for engine in engines)
            (folder / "conf").write_text(NGINX.format(dir=folder, port=self.port, servers=servers))
            command = [str(_nginx(cache)), "-c", str(folder / "conf")]
        elif name == "vllm-router":
            command = [str(cache / "routers/bin/python"), "-m", "vllm_router.launch_router", "--worker-urls", *urls]
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--policy", "round_robin"]
            command += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
        else:
            command = [str(cache / "routers/bin/python"), "-m", "sglang_router.launch_router", "--worker-urls", *urls]
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--policy", "round_robin"]
            command += ["--prometheus-port", str(free_port()), "--log-level", "warn"]
        self.process = subprocess.Popen(
            [*pinned, *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def processes(self) -> list[int]:
        if self.process is None:
            return []
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    queue += [int(child) for child in (task / "children").read_text().split()]
        return found

    def cpu(self) -> float:
        """Seconds that its threads have run."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def memory(self) -> int:
        """Resident bytes."""
        return sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for pid in self.processes()
        )

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _nginx(cache: Path) -> Path:
    return cache / "nginx/usr/sbin/nginx"


# what is measured


async def one_by_one(peer: Peer, number: int, size: int = 0) -> float:
    """Median seconds of an answer, one request after another."""
    (load,) = await connected(peer.port, 1)
    asked, times = request(size=size), []
    for _ in range(number):
        began = time.monotonic()
        times.append(await load.ask(asked) - began)
    load.transport.abort()
    return statistics.median(times[number // 10 :])


async def throughput(peer: Peer, seconds: float, at_once: int = 64) -> tuple[float, float]:
    """Requests a second, and the peer's CPU seconds per request."""
    loads, asked, number = await connected(peer.port, at_once), request(), 0
    cpu, began = peer.cpu(), time.monotonic()

    async def client(load: Load) -> None:
        nonlocal number
        while time.monotonic() < began + seconds:
            await load.ask(asked)
            number += 1

    await asyncio.gather(*map(client, loads))
    took, used = time.monotonic() - began, peer.cpu() - cpu
    for load in loads:
        load.transport.abort()
    return number / took, used / number


async def streams(peer: Peer, number: int, events: int) -> tuple[float, float, float]:
    """CPU seconds per event, and the median and 99th percentile of an event's way, once all streams are under way.

    What it takes to open them is in other columns (requests, first bytes at once).
    """
    loads = await connected(peer.port, number)
    asked = request(TICKS, events)
    ended = asyncio.gather(*(load.ask(asked) for load in loads))
    await asyncio.gather(*(load.under_way for load in loads if load.under_way is not None))
    cpu, before = peer.cpu(), [len(load.delays) for load in loads]
    await ended
    used = peer.cpu() - cpu
    delays = sorted(delay for load, seen in zip(loads, before, strict=True) for delay in load.delays[seen:])
    for load in loads:
        load.transport.abort()
    return used / len(delays), delays[len(delays) // 2], delays[int(len(delays) * 0.99)]


async def fan_in(peer: Peer, number: int, engines: int) -> float:
    """Seconds until the last of ``number`` first bytes that the engines send at the same moment."""
    loads = await connected(peer.port, number)
    share = number if peer.name == "direct" else number // engines
    await asyncio.gather(*(load.ask(request(TOGETHER, share)) for load in loads))
    for load in loads:
        load.transport.abort()
    return max(load.delays[0] for load in loads)


async def memory(peer: Peer, number: int) -> float:
    """Resident bytes per open stream."""
    before = peer.memory()
    loads = await connected(peer.port, number)
    for load in loads:
        load.ask(request(SILENT)).add_done_callback(lambda ended: ended.exception() if not ended.cancelled() else None)
    await asyncio.gather(*(load.first for load in loads))
    after = peer.memory()
    for load in loads:
        load.transport.abort()
    return (after - before) / number


async def measure(peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    found["c=1 us"] = 1e6 * await one_by_one(peer, 400)
    found["400 kB us"] = 1e6 * await one_by_one(peer, 60, 400_000)
    rate, cpu = await throughput(peer, options.seconds)
    found["req/s c=64"], found["CPU us/req"] = rate, 1e6 * cpu
    if not options.quick:
        cpu, middle, slow = await streams(peer, 256, 300)
        found["CPU us/event"], found["event p50 us"], found["event p99 us"] = 1e6 * cpu, 1e6 * middle, 1e6 * slow
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                found["fan-in ms"] = 1e3 * await fan_in(peer, 256, 2)
    return found


async def ready(peer: Peer) -> None:
    """Wait until a request is answered: routers look for their workers first."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, RuntimeError):
                (load,) = await connected(peer.port, 1)
                await load.ask(request())
                load.transport.abort()
                return
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[Peer]:
    try:
        yield peer
    finally:
        peer.stop()


async def bench(options: argparse.Namespace) -> None:
    engines = [free_port(), free_port()]
    cpus = sorted(os.sched_getaffinity(0))
    mine, theirs = (cpus[1], cpus[0]) if len(cpus) > 1 else (None, None)
    if mine is not None:
        os.sched_setaffinity(0, {mine})
    script = [sys.executable, SCRIPT, "engine", ",".join(map(str, engines)), "-"]
    process = subprocess.Popen(script, stdout=subprocess.PIPE)  # noqa: ASYNC220 - nothing else runs yet
    assert process.stdout is not None
    process.stdout.readline()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in options.peers}
    try:
        for round_number in range(options.rounds):
            for name in options.peers:
                try:
                    with running(Peer(name, options, engines, theirs)) as peer:
                        await ready(peer)
                        async with asyncio.timeout(120):
                            found = await measure(peer, options)
                        if options.streams:
                            async with asyncio.timeout(60):
                                found["kB/stream"] = await memory(peer, options.streams) / 1000
                        results[name].append(found)
                        shown = "  ".join(f"{key} {value:.4g}" for key, value in found.items())
                        print(f"round {round_number} {name:12} {shown}", flush=True)
                except (OSError, RuntimeError, TimeoutError) as error:
                    print(f"round {round_number} {name}: failed: {type(error).__name__} {error}", flush=True)
    finally:
        process.kill()
        process.wait()
    report(results)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    columns = list(dict.fromkeys(key for rounds in results.values() for found in rounds for key in found))
    print("\n| peer | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, rounds in results.items():
        cells = []
        for key in columns:
            values = sorted(found[key] for found in rounds if key in found)
            cells.append(
                f"{statistics.median(values):,.4g} ({values[0]:,.4g}-{values[-1]:,.4g})" if values else "failed"
            )
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if len(sys.argv) == 4 and sys.argv[1] in ("engine", "serve"):
        import uvloop

        role, first, second = sys.argv[1:]
        work = engine(first) if role == "engine" else serve(int(first), [int(port) for port in second.split(",")])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of requests, per round and peer")
    parser.add_argument("--streams", type=int, default=2000, help="open at once, for memory; 0: not measured")
    parser.add_argument("--quick", action="store_true", help="requests only")
    parser.add_argument("--peers", default="direct,ours,nginx,vllm-router,sglang-router")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/vllm-supervisord-bench")
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=DIR")
    options = parser.parse_args()
    options.checkouts = {"ours": REPOSITORY} | {
        name: Path(folder).resolve() for name, _, folder in (one.partition("=") for one in options.checkout)
    }
    options.peers = [*options.peers.split(","), *(name for name in options.checkouts if name != "ours")]
    for name in list(options.peers):
        missing = (name == "nginx" and not _nginx(options.cache).exists()) or (
            name.endswith("-router") and not (options.cache / "routers/bin/python").exists()
        )
        if missing:
            print(f"skipped: {name} is not installed in {options.cache}")
            options.peers.remove(name)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bench(options))


if __name__ == "__main__":
    main()
