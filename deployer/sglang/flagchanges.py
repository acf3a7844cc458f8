"""Flags that came and went from release to release, without their dashes. Pure data.

Made as `flagtable` tells.
"""

from __future__ import annotations

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
enable-quant-communications enforce-shared-experts-fusion grpc-http-sidecar-port lora-strict-loading
lora-use-virtual-experts msprobe-dump-config no-lora-strict-loading no-record-nolora-graph
record-nolora-graph speculative-adaptive speculative-adaptive-config speculative-dflash-block-size
speculative-dflash-draft-window-size speculative-ngram-external-corpus-max-tokens
speculative-ngram-external-corpus-path speculative-ngram-external-sam-budget
speculative-skip-dp-mlp-sync strip-thinking-cache tokenizer-backend
weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads
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
        "",
    ),
    (
        13,
        """
asr-max-buffer-seconds asr-max-concurrent-sessions deepep-dispatcher-output-dtype
disable-attn-tp-gather dsa-decode-backend dsa-prefill-backend dsa-prefill-cp-mode dsa-topk-backend
enable-deepseek-v4-fp4-indexer enable-dsa-prefill-context-parallel encoder-bootstrap-port
encoder-register-urls kv-canary kv-canary-real-data kv-canary-sweep-interval lmcache-config-file
load-snapshot-publish-interval optimistic-prefill-retries radix-cache-backend trace-modules
""",
        """
enable-nan-detection no-record-nolora-graph record-nolora-graph
""",
    ),
    (
        14,
        """
cp-strategy cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs-decode
cuda-graph-bs-prefill cuda-graph-config cuda-graph-max-bs-decode cuda-graph-max-bs-prefill
cuda-graph-tc-compiler disable-decode-cuda-graph disable-prefill-cuda-graph
disaggregation-decode-extra-slots enable-int8-mamba-checkpoint enable-prefill-cp
flashinfer-allreduce-fusion-backend int8-mamba-ckpt-size mamba-radix-cache-strategy
speculative-use-rejection-sampling
""",
        """
custom-sigquit-handler debug-tensor-dump-inject enable-piecewise-cuda-graph hybrid-kvcache-ratio
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
        "",
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
        17,
        """
dcp-comm-backend dcp-replicate-q-proj dwdp-size enable-cp-decode-attn-tp
enable-linear-replayssm-spec flashinfer-autotune-skip-ops linear-attn-verify-backend
mamba-max-states-per-path mm-io-worker-num mm-processor-worker-num no-dcp-replicate-q-proj
return-hidden-states-mode weight-cache-mode weight-cache-socket weight-cache-timeout
""",
        "",
    ),
    (
        18,
        """
allowed-media-domains c128-page-size disaggregation-decode-retraction-backup
enable-tp-lm-head-all-to-all expert-balancedness-report-mode http2-max-concurrent-streams
image-processor-backend language-model-only media-url-max-file-size-mb mlx-enable-sampling
mm-global-cache-backend mm-preprocess-cache-size-mb no-enable-tp-lm-head-all-to-all
speculative-draft-kv-cache-dtype startup-weight-load-mode trust-mm-content-hashes
""",
        """
torchao-config
""",
    ),
    (
        19,
        """
deepep-v2-mode dsv4-prefill-backend enable-dense-mlp-attn-tp enable-layernorm-sp
enable-lean-attention enable-shared-experts-attn-tp enable-w4a4-mxfp4-megamoe gated-launch-port
hicache-host-memory-mode hicache-storage-prefetch-retry-max-attempts
hicache-storage-prefetch-retry-poll-interval http2-initial-connection-window-size
load-publish-endpoint prefill-decode-interval speculative-dsa-topk-backend
""",
        "",
    ),
    (
        20,
        """
dsv4-attn-backend enable-response-store enable-unified-cache-external-linker
flashinfer-a2a-dispatch-type no-ple-offload-embedding ple-offload-backend ple-offload-dir
ple-offload-embedding radix-eviction-policy-config return-input-ids return-output-ids
sampling-mask-max-tokens speculative-domino-candidate-pool-size
unified-cache-external-linker-backend uno-lora-path
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
        21,
        """
boundary-reduction constrained-json-max-whitespace-cnt context-bucket cuda-graph-max-seq-len-prefill
cuda-graph-prefill-max-context disable-aiter-allreduce-fusion-in-decode
disable-aiter-allreduce-fusion-in-prefill disaggregation-decode-host-receive-threshold
disaggregation-enable-kv-checksum enable-decoder-swa-bounded-replay
enable-encoder-swa-bounded-replay enable-linker-mla-dedup enable-pd-role-switch
grpc-response-timeout-secs hicache-host-memory-fraction otlp-service-name
prefill-kv-cache-dequant-dtype shared-experts-tp-size speculative-draft-sink-size swa-prefix-tails
trust-request-chat-template
""",
        """
elastic-ep-rejoin keep-mm-feature-on-device
""",
    ),
    (
        22,
        """
attention-data-parallel-size attn-dp-size disaggregation-decode-allocation-policy dsa-triton-union
enable-dsa-fused-indexer enable-kv-cache-sharding enable-watermark no-enable-dsa-fused-indexer
no-speculative-enable-w4a4-mxfp4-megamoe qsa-indexer-dtype speculative-enable-w4a4-mxfp4-megamoe
speculative-use-block-verification watermark-config
""",
        """
cuda-graph-tc-compiler
""",
    ),
    (
        23,
        """
enable-amd-monokernel enable-hicache enable-http-worker-reuseport enable-megamoe-for-layernorm-sp
enable-nvidia-megakernel enable-paged-experts enable-return-aux-hidden-states monokernel-backend
no-enable-decoder-swa-bounded-replay no-enable-fused-qk-norm-rope no-enable-tf32-matmul
no-mm-enable-dp-encoder paged-experts-num-resident prefill-decode-interval-min-bs
return-aux-hidden-state-layer-ids unified-cache-external-linker-config
""",
        """
speculative-skip-dp-mlp-sync
""",
    ),
)
"""(patch of 0.5, flags that came, flags that went), oldest first."""
