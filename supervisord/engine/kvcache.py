"""How many tokens an engine's KV cache holds, from a page of Prometheus metrics.

vLLM tells it in the labels of ``vllm:cache_config_info``, one sample per engine core: newer ones in
``kv_cache_size_tokens``, all in ``num_gpu_blocks`` and ``block_size``. Where layers of several kinds share the blocks
(hybrid models) the product of those two is not in tokens; it is believed only where it holds at least one longest
prompt, which vLLM sees to before it starts.
"""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(?<![a-z_])(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d{1,12})"')


def tokens_of(metrics: str, max_model_len: int | None) -> int:
    """Tokens that fit, of all engine cores together; 0 where the page does not tell."""
    total = 0
    for labels in _SAMPLE.findall(metrics):
        told = {name: int(value) for name, value in _LABEL.findall(labels)}
        tokens = told.get("kv_cache_size_tokens", 0)
        if not tokens:
            tokens = told.get("num_gpu_blocks", 0) * told.get("block_size", 0)
            if tokens < (max_model_len or 0):
                return 0
        if not tokens:
            return 0
        total += tokens
    return total
