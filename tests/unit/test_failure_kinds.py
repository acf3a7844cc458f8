"""Failures that people reported of SGLang, each as the end of its log: class, phase and cause.

The texts are those of SGLang 0.5.9 to 0.5.23, torch, NCCL, triton, flashinfer and transformers. A
headline, a consequence or a hint of SGLang's is never the cause. The first line of a fixture tells
what is expected.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deployer.sglang.diagnosis import Diagnosis, diagnose
from deployer.sglang.failure_rules import PLACES

FIXTURES = Path(__file__).parent.parent / "fixtures" / "failure-kinds"
HEAD = re.compile(r"# exit=(\S+) phase=(\S+) class=(\S+) cause=(.*)")
NAMES = sorted(path.stem for path in FIXTURES.glob("*.log"))


def load(name: str) -> tuple[re.Match[str], Diagnosis]:
    """(what is expected, what is found)"""
    head, _, log = (FIXTURES / f"{name}.log").read_text().partition("\n")
    expected = HEAD.fullmatch(head)
    assert expected is not None, name
    return expected, diagnose(log.encode(), exit_code=int(expected[1]))


@pytest.mark.parametrize("name", NAMES)
def test_a_reported_failure(name: str) -> None:
    expected, found = load(name)
    assert found.failure is not None
    assert (found.phase, found.failure.cls) == (expected[2], expected[3])
    assert found.failure.cause_line.startswith(expected[4])
    assert bool(expected[4]) == bool(found.failure.cause_line)
    assert found.failure.action


def test_every_place_has_its_case() -> None:
    assert {place.cls for place in PLACES} <= {load(name)[0][3] for name in NAMES}


def test_an_error_of_no_known_text_tells_where_it_was_raised() -> None:
    failure = load("tphead")[1].failure
    assert failure is not None
    assert "sglang/srt/models/qwen2.py line 10" in failure.action
