"""``/metrics`` in the Prometheus text format with vLLM's names.

The gauges are a copy from the engine's last step: while it sleeps no step runs, so they are stale, like the real ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

#: vLLM's own buckets, seconds.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)


class Histogram:
    """A Prometheus histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


@dataclass(slots=True)
class Metrics:
    """Counters as they are, gauges as of the last engine step. Seconds are real ones, as a client measures them."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    success: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))

    def render(self, model: str, sleep_level: int, num_blocks: int, block_size: int) -> str:
        """The whole page."""
        labels = f'engine="0",model_name="{model}"'
        out: list[str] = []

        def metric(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
            out.extend((f"# HELP {name} {text} (simulated)", f"# TYPE {name} {kind}"))
            out.extend(f"{name}{{{labels}{extra}}} {float(value)}" for extra, value in samples)

        def histogram(name: str, text: str, values: Histogram) -> None:
            metric(name, "histogram", text)
            out.extend(values.lines(name, labels))

        metric("vllm:num_requests_running", "gauge", "Requests in execution.", ("", self.running))
        metric("vllm:num_requests_waiting", "gauge", "Requests waiting to be processed.", ("", self.waiting))
        metric("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage, 1 is all of it.", ("", self.kv_usage))
        states = ("awake", "weights_offloaded", "discard_all")
        asleep = [(f',sleep_state="{state}"', 1 if level == sleep_level else 0) for level, state in enumerate(states)]
        metric("vllm:engine_sleep_state", "gauge", "Engine sleep state.", *asleep)
        info = f',block_size="{block_size}",num_gpu_blocks="{num_blocks}"'
        metric("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig.", (info, 1))
        metric("vllm:prefix_cache_queries_total", "counter", "Tokens looked up.", ("", self.prefix_queries))
        metric("vllm:prefix_cache_hits_total", "counter", "Tokens found.", ("", self.prefix_hits))
        metric("vllm:num_preemptions_total", "counter", "Preemptions from the engine.", ("", self.preemptions))
        metric("vllm:prompt_tokens_total", "counter", "Prefill tokens processed.", ("", self.prompt_tokens))
        metric("vllm:generation_tokens_total", "counter", "Generated tokens.", ("", self.generation_tokens))
        reasons = ("stop", "length", "abort", "error")
        done = [(f',finished_reason="{reason}"', self.success[reason]) for reason in reasons]
        metric("vllm:request_success_total", "counter", "Finished requests.", *done)
        histogram("vllm:time_to_first_token_seconds", "Time to first token.", self.ttft)
        histogram("vllm:inter_token_latency_seconds", "Time between tokens.", self.inter_token)
        histogram("vllm:e2e_request_latency_seconds", "Request latency.", self.e2e)
        out.extend(
            ("# HELP vllm_simulated 1: no GPU behind this.", "# TYPE vllm_simulated gauge", "vllm_simulated 1.0")
        )
        return "\n".join(out) + "\n"
