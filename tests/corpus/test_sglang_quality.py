from __future__ import annotations

from pathlib import Path

import pytest

from deployer.sglang.quality import judge

OUTPUTS = Path(__file__).parent.parent / "fixtures" / "outputs"


def texts(kind: str) -> list[Path]:
    return sorted((OUTPUTS / kind).glob("*.txt"))


def test_there_are_enough_texts() -> None:
    assert len(texts("good")) >= 60
    assert len(texts("bad")) >= 60


@pytest.mark.parametrize("path", texts("good"), ids=lambda path: path.stem)
def test_good_text_passes(path: Path) -> None:
    verdict = judge("Tell me.", path.read_text(encoding="utf-8"), None, "stop")
    assert verdict.good, verdict


@pytest.mark.parametrize("path", texts("bad"), ids=lambda path: path.stem)
def test_bad_text_is_refused_with_its_place(path: Path) -> None:
    verdict = judge("Tell me.", path.read_text(encoding="utf-8"), None, "stop")
    assert not verdict.good
    assert verdict.why
    assert verdict.position >= 0


@pytest.mark.parametrize(
    "name", ["bangs-late", "phrase-late", "word-run-late", "replacement-late", "sentence-loop"]
)
def test_the_place_is_where_the_text_turns_bad(name: str) -> None:
    verdict = judge("Tell me.", (OUTPUTS / "bad" / f"{name}.txt").read_text(encoding="utf-8"))
    assert 300 <= verdict.position <= 480
    assert verdict.evidence


def test_reasoning_is_judged_too() -> None:
    assert not judge("Say hi", "Hi!", "thinking\n\n" * 30, "stop").good
    assert judge("Say hi", "Hi!", "They want a greeting.", "stop").good


def test_reasoning_cut_by_the_limit_is_no_empty_answer() -> None:
    thought = "The user wants an essay about tides, so I should plan three parts first."
    assert judge("Essay", "", thought, "length").good
    verdict = judge("Essay", None, thought, "stop")
    assert verdict.why == "there is reasoning but no answer"


def test_a_prompt_may_ask_for_repetition() -> None:
    assert judge("Say hello 30 times.", "hello " * 30, None, "stop").good
    assert not judge("Say hello.", "hello " * 30, None, "stop").good


def test_too_short_an_answer() -> None:
    verdict = judge("Essay", "No.", None, "stop", min_tokens=50)
    assert "at least 50" in verdict.why
    assert judge("Essay", "No.", None, "stop", min_tokens=50, completion_tokens=60).good


def test_one_torn_character_at_the_cut_is_no_garbage() -> None:
    assert judge("Essay", "The moon pulls the sea and the w\ufffd", None, "length").good


def test_a_draft_and_its_fair_copy_are_good_text() -> None:
    essay = (OUTPUTS / "good" / "essay.txt").read_text(encoding="utf-8")
    assert judge("Essay", f"Draft:\n{essay}\n\nFinal:\n{essay}", None, "stop").good


def test_a_wanted_repetition_is_excused_within_reason() -> None:
    assert judge("Count 40 sheep", "\n".join(f"{i} sheep jumped" for i in range(1, 41))).good
    assert judge("Repeat the letter a 50 times", "a" * 50).good
    assert not judge("Say hello 30 times.", "hello " * 300, None, "length").good
    assert not judge("Why do loops repeat?", "!" * 300, None, "length").good


def test_a_required_answer_that_the_limit_cut_off() -> None:
    thought = "The user wants an essay about tides."
    verdict = judge("Essay", "", thought, "length", answer_required=True)
    assert (verdict.good, verdict.part) == (False, "reasoning_content")
