"""Options of ``vllm serve`` (0.32/0.33) that are accepted and ignored: a real command line works here too."""

from __future__ import annotations

_VALUES = """
    allowed-headers allowed-local-media-path allowed-methods allowed-origins api-server-count
    attention-backend attention-config block-pool-size chat-template chat-template-content-format
    code-revision collect-detailed-traces compilation-config config config-format context-parallel-size
    convert cp-kv-cache-interleave-size cpu-offload-gb data-parallel-address data-parallel-backend
    data-parallel-rank data-parallel-rpc-port data-parallel-size data-parallel-size-local
    data-parallel-start-rank dcp-kv-cache-interleave-size decode-context-parallel-size
    default-chat-template-kwargs device distributed-executor-backend download-dir dtype ec-transfer-config
    eplb-config exclude-log-deltas expert-placement-strategy fully-sharded-loras generation-config
    guided-decoding-backend h11-max-header-count h11-max-incomplete-event-size hf-config-path hf-overrides
    hf-token io-processor-plugin kernel-config kv-cache-dtype kv-cache-memory-bytes kv-cache-metrics-sample
    kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config
    limit-mm-per-prompt load-format log-config-file logits-processor-pattern logprobs-mode
    long-prefill-token-threshold lora-dtype mamba-block-size mamba-cache-dtype mamba-cache-mode
    mamba-ssm-cache-dtype master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
    max-logprobs max-long-partial-prefills max-lora-rank max-loras max-num-partial-prefills
    max-parallel-loading-workers media-io-kwargs mm-encoder-tp-mode mm-processor-cache-gb
    mm-processor-cache-type mm-processor-kwargs mm-shm-cache-max-object-size-mb model-impl
    model-loader-extra-config moe-backend nnodes node-rank num-lookahead-slots num-speculative-tokens
    numa-bind-cpus offload-backend optimization-level otlp-traces-endpoint override-attention-dtype
    override-generation-config override-pooler-config performance-mode pipeline-parallel-size pooler-config
    prefill-context-parallel-size prefix-caching-hash-algo profiler-config pt-load-map-location quantization
    ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin response-role
    return-tokens-as-token-ids revision root-path safetensors-load-strategy scheduler-cls
    scheduling-policy seed show-hidden-metrics-for-version skip-mm-profiling speculative-config ssl-ca-certs
    ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile stream-interval structured-outputs-config swap-space
    task tensor-parallel-size tokenizer tokenizer-mode tokenizer-revision tokens-only-endpoint
    tool-call-parser tool-parser-plugin tool-server ubatch-size use-tqdm-on-load uvicorn-log-level
    video-pruning-rate weight-transfer-config worker-cls worker-extension-cls
"""
_LISTS = """
    allowed-media-domains cudagraph-capture-sizes default-mm-loras ignore-patterns logits-processors
    lora-target-modules middleware
"""
_SWITCHES = """
    aggregate-engine-logging allow-credentials async-scheduling calculate-kv-scales data-parallel-external-lb
    data-parallel-hybrid-lb disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
    disable-fastapi-docs disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-log-stats
    disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization disable-sliding-window
    enable-auto-tool-choice enable-chunked-prefill enable-cumem-allocator enable-dbo enable-elastic-ep
    enable-eplb enable-expert-parallel enable-flashinfer-autotune enable-force-include-usage
    enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
    enable-logging-iteration-details enable-lora enable-lora-bias enable-mfu-metrics enable-mm-embeds
    enable-offline-docs enable-prompt-adapter enable-prompt-embeds enable-response-messages
    enable-return-routed-experts enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
    enforce-eager headless interleave-mm-strings kv-cache-metrics language-model-only log-config-file-reload
    log-error-stack mm-encoder-only multi-step-stream-outputs numa-bind skip-tokenizer-init tokens-only
    trust-remote-code trust-request-chat-template use-v2-block-manager
"""

#: They take one value.
VALUES = tuple(_VALUES.split())
#: They take several values.
LISTS = tuple(_LISTS.split())
#: They take none, and have a ``--no-`` form.
SWITCHES = tuple(_SWITCHES.split())
