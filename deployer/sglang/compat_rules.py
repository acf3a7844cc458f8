"""Rules about a version, a model and its flags that are known not to work. Data, with sources.

Version ranges end where a wheel was read that behaves otherwise; a version between two read ones
belongs to the range only when both of them do.
"""

from __future__ import annotations

from deployer.sglang.compat_case import LATEST, Rule

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
        (0, 5, 12, 9999),
        lambda case: (
            case.hybrid and case.speculative and case.radix_cache and not case.extra_buffer
        ),
        "SGLang 0.5.10 to 0.5.12 refuse NEXTN/EAGLE with the radix cache under the default "
        "mamba strategy (ValueError about 15 s after the start)",
        "serve.args mamba-scheduler-strategy: extra_buffer (on 0.5.10 also serve.env "
        "SGLANG_ENABLE_SPEC_V2: '1'), or disable-radix-cache: true",
        "server_args.py:2453 of 0.5.11, :2207 of 0.5.10, :2569 of 0.5.12.post1; seen on a real "
        "server",
    ),
    Rule(
        "extra-buffer-without-radix",
        (0, 5, 10),
        (0, 5, 12, 9999),
        lambda case: case.hybrid and case.extra_buffer and not case.radix_cache,
        "mamba extra_buffer is refused together with disable-radix-cache",
        "leave out one of mamba-scheduler-strategy: extra_buffer and disable-radix-cache: true",
        "server_args.py:2396 of 0.5.11, :2515 of 0.5.12.post1; seen on a real server",
    ),
    Rule(
        "renamed-mamba-strategy",
        (0, 5, 20),
        LATEST,
        lambda case: "mamba-scheduler-strategy" in case.args,
        "SGLang 0.5.20 and newer know only the new name of mamba-scheduler-strategy; the old one "
        "ends in an argparse error",
        "serve.args mamba-radix-cache-strategy (or leave it out: auto means extra_buffer there)",
        "server_args.py of 0.5.18 has the old name as a deprecated alias, that of 0.5.20 not; "
        "argparse of 0.5.23 was run",
    ),
    Rule(
        "new-mamba-strategy-name",
        (0,),
        (0, 5, 12, 9999),
        lambda case: "mamba-radix-cache-strategy" in case.args,
        "mamba-radix-cache-strategy does not exist up to 0.5.12: argparse refuses it",
        "serve.args mamba-scheduler-strategy",
        "argparse of 0.5.9 and 0.5.11 was run; server_args.py of 0.5.12.post1 and 0.5.14",
    ),
    Rule(
        "ambiguous-graph-bs",
        (0, 5, 20),
        LATEST,
        lambda case: "cuda-graph-max-bs" in case.args or "cuda-graph-bs" in case.args,
        "SGLang 0.5.20 and newer have no cuda-graph-max-bs / cuda-graph-bs: argparse refuses them",
        "serve.args cuda-graph-max-bs-decode / cuda-graph-bs-decode",
        "argparse of 0.5.18, 0.5.20 and 0.5.23 was run",
    ),
    Rule(
        "auto-parser",
        (0,),
        (0, 5, 11, 9999),
        lambda case: "auto" in (case.text("reasoning-parser"), case.text("tool-call-parser")),
        "a parser called `auto` exists since 0.5.12: argparse refuses it",
        "name the parser, for example reasoning-parser: qwen3",
        "argparse of 0.5.9, 0.5.11 and 0.5.12.post1 was run",
    ),
    Rule(
        "mtp-crash-0.5.13",
        (0, 5, 13),
        (0, 5, 13, 9999),
        lambda case: case.hybrid,
        "SGLang 0.5.13 crashes about one start in five with qwen3_5/qwen3_next state layers, "
        "with and without their MTP head",
        "engine.version 0.5.11, or 0.5.15 and newer",
        "sgl-project/sglang issues 28431 and 28312",
    ),
    Rule(
        "mtp-crash-0.5.14",
        (0, 5, 14),
        (0, 5, 14, 9999),
        lambda case: (
            case.hybrid
            and case.speculative
            and case.radix_cache
            and case.text("mamba-radix-cache-strategy", "mamba-scheduler-strategy") != "no_buffer"
        ),
        "SGLang 0.5.14 crashes with NEXTN/EAGLE and mamba extra_buffer, its default there "
        "('NoneType' in the draft's metadata)",
        "engine.version 0.5.11, or 0.5.15 and newer; or disable-radix-cache: true",
        "sgl-project/sglang issue 29516, mended by PR 29449",
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
