from __future__ import annotations

import pytest

from deployer.sglang.reasoning import fitting_parser, read, way_out

THOUGHT, ANSWER = "I know this.", "It is 391."


@pytest.mark.parametrize(
    ("content", "reasoning", "finish", "tokens", "kind", "said", "thought"),
    [
        (ANSWER, None, "stop", 5, "said", ANSWER, ""),
        (ANSWER, THOUGHT, "stop", 9, "said", ANSWER, THOUGHT),
        (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", None, "stop", 9, "leaked", ANSWER, THOUGHT),
        # Templates that open the thoughts themselves leave only the end in the text.
        (f"{THOUGHT}\n</think>\n\n{ANSWER}", None, "stop", 9, "leaked", ANSWER, THOUGHT),
        (f"[THINK]{THOUGHT}[/THINK]{ANSWER}", None, "stop", 9, "leaked", ANSWER, THOUGHT),
        (f"◁think▷{THOUGHT}◁/think▷{ANSWER}", None, "stop", 9, "leaked", ANSWER, THOUGHT),
        (f"<think>{THOUGHT}", None, "length", 9, "thinking", "", THOUGHT),
        (f"<think>{THOUGHT}", None, "stop", 9, "leaked", "", THOUGHT),
        (None, THOUGHT, "length", 9, "thinking", "", THOUGHT),
        (None, ANSWER, "stop", 9, "swallowed", "", ANSWER),
        ("", ANSWER, "stop", 9, "swallowed", "", ANSWER),
        ("", None, "stop", 40, "lost", "", ""),
        ("", None, "stop", 1, "empty", "", ""),
        (None, None, None, None, "empty", "", ""),
    ],
)
def test_where_the_thoughts_stand(
    content: str | None,
    reasoning: str | None,
    finish: str | None,
    tokens: int | None,
    kind: str,
    said: str,
    thought: str,
) -> None:
    found = read(content, reasoning, finish, tokens)
    assert (found.kind, found.content, found.reasoning) == (kind, said, thought)


def test_a_text_about_the_marks_is_an_answer() -> None:
    text = "Models write <think> first; what follows is their train of thought."
    assert read(text, None, "stop").kind == "said"


def test_the_way_out_names_the_parser() -> None:
    assert fitting_parser("qwen3_5") == "qwen3"
    assert fitting_parser("glm4_moe") == "glm45"
    assert fitting_parser("llama") is None
    assert way_out("leaked", "", "qwen3_5") == "add serve.args reasoning-parser: qwen3"
    assert "qwen3 (it is glm45)" in way_out("leaked", "glm45", "qwen3_5")
    assert "qwen3 (it is deepseek-r1)" in way_out("swallowed", "deepseek-r1", "qwen3_5")
    assert "take reasoning-parser: qwen3 out" in way_out("swallowed", "qwen3", "qwen3_5")
    assert "tool-call-parser" in way_out("lost", "", None)
