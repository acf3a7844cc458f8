from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deployer.cli.judge import command
from deployer.errors import UsageError

OUTPUTS = Path(__file__).parent.parent / "fixtures" / "outputs"
GOOD = "The moon pulls the water towards itself, and so it rises."
LOOP = GOOD + " and so it rises" * 20


def run(document: Any, *words: str) -> tuple[int, str]:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    result = CliRunner().invoke(command, ["-", *words], input=data, standalone_mode=False)
    if result.exception:
        raise result.exception
    return int(result.return_value or 0), result.stdout


def completion(**message: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 12},
    }


@pytest.mark.parametrize(
    "document",
    [
        {"prompt": "Tides?", "content": GOOD, "reasoning_content": None, "finish_reason": "stop"},
        {"content": GOOD},
        {"content": GOOD, "reasoning": "They ask about tides."},
        {"content": [{"type": "text", "text": GOOD}]},
        {"prompt": "Say hello 30 times.", "content": "hello " * 30},
        {"messages": [{"role": "user", "content": "Repeat ha 9 times"}], "content": "ha " * 9},
        completion(role="assistant", content=GOOD, reasoning_content="Think."),
        completion(content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        completion(content=None, refusal="I cannot help with that."),
        completion(content="", function_call={"name": "f", "arguments": "{}"}),
        {"choices": [{"text": GOOD, "finish_reason": "length"}]},
        {
            "messages": [
                {"role": "user", "content": "Tides?"},
                {"role": "assistant", "content": GOOD},
            ]
        },
        [{"role": "user", "content": "Tides?"}, {"role": "assistant", "content": GOOD}],
        {"prompt": ["Tides?"], "content": ["The moon ", {"type": "text", "text": "pulls."}]},
        {
            "request": {"messages": [{"role": "user", "content": "Say hello 30 times."}]},
            "response": completion(content="hello " * 30),
        },
        {"content": f"<think>\nThey ask about tides.\n</think>\n\n{GOOD}", "finish_reason": "stop"},
        {"text": GOOD, "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 9}},
    ],
)
def test_good_answers_in_every_form(document: dict[str, Any]) -> None:
    code, text = run(document)
    assert code == 0
    assert text.startswith("good: ")


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"prompt": "Tides?"}, "empty"),
        ({"content": "", "finish_reason": "stop"}, "empty"),
        ({"content": " \n\u200b", "finish_reason": "stop"}, "empty"),
        (completion(content=None, reasoning_content=None), "empty"),
        ({"reasoning_content": "Let me see.", "finish_reason": "length"}, "no answer"),
        ({"content": "", "reasoning_content": "Let me see.", "finish_reason": "stop"}, "no answer"),
        ({"content": "Hi!", "reasoning_content": "thinking\n\n" * 30}, "think"),
        ({"content": LOOP}, "times in a row"),
        ({"content": "<think>\nTides.\n</think>\n\n", "finish_reason": "stop"}, "no answer"),
        ({"content": "<think>\nThey ask about", "finish_reason": "stop"}, "no answer"),
        ({"content": "<think>\nThey ask about", "finish_reason": "length"}, "no answer"),
        (b'data: {"choices": [{"delta": {"content": "so it rises "}}]}\n\n' * 40, "times in a row"),
        ({"prompt": "Repeat the question, then answer it.", "content": LOOP}, "times in a row"),
        ({"prompt": "Say hello 30 times.", "content": "hello " * 400}, "times in a row"),
        ({"content": "moon \ud83d " * 40}, "times in a row"),
        (
            {"choices": [{"message": {"content": GOOD}}, {"message": {"content": LOOP}}]},
            "times in a row",
        ),
    ],
)
def test_bad_answers_say_why(document: dict[str, Any], why: str) -> None:
    code, text = run(document)
    assert code == 5
    assert text.startswith("bad: ")
    assert why in text.splitlines()[0]


def test_a_stream_is_put_together() -> None:
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "The moon "}}]},
        {"choices": [{"index": 0, "delta": {"content": "pulls."}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    ]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    code, text = run(lines.encode(), "--json")
    document = json.loads(text)
    assert (code, document["finish_reason"]) == (0, "length")
    assert document["content_characters"] == len("The moon pulls.")


def test_json_shows_part_position_and_excerpt() -> None:
    code, text = run({"content": "\n" + LOOP, "finish_reason": "length"}, "--json")
    document = json.loads(text)
    assert (code, document["good"], document["part"]) == (5, False, "content")
    assert ("\n" + LOOP)[document["position"] :].startswith("and so it rises")
    assert "and so it rises" in document["excerpt"]
    assert document["finish_reason"] == "length"
    assert json.loads(run({"content": GOOD}, "--json")[1])["position"] is None


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"hello",
        b'{"content": ',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b"data: nonsense",
        b"data: 5",
        b"data: [DONE]",
        [],
        "text",
        {},
        {"content": 5},
        {"finish_reason": ["stop"]},
        {"choices": []},
        {"choices": ["x"]},
        {"choices": [{}]},
        {"object": "error", "message": "too long", "code": 400},
        {"error": {"message": "too long"}},
    ],
)
def test_what_is_no_answer_is_a_usage_error(document: Any) -> None:
    with pytest.raises(UsageError) as caught:
        run(document)
    assert caught.value.exit_code == 2
    assert caught.value.fix


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"content": GOOD}).encode())
    result = CliRunner().invoke(command, [str(path)], standalone_mode=False)
    assert result.return_value == 0
    with pytest.raises(UsageError, match="cannot read"):
        missing = CliRunner().invoke(command, [str(tmp_path / "no")], standalone_mode=False)
        raise missing.exception or AssertionError


@pytest.mark.parametrize("good", sorted((OUTPUTS / "good").glob("*.txt")), ids=lambda p: p.stem)
def test_a_good_text_with_a_loop_behind_it_is_refused_at_the_loop(good: Path) -> None:
    text = good.read_text(encoding="utf-8")
    loop = "\nand the water rises again" * 40
    code, out = run({"content": text + loop}, "--json")
    assert code == 5, good.stem
    assert json.loads(out)["position"] >= len(text) - 200
