"""The table of failure classes: which text in a launch's log names which cause. Data.

Read top down: narrow causes stand above the wide ones that they set off. A pattern that a healthy
log may hold (a warning, a caught import) is bound to the head of an exception's last line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """`pattern` is looked for in each line; the cause is the first line that has it, or the last.

    `phases`: the phases in which the rule holds, first and last; None is any. `passing`: a launch
    may go on after such a line; it is the cause only when nothing follows it, or nothing else is
    found.
    """

    cls: str
    pattern: re.Pattern[str]
    action: str
    next_variant: bool = False
    last: bool = False
    phases: tuple[str, str] | None = None
    passing: bool = False


def _rule(
    cls: str,
    pattern: str,
    action: str,
    *,
    next_variant: bool = False,
    last: bool = False,
    phases: tuple[str, str] | None = None,
    passing: bool = False,
) -> Rule:
    return Rule(cls, re.compile(pattern), action, next_variant, last, phases, passing)


RULES: tuple[Rule, ...] = (
    _rule(
        "port-in-use",
        r"\[Errno 98\].*address already in use|is used by a process already"
        r"|[Aa]ddress already in use"
        r"|EADDRINUSE|server socket has failed to listen"
        r"|Error: .*[Pp]ort \d+ is (?:not available|already in use|in use|occupied)",
        "find the owner of the port (`deploy doctor`) and stop it, or choose another serve.port",
    ),
    _rule(
        "address-not-here",
        r"\[Errno 99\].*bind|[Cc]annot assign requested address.*bind"
        r"|bind on address .*[Cc]annot assign",
        "serve.host is no address of the target: use 0.0.0.0 or one of its own",
        passing=True,
    ),
    _rule(
        "bad-arguments",
        r"error: unrecognized arguments:|error: argument --|error: ambiguous option:"
        r"|error: the following arguments are required",
        "correct serve.args in the playbook: this version's own parser refuses them",
        last=True,
    ),
    _rule(
        "speculation-needs-extra-buffer",
        r"Speculative decoding for .* is not compatible with radix cache",
        "add serve.args mamba-scheduler-strategy: extra_buffer, or disable-radix-cache: true",
        last=True,
    ),
    _rule(
        "extra-buffer-needs-radix",
        r"mamba extra_buffer is not compatible with --disable-radix-cache",
        "leave out one of mamba-scheduler-strategy: extra_buffer and disable-radix-cache",
        last=True,
    ),
    _rule(
        "context-too-long",
        r"ValueError: .*context_length \(\d+\) is greater than the derived",
        "lower serve.args context-length to what the model's config allows",
        last=True,
    ),
    _rule(
        "quantization-unsupported",
        r"Error: (?:Unknown|Invalid) quantization method",
        "this engine.version has no such quantization: another serve.args quantization (the "
        "model's config names its own), or another engine.version",
        last=True,
    ),
    _rule(
        "quantization-mismatch",
        r"Quantization method specified in the model config",
        "remove serve.args quantization, or name the one of the model's config",
        last=True,
    ),
    _rule(
        "unknown-model-type",
        r"does not recognize this architecture|Model architectures .* are not supported"
        r"|has no SG[Ll]ang implementation|Error: .*[Uu]nknown (?:RoPE scaling|rope)[ _]?type"
        r"|Error: `rope_(?:scaling|parameters)` must be"
        r"|is not supported for model \S+ or model type",
        "this engine does not know the model: choose a newer engine.version with its lock",
    ),
    _rule(
        "unknown-model-type",
        r"^KeyError: '(?:qwen|llama|mi[sn]|gemma|deepseek|glm|phi|gpt|falcon|kimi|nemotron|ernie"
        r"|mimo|olmo|granite|cohere|exaone|intern|step|mamba|bamba|jamba|seed)[\w.-]*'\s*$",
        "this engine does not know the model: choose a newer engine.version with its lock",
        phases=("starting", "tokenizer"),
        last=True,
    ),
    _rule(
        "model-config-missing",
        r"Unrecognized model in .*model_type",
        "config.json is absent or empty: `deploy up --from shards` completes the weights",
        last=True,
    ),
    _rule(
        "model-path-missing",
        r"OSError: Repo id must be in the form|OSError: .* is not a local folder"
        r"|Incorrect path_or_model_id",
        "the folder in model.path does not exist on the target: `deploy up --from shards`",
        last=True,
    ),
    _rule(
        "hub-refused",
        r"401 Client Error|403 Client Error|GatedRepoError|[Cc]annot access gated repo"
        r"|429 Client Error|trying to access a gated repo|Invalid user token"
        r"|RepositoryNotFoundError",
        "the Hub refused (a token that is missing or may not): model.path must be a local folder",
        passing=True,
    ),
    _rule(
        "proxy",
        r"Error: .*(?:127\.0\.0\.1|localhost|0\.0\.0\.0).*(?:ProxyError"
        r"|[Uu]nable to connect to proxy)",
        "the server's own first request went to a proxy: serve.env NO_PROXY: 127.0.0.1,localhost",
        last=True,
    ),
    _rule(
        "chat-template",
        r"Error: Chat template .* is not a built-in|jinja2\.exceptions\.\w+: ",
        "the chat template cannot be used: correct serve.args chat-template, or the model's own",
        last=True,
        passing=True,
    ),
    _rule(
        "trust-remote-code",
        r"requires you to execute the .*file|trust_remote_code=True.* to remove this error"
        r"|contains custom code which must be executed",
        "the model brings its own code: read it, then add serve.args trust-remote-code: true",
        last=True,
    ),
    _rule(
        "model-config-broken",
        r"config file at .* is not a valid JSON file|Error parsing .*config\.json",
        "a config file of the model is no JSON: `deploy up --from shards` checks every hash",
        last=True,
    ),
    _rule(
        "tokenizer",
        r"Can't load tokenizer for|[Cc]ouldn't instantiate the backend tokenizer"
        r"|Tokenizer class \S+ does not exist|Unable to load vocabulary from file"
        r"|untagged enum \w+|[Ee]rror (?:while )?(?:loading|parsing) (?:the )?tokenizer"
        r"|Error.*(?:tokenizer\.json|tokenizer\.model|tokenizer_config\.json|vocab\.json)"
        r"|Failed to load the tokenizer",
        "the tokenizer's files are missing or broken: `deploy up --from shards` checks every hash",
        last=True,
        passing=True,
    ),
    _rule(
        "tp-size-mismatch",
        r"Error: .*(?:is not|must be|should be|not) divisible by|too large tensor parallel size",
        "tp-size (or another size) does not divide what the model has: change tp-size",
        last=True,
    ),
    _rule(
        "hub-unreachable",
        r"We couldn't connect to 'https?://|Temporary failure in name resolution"
        r"|Error: .*host='[\w.-]*(?:huggingface\.co|hf-mirror"
        r"|modelscope)[\w.-]*'.*Max retries exceeded",
        "the server tried to reach the Hub: model.path must be a complete local folder",
        passing=True,
    ),
    _rule(
        "weights-missing",
        r"Cannot find any model weights with|FileNotFoundError: .*\.safetensors",
        "no weights in model.path: `deploy up --from shards`",
        last=True,
    ),
    _rule(
        "weights-missing",
        r"Local snapshot incomplete for|LocalEntryNotFoundError: ",
        "files of the model are missing in model.path: `deploy up --from shards`",
        passing=True,
    ),
    _rule(
        "disk-error",
        r"\bos error 5\b|\[Errno 5\]|(?:Error|error): .*Input/output error",
        "a disk of the target cannot be read: see the host's `dmesg`, and check the disk",
    ),
    _rule(
        "weights-corrupt",
        r"SafetensorError: |header too large|incomplete metadata, file not fully covered",
        "a weight file is cut or is not one: `deploy up --from shards` checks every hash",
        last=True,
    ),
    _rule(
        "weights-mismatch",
        r"Error: .*(?:size mismatch for|shape mismatch|[Ss]hapes? .* (?:do not|don't) match)"
        r"|Error: .*size of tensor .* must match|Error: param_data\.shape"
        r"|KeyError: .(?:model|lm_head|language_model|visual|mtp)\.[\w.]+",
        "the weights are not those of config.json: `deploy up --from shards` checks every hash",
        last=True,
    ),
    _rule(
        "shared-memory-full",
        r"(?:Error|WARN|Exception)\b.*/dev/shm/.*No space left|Error: .*No space left.*/dev/shm"
        r"|[Ee]rror while creating shared memory segment|[Ff]ailed to \w+ /dev/shm/nccl-"
        r"|Error: .*unable to (?:open|mmap|allocate|resize) .*shared memory (?:object|file)",
        "/dev/shm of the container is too small for NCCL: make it larger (8 GB or more)",
    ),
    _rule(
        "disk-full",
        r"(?:Error|Exception|fatal error|filesystem error): .*(?:No space left|Errno 28\b)"
        r"|os error 28\b|Error: .*Disk quota exceeded|^\[[^\]]*\].*\[Errno 28\]",
        "a file system of the target is full: `df -h` there, then free space (`deploy doctor`)",
        passing=True,
    ),
    _rule(
        "driver-too-old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted on non supported HW|cudaErrorInsufficientDriver"
        r"|the provided PTX was compiled with an unsupported toolchain",
        "the host's driver is older than this engine's CUDA needs: `deploy up --from driver`",
    ),
    _rule(
        "driver-mismatch",
        r"[Dd]river/library version mismatch|unsupported display driver / cuda driver combination",
        "kernel module and user libraries are of two driver versions: `deploy up --from driver`",
    ),
    _rule(
        "gpu-broken",
        r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus|CUDA error: hardware",
        "a GPU has failed: read `dmesg` on the host for Xid lines, then reset or replace it",
    ),
    _rule(
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
        r"|Error: .*(?:requires? (?:SM\d|Blackwell|Hopper)|platform does not support)",
        "this GPU cannot run that: another serve.args attention-backend, dtype or quantization, "
        "or an engine.version that has kernels for it",
        passing=True,
    ),
    _rule(
        "no-gpu",
        r"No accelerator \(CUDA|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|no CUDA-capable device is detected|CUDA unknown error|Torch not compiled with CUDA"
        r"|CUDA error: (?:initialization error|system not yet initialized)"
        r"|Unexpected error from cudaGetDeviceCount.*Error (?!80[34])\d+"
        r"|libcuda\.so\.1: cannot open shared object"
        r"|Failed to initialize NVML|Can't initialize NVML",
        "no GPU is usable in the guest: `deploy up --from driver`",
        last=True,
    ),
    _rule(
        "too-few-gpus",
        r"CUDA error: invalid device ordinal|Duplicate GPU detected"
        r"|Error: .*(?:required|requested) GPUs exceeds",
        "tp-size asks for more GPUs than the container has: change tp-size or its `gpus`",
    ),
    _rule(
        "gpu-occupied",
        r"memory capacity is unbalanced|CUDA-capable device\(s\) is/are busy or unavailable",
        "another process holds memory of one GPU: `deploy doctor` names it",
    ),
    _rule(
        "graph-capture-out-of-memory",
        r"Capture (?:[\w-]+ )*(?i:cuda graph) failed: .*out of memory",
        "lower serve.args mem-fraction-static or cuda-graph-max-bs",
        next_variant=True,
        last=True,
    ),
    _rule(
        "graph-capture-out-of-memory",
        r"OutOfMemoryError: CUDA out of memory|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
        r"|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Triton Error \[CUDA\]: out of memory",
        "lower serve.args mem-fraction-static or cuda-graph-max-bs",
        next_variant=True,
        last=True,
        phases=("graphs", "graphs"),
    ),
    _rule(
        "not-enough-memory",
        r"(?:RuntimeError|ValueError): (?:Not enough (?:GPU )?memory|Loaded weights leave no GPU)"
        r"|Hybrid \(mamba/linear-attention\) state cache is too small"
        r"|is larger than the profiled value -",
        "first see that nothing else uses the GPUs (`deploy doctor`); then raise "
        "serve.args mem-fraction-static, or lower context-length or max-running-requests",
        next_variant=True,
        last=True,
    ),
    _rule(
        "mamba-pool-too-small",
        r"Not enough space for mamba ping pong idx|max_running_request is zero",
        "raise serve.args mamba-full-memory-ratio or max-mamba-cache-size",
        next_variant=True,
        last=True,
    ),
    _rule(
        "out-of-memory",
        r"OutOfMemoryError: CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|Triton Error \[CUDA\]: out of memory",
        "lower serve.args mem-fraction-static, context-length or max-running-requests",
        next_variant=True,
        last=True,
    ),
    _rule(
        "kv-pool-exhausted",
        r"Error: (?:Prefill|Decode) out of memory\. Try to lower",
        "the KV pool was too small for the requests that ran: lower serve.args "
        "max-running-requests, or raise mem-fraction-static",
        next_variant=True,
    ),
    _rule(
        "host-out-of-memory",
        r"^(?:\[[^\]]*\] )?MemoryError\b|Error: Not enough host memory|std::bad_alloc"
        r"|Cannot allocate memory"
        r"|can't allocate memory"
        r"|[Oo]ut of memory: Killed process|oom-kill",
        "the target's own memory (not the GPU's) is full: raise the container's memory",
    ),
    _rule(
        "bad-numbers",
        r"Assertion [`']probability tensor contains either",
        "the model computes garbage (missing or wrong weights): `deploy up --from shards`",
    ),
    _rule(
        "engine-not-installed",
        r"Error while finding module specification for 'sglang|No module named '?sglang"
        r"|exec: \S*/python[\d.]*: (?:not found|Permission denied|cannot execute)|bad interpreter",
        "the venv lacks sglang or its Python: `deploy up --from venv`",
    ),
    _rule(
        "system-too-old",
        r"version `?(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+'? not found",
        "the container's distribution is older than this engine's wheels: a newer one (glibc), or "
        "an older engine.version",
    ),
    _rule(
        "system-library-missing",
        r"(?:ImportError|OSError): (?:- )?lib(?:numa|ibverbs|rdmacm|GL|glib-2\.0|gomp|sndfile"
        r"|X\w+|SM|ICE)\b"
        r"[^:]*: cannot open shared object file",
        "a library of the distribution is missing in the target: install its package (libnuma.so.1 "
        "is in libnuma1)",
        passing=True,
    ),
    _rule(
        "library-missing",
        r"(?:ImportError|OSError): \S+\.so[.\d]*: "
        r"(?:cannot open shared object file|undefined symbol)"
        r"|ImportError: (?:cannot import name .* from 'sgl_kernel'|Can not import FA3)",
        "the venv does not fit this machine (a CUDA library is missing): `deploy up --from venv`",
        passing=True,
    ),
    _rule(
        "compiler-missing",
        r"nvcc: not found|ninja: not found|Could not find (?:nvcc|CUDA installation)"
        r"|CUDA_HOME .*not set|Failed to find C compiler|(?:gcc|g\+\+|c\+\+): not found"
        r"|fatal error: [\w./-]+\.(?:h|cuh|hpp): No such file|cannot find -l(?:cuda|cudart"
        r"|nvrtc)\b",
        "this engine compiles kernels at the first start: install nvcc (CUDA toolkit) and ninja",
        passing=True,
    ),
    _rule(
        "kernel-build-failed",
        r"Error building extension|Command '\['ninja'|ninja exited with status|nvcc fatal"
        r"|ninja: build stopped|CalledProcessError: Command '\[[^\]]*(?:gcc|g\+\+|/cc|nvcc|ptxas)"
        r"|PTXASError: ",
        "a kernel could not be compiled at the start: see the compiler's lines in the log; nvcc's "
        "version must fit the venv's CUDA",
    ),
    _rule(
        "cuda-fault",
        r"(?:CUDA [Ee]rror: |with error )(?:an illegal memory access|device-side assert"
        r"|unspecified launch failure"
        r"|misaligned address|invalid argument|launch failed|operation not permitted)",
        "a GPU kernel failed; try the next variant, without speculation",
        next_variant=True,
    ),
    _rule(
        "nccl",
        r"NCCL error|nccl[A-Z]\w+(?:Error|Usage|Argument)\b|DistBackendError"
        r"|NCCL WARN .*(?:fail|error)|Watchdog caught collective operation timeout"
        r"|Error: .*peer access is not supported",
        "the GPUs cannot talk to each other; try serve.env NCCL_P2P_DISABLE: '1'",
        passing=True,
    ),
    _rule(
        "distributed-timeout",
        r"DistNetworkError|DistStoreError|Gloo connectFullMesh failed"
        r"|The client socket has (?:timed out|failed to connect)"
        r"|other ranks that didn't finish loading",
        "the ranks did not find each other: see which rank died first",
        passing=True,
    ),
    _rule(
        "kernel-too-large",
        r"OutOfResources: |out of resource: shared memory",
        "a kernel does not fit this GPU: try another serve.args attention-backend",
        next_variant=True,
    ),
    _rule(
        "graph-capture-failed",
        r"Capture (?:[\w-]+ )*(?i:cuda graph) failed:",
        "graph capture failed: try serve.args disable-cuda-graph: true to see the server run",
        next_variant=True,
        last=True,
    ),
    _rule(
        "watchdog",
        r"[Ww]atchdog timeout",
        "a step took longer than the watchdog allows: see the stacks in the log",
        next_variant=True,
    ),
    _rule(
        "process-limit",
        r"can't start new thread|BlockingIOError: \[Errno 11\]|pthread_create failed"
        r"|[Cc]annot fork|fork: (?:retry: )?Resource temporarily unavailable",
        "no process or thread may be started any more: raise the container's limit of processes",
    ),
    _rule(
        "too-many-files",
        r"Too many open files",
        "the limit of open files is too low in the container: raise its nofile limit",
        passing=True,
    ),
    _rule(
        "python-module-missing",
        r"^(?:- )?(?:\[[^\]]*\] )?"
        r"(?:ModuleNotFoundError: |ImportError: (?:cannot import name|.*(?:requires?\b"
        r"|[Pp]lease install))"
        r"|\w+: .* is installed with version .* minimum required"
        r"|\w+: .* with minimum required version .* is not installed)"
        r"|CuDNN Compatibility Issue Detected",
        "the venv lacks a package or holds a wrong version: `deploy up --from venv`",
        last=True,
        passing=True,
    ),
    _rule(
        "permission",
        r"(?:PermissionError|OSError): .*"
        r"(?:Permission denied|Operation not permitted|Read-only file system)",
        "the server may not use that file: see its owner, and who the launch runs as",
        last=True,
        passing=True,
    ),
    _rule(
        "crashed",
        r"Fatal Python error: (?!Aborted)|Segmentation fault|\*\*\* SIG(?:SEGV|BUS|ABRT)|Bus error",
        "native code crashed; the next variant may do without what crashed",
        next_variant=True,
    ),
    _rule(
        "child-killed",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code -9"
        r"|scheduler died during initialization \(exit code: -9\)|\] Exit code: -9\s*$",
        "a worker was killed from outside (out of host memory?): read `dmesg` on the host",
    ),
    _rule(
        "child-crashed",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code"
        r"|scheduler died during initialization \(exit code:|Rank \d+ scheduler is dead",
        "a worker process crashed; the next variant may do without what crashed",
        next_variant=True,
    ),
    _rule(
        "asked-to-stop",
        r"SIGTERM received\.",
        "somebody stopped the server: run `deploy up` again",
    ),
)


@dataclass(frozen=True)
class Place:
    """A part of SGLang in whose code an error of no known text was raised.

    `frame` is looked for in the last frames of the traceback; `phases` as in Rule.
    """

    cls: str
    frame: re.Pattern[str]
    action: str
    next_variant: bool = False
    phases: tuple[str, str] | None = None


LOADING = ("starting", "mamba")
PLACES: tuple[Place, ...] = (
    Place(
        "arguments-refused",
        re.compile(r"/sglang/srt/(?:server_args|arg_groups/\w+)\.py"),
        "the engine refuses this combination of arguments: change serve.args as the line says",
        phases=("starting", "args"),
    ),
    Place(
        "quantization-unsupported",
        re.compile(r"/sglang/srt/layers/quantization/"),
        "this engine cannot load this quantization so: another serve.args quantization, another "
        "engine.version, or a checkpoint of another format",
        phases=LOADING,
    ),
    Place(
        "speculation-failed",
        re.compile(r"/sglang/srt/speculative/"),
        "the code that drafts failed: the variant without speculation, or other speculative-* "
        "arguments",
        next_variant=True,
    ),
    Place(
        "grammar-failed",
        re.compile(r"/sglang/srt/constrained/"),
        "structured output failed: another serve.args grammar-backend (xgrammar, llguidance, none)",
    ),
    Place(
        "adapter-failed",
        re.compile(r"/sglang/srt/lora/"),
        "a LoRA adapter does not fit: see serve.args lora-paths, max-lora-rank and target modules",
    ),
    Place(
        "model-code-failed",
        re.compile(r"/sglang/srt/models/"),
        "the engine's code for this model does not fit the checkpoint: another engine.version, or "
        "another tp-size",
        phases=LOADING,
    ),
)
"""Looked at in this order, after every text has failed."""
