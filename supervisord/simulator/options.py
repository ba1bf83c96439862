"""The command line of ``vllm serve`` as far as it matters here, plus the ``--sim-...`` options.

Options that vLLM knows and the simulator has no use for are accepted and ignored; unknown ones exit 2, as vLLM does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from supervisord.simulator.faults import parse as parse_fault
from supervisord.simulator.known_options import LISTS, SWITCHES, VALUES
from supervisord.simulator.scheduler import CostModel
from supervisord.simulator.sleep import MemorySizes, StepTimes

GIB = 1024**3
DEFAULT_COSTS = CostModel()
#: Wakes of 2.5-4 s and about 23 s were measured on a real deployment.
DEFAULT_TIMES = StepTimes(sleep=1.0, wake1=3.0, wake2=23.0)
DEFAULT_MEMORY = MemorySizes(total=32 * GIB, weights=16 * GIB, kv_cache=12 * GIB, other=1 * GIB)
#: The most context that one 32 GB card's KV cache held there.
DEFAULT_CONTEXT = 114_688

_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size", "q": "quantization"}


@dataclass(frozen=True, slots=True)
class Options:
    """What one simulated engine was started with. Times are simulated seconds, sizes bytes."""

    model: str
    served_names: tuple[str, ...]
    #: LoRA adapters, and where they are said to come from.
    adapters: tuple[tuple[str, str], ...] = ()
    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    max_model_len: int = DEFAULT_CONTEXT
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_tokens: int = DEFAULT_CONTEXT
    prefix_caching: bool = True
    #: False with ``--runner pooling``: such a model has no routes that generate.
    generates: bool = True
    sleep_mode: bool = False
    dev_mode: bool = False
    stores_responses: bool = False
    api_keys: tuple[str, ...] = ()
    shutdown_timeout: float = 0.0
    access_log: bool = True
    request_id_headers: bool = False
    prompt_tokens_details: bool = True
    name: str = "simulated"
    load_time: float = 0.0
    clock_factor: float = 1.0
    #: Real seconds, whatever the clock factor: it belongs to HTTP, not to the engine.
    keepalive: float = 5.0
    costs: CostModel = DEFAULT_COSTS
    times: StepTimes = DEFAULT_TIMES
    memory: MemorySizes = DEFAULT_MEMORY
    faults: tuple[tuple[str, str, int | None], ...] = ()


class ModelNotFound(Exception):
    """The model is a path, and nothing is there."""


class _Parser(argparse.ArgumentParser):
    """Words its errors, and exits 2, as ``vllm serve`` does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: vllm serve [model_tag] [options]  (simulated)\nvllm serve: error: {message}\n")


def human_int(text: str) -> int:
    """``8192``, ``8k`` (thousands), ``8K`` (1024s), as vLLM reads --max-model-len."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"invalid integer {text!r}")
    powers = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    return int(float(match[1]) * powers[match[2]])


def size_bytes(text: str) -> int:
    """``32G``, ``512M``: bytes, binary units."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"invalid size {text!r}")
    return int(float(match[1]) * 1024 ** ("", "K", "M", "G", "T").index(match[2]))


def _fault(text: str) -> tuple[str, str, int | None]:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _adapter(text: str) -> tuple[str, str]:
    """``NAME=PATH``, or a JSON object with ``name`` and ``path``."""
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        if not (name and equals and path) or "," in text:
            raise argparse.ArgumentTypeError(f"Invalid fields: {text}")
        return name, path
    try:
        value = json.loads(text)
        return str(value["name"]), str(value["path"])
    except (ValueError, LookupError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"Invalid JSON format for --lora-modules: {text}") from error


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm serve", allow_abbrev=False, add_help=True)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", default=None)
    parser.add_argument("--served-model-name", nargs="+", default=[])
    parser.add_argument("--lora-modules", nargs="+", type=_adapter, default=[])
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds", default=None)
    parser.add_argument("--api-key", nargs="*", default=[])
    parser.add_argument("--max-model-len", type=human_int, default=None)
    parser.add_argument("--max-num-seqs", type=human_int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=human_int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=None)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--enable-prefix-caching", action=switch, default=True)
    parser.add_argument("--runner", choices=("auto", "draft", "generate", "pooling"), default="auto")
    parser.add_argument("--enable-sleep-mode", action=switch, default=False)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    parser.add_argument("--disable-uvicorn-access-log", action=switch, default=False)
    parser.add_argument("--disable-access-log-for-endpoints", default=None)
    parser.add_argument("--enable-request-id-headers", action=switch, default=False)
    # vLLM's own default is off; the simulator shows cached tokens unless told not to.
    parser.add_argument("--enable-prompt-tokens-details", action=switch, default=True)
    for names, arity in ((VALUES, None), (LISTS, "+")):
        for name in names:
            parser.add_argument(f"--{name}", nargs=arity, help=argparse.SUPPRESS)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action=switch, default=None, help=argparse.SUPPRESS)

    sim = parser.add_argument_group("simulator")
    sim.add_argument("--sim-name", default=None, help="what system_fingerprint says (default: the process id)")
    sim.add_argument("--sim-load-time", type=float, default=0.0, help="seconds until it listens")
    sim.add_argument("--sim-clock-factor", type=float, default=1.0, help="real seconds per simulated second")
    sim.add_argument("--sim-keepalive", type=float, default=5.0, help="real seconds an idle connection is kept")
    sim.add_argument("--sim-ttft-rate", type=float, default=DEFAULT_COSTS.prefill_rate, help="prefill tokens/s")
    sim.add_argument("--sim-prefill-base", type=float, default=0.0, help="seconds of every step with a prompt in it")
    sim.add_argument("--sim-prefill-pair", type=float, default=0.0, help="seconds per new token and token before it")
    sim.add_argument("--sim-tpot-base", type=float, default=DEFAULT_COSTS.step_base, help="seconds per decode step")
    sim.add_argument(
        "--sim-tpot-per-seq", type=float, default=DEFAULT_COSTS.step_per_seq, help="and per sequence in it"
    )
    sim.add_argument("--sim-sleep", type=float, default=1.0, help="seconds of /sleep")
    sim.add_argument("--sim-wake1", type=float, default=3.0, help="seconds of a level-1 wake")
    sim.add_argument("--sim-wake2", type=float, default=23.0, help="seconds of a level-2 wake, all steps together")
    sim.add_argument("--sim-gpu-memory", type=size_bytes, default=32 * GIB)
    sim.add_argument("--sim-weights", type=size_bytes, default=None, help="default: half of the GPU memory in use")
    sim.add_argument("--sim-kv-tokens", type=human_int, default=None, help="KV cache size (default: max-model-len)")
    sim.add_argument("--sim-fault", type=_fault, action="append", default=[], metavar="NAME[=ARG][*COUNT]")
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """The options of ``argv`` (after ``serve``). Exits 2 on a usage error; raises ``ModelNotFound``."""
    args = build_parser().parse_args(_vllm_spelling(argv))
    model = args.model_tag or args.model or "simulated/model"
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise ModelNotFound(model)
    max_len = args.max_model_len if args.max_model_len and args.max_model_len > 0 else _config_len(model)
    kv_tokens = args.sim_kv_tokens or max(max_len, args.block_size)
    if args.num_gpu_blocks_override is not None:
        kv_tokens = args.num_gpu_blocks_override * args.block_size
    in_use = int(args.sim_gpu_memory * args.gpu_memory_utilization)
    other = min(GIB, in_use // 16)
    weights = args.sim_weights if args.sim_weights is not None else in_use // 2
    return Options(
        model=model,
        served_names=tuple(args.served_model_name) or (model,),
        adapters=tuple(args.lora_modules),
        host=args.host,
        port=args.port,
        uds=args.uds,
        max_model_len=max_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_tokens=kv_tokens,
        prefix_caching=args.enable_prefix_caching,
        generates=args.runner != "pooling",
        sleep_mode=args.enable_sleep_mode,
        dev_mode=environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"),
        stores_responses=environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") not in ("", "0"),
        api_keys=tuple(key for key in (args.api_key or [environ.get("VLLM_API_KEY", "")]) if key),
        shutdown_timeout=args.shutdown_timeout,
        access_log=not args.disable_uvicorn_access_log,
        request_id_headers=args.enable_request_id_headers,
        prompt_tokens_details=args.enable_prompt_tokens_details,
        name=args.sim_name or f"simulated-{os.getpid()}",
        load_time=args.sim_load_time,
        clock_factor=args.sim_clock_factor,
        keepalive=args.sim_keepalive,
        costs=CostModel(
            args.sim_ttft_rate, args.sim_tpot_base, args.sim_tpot_per_seq, args.sim_prefill_pair, args.sim_prefill_base
        ),
        times=StepTimes(args.sim_sleep, args.sim_wake1, args.sim_wake2),
        memory=MemorySizes(args.sim_gpu_memory, weights, max(0, in_use - weights - other), other),
        faults=tuple(args.sim_fault),
    )


def _vllm_spelling(argv: Sequence[str]) -> list[str]:
    """vLLM takes ``--max_model_len`` for ``--max-model-len``, ``-tp 2``, ``-O3``, ``--compilation-config.level 3``."""
    out: list[str] = []
    for word in argv:
        head, eq, value = word.partition("=")
        if re.fullmatch(r"-O\d", word):
            out.append(f"--optimization-level={word[2:]}")
        elif re.fullmatch(r"--?[a-z]{1,2}", head) and head.lstrip("-") in _SHORT:
            out.append(f"--{_SHORT[head.lstrip('-')]}{eq}{value}")
        elif head.startswith("--"):
            out.append(head.split(".", 1)[0].replace("_", "-") + eq + value)
        else:
            out.append(word)
    return out


def _config_len(model: str) -> int:
    """The context length that a model directory's config.json says."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_CONTEXT
