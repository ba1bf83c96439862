"""What metrics cost: one request counted, one scrape of a fleet of 8 models with 4 replicas each, and memory.

    .venv/bin/python tests/bench/bench_metrics.py

Times are of the thread's CPU, so that whatever else the machine does is not in them. A scrape lets the loop do other
work between two families; the longest of them is what a stream can be late by. Every replica has had requests on three
routes, with four outcomes each, and everything has happened to it once.
"""

import asyncio
import logging
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "monitoring"))

from monitored import fleet, replica, sources, spec

from proxy.accesslog import log_request
from proxy.exchange import Finished, Outcome, Stage
from proxy.reading.usage import Usage
from proxy.tally import RequestTally
from supervisord.core.actions import Note, NoteKind
from supervisord.core.admission import Placement
from supervisord.fleet_events import FleetEvents
from supervisord.monitoring import collector

MODELS, REPLICAS = 8, 4
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
OUTCOMES = ((200, ""), (400, ""), (499, ""), (502, "upstream_failed"))
NAMES = [(f"model-{m}", f"model-{m}-{r}") for m in range(MODELS) for r in range(REPLICAS)]
BATCH = 1000


def request(model: str, name: str, route: str, status: int, code: str, at: int) -> tuple[Finished, Outcome]:
    outcome = Outcome(status=status, code=code, model=model, replica=name, reason="cold: 0.1s", stream=True, attempts=1)
    outcome.placement, outcome.stage, outcome.usage = Placement.COLD, Stage.STREAM, Usage(1000, 200, 800)
    outcome.bytes_received, outcome.bytes_sent = 4000, 9000
    outcome.first_byte, outcome.computed = 100.1, 100.2 + at % 7
    return Finished("POST", route, "0123456789abcdef", "127.0.0.1", 100.0, 101.0 + at % 60), outcome


def ended() -> list[tuple[Finished, Outcome]]:
    kinds = [(m, n, route, *outcome) for m, n in NAMES for route in ROUTES for outcome in OUTCOMES]
    return [request(*kind, at) for at, kind in enumerate(kinds * 2)]


def per_call(call, requests) -> list[float]:
    """Microseconds, of batches."""
    samples = []
    for _ in range(100):
        before = time.thread_time()
        for at in range(BATCH):
            call(*requests[at % len(requests)])
        samples.append(1e6 * (time.thread_time() - before) / BATCH)
    return samples


def counting() -> RequestTally:
    tally = RequestTally()
    tally.configure(
        [spec(f"model-{m}", (), tuple(name for model, name in NAMES if model == f"model-{m}")) for m in range(MODELS)]
    )
    requests = ended()
    show("counting one request, us", per_call(tally, requests))
    show("for comparison, its log line (written nowhere), us", per_call(log_request, requests))
    return tally


async def scraping(tally: RequestTally) -> None:
    events = FleetEvents()
    for model, name in NAMES:
        for kind in NoteKind:
            events.note(Note(kind, model, name, "", level=1, seconds=3.0))
    given = sources(fleet(*(replica(name, model) for model, name in NAMES)), events, tally)
    encode, _ = collector.choose_encoder("")
    whole, longest = [], []
    for _ in range(20):
        slices, before = [], time.thread_time()
        for family in collector.families(given):
            encode(collector._One(family))
            slices.append(1e3 * (time.thread_time() - before - sum(slices) / 1e3))
        whole.append(sum(slices))
        longest.append(max(slices))
    body, _ = await collector.exposition(given, "")
    show("one scrape, ms", whole)
    show("the longest that it keeps the loop, ms", longest)
    lines = sum(1 for line in body.splitlines() if not line.startswith(b"#"))
    print(f"{'its size':52} {len(body) / 1e3:.0f} kB, {lines} samples")


def memory() -> None:
    """Of an interpreter with the daemon's modules, and then with what the listener needs besides."""
    code = (
        "import supervisord.app\n"
        "def kb(): return int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])\n"
        "before = kb()\n"
        "import supervisord.monitoring.server, supervisord.monitoring.status\n"
        "print(before, kb())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    before, after = (int(word) / 1024 for word in done.stdout.split())
    print(f"{'memory of the modules without and with it':52} {before:.1f} and {after:.1f} MiB")


def show(name: str, samples: list[float]) -> None:
    low, high = min(samples), max(samples)
    print(f"{name:52} median {statistics.median(samples):.2f}   ({low:.2f} to {high:.2f}, {len(samples)} samples)")


class _Nowhere(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        pass


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, handlers=[_Nowhere()])
    asyncio.run(scraping(counting()))
    memory()
