"""Flags of the server's own parser in each release read, without their dashes. Pure data.

Made by running `ServerArgs.add_cli_args` of the wheels of every release from 0.5.9 to 0.5.23 on a
CPU (0.5.10, 0.5.12, 0.5.13 and 0.5.15 in their post releases). A newer release is not judged.
"""

from __future__ import annotations

from deployer.sglang.flagchanges import CHANGES
from deployer.sglang.releases import Version

FIRST = """
abort-on-priority-when-disabled admin-api-key allow-auto-truncate api-key attention-backend
attention-context-parallel-size attn-cp-size base-gpu-id bucket-e2e-request-latency
bucket-inter-token-latency bucket-time-to-first-token chat-template
checkpoint-engine-wait-weights-before-ready chunked-prefill-size collect-tokens-histogram
completion-template config constrained-json-disable-any-whitespace
constrained-json-whitespace-pattern context-length cpu-offload-gb crash-dump-folder cuda-graph-bs
cuda-graph-max-bs custom-sigquit-handler custom-weight-loader data-parallel-size
debug-tensor-dump-inject debug-tensor-dump-input-file debug-tensor-dump-layers
debug-tensor-dump-output-folder decode-attention-backend decode-log-interval decrypted-config-file
decrypted-draft-config-file deepep-config deepep-mode delete-ckpt-after-loading device
disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding
disable-custom-all-reduce disable-fast-image-processor disable-flashinfer-autotune
disable-flashinfer-cutlass-moe-fp4-allgather disable-hicache-numa-detect disable-hybrid-swa-memory
disable-outlines-disk-cache disable-overlap-schedule disable-radix-cache
disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port
disaggregation-decode-dp disaggregation-decode-enable-offload-kvcache
disaggregation-decode-polling-interval disaggregation-decode-tp disaggregation-ib-device
disaggregation-mode disaggregation-prefill-pp disaggregation-transfer-backend dist-init-addr
dist-timeout dllm-algorithm dllm-algorithm-config download-dir dp-size ds-channel-config-path
ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num ds-sparse-decode-threshold dtype
dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout elastic-ep-backend
enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process enable-cache-report
enable-cudagraph-gc enable-custom-logit-processor enable-deterministic-inference
enable-double-sparsity enable-dp-attention enable-dp-lm-head enable-draft-weights-cpu-backup
enable-dynamic-batch-tokenizer enable-dynamic-chunking enable-eplb
enable-expert-distribution-metrics enable-flashinfer-allreduce-fusion enable-fp32-lm-head
enable-fused-qk-norm-rope enable-hierarchical-cache enable-layerwise-nvtx-marker enable-lmcache
enable-lora enable-lora-overlap-loading enable-memory-saver enable-metrics
enable-metrics-for-all-schedulers enable-mixed-chunk enable-mscclpp enable-multi-layer-eagle
enable-multimodal enable-nan-detection enable-nccl-nvls enable-nsa-prefill-context-parallel
enable-p2p-check enable-pdmux enable-piecewise-cuda-graph enable-precise-embedding-interpolation
enable-prefill-delayer enable-prefix-mm-cache enable-priority-scheduling enable-profile-cuda-graph
enable-request-time-stats-logging enable-return-hidden-states enable-return-routed-experts
enable-single-batch-overlap enable-symm-mem enable-tokenizer-batch-encode enable-torch-compile
enable-torch-compile-debug-mode enable-torch-symm-mem enable-trace enable-two-batch-overlap
enable-weights-cpu-backup encoder-only encoder-transfer-backend encoder-urls ep
ep-dispatch-algorithm ep-num-redundant-experts ep-size eplb-algorithm
eplb-min-rebalancing-utilization-threshold eplb-rebalance-layers-per-chunk
eplb-rebalance-num-iterations expert-distribution-recorder-buffer-size
expert-distribution-recorder-mode expert-parallel-size export-metrics-to-file
export-metrics-to-file-dir extra-metric-labels fastapi-root-path file-storage-path
flashinfer-mla-disable-ragged flashinfer-mxfp4-moe-precision forward-hooks fp4-gemm-backend
fp8-gemm-backend gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grammar-backend
grpc-mode help hf-chat-template-name hicache-io-backend hicache-mem-layout hicache-ratio
hicache-size hicache-storage-backend hicache-storage-backend-extra-config
hicache-storage-prefetch-policy hicache-write-policy hierarchical-sparse-attention-extra-config
host hybrid-kvcache-ratio init-expert-location is-embedding json-model-override-args
keep-mm-feature-on-device kt-cpuinfer kt-max-deferred-experts-per-token kt-method
kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-cache-dtype kv-events-config language-only
limit-mm-data-per-request load-balance-method load-format log-level log-level-http log-requests
log-requests-format log-requests-level log-requests-target lora-backend lora-eviction-policy
lora-paths lora-target-modules mamba-backend mamba-full-memory-ratio mamba-scheduler-strategy
mamba-ssm-dtype mamba-track-interval max-loaded-loras max-lora-chunk-size max-lora-rank
max-loras-per-batch max-mamba-cache-size max-prefill-tokens max-queued-requests
max-running-requests max-total-tokens mem-fraction-static mm-attention-backend mm-enable-dp-encoder
mm-max-concurrent-calls mm-per-request-timeout mm-process-config model model-checksum model-impl
model-loader-extra-config model-path modelopt-checkpoint-restore-path modelopt-checkpoint-save-path
modelopt-export-path modelopt-quant moe-a2a-backend moe-data-parallel-size moe-dense-tp-size
moe-dp-size moe-runner-backend mooncake-ib-device multi-item-scoring-delimiter nccl-init-addr
nccl-port nnodes node-rank nsa-decode-backend nsa-prefill-backend nsa-prefill-cp-mode
num-continuous-decode-steps num-reserved-decode-tokens numa-node offload-group-size offload-mode
offload-num-in-group offload-prefetch-step otlp-traces-endpoint page-size pdmux-config-path
piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens
pipeline-parallel-size port pp-async-batch-depth pp-max-micro-batch-size pp-size
preferred-sampling-params prefill-attention-backend prefill-delayer-forward-passes-buckets
prefill-delayer-max-delay-passes prefill-delayer-token-usage-low-watermark
prefill-delayer-wait-seconds-buckets prefill-max-requests prefill-round-robin-balance
priority-scheduling-preemption-threshold prompt-tokens-buckets quantization quantization-param-path
quantize-and-serve radix-eviction-policy random-seed reasoning-parser
remote-instance-weight-loader-backend remote-instance-weight-loader-seed-instance-ip
remote-instance-weight-loader-seed-instance-service-port
remote-instance-weight-loader-send-weights-group-ports
remote-instance-weight-loader-start-seed-via-transfer-engine revision rl-on-policy-target
rl-quant-profile sampling-backend sampling-defaults schedule-conservativeness
schedule-low-priority-values-first schedule-policy scheduler-recv-interval served-model-name
show-time-cost skip-server-warmup skip-tokenizer-init sleep-on-idle sm-group-num
soft-watchdog-timeout speculative-accept-threshold-acc speculative-accept-threshold-single
speculative-algorithm speculative-attention-mode speculative-draft-attention-backend
speculative-draft-load-format speculative-draft-model speculative-draft-model-path
speculative-draft-model-quantization speculative-draft-model-revision speculative-eagle-topk
speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-branch-length
speculative-ngram-capacity speculative-ngram-match-type speculative-ngram-max-bfs-breadth
speculative-ngram-max-match-window-size speculative-ngram-min-bfs-breadth
speculative-ngram-min-match-window-size speculative-num-draft-tokens speculative-num-steps
speculative-token-map stream-interval stream-output swa-full-tokens-ratio
tbo-token-distribution-threshold tensor-parallel-size tokenizer-metrics-allowed-custom-labels
tokenizer-metrics-custom-labels-header tokenizer-mode tokenizer-path tokenizer-worker-num
tool-call-parser tool-server torch-compile-max-bs torchao-config tp-size
triton-attention-num-kv-splits triton-attention-reduce-in-fp32 triton-attention-split-tile-size
trust-remote-code uvicorn-access-log-exclude-prefixes warmups watchdog-timeout
weight-loader-disable-mmap weight-version
"""
"""0.5.9."""

READ = frozenset({9, *(patch for patch, _, _ in CHANGES)})

RENAMED: dict[str, str] = {
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
    "mamba-radix-cache-strategy": "mamba-scheduler-strategy",
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "cuda-graph-bs": "cuda-graph-bs-decode",
    "cuda-graph-bs-decode": "cuda-graph-bs",
    "nsa-prefill-backend": "dsa-prefill-backend",
    "nsa-decode-backend": "dsa-decode-backend",
    "nsa-prefill-cp-mode": "cp-strategy",
    "enable-gdn-replayssm-spec": "enable-linear-replayssm-spec",
    "disable-piecewise-cuda-graph": "disable-prefill-cuda-graph",
    "speculative-dflash-draft-window-size": "speculative-draft-window-size",
    "stream-output": "incremental-streaming-output",
    "piecewise-cuda-graph-tokens": "cuda-graph-bs-prefill",
    "cuda-graph-bs-prefill": "piecewise-cuda-graph-tokens",
    "piecewise-cuda-graph-max-tokens": "cuda-graph-max-bs-prefill",
    "cuda-graph-max-bs-prefill": "piecewise-cuda-graph-max-tokens",
    "piecewise-cuda-graph-compiler": "cuda-graph-tc-compiler",
    "enable-breakable-cuda-graph": "cuda-graph-backend-prefill",
    "enforce-piecewise-cuda-graph": "cuda-graph-backend-prefill",
    "enable-prefill-context-parallel": "enable-prefill-cp",
    "enable-nsa-prefill-context-parallel": "enable-prefill-cp",
    "enable-dsa-prefill-context-parallel": "enable-prefill-cp",
    "prefill-cp-mode": "cp-strategy",
    "dsa-prefill-cp-mode": "cp-strategy",
    "enable-deepep-waterfill": "enable-waterfill",
    "optimistic-prefill-retries": "optimistic-prefill-attempts",
    "keep-mm-feature-on-device": "mm-feature-transport",
    "elastic-ep-rejoin": "elastic-ep-join-mode",
    "speculative-ngram-max-match-window-size": "speculative-ngram-max-trie-depth",
    "grpc-mode": "smg-grpc-mode",
}
"""A flag -> what the same thing is called in other releases.

`new_flag` of server_args.py in 0.5.14 to 0.5.21, and for those that it does not name the help text
of the flag that came in the release in which the other went.
"""


def flags_of(version: Version) -> frozenset[str]:
    """All flags of this release; empty when it is not one of those read."""
    if version[:2] != (0, 5) or len(version) < 3 or version[2] not in READ:
        return frozenset()
    names = set(FIRST.split())
    for patch, came, went in CHANGES:
        if version[2] >= patch:
            names |= set(came.split())
            names -= set(went.split())
    return frozenset(names)
