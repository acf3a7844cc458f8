"""Why a launch failed: classes of failures by log text and exit code. Pure.

The table is read top down; the first rule whose text is in the log of THIS launch names the cause.
SGLang's own headlines ("Received sigquit from a child process", "SIGQUIT received") name none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deployer.sglang.log import PHASES, is_bar

MISLEADING = re.compile(
    r"[Ss]igquit (?:received|from a child)|SIGQUIT received|Received sigquit"
    r"|CUDA kernel errors might be asynchronously|For debugging consider passing CUDA_LAUNCH"
    r"|Compile with `TORCH_USE_CUDA_DSA`|leaked semaphore|resource_tracker: |Ignore import error"
    r"|still supported, but 'sglang serve'|warnings\.warn\(|Gracefully exiting"
    r"|Example: sglang serve|server_args=ServerArgs|has no attribute 'path'"
    r"|\[http_server\] Error: "
)
"""Lines that are never shown as a cause."""
HEADLINE = re.compile(r"[Ss]igquit|SIGQUIT")
NOISE = re.compile(
    r'INFO: .* HTTP/1\.1"|^\s*(?:File "|\^+$|raise |~+)|^Traceback |^\s{4,}\S|^usage: |^\s+\[--'
)
SHELL_WORD = re.compile(r"^(?:Killed|Terminated|Aborted|Segmentation fault|Bus error)\b.{0,40}$")
"""What the shell above the server writes when a signal ended it."""
TRAFFIC = re.compile(r'INFO: .* HTTP/1\.1"|Prefill batch,|Decode batch,|^\s*[\^~]+\s*$')
MAX_LINE = 500


@dataclass(frozen=True)
class Failure:
    """`cls` is a stable word; `cause_line` is the line that states the cause ('' when none)."""

    cls: str
    cause_line: str
    action: str
    next_variant_allowed: bool
    """May the next rung of the ladder be tried? False where it would only hide the cause."""


@dataclass(frozen=True)
class Rule:
    """`pattern` is looked for in each line; the cause is the first line that has it, or the last.

    `phases`: the phases in which the rule holds, first and last; None is any.
    """

    cls: str
    pattern: re.Pattern[str]
    action: str
    next_variant: bool = False
    last: bool = False
    phases: tuple[str, str] | None = None


def _rule(
    cls: str,
    pattern: str,
    action: str,
    *,
    next_variant: bool = False,
    last: bool = False,
    phases: tuple[str, str] | None = None,
) -> Rule:
    return Rule(cls, re.compile(pattern), action, next_variant, last, phases)


RULES: tuple[Rule, ...] = (
    _rule(
        "port-in-use",
        r"\[Errno 98\].*address already in use|is used by a process already|Address already in use",
        "find the owner of the port (`deploy doctor`) and stop it, or choose another serve.port",
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
        "quantization-mismatch",
        r"Quantization method specified in the model config",
        "remove serve.args quantization, or name the one of the model's config",
        last=True,
    ),
    _rule(
        "unknown-model-type",
        r"does not recognize this architecture|Model architectures .* are not supported",
        "this engine does not know the model: choose a newer engine.version with its lock",
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
        "hub-unreachable",
        r"We couldn't connect to 'https?://|Temporary failure in name resolution",
        "the server tried to reach the Hub: model.path must be a complete local folder",
    ),
    _rule(
        "weights-missing",
        r"Cannot find any model weights with",
        "no weights in model.path: `deploy up --from shards`",
        last=True,
    ),
    _rule(
        "weights-corrupt",
        r"SafetensorError: |header too large|incomplete metadata, file not fully covered",
        "a weight file is cut or is not one: `deploy up --from shards` checks every hash",
        last=True,
    ),
    _rule(
        "no-gpu",
        r"No accelerator \(CUDA|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|CUDA driver version is insufficient",
        "no GPU is usable in the guest: `deploy up --from driver`",
        last=True,
    ),
    _rule(
        "too-few-gpus",
        r"CUDA error: invalid device ordinal",
        "tp-size asks for more GPUs than the container has: change tp-size or its `gpus`",
    ),
    _rule(
        "gpu-occupied",
        r"memory capacity is unbalanced",
        "another process holds memory of one GPU: `deploy doctor` names it",
    ),
    _rule(
        "graph-capture-out-of-memory",
        r"Capture cuda graph failed: .*out of memory",
        "lower serve.args mem-fraction-static or cuda-graph-max-bs",
        next_variant=True,
        last=True,
    ),
    _rule(
        "graph-capture-out-of-memory",
        r"OutOfMemoryError: CUDA out of memory",
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
        r"OutOfMemoryError: CUDA out of memory|CUDA error: out of memory",
        "lower serve.args mem-fraction-static, context-length or max-running-requests",
        next_variant=True,
        last=True,
    ),
    _rule(
        "bad-numbers",
        r"Assertion [`']probability tensor contains either",
        "the model computes garbage (missing or wrong weights): `deploy up --from shards`",
    ),
    _rule(
        "engine-not-installed",
        r"Error while finding module specification for 'sglang|No module named '?sglang",
        "the venv lacks sglang: `deploy up --from venv`",
    ),
    _rule(
        "library-missing",
        r"ImportError: \S+\.so[.\d]*: cannot open shared object file"
        r"|ImportError: (?:cannot import name .* from 'sgl_kernel'|Can not import FA3)",
        "the venv does not fit this machine (a CUDA library is missing): `deploy up --from venv`",
    ),
    _rule(
        "compiler-missing",
        r"nvcc: not found|ninja: not found|Could not find (?:nvcc|CUDA installation)"
        r"|CUDA_HOME .*not set",
        "this engine compiles kernels at the first start: install nvcc (CUDA toolkit) and ninja",
    ),
    _rule(
        "cuda-fault",
        r"CUDA error: (?:an illegal memory access|device-side assert|unspecified launch failure"
        r"|misaligned address|no kernel image)",
        "a GPU kernel failed; try the next variant, without speculation",
        next_variant=True,
    ),
    _rule(
        "nccl",
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|DistBackendError",
        "the GPUs cannot talk to each other; try serve.env NCCL_P2P_DISABLE: '1'",
    ),
    _rule(
        "child-killed",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code -9",
        "a worker was killed from outside (out of host memory?): read `dmesg` on the host",
    ),
    _rule(
        "child-crashed",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code",
        "a worker process crashed; the next variant may do without what crashed",
        next_variant=True,
    ),
    _rule(
        "asked-to-stop",
        r"SIGTERM received\.",
        "somebody stopped the server: run `deploy up` again",
    ),
)
EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt): ?.*\S")
FATAL_WHILE_ALIVE = re.compile(r"\[Errno 98\].*address already in use")


def classify(log_text: str, exit_code: int | None, phase: str = "starting") -> Failure:
    """The failure that this log (of one launch only) and this exit code show.

    `exit_code` is 0..255, -n for signal n, None when the process vanished or still runs.
    """
    lines = [line for line in re.split(r"[\r\n]", log_text) if line.strip() and not is_bar(line)]
    if not [line for line in lines if not SHELL_WORD.match(line)]:
        return Failure(
            "died-silent",
            "",
            f"it ended with {_code(exit_code)} before it wrote a word: run the job's script by "
            "hand on the target, and look for the out-of-memory killer in `dmesg`",
            False,
        )
    telling = [line for line in lines if not MISLEADING.search(line)]
    for rule in RULES:
        if rule.phases and not _between(phase, rule.phases):
            continue
        hits = [line for line in telling if rule.pattern.search(line)]
        if hits:
            return Failure(
                rule.cls, _cut(hits[-1 if rule.last else 0]), rule.action, rule.next_variant
            )
    if exit_code == -15:
        return Failure(
            "asked-to-stop", "", "somebody stopped the server: run `deploy up` again", False
        )
    if exit_code == -9 and not any(HEADLINE.search(line) for line in lines):
        return Failure(
            "killed",
            "",
            "it was killed from outside: look for the out-of-memory killer in `dmesg` on the host",
            False,
        )
    raised = [line for line in telling if EXCEPTION.match(line)]
    if raised:
        return Failure(
            "exception",
            _cut(raised[-1]),
            "an error that is not in this tool's table; the traceback is in the log of the launch",
            PHASES.index(phase) >= PHASES.index("graphs") if phase in PHASES else False,
        )
    told = [line for line in telling if not NOISE.search(line)]
    return Failure(
        "unknown",
        _cut(told[-1]) if told else "",
        f"unknown cause ({_code(exit_code)}, phase {phase}): read the last lines of the log",
        False,
    )


def fatal_while_alive(log_text: str) -> bool:
    """Is the launch lost although its process lives on? (A lost port: SGLang does not exit.)"""
    return bool(FATAL_WHILE_ALIVE.search(log_text))


def telling_lines(log_text: str, count: int = 12) -> tuple[str, ...]:
    """The last lines that say something: no bars, no headlines that mislead."""
    lines = [line for line in re.split(r"[\r\n]", log_text) if line.strip() and not is_bar(line)]
    told = (line for line in lines if not (MISLEADING.search(line) or TRAFFIC.search(line)))
    return tuple(_cut(line) for line in told)[-count:]


def _between(phase: str, span: tuple[str, str]) -> bool:
    if phase not in PHASES:
        return False
    return PHASES.index(span[0]) <= PHASES.index(phase) <= PHASES.index(span[1])


def _code(exit_code: int | None) -> str:
    if exit_code is None:
        return "an unknown exit code"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _cut(line: str) -> str:
    return line.strip()[:MAX_LINE]
