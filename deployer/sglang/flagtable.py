"""Flags of the server's own parser in each release read, without their dashes. Pure data.

Made by running `ServerArgs.add_cli_args` of the wheels 0.5.9, 0.5.10, 0.5.11, 0.5.12.post1,
0.5.14, 0.5.15.post1, 0.5.16, 0.5.18, 0.5.20 and 0.5.23 on a CPU. A release between two of them is
not judged.
"""

from __future__ import annotations

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

CHANGES: tuple[tuple[int, str, str], ...] = (
    (
        10,
        """
default-priority-value disable-piecewise-cuda-graph disable-priority-preemption
enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion enable-elastic-expert-backup
enable-fused-moe-sum-all-reduce enable-hisparse enable-mfu-metrics enable-mm-global-cache
enable-prefill-context-parallel enable-ssl-refresh enable-streaming-session
enforce-disable-flashinfer-allreduce-fusion enforce-piecewise-cuda-graph engine-info-bootstrap-port
experts-shared-outer-loras gc-threshold hisparse-config incremental-streaming-output
linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend modelexpress-config
no-experts-shared-outer-loras pre-warm-nccl prefill-cp-mode speculative-ngram-max-trie-depth
ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password stream-response-default-include-usage
use-ray
""",
        """
disable-hicache-numa-detect disaggregation-decode-dp disaggregation-decode-tp
disaggregation-prefill-pp hierarchical-sparse-attention-extra-config mm-max-concurrent-calls
mm-per-request-timeout speculative-ngram-branch-length speculative-ngram-max-match-window-size
speculative-ngram-min-match-window-size
""",
    ),
    (
        11,
        """
batch-notify-size debug-cuda-graph disaggregation-decode-enable-radix-cache elastic-ep-rejoin
enable-breakable-cuda-graph enable-dp-attention-local-control-broadcast enable-http2 enable-mis
enable-quant-communications enforce-shared-experts-fusion grpc-http-sidecar-port
lora-strict-loading lora-use-virtual-experts msprobe-dump-config no-lora-strict-loading
no-record-nolora-graph record-nolora-graph speculative-adaptive speculative-adaptive-config
speculative-dflash-block-size speculative-dflash-draft-window-size
speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
speculative-ngram-external-sam-budget speculative-skip-dp-mlp-sync strip-thinking-cache
tokenizer-backend weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads
""",
        """
ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num
ds-sparse-decode-threshold enable-double-sparsity multi-item-scoring-delimiter
""",
    ),
    (
        12,
        """
detokenizer-worker-num enable-deepep-waterfill enable-forward-pass-metrics
enable-return-indexer-topk enable-strict-thinking forward-pass-metrics-ipc-name
forward-pass-metrics-worker-id hierarchical-sparse-attention-extra-config lora-drain-wait-threshold
model-config-parser prefill-delayer-max-delay-ms prefill-delayer-queue-min-ratio
prefill-only-disable-kv-cache speculative-draft-window-size weight-loader-drop-cache-after-load
""",
        """

""",
    ),
    (
        14,
        """
asr-max-buffer-seconds asr-max-concurrent-sessions cp-strategy cuda-graph-backend-decode
cuda-graph-backend-prefill cuda-graph-bs-decode cuda-graph-bs-prefill cuda-graph-config
cuda-graph-max-bs-decode cuda-graph-max-bs-prefill cuda-graph-tc-compiler
deepep-dispatcher-output-dtype disable-attn-tp-gather disable-decode-cuda-graph
disable-prefill-cuda-graph disaggregation-decode-extra-slots dsa-decode-backend dsa-prefill-backend
dsa-prefill-cp-mode dsa-topk-backend enable-deepseek-v4-fp4-indexer
enable-dsa-prefill-context-parallel enable-int8-mamba-checkpoint enable-prefill-cp
encoder-bootstrap-port encoder-register-urls flashinfer-allreduce-fusion-backend
int8-mamba-ckpt-size kv-canary kv-canary-real-data kv-canary-sweep-interval lmcache-config-file
load-snapshot-publish-interval mamba-radix-cache-strategy optimistic-prefill-retries
radix-cache-backend speculative-use-rejection-sampling trace-modules
""",
        """
custom-sigquit-handler debug-tensor-dump-inject enable-nan-detection enable-piecewise-cuda-graph
hybrid-kvcache-ratio no-record-nolora-graph record-nolora-graph
""",
    ),
    (
        15,
        """
bf16-gemm-backend dcp-size decode-context-parallel-size decoupled-spec-bind-endpoint
decoupled-spec-connect-endpoints decoupled-spec-rank decoupled-spec-role
dsa-paged-mqa-logits-backend enable-linear-replayssm enable-mamba-cache-stochastic-rounding
enable-page-major-kv-layout enable-session-radix-cache enable-tf32-matmul enable-unified-memory
linear-replayssm-cache-len mamba-cache-philox-rounds min-free-slots-delay spec-trace-dir
""",
        """

""",
    ),
    (
        16,
        """
default-chat-template-kwargs dllm-fdfo elastic-ep-initial-size elastic-ep-join-mode
elastic-ep-join-rank-offset elastic-ep-scale-timeout enable-dsa-cache-layer-split enable-flexkv
enable-gdn-replayssm-spec enable-scattered-sconv enable-waterfill flexkv-config-file fuseep-mode
grpc-port max-ep-size mm-feature-transport no-dllm-fdfo optimistic-prefill-attempts
retraction-policy sidecar sidecar-args smg-grpc-mode smg-http-sidecar-port
speculative-dspark-align-verify-tokens-to-graph-tier speculative-dspark-block-size
speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path
""",
        """
enable-deepep-waterfill optimistic-prefill-retries
""",
    ),
    (
        18,
        """
allowed-media-domains c128-page-size dcp-comm-backend dcp-replicate-q-proj
disaggregation-decode-retraction-backup dwdp-size enable-cp-decode-attn-tp
enable-linear-replayssm-spec enable-tp-lm-head-all-to-all expert-balancedness-report-mode
flashinfer-autotune-skip-ops http2-max-concurrent-streams image-processor-backend
language-model-only linear-attn-verify-backend mamba-max-states-per-path media-url-max-file-size-mb
mlx-enable-sampling mm-global-cache-backend mm-io-worker-num mm-preprocess-cache-size-mb
mm-processor-worker-num no-dcp-replicate-q-proj no-enable-tp-lm-head-all-to-all
return-hidden-states-mode speculative-draft-kv-cache-dtype startup-weight-load-mode
trust-mm-content-hashes weight-cache-mode weight-cache-socket weight-cache-timeout
""",
        """
torchao-config
""",
    ),
    (
        20,
        """
deepep-v2-mode dsv4-attn-backend dsv4-prefill-backend enable-dense-mlp-attn-tp enable-layernorm-sp
enable-lean-attention enable-response-store enable-shared-experts-attn-tp
enable-unified-cache-external-linker enable-w4a4-mxfp4-megamoe flashinfer-a2a-dispatch-type
gated-launch-port hicache-host-memory-mode hicache-storage-prefetch-retry-max-attempts
hicache-storage-prefetch-retry-poll-interval http2-initial-connection-window-size
load-publish-endpoint no-ple-offload-embedding ple-offload-backend ple-offload-dir
ple-offload-embedding prefill-decode-interval radix-eviction-policy-config return-input-ids
return-output-ids sampling-mask-max-tokens speculative-domino-candidate-pool-size
speculative-dsa-topk-backend unified-cache-external-linker-backend uno-lora-path
""",
        """
collect-tokens-histogram cuda-graph-bs cuda-graph-max-bs disable-piecewise-cuda-graph
dsa-prefill-cp-mode enable-breakable-cuda-graph enable-dsa-prefill-context-parallel
enable-expert-distribution-metrics enable-gdn-replayssm-spec enable-nsa-prefill-context-parallel
enable-prefill-context-parallel enforce-piecewise-cuda-graph mamba-scheduler-strategy
nsa-decode-backend nsa-prefill-backend nsa-prefill-cp-mode piecewise-cuda-graph-compiler
piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens prefill-cp-mode
prefill-round-robin-balance speculative-dflash-draft-window-size stream-output
""",
    ),
    (
        23,
        """
attention-data-parallel-size attn-dp-size boundary-reduction constrained-json-max-whitespace-cnt
context-bucket cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context
disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill
disaggregation-decode-allocation-policy disaggregation-decode-host-receive-threshold
disaggregation-enable-kv-checksum dsa-triton-union enable-amd-monokernel
enable-decoder-swa-bounded-replay enable-dsa-fused-indexer enable-encoder-swa-bounded-replay
enable-hicache enable-http-worker-reuseport enable-kv-cache-sharding enable-linker-mla-dedup
enable-megamoe-for-layernorm-sp enable-nvidia-megakernel enable-paged-experts enable-pd-role-switch
enable-return-aux-hidden-states enable-watermark grpc-response-timeout-secs
hicache-host-memory-fraction monokernel-backend no-enable-decoder-swa-bounded-replay
no-enable-dsa-fused-indexer no-enable-fused-qk-norm-rope no-enable-tf32-matmul
no-mm-enable-dp-encoder no-speculative-enable-w4a4-mxfp4-megamoe otlp-service-name
paged-experts-num-resident prefill-decode-interval-min-bs prefill-kv-cache-dequant-dtype
qsa-indexer-dtype return-aux-hidden-state-layer-ids shared-experts-tp-size
speculative-draft-sink-size speculative-enable-w4a4-mxfp4-megamoe
speculative-use-block-verification swa-prefix-tails trust-request-chat-template
unified-cache-external-linker-config watermark-config
""",
        """
cuda-graph-tc-compiler elastic-ep-rejoin keep-mm-feature-on-device speculative-skip-dp-mlp-sync
""",
    ),
)
"""(patch of 0.5, flags that came, flags that went), oldest first."""

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
    "nsa-prefill-cp-mode": "dsa-prefill-cp-mode",
    "enable-gdn-replayssm-spec": "enable-linear-replayssm-spec",
    "disable-piecewise-cuda-graph": "disable-prefill-cuda-graph",
    "speculative-dflash-draft-window-size": "speculative-draft-window-size",
}
"""A flag -> what the same thing is called in other releases."""


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
