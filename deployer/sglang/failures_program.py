"""Failures of the venv, the machine, the ranks and the processes. Data.

Read top down, as `failure_rules` tells.
"""

from __future__ import annotations

from deployer.sglang.failure_rule import Rule, rule
from deployer.sglang.failures_nodes import PEERS

PROGRAM: tuple[Rule, ...] = (
    rule(
        "host-out-of-memory",
        r"^(?:\[[^\]]*\] )?MemoryError\b|Error: Not enough host memory|std::bad_alloc"
        r"|Cannot allocate memory"
        r"|can't allocate memory"
        r"|[Oo]ut of memory: Killed process|oom-kill",
        "the target's own memory (not the GPU's) is full: raise the container's memory",
    ),
    rule(
        "bad-numbers",
        r"Assertion [`']probability tensor contains either",
        "the model computes garbage (missing or wrong weights): `deploy up --from shards`",
    ),
    rule(
        "engine-not-installed",
        r"Error while finding module specification for 'sglang|No module named '?sglang"
        r"|exec: \S*/python[\d.]*: (?:not found|Permission denied|cannot execute)|bad interpreter"
        r"|\bpython[\d.]*: (?:(?:command )?not found|Permission denied|No such file or directory"
        r"|cannot execute)|\bsglang: (?:command )?not found",
        "the venv lacks sglang or its Python: `deploy up --from venv`",
    ),
    rule(
        "system-too-old",
        r"version `?(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+'? not found",
        "the container's distribution is older than this engine's wheels: a newer one (glibc), or "
        "an older engine.version",
    ),
    rule(
        "system-library-missing",
        r"(?:ImportError|OSError): (?:- )?lib(?:numa|ibverbs|rdmacm|GL|glib-2\.0|gomp|sndfile"
        r"|X\w+|SM|ICE)\b"
        r"[^:]*: cannot open shared object file",
        "a library of the distribution is missing in the target: install its package (libnuma.so.1 "
        "is in libnuma1)",
        passing=True,
    ),
    rule(
        "library-missing",
        r"(?:ImportError|OSError): \S+\.so[.\d]*: "
        r"(?:cannot open shared object file|undefined symbol)"
        r"|ImportError: (?:cannot import name .* from 'sgl_kernel'|Can not import FA3)",
        "the venv does not fit this machine (a CUDA library is missing): `deploy up --from venv`",
        passing=True,
    ),
    rule(
        "compiler-missing",
        r"nvcc: not found|ninja: not found|Could not find (?:nvcc|CUDA installation)"
        r"|CUDA_HOME .*not set|Failed to find C compiler|(?:gcc|g\+\+|c\+\+): not found"
        r"|No such file or directory: '(?:\S*/)?(?:ninja|nvcc|gcc|g\+\+|c\+\+|cc)'"
        r"|fatal error: [\w./-]+\.(?:h|cuh|hpp): No such file|cannot find -l(?:cuda|cudart"
        r"|nvrtc)\b",
        "this engine compiles kernels at the first start: install nvcc (CUDA toolkit) and ninja",
        passing=True,
    ),
    rule(
        "kernel-build-failed",
        r"Error building extension|Command '\['ninja'|ninja exited with status|nvcc fatal"
        r"|ninja: build stopped|CalledProcessError: Command '\[[^\]]*(?:gcc|g\+\+|/cc|nvcc|ptxas)"
        r"|PTXASError: ",
        "a kernel could not be compiled at the start: see the compiler's lines in the log; nvcc's "
        "version must fit the venv's CUDA",
    ),
    rule(
        "cuda-fault",
        r"(?:CUDA [Ee]rror: |Triton Error \[CUDA\]: |with error )"
        r"(?:an illegal memory access|device-side assert"
        r"|unspecified launch failure"
        r"|misaligned address|invalid argument|launch failed|operation not permitted)"
        r"|Error: Failed to run cutlass|Error: cuDNN error: CUDNN_STATUS_EXECUTION",
        "a GPU kernel failed; try the next variant, without speculation",
        next_variant=True,
    ),
    *PEERS,
    rule(
        "nccl",
        r"NCCL error|nccl[A-Z]\w+(?:Error|Usage|Argument)\b|DistBackendError"
        r"|NCCL WARN .*(?:fail|error)|Watchdog caught collective operation timeout"
        r"|ProcessGroupNCCL watchdog hang"
        r"|Error: .*peer access is not supported"
        r"|nvshmem (?:initialization|setup connections) failed",
        "the GPUs cannot talk to each other: on one host try serve.env NCCL_P2P_DISABLE: '1'; of "
        "several nodes see each one's log, and that all ports are open between them",
        passing=True,
    ),
    rule(
        "network-interface",
        r"Unable to find (?:interface|address) for: |no socket interface found"
        r"|Error: Invalid IB devices",
        "no such network interface in the target: correct NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME in serve.env (or serve.args disaggregation-ib-device)",
    ),
    rule(
        "distributed-timeout",
        r"DistNetworkError|DistStoreError|Gloo connectFullMesh failed"
        r"|The client socket has (?:timed out|failed to connect)"
        r"|other ranks that didn't finish loading"
        r"|gloo/transport/\S+ Timed out waiting",
        "the ranks did not find each other: see which one died first (`deploy logs` of each node), "
        "and that the port of dist-init-addr is open between them",
        passing=True,
    ),
    rule(
        "kernel-too-large",
        r"OutOfResources: |out of resource: shared memory",
        "a kernel does not fit this GPU: try another serve.args attention-backend",
        next_variant=True,
    ),
    rule(
        "graph-capture-failed",
        r"Capture (?:[\w-]+ )*(?i:cuda graph) failed:",
        "graph capture failed: try serve.args disable-cuda-graph: true to see the server run",
        next_variant=True,
        last=True,
    ),
    rule(
        "watchdog",
        r"[Ww]atchdog timeout",
        "a step took longer than the watchdog allows: see the stacks in the log",
        next_variant=True,
    ),
    rule(
        "warm-up-timeout",
        r"(?:ReadTimeout|TimeoutError): .*(?:127\.0\.0\.1|localhost|0\.0\.0\.0).*Read timed out",
        "the server's own first request got no answer in time: kernels may have been compiled "
        "then, so start it once more; the variant without what hangs, where it comes back",
        next_variant=True,
        last=True,
        passing=True,
    ),
    rule(
        "process-limit",
        r"can't start new thread|BlockingIOError: \[Errno 11\]|pthread_create failed"
        r"|[Cc]annot fork|fork: (?:retry: )?Resource temporarily unavailable",
        "no process or thread may be started any more: raise the container's limit of processes",
    ),
    rule(
        "too-many-files",
        r"Too many open files",
        "the limit of open files is too low in the container: raise its nofile limit",
        passing=True,
    ),
    rule(
        "python-module-missing",
        r"^(?:- )?(?:\[[^\]]*\] )?"
        r"(?:ModuleNotFoundError: |ImportError: (?:cannot import name|.*(?:requires?\b"
        r"|[Pp]lease install))"
        r"|\w+: .* is installed with version .* minimum required"
        r"|ImportError: numpy\.core\.\w+ failed to import"
        r"|\w+: .* with minimum required version .* is not installed)"
        r"|CuDNN Compatibility Issue Detected",
        "the venv lacks a package or holds a wrong version: `deploy up --from venv`",
        last=True,
        passing=True,
    ),
    rule(
        "permission",
        r"(?:PermissionError|OSError): .*"
        r"(?:Permission denied|Operation not permitted|Read-only file system)",
        "the server may not use that file: see its owner, and who the launch runs as",
        last=True,
        passing=True,
    ),
    rule(
        "crashed",
        r"Fatal Python error: (?!Aborted)|Segmentation fault|\*\*\* SIG(?:SEGV|BUS|ABRT)|Bus error"
        r"|Illegal instruction",
        "native code crashed; the next variant may do without what crashed",
        next_variant=True,
    ),
    rule(
        "child-killed",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code -9"
        r"|scheduler died during initialization \(exit code: -9\)|\] Exit code: -9\s*$"
        r"|Scheduler or DataParallelController \d+ terminated with -9\b",
        "a worker was killed from outside (out of host memory?): read `dmesg` on the host",
    ),
    rule(
        "child-crashed",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code"
        r"|scheduler died during initialization \(exit code:|Rank \d+ scheduler is dead"
        r"|Scheduler or DataParallelController \d+ terminated with -\d",
        "a worker process crashed; the next variant may do without what crashed",
        next_variant=True,
    ),
    rule(
        "asked-to-stop",
        r"SIGTERM received\.|^KeyboardInterrupt\s*$",
        "somebody stopped the server: run `deploy up` again",
    ),
)
