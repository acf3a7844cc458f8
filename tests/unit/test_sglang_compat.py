from __future__ import annotations

import pytest

from deployer.playbook import ArgValue
from deployer.sglang.compat import RULES, check, parse_version

SPEC: dict[str, ArgValue] = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}


def rules(version: str, args: dict[str, ArgValue], kind: str | None = "qwen3_5") -> list[str]:
    return [problem.rule for problem in check(version, args, kind, "580.126.09")]


def test_dense_qwen3_5_on_two_gpus_of_0_5_9() -> None:
    assert rules("0.5.9", {"tp-size": 2}) == ["dense-qwen3_5-tp"]
    assert rules("0.5.9.post1", {"tensor-parallel-size": 4}) == ["dense-qwen3_5-tp"]
    assert rules("0.5.9", {"tp-size": 1}) == []
    assert rules("0.5.9", {"tp-size": 2}, "qwen3_5_moe") == []
    assert rules("0.5.10", {"tp-size": 2}) == []
    assert rules("0.5.9", {"tp-size": 2}, None) == []


@pytest.mark.parametrize("version", ["0.5.10", "0.5.10.post1", "0.5.11"])
def test_speculation_needs_extra_buffer(version: str) -> None:
    problems = check(version, SPEC, "qwen3_5", "580.1")
    assert [problem.rule for problem in problems] == ["speculative-radix-no-buffer"]
    assert "extra_buffer" in problems[0].change
    assert rules(version, {**SPEC, "mamba-scheduler-strategy": "extra_buffer"}) == []
    assert rules(version, {**SPEC, "disable-radix-cache": True}) == []
    assert rules(version, SPEC, "llama") == []


def test_speculation_is_no_problem_elsewhere() -> None:
    assert rules("0.5.9", SPEC) == []
    assert rules("0.5.23", SPEC) == []


def test_both_ways_out_together_are_refused() -> None:
    both: dict[str, ArgValue] = {
        "mamba-scheduler-strategy": "extra_buffer",
        "disable-radix-cache": True,
    }
    assert rules("0.5.11", {**SPEC, **both}) == ["extra-buffer-without-radix"]


def test_renamed_flags() -> None:
    assert rules("0.5.23", {"mamba-scheduler-strategy": "auto"}) == ["renamed-mamba-strategy"]
    assert rules("0.5.11", {"mamba-radix-cache-strategy": "auto"}) == ["new-mamba-strategy-name"]
    assert rules("0.5.23", {"cuda-graph-max-bs": 8}) == ["ambiguous-graph-bs"]
    assert rules("0.5.11", {"reasoning-parser": "auto"}) == ["auto-parser"]


def test_cuda_13_needs_its_driver() -> None:
    assert [one.rule for one in check("0.5.11", {}, None, "570.86.15")] == ["cuda13-driver"]
    assert check("0.5.10", {}, None, "570.86.15") == []
    assert check("0.5.11", {}, None, None) == []


def test_draft_figures_come_together() -> None:
    assert rules("0.5.11", {"speculative-num-steps": 3}, None) == ["draft-figures-incomplete"]


def test_versions() -> None:
    assert parse_version("0.5.10.post1") == (0, 5, 10, 1)
    assert parse_version("main") is None
    assert check("main", SPEC, "qwen3_5", "1") == []


def test_every_rule_names_its_source() -> None:
    assert all(rule.source and rule.change and rule.reason for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)
