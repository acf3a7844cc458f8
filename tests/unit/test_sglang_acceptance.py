from __future__ import annotations

from typing import Any

import pytest

from deployer.sglang.acceptance import Drafts, acceptance, of_meta

FOUR = Drafts(3, 4)


@pytest.mark.parametrize(
    ("told", "drafts"),
    [
        ({"speculative_num_draft_tokens": 4, "speculative_num_steps": 3}, FOUR),
        ({"speculative_num_draft_tokens": 4}, FOUR),
        ({"speculative_num_steps": 3}, FOUR),
        # With one branch SGLang itself makes the tokens steps + 1.
        (
            {
                "speculative_num_draft_tokens": 4,
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 1,
            },
            FOUR,
        ),
        # A tree proposes more than it can accept.
        (
            {
                "speculative_num_draft_tokens": 16,
                "speculative_num_steps": 5,
                "speculative_eagle_topk": 8,
            },
            Drafts(5, 16),
        ),
        ({"speculative_num_draft_tokens": 1}, None),
        ({"speculative_num_draft_tokens": None}, None),
        ({}, None),
    ],
)
def test_what_is_proposed(told: dict[str, Any], drafts: Drafts | None) -> None:
    assert Drafts.of(told) == drafts


@pytest.mark.parametrize(
    ("version", "told_rate", "agrees"),
    [
        ("0.5.9", 2.5 / 4, True),
        ("0.5.9", 1.5 / 3, False),
        ("0.5.11", 1.5 / 3, True),
        ("0.5.11", 2.5 / 4, False),
        ("0.5.23", 0.5, True),
        ("0.5.10", 2.5 / 4, True),
        ("0.5.10", 1.5 / 3, True),
        ("0.5.10", 0.9, False),
        ("0.5.11", None, True),
    ],
)
def test_one_definition_for_all_versions(
    version: str, told_rate: float | None, agrees: bool
) -> None:
    found = acceptance(2.5, told_rate, FOUR, version, "metrics")
    assert found is not None
    assert (found.length, found.rate, found.agrees) == (2.5, 0.5, agrees)


def test_no_drafts_yet() -> None:
    assert acceptance(None, 0.0, FOUR, "0.5.11", "metrics") is None
    assert acceptance(0.0, 0.0, FOUR, "0.5.11", "metrics") is None
    nothing = acceptance(1.0, 0.0, FOUR, "0.5.11", "metrics")
    assert nothing is not None
    assert nothing.rate == 0.0


def test_from_the_meta_of_an_answer() -> None:
    counted = of_meta({"spec_verify_ct": 100, "completion_tokens": 250}, FOUR, "0.5.11")
    assert counted is not None
    assert (counted.length, counted.rate) == (2.5, 0.5)
    told = of_meta({"spec_accept_length": 2.5, "spec_accept_rate": 0.625}, FOUR, "0.5.9")
    assert told is not None
    assert told.agrees
    assert of_meta({"completion_tokens": 250}, FOUR, "0.5.11") is None
    assert of_meta({"spec_verify_ct": 0, "spec_accept_length": 0.0}, FOUR, "0.5.11") is None
