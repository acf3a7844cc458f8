"""Failures of drivers and GPUs, and of the memory of GPUs. Data.

Read top down, as `failure_rules` tells.
"""

from __future__ import annotations

from deployer.sglang.failure_rule import Rule, rule

GPU: tuple[Rule, ...] = (
    rule(
        "driver-too-old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted on non supported HW|cudaErrorInsufficientDriver"
        r"|the provided PTX was compiled with an unsupported toolchain",
        "the host's driver is older than this engine's CUDA needs: `deploy up --from driver`",
    ),
    rule(
        "driver-mismatch",
        r"[Dd]river/library version mismatch|unsupported display driver / cuda driver combination",
        "kernel module and user libraries are of two driver versions: `deploy up --from driver`",
    ),
    rule(
        "gpu-broken",
        r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus|CUDA error: hardware",
        "a GPU has failed: read `dmesg` on the host for Xid lines, then reset or replace it",
    ),
    rule(
        "gpu-unsupported",
        r"no kernel image is available for execution"
        r"|not compatible with the current PyTorch installation"
        r"|requires (?:a )?(?:CUDA )?compute capability|is not supported on this GPU"
        r"|Error: .*(?:requires SM\b|Minimum capability: |compute capability of at least)"
        r"|Error: .*not supported for the current GPU"
        r"|not defined for option 'gpu-name'|Unsupported gpu architecture"
        r"|type fp8\w* not supported in this architecture|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|Error: .*only supported on CUDA devices with compute capability"
        r"|Error: .*only supports? \w+ GPUs or newer"
        r"|Error: .*only supported on (?:NVIDIA )?(?:Blackwell|Hopper|Ampere|Ada|SM ?\d)"
        r"|Error: .*(?:requires? (?:SM\d|Blackwell|Hopper)|platform does not support)",
        "this GPU cannot run that: another serve.args attention-backend, dtype or quantization, "
        "or an engine.version that has kernels for it",
        passing=True,
    ),
    rule(
        "no-gpu",
        r"No accelerator \(CUDA|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|no CUDA-capable device is detected|CUDA unknown error|Torch not compiled with CUDA"
        r"|CUDA error: (?:initialization error|system not yet initialized)"
        r"|Unexpected error from cudaGetDeviceCount.*Error (?!80[34])\d+"
        r"|libcuda\.so\.1: cannot open shared object"
        r"|Failed to initialize NVML|Can't initialize NVML|NVML Shared Library Not Found"
        r"|NVMLError_(?:LibraryNotFound|DriverNotLoaded|Uninitialized)|Error: nvidia-smi not found"
        r"|could not select device driver",
        "no GPU is usable in the guest: `deploy up --from driver`",
        last=True,
    ),
    rule(
        "too-few-gpus",
        r"CUDA error: invalid device ordinal|Duplicate GPU detected"
        r"|Error: .*(?:required|requested) GPUs exceeds",
        "tp-size asks for more GPUs than the container has: change tp-size or its `gpus`",
    ),
    rule(
        "gpu-occupied",
        r"memory capacity is unbalanced|CUDA-capable device\(s\) is/are busy or unavailable",
        "another process holds memory of one GPU: `deploy doctor` names it",
    ),
    rule(
        "graph-capture-out-of-memory",
        r"Capture (?:[\w-]+ )*(?i:cuda graph) failed: .*out of memory",
        "lower serve.args mem-fraction-static or cuda-graph-max-bs",
        next_variant=True,
        last=True,
    ),
    rule(
        "graph-capture-out-of-memory",
        r"OutOfMemoryError: CUDA out of memory"
        r"|CU(?:BLAS|DNN)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
        r"|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Triton Error \[CUDA\]: out of memory",
        "lower serve.args mem-fraction-static or cuda-graph-max-bs",
        next_variant=True,
        last=True,
        phases=("graphs", "graphs"),
    ),
    rule(
        "not-enough-memory",
        r"(?:RuntimeError|ValueError): (?:Not enough (?:GPU )?memory|Loaded weights leave no GPU)"
        r"|Hybrid \(mamba/linear-attention\) state cache is too small"
        r"|is larger than the profiled value -",
        "first see that nothing else uses the GPUs (`deploy doctor`); then raise "
        "serve.args mem-fraction-static, or lower context-length or max-running-requests",
        next_variant=True,
        last=True,
    ),
    rule(
        "mamba-pool-too-small",
        r"Not enough space for mamba ping pong idx|max_running_request is zero",
        "raise serve.args mamba-full-memory-ratio or max-mamba-cache-size",
        next_variant=True,
        last=True,
    ),
    rule(
        "out-of-memory",
        r"OutOfMemoryError: CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|CU(?:BLAS|DNN)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
        r"|Triton Error \[CUDA\]: out of memory",
        "lower serve.args mem-fraction-static, context-length or max-running-requests",
        next_variant=True,
        last=True,
    ),
    rule(
        "kv-pool-exhausted",
        r"Error: (?:(?:Prefill|Decode) out|Out) of memory\. Try to lower"
        r"|alloc_req_slots runs out of memory"
        r"|Out of memory even after retracting all",
        "the KV pool was too small for the requests that ran: lower serve.args "
        "max-running-requests, or raise mem-fraction-static",
        next_variant=True,
    ),
)
