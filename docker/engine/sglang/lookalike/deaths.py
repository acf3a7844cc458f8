"""How a start fails, by class: the fault `server-fails-CLASS` makes it happen at its real place.

The texts are those of real logs where there is one, else of the source of SGLang, torch, NCCL or
the kernel's own words. `{model}` and `{port}` are filled in.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from sglang.lookalike import faults, logs

PREFIX = "server-fails-"
IMPORT, ARGPARSE, ARGS, BIND = "import", "argparse", "args", "bind"
STARTING, DISTRIBUTED, WEIGHTS, LOADED = "starting", "distributed", "weights", "loaded"
GRAPHS, CAPTURED, WARMUP, SERVING = "graphs", "captured", "warmup", "serving"
RAISES, EXITS, SIGNALLED = "raises", "exits", "signalled"
SERVES_S = 1.0


@dataclass(frozen=True)
class Death:
    """`place`: how far it gets. `text`: the last lines. `code`: exit code, or -n for a signal.

    RAISES: an exception (a scheduler's ends the tree with SIGKILL, the parent's with exit code 1).
    EXITS: the text, then exit `code`. SIGNALLED: the text, then the process gets signal -`code`.
    """

    place: str
    text: str
    way: str = RAISES
    code: int = 1


CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.89 GiB. GPU 0 has a total "
    "capacity of 47.41 GiB of which 1.76 GiB is free. Including non-PyTorch memory, this process "
    "has 45.64 GiB memory in use. Of the allocated memory 44.63 GiB is allocated by PyTorch, and "
    "30.02 MiB is reserved by PyTorch but unallocated."
)
CAPTURE_ADVICE = (
    "\nPossible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n"
    "3. disable torch compile by not using --enable-torch-compile\n"
    "4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)\n"
    "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
)
DEATHS: dict[str, Death] = {
    "died-silent": Death(IMPORT, "", EXITS, 3),
    "killed": Death(WEIGHTS, "", SIGNALLED, -9),
    "unknown": Death(IMPORT, "/opt/wrapper: line 3: the licence server is away\n", EXITS, 7),
    "exception": Death(LOADED, "FooBarError: the flux capacitor is cold"),
    "engine-not-installed": Death(
        IMPORT,
        "/srv/venv/bin/python3: Error while finding module specification for "
        "'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang')\n",
        EXITS,
    ),
    "library-missing": Death(
        IMPORT, "ImportError: libcusparseLt.so.0: cannot open shared object file: No such file or "
        "directory",
    ),
    "system-too-old": Death(
        IMPORT, "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found "
        "(required by /srv/venv/lib/python3.12/site-packages/sglang/srt/_core.abi3.so)",
    ),
    "python-module-missing": Death(IMPORT, "ModuleNotFoundError: No module named 'orjson'"),
    "bad-arguments": Death(
        ARGPARSE, "sglang serve: error: unrecognized arguments: --enable-warp-drive\n", EXITS, 2
    ),
    "speculation-needs-extra-buffer": Death(
        ARGS, "ValueError: Speculative decoding for Qwen3_5ForConditionalGeneration is not "
        "compatible with radix cache when using --mamba-scheduler-strategy no_buffer.To use radix "
        "cache with speculative decoding, please use --mamba-scheduler-strategy extra_buffer and "
        "set SGLANG_ENABLE_SPEC_V2=1.",
    ),
    "extra-buffer-needs-radix": Death(
        ARGS, "ValueError: mamba extra_buffer is not compatible with --disable-radix-cache "
        "Overlap scheduling is already supported with no_buffer + disable_radix_cache",
    ),
    "context-too-long": Death(
        ARGS, "ValueError: Warning: User-specified context_length (999999) is greater than the "
        "derived context_length (4096). This may lead to incorrect model outputs or CUDA errors.",
    ),
    "quantization-mismatch": Death(
        ARGS, "ValueError: Quantization method specified in the model config (awq) does not match "
        "the quantization method specified in the `quantization` argument (fp8).",
    ),
    "unknown-model-type": Death(
        ARGS, "ValueError: The checkpoint you are trying to load has model type `qwen9_moe` but "
        "Transformers does not recognize this architecture. This could be because of an issue with "
        "the checkpoint, or because your version of Transformers is out of date.\n\nYou can update "
        "Transformers with the command `pip install --upgrade transformers`.",
    ),
    "model-config-missing": Death(
        ARGS, "ValueError: Unrecognized model in {model}. Should have a `model_type` key in its "
        "config.json.",
    ),
    "model-path-missing": Death(
        ARGS, "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
        "'{model}'. Use `repo_type` argument if needed.",
    ),
    "model-config-broken": Death(
        ARGS, "OSError: It looks like the config file at '{model}/config.json' is not a valid JSON "
        "file.",
    ),
    "trust-remote-code": Death(
        ARGS, "ValueError: The repository {model} contains custom code which must be executed to "
        "correctly load the model. You can inspect the repository content at {model} .\n Please "
        "pass the argument `trust_remote_code=True` to allow custom code to be run.",
    ),
    "hub-refused": Death(
        ARGS, "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-6750)"
        "\n\nCannot access gated repo for url https://huggingface.co/acme/x/resolve/main/"
        "config.json.\nAccess to model acme/x is restricted. You must have access to it and be "
        "authenticated to access it. Please log in.",
    ),
    "hub-unreachable": Death(
        ARGS, "'[Errno -3] Temporary failure in name resolution' thrown while requesting HEAD "
        "https://huggingface.co/acme/x/resolve/main/config.json\nOSError: We couldn't connect to "
        "'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
    ),
    "no-gpu": Death(
        ARGS, "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available."
    ),
    "tokenizer": Death(
        ARGS, "OSError: Can't load tokenizer for '{model}'. If you were trying to load it from "
        "'https://huggingface.co/models', make sure you don't have a local directory with the same "
        "name.",
    ),
    "permission": Death(
        ARGS, "PermissionError: [Errno 13] Permission denied: '{model}/config.json'"
    ),
    "too-many-files": Death(STARTING, "OSError: [Errno 24] Too many open files"),
    "process-limit": Death(STARTING, "RuntimeError: can't start new thread"),
    "driver-too-old": Death(
        STARTING, "RuntimeError: The NVIDIA driver on your system is too old (found version "
        "12080). Please update your GPU driver by downloading and installing a new version from "
        "the URL: http://www.nvidia.com/Download/index.aspx",
    ),
    "driver-mismatch": Death(
        STARTING, "RuntimeError: Failed to initialize NVML: Driver/library version mismatch"
    ),
    "gpu-broken": Death(
        WEIGHTS, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
        + CUDA_ADVICE,
    ),
    "gpu-unsupported": Death(
        WEIGHTS, "torch.AcceleratorError: CUDA error: no kernel image is available for execution "
        "on the device" + CUDA_ADVICE,
    ),
    "too-few-gpus": Death(
        STARTING, "torch.AcceleratorError: CUDA error: invalid device ordinal" + CUDA_ADVICE
    ),
    "nccl": Death(
        DISTRIBUTED, "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for "
        "details)",
    ),
    "network-interface": Death(
        DISTRIBUTED, "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/"
        "device.cc:83] ifa != nullptr. Unable to find address for: eth7",
    ),
    "rank-address-unknown": Death(
        DISTRIBUTED, "torch.distributed.DistNetworkError: The IPv6 network addresses of (kpro55, "
        "20000) cannot be retrieved (gai error: -2 - Name or service not known).",
    ),
    "rank-address-loopback": Death(
        DISTRIBUTED, "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/"
        "gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:33421: Connection refused",
    ),
    "ranks-no-route": Death(
        DISTRIBUTED, "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/"
        "gloo/transport/tcp/pair.cc:799] connect [10.9.0.6]:33421: No route to host",
    ),
    "distributed-timeout": Death(
        DISTRIBUTED, "torch.distributed.DistNetworkError: The client socket has timed out after "
        "600000ms while trying to connect to (127.0.0.1, 31001).",
    ),
    "shared-memory-full": Death(
        DISTRIBUTED, "RuntimeError: NCCL error: Error while creating shared memory segment "
        "/dev/shm/nccl-QbKzYx (size 9637888), No space left on device",
    ),
    "gpu-occupied": Death(
        DISTRIBUTED, "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied "
        "by other processes. pre_model_load_memory=2.41, local_gpu_memory=46.32, "
        "local_gpu_memory * 0.9=41.69",
    ),
    "tp-size-mismatch": Death(DISTRIBUTED, "AssertionError: 24 is not divisible by 5"),
    "weights-missing": Death(
        WEIGHTS, "RuntimeError: Cannot find any model weights with `{model}`"
    ),
    "weights-corrupt": Death(
        WEIGHTS, "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: "
        "incomplete metadata, file not fully covered",
    ),
    "weights-mismatch": Death(
        WEIGHTS, "RuntimeError: The size of tensor a (768) must match the size of tensor b (512) "
        "at non-singleton dimension 0",
    ),
    "disk-full": Death(WEIGHTS, "OSError: [Errno 28] No space left on device: '/root/.triton'"),
    "disk-error": Death(WEIGHTS, "OSError: [Errno 5] Input/output error"),
    "out-of-memory": Death(WEIGHTS, OOM),
    "host-out-of-memory": Death(WEIGHTS, "RuntimeError: mmap: Cannot allocate memory (12)"),
    "not-enough-memory": Death(
        LOADED, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    ),
    "mamba-pool-too-small": Death(LOADED, "AssertionError: max_running_request is zero"),
    "graph-capture-out-of-memory": Death(
        GRAPHS, "Exception: Capture cuda graph failed: "
        + OOM.partition(": ")[2] + CAPTURE_ADVICE,
    ),
    "graph-capture-failed": Death(
        GRAPHS, "Exception: Capture cuda graph failed: unsupported operand type" + CAPTURE_ADVICE
    ),
    "kernel-too-large": Death(
        GRAPHS, "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
        "147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
    ),
    "cuda-fault": Death(
        CAPTURED, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        + CUDA_ADVICE,
    ),
    "crashed": Death(
        CAPTURED, "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f11c2bfe640 "
        "(most recent call first):\n", SIGNALLED, -11,
    ),
    "port-in-use": Death(
        BIND, "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', {port}): "
        "address already in use",
    ),
    "address-not-here": Death(
        BIND, "ERROR:    [Errno 99] error while attempting to bind on address ('203.0.113.7', "
        "{port}): cannot assign requested address",
    ),
    "chat-template": Death(
        LOADED, "jinja2.exceptions.TemplateSyntaxError: unexpected '}'",
    ),
    "proxy": Death(
        WARMUP, "requests.exceptions.ProxyError: HTTPConnectionPool(host='127.0.0.1', "
        "port={port}): Max retries exceeded with url: /model_info (Caused by "
        "ProxyError('Unable to connect to proxy', OSError('Tunnel connection failed: 403')))",
    ),
    "warm-up-timeout": Death(
        WARMUP, "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', "
        "port={port}): Read timed out. (read timeout=600)",
    ),
    "kv-pool-exhausted": Death(
        SERVING, "RuntimeError: Decode out of memory. Try to lower your batch size.\n"
        "Try to allocate 9 tokens.\n",
    ),
    "system-library-missing": Death(
        IMPORT, "ImportError: libnuma.so.1: cannot open shared object file: No such file or "
        "directory",
    ),
    "quantization-unsupported": Death(
        ARGS, "ValueError: Unknown quantization method: hqq. Must be one of ['awq', 'fp8', 'gptq']",
    ),
    "kernel-build-failed": Death(
        WARMUP, "RuntimeError: ninja exited with status 1\nstdout:\n[1/2] /usr/local/cuda/bin/nvcc "
        "-std=c++20 -O3 -c cuda.cu -o cuda_0.o\nnvcc fatal   : Value 'c++20' is not "
        "defined for option 'std'\nninja: build stopped: subcommand failed.\n",
    ),
    "compiler-missing": Death(
        WARMUP, "RuntimeError: ninja exited with status 127\nstdout:\n/bin/sh: 1: "
        "/usr/local/cuda/bin/nvcc: not found\nninja: build stopped: subcommand failed.\n",
    ),
    "bad-numbers": Death(
        SERVING, "/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:109: "
        "_assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] Assertion `probability tensor "
        "contains either `inf`, `nan` or element < 0` failed.\ntorch.AcceleratorError: CUDA error: "
        "device-side assert triggered" + CUDA_ADVICE,
    ),
    "watchdog": Death(
        SERVING, "Scheduler watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)\n",
        SIGNALLED, -3,
    ),
    "child-killed": Death(SERVING, "", SIGNALLED, -9),
    "child-crashed": Death(SERVING, "", SIGNALLED, -6),
    "asked-to-stop": Death(SERVING, "", SIGNALLED, -15),
}  # fmt: skip


def ordered(place: str) -> Death | None:
    """The death that is switched on, if this is its place."""
    for name in faults.active():
        death = DEATHS.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
        if death is not None and death.place == place:
            return death
    return None


def fill(text: str, args: Any) -> str:
    model = getattr(args, "model_path", "/srv/models/x")
    return text.replace("{model}", model).replace("{port}", str(getattr(args, "port", 30000)))


def strike_parent(place: str, args: Any = None) -> None:
    """The parent's part, before it has children."""
    death = ordered(place)
    if death is None:
        return
    text = fill(death.text, args)
    if death.way == RAISES:
        where = '  File "/srv/venv/lib/python3.12/site-packages/sglang/launch_server.py", line 27'
        text = f"Traceback (most recent call last):\n{where}, in <module>\n{text}\n"
    logs.raw(text)
    os._exit(death.code)


def strike(place: str, args: Any = None) -> None:
    """A scheduler's part. The parent is told as the real one tells it, and ends this process."""
    death = ordered(place)
    if death is None:
        return
    parent = os.getppid()
    text = fill(death.text, args)
    if death.way == RAISES:
        where = '  File "/srv/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py"'
        logs.say(
            "Scheduler hit an exception: Traceback (most recent call last):\n"
            f"{where}, line 3752, in run_scheduler_process\n    scheduler = Scheduler(\n{text}\n"
        )
        os.kill(parent, signal.SIGQUIT)
    elif text:
        logs.raw(text)
    if death.way == SIGNALLED and -death.code in (signal.SIGQUIT, signal.SIGTERM):
        os.kill(parent, -death.code)  # the watchdog, or somebody with `kill`
    elif death.way == SIGNALLED:
        os.kill(os.getpid(), -death.code)
    while True:
        time.sleep(3600)
