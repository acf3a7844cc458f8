"""Reasoning and tool-call parsers of each release, and which model family speaks which. Pure data.

Names: `DetectorMap` of parser/reasoning_parser.py and `ToolCallParserEnum` of
function_call/function_call_parser.py in the wheels of every release from 0.5.9 to 0.5.23 (0.5.10,
0.5.12, 0.5.13 and 0.5.15 in their post releases). A newer release is not judged.
"""

from __future__ import annotations

from deployer.sglang.releases import Version

REASONING, TOOLS = "reasoning-parser", "tool-call-parser"
READ: tuple[Version, ...] = tuple((0, 5, patch) for patch in range(9, 24))

PARSERS: dict[str, tuple[tuple[int, str, str], ...]] = {
    REASONING: (
        (
            9,
            "deepseek-r1 deepseek-v3 glm45 gpt-oss interns1 kimi kimi_k2 minimax "
            "minimax-append-think nano_v3 qwen3 qwen3-thinking step3 step3p5",
            "",
        ),
        (10, "mimo mistral nemotron_3", "nano_v3"),
        (11, "gemma4 hunyuan", ""),
        (12, "deepseek-v4 poolside_v1", ""),
        (13, "apertus2509 cohere_command4", ""),
        (16, "inkling minimax-m3", ""),
        (17, "kimi_k3", ""),
        (18, "muse", ""),
        (19, "dots ling3", ""),
        (20, "granite_thinking_parser k2_horizon nanbeige", ""),
        (21, "deepseek-v41 gigachat35 iquest_q1", ""),
        (23, "beam response_template", ""),
    ),
    TOOLS: (
        (
            9,
            "deepseekv3 deepseekv31 deepseekv32 gigachat3 glm glm45 glm47 gpt-oss hermes interns1 "
            "kimi_k2 lfm2 llama3 mimo minimax-m2 mistral pythonic qwen qwen25 qwen3_coder step3 "
            "step3p5 trinity",
            "",
        ),
        (11, "gemma4 hunyuan", ""),
        (12, "deepseekv4 poolside_v1", ""),
        (13, "apertus2509 cohere_command4 minicpm5", ""),
        (16, "inkling minimax-m3", ""),
        (17, "kimi_k3", ""),
        (18, "muse", ""),
        (19, "dots ling3 spark25", ""),
        (20, "k2_horizon nanbeige", ""),
        (21, "deepseekv41 gigachat35 iquest_q1", ""),
        (23, "beam response_template", ""),
    ),
}
"""Flag -> (patch of 0.5, names that came, names that went), oldest first."""

FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("qwen3_5", "qwen3", "qwen3_coder"),
    ("qwen3_next", "qwen3", "qwen25"),
    ("qwen3", "qwen3", "qwen25"),
    ("qwen2", "", "qwen25"),
    ("glm4_moe", "glm45", "glm45"),
    ("gpt_oss", "gpt-oss", "gpt-oss"),
    ("kimi_k2", "kimi_k2", "kimi_k2"),
    ("minimax_m2", "minimax-append-think", "minimax-m2"),
    ("step3p5", "step3p5", "step3p5"),
    ("gemma4", "gemma4", "gemma4"),
    ("hunyuan", "hunyuan", "hunyuan"),
    ("mimo", "mimo", "mimo"),
    ("nemotron_h", "nemotron_3", ""),
    ("llama", "", "llama3"),
    ("mistral", "", "mistral"),
    ("lfm2", "", "lfm2"),
    ("deepseek_v4", "deepseek-v4", "deepseekv4"),
)
"""model_type prefix -> reasoning parser, tool parser, by their names; first match counts.

DeepSeek V3 and R1 share one model_type and need different parsers: none is proposed."""


def known_parsers(version: Version, flag: str) -> frozenset[str]:
    """The names that this release accepts; empty when it is not one of those read."""
    if version[:3] not in READ:
        return frozenset()
    names: set[str] = set()
    for patch, came, went in PARSERS[flag]:
        if version >= (0, 5, patch):
            names |= set(came.split())
            names -= set(went.split())
    return frozenset(names)


def parsers_for(model_type: str, version: Version) -> dict[str, str]:
    """Flag -> parser for this family in this release; a flag without a sure answer is left out."""
    for prefix, reasoning, tools in FAMILIES:
        if model_type.startswith(prefix):
            pairs = ((REASONING, reasoning), (TOOLS, tools))
            return {flag: name for flag, name in pairs if name in known_parsers(version, flag)}
    return {}
