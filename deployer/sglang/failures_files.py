"""Failures of files: weights that are missing, cut or others, disks, shared memory. Data.

Read top down, as `failure_rules` tells.
"""

from __future__ import annotations

from deployer.sglang.failure_rule import Rule, rule

FILES: tuple[Rule, ...] = (
    rule(
        "weights-missing",
        r"Cannot find any model weights with|FileNotFoundError: .*\.safetensors",
        "no weights in model.path: `deploy up --from shards`",
        last=True,
    ),
    rule(
        "weights-missing",
        r"Local snapshot incomplete for|LocalEntryNotFoundError: ",
        "files of the model are missing in model.path: `deploy up --from shards`",
        passing=True,
    ),
    rule(
        "disk-error",
        r"\bos error 5\b|\[Errno 5\]|(?:Error|error): .*Input/output error",
        "a disk of the target cannot be read: see the host's `dmesg`, and check the disk",
    ),
    rule(
        "weights-corrupt",
        r"SafetensorError: |header too large|incomplete metadata, file not fully covered"
        r"|PytorchStreamReader failed|UnpicklingError: (?:invalid load|pickle data was)",
        "a weight file is cut or is not one: `deploy up --from shards` checks every hash",
        last=True,
    ),
    rule(
        "weights-mismatch",
        r"Error: .*(?:size mismatch for|shape mismatch|[Ss]hapes? .* (?:do not|don't) match)"
        r"|Error: .*size of tensor .* must match|Error: start \(\d+\) \+ length \(\d+\) exceeds"
        r"|Error: param_data\.shape"
        r"|KeyError: .(?:model|lm_head|language_model|visual|mtp)\.[\w.]+",
        "the weights are not those of config.json: `deploy up --from shards` checks every hash",
        last=True,
    ),
    rule(
        "shared-memory-full",
        r"(?:Error|WARN|Exception)\b.*/dev/shm/.*No space left|Error: .*No space left.*/dev/shm"
        r"|[Ee]rror while creating shared memory segment|[Ff]ailed to \w+ /dev/shm/nccl-"
        r"|Error: .*unable to (?:open|mmap|allocate|resize) .*shared memory (?:object|file)",
        "/dev/shm of the container is too small for NCCL: make it larger (8 GB or more)",
    ),
    rule(
        "disk-full",
        r"(?:Error|Exception|fatal error|filesystem error): .*(?:No space left|Errno 28\b)"
        r"|os error 28\b|Error: .*Disk quota exceeded|^\[[^\]]*\].*\[Errno 28\]",
        "a file system of the target is full: `df -h` there, then free space (`deploy doctor`)",
        passing=True,
    ),
)
