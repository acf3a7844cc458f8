"""What is known not to work together: SGLang version, model type, arguments, driver.

Every rule names its source; `check` applies them all. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deployer.playbook import ArgValue

Version = tuple[int, ...]
HYBRID_TYPES = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_text"})
SPECULATIVE = frozenset({"NEXTN", "EAGLE", "EAGLE3"})


@dataclass(frozen=True)
class Problem:
    """One reason not to launch. `change` is what to write in the playbook instead."""

    rule: str
    reason: str
    change: str
    source: str


@dataclass(frozen=True)
class Case:
    """What a rule looks at. `driver` and `model_type` are None when not known."""

    version: Version
    args: Mapping[str, ArgValue]
    model_type: str | None
    driver: Version | None

    def text(self, *names: str) -> str:
        """The value of the first of these flags that is set, as text."""
        return next((str(self.args[name]) for name in names if name in self.args), "")

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        value = self.text("tp-size", "tensor-parallel-size", "tp") or "1"
        return int(value) if value.isdigit() else 1

    @property
    def speculative(self) -> bool:
        """Does it ask for a draft that verifies against the target's recurrent state?"""
        return self.text("speculative-algorithm", "speculative-algo").upper() in SPECULATIVE

    @property
    def extra_buffer(self) -> bool:
        """Is the mamba state kept in the strategy that speculation with a radix cache needs?"""
        return self.text("mamba-scheduler-strategy") == "extra_buffer"

    @property
    def radix_cache(self) -> bool:
        """Is the prefix cache on (SGLang's default)?"""
        return not self.args.get("disable-radix-cache", False)


@dataclass(frozen=True)
class Rule:
    """`applies` decides; versions are inclusive on both ends."""

    name: str
    first: Version
    last: Version
    applies: Callable[[Case], bool]
    reason: str
    change: str
    source: str


LATEST: Version = (9999,)
RULES: tuple[Rule, ...] = (
    Rule(
        "dense-qwen3_5-tp",
        (0, 5, 9),
        (0, 5, 9, 9999),
        lambda case: case.model_type == "qwen3_5" and case.tp >= 2,
        "SGLang 0.5.9 skips the MLP all-reduce of dense qwen3_5 at tp >= 2: "
        "it serves repetitive, degenerate text",
        "engine.version 0.5.10 or newer (0.5.11 is known to run), or tp-size: 1",
        "sgl-project/sglang PR 19411, issues 19393 and 19322; models/qwen3_5.py:403 of 0.5.9",
    ),
    Rule(
        "speculative-radix-no-buffer",
        (0, 5, 10),
        (0, 5, 11, 9999),
        lambda case: (
            case.model_type in HYBRID_TYPES
            and case.speculative
            and case.radix_cache
            and not case.extra_buffer
        ),
        "SGLang 0.5.10 and 0.5.11 refuse NEXTN/EAGLE with the radix cache under the default "
        "mamba strategy (ValueError about 15 s after the start)",
        "serve.args mamba-scheduler-strategy: extra_buffer (on 0.5.10 also serve.env "
        "SGLANG_ENABLE_SPEC_V2: '1'), or disable-radix-cache: true",
        "server_args.py:2453 of 0.5.11, :2207 of 0.5.10; seen on a real server",
    ),
    Rule(
        "extra-buffer-without-radix",
        (0, 5, 10),
        (0, 5, 11, 9999),
        lambda case: case.model_type in HYBRID_TYPES and case.extra_buffer and not case.radix_cache,
        "mamba extra_buffer is refused together with disable-radix-cache",
        "leave out one of mamba-scheduler-strategy: extra_buffer and disable-radix-cache: true",
        "server_args.py:2396 of 0.5.11; seen on a real server",
    ),
    Rule(
        "renamed-mamba-strategy",
        (0, 5, 23),
        LATEST,
        lambda case: "mamba-scheduler-strategy" in case.args,
        "SGLang 0.5.23 renamed mamba-scheduler-strategy; the old name ends in an argparse error",
        "serve.args mamba-radix-cache-strategy (or leave it out: auto means extra_buffer there)",
        "arg_groups/overrides.py:477 of 0.5.23; its argparse was run",
    ),
    Rule(
        "new-mamba-strategy-name",
        (0,),
        (0, 5, 11, 9999),
        lambda case: "mamba-radix-cache-strategy" in case.args,
        "mamba-radix-cache-strategy does not exist before 0.5.23: argparse refuses it",
        "serve.args mamba-scheduler-strategy",
        "argparse of 0.5.9 and 0.5.11 was run",
    ),
    Rule(
        "ambiguous-graph-bs",
        (0, 5, 23),
        LATEST,
        lambda case: "cuda-graph-max-bs" in case.args or "cuda-graph-bs" in case.args,
        "SGLang 0.5.23 has no cuda-graph-max-bs / cuda-graph-bs any more: argparse refuses them",
        "serve.args cuda-graph-max-bs-decode / cuda-graph-bs-decode",
        "argparse of 0.5.23 was run",
    ),
    Rule(
        "auto-parser",
        (0,),
        (0, 5, 11, 9999),
        lambda case: "auto" in (case.text("reasoning-parser"), case.text("tool-call-parser")),
        "a parser called `auto` exists only in 0.5.23: argparse refuses it",
        "name the parser, for example reasoning-parser: qwen3",
        "argparse of 0.5.9 and 0.5.11 was run",
    ),
    Rule(
        "cuda13-driver",
        (0, 5, 11),
        LATEST,
        lambda case: case.driver is not None and case.driver < (580,),
        "SGLang 0.5.11 and newer are built for CUDA 13 and need an NVIDIA driver >= 580",
        "driver.version 580 or newer, or engine.version 0.5.10 with its own lock",
        "wheel metadata: torch 2.11.0+cu130; sgl_kernel links libcudart.so.13",
    ),
    Rule(
        "draft-figures-incomplete",
        (0,),
        LATEST,
        lambda case: (
            "speculative-num-steps" in case.args
            and not {"speculative-eagle-topk", "speculative-num-draft-tokens"} <= set(case.args)
        ),
        "with speculative-num-steps SGLang also needs speculative-eagle-topk and "
        "speculative-num-draft-tokens",
        "give all three, for example 3, 1 and 4",
        "server_args.py of 0.5.9, 0.5.11 and 0.5.23",
    ),
)


def parse_version(text: str) -> Version | None:
    """`0.5.10.post1` -> (0, 5, 10, 1); None when it does not begin with a number."""
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    if not match:
        return None
    parts = [int(part) for part in match.group().split(".")]
    post = re.search(r"post(\d+)", text)
    return (*parts, int(post.group(1))) if post else tuple(parts)


def check(
    version: str, args: Mapping[str, ArgValue], model_type: str | None, driver: str | None
) -> list[Problem]:
    """All rules that speak against this launch; an unreadable version matches none."""
    parsed = parse_version(version)
    if parsed is None:
        return []
    case = Case(parsed, args, model_type, parse_version(driver) if driver else None)
    return [
        Problem(rule.name, rule.reason, rule.change, rule.source)
        for rule in RULES
        if rule.first <= parsed <= rule.last and rule.applies(case)
    ]
