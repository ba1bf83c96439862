"""What stands between a load and the engines: this product, other routers, nginx; each a process (or units) of its own.

What waits by the clock on its own (health checks, circuit breakers, ``fail_timeout``) is told to wait ``factor`` times
as long, as everything else in a simulation does; all other options are the peers' defaults.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "systemd"))

import product as rig
from product import SERVICE, SOCKET, Product, free_port, show, systemctl

OURS = "vllm-supervisord"
_ROOT = Path(__file__).parents[2]
_NGINX = """
worker_processes 1; daemon off; pid {dir}/pid; error_log /dev/null; worker_rlimit_nofile 20000;
events {{ worker_connections 10000; }}
http {{
  access_log /dev/null; client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir};
  uwsgi_temp_path {dir}; scgi_temp_path {dir}; client_max_body_size 256m; client_body_buffer_size 2m;
  upstream engines {{ zone engines 256k; {method} {servers} keepalive 512; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{
    proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_request_buffering on; proxy_read_timeout 3600s; }} }}
}}
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where peers find what they need. ``cache``: what ``install-peers`` filled; ``units``: the engines' units."""

    cache: Path
    folder: Path
    urls: Sequence[str]
    units: Sequence[str]
    factor: float


class Peer(Protocol):
    """Something that answers on ``port``."""

    port: int

    def start(self) -> None: ...
    def processes(self) -> Iterator[int]: ...
    def stop(self) -> None: ...


class Supervisor:
    """The whole product: its daemon as a unit of this user manager, and the engines' units as replicas of one model.

    ``checkout``: whose daemon.
    """

    def __init__(self, setting: Setting, checkout: Path = _ROOT) -> None:
        second = setting.factor
        replicas = "".join(
            f'[models.m.replicas.{"abcdefgh"[n]}]\nunit = "{unit}"\nendpoint = "{url}"\n'
            for n, (unit, url) in enumerate(zip(setting.units, setting.urls, strict=True))
        )
        rig.SUPERVISOR = ""  # the test rig looks at engines all the time
        self._product = product = Product(
            setting.folder,
            f"[supervisor]\nprobe_interval = {5 * second}\nsuspect_interval = {0.5 * second}\n"
            f"backoff_min = {2 * second}\n{replicas}",
        )
        self.port = product.port
        daemon = f"{sys.executable} {Path(__file__).with_name('scaled_daemon.py')} {setting.factor}"
        unit = f"[Service]\nEnvironment=PYTHONPATH={checkout}\nExecStart=\nExecStart={daemon}\n"
        product.write_unit(f"{SERVICE}.d/zz-bench.conf", unit)
        systemctl("daemon-reload")

    def start(self) -> None:
        self._product.start()

    def processes(self) -> Iterator[int]:
        return tree(self._product.main_pid())

    def stop(self) -> None:
        systemctl("stop", SOCKET, SERVICE)
        for line in self._product.remove():
            print(f"left by the supervisor: {line}", file=sys.stderr)


class Program:
    """A peer that is one program."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.port = port
        self._command = command

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def processes(self) -> Iterator[int]:
        return tree(self._process.pid)

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _router(module: str, policy: str) -> Callable[[Setting], Peer]:
    def make(setting: Setting) -> Peer:
        port = free_port()
        command = [str(setting.cache / "routers/bin/python"), "-m", f"{module}.launch_router"]
        command += ["--worker-urls", *setting.urls, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        command += ["--prometheus-port", str(free_port()), "--log-level", "error"]
        # Their defaults are 60 s for both.
        seconds = str(max(1, round(60 * setting.factor)))
        command += ["--health-check-interval-secs", seconds, "--cb-timeout-duration-secs", seconds]
        return Program(command, port)

    return make


def _nginx(method: str) -> Callable[[Setting], Peer]:
    def make(setting: Setting) -> Peer:
        port = free_port()
        seconds = max(1, round(10 * setting.factor))  # its default is 10
        hosts = [url.removeprefix("http://") for url in setting.urls]
        servers = "".join(f"server {host} fail_timeout={seconds}s;" for host in hosts)
        setting.folder.mkdir(parents=True)
        conf = setting.folder / "nginx.conf"
        conf.write_text(_NGINX.format(dir=setting.folder, port=port, servers=servers, method=method))
        return Program([str(setting.cache / "nginx/usr/sbin/nginx"), "-c", str(conf)], port)

    return make


#: Name, and how it is made.
PEERS: Mapping[str, Callable[[Setting], Peer]] = {
    OURS: Supervisor,
    "sglang-router cache_aware": _router("sglang_router", "cache_aware"),
    "sglang-router power_of_two": _router("sglang_router", "power_of_two"),
    "vllm-router cache_aware": _router("vllm_router", "cache_aware"),
    "vllm-router consistent_hash": _router("vllm_router", "consistent_hash"),
    "vllm-router sticky_least_loaded": _router("vllm_router", "sticky_least_loaded"),
    "nginx least_conn": _nginx("least_conn;"),
    "nginx round robin": _nginx(""),
}


def installed(name: str, cache: Path) -> bool:
    """Is there something to run it with?"""
    if name == OURS:
        return True
    program = "nginx/usr/sbin/nginx" if name.startswith("nginx") else "routers/bin/python"
    return (cache / program).exists()


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    queue = [pid] if pid else []
    while queue:
        pid = queue.pop()
        yield pid
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue += [int(child) for child in (task / "children").read_text().split()]


def cpu_seconds(pids: Iterator[int]) -> float:
    """What processes have computed so far, ended threads and children included."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(stat[at]) for at in (11, 12, 13, 14))
    return ticks / os.sysconf("SC_CLK_TCK")


__all__ = ["OURS", "PEERS", "Peer", "Setting", "cpu_seconds", "free_port", "installed", "show", "systemctl", "tree"]
