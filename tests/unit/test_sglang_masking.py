"""API keys in the server's log are masked, wherever the text is cut."""

from __future__ import annotations

import pytest

from deployer.sglang.masking import KeyMask, masked_words

LINE = (
    "[2026-11-30 07:00:00] server_args=ServerArgs(model_path='/srv/m', api_key='s3cr\\'et', "
    'admin_api_key="it\'s s3cret", port=30000)\n'
)
MASKED = (
    "[2026-11-30 07:00:00] server_args=ServerArgs(model_path='/srv/m', api_key='***', "
    'admin_api_key="***", port=30000)\n'
)


def whole(*pieces: str) -> str:
    mask = KeyMask()
    return "".join(mask.feed(piece) for piece in pieces) + mask.flush()


@pytest.mark.parametrize("at", range(len(LINE)))
def test_wherever_it_is_cut(at: int) -> None:
    assert whole(LINE[:at], LINE[at:]) == MASKED


def test_one_character_at_a_time() -> None:
    assert whole(*LINE) == MASKED


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("api_key=None, port=1\n", "api_key=None, port=1\n"),
        ('{"api_key": "abc", "x": 1}', '{"api_key": "***", "x": 1}'),
        ("api_key='cut off\nnext 'line'\n", "api_key='***\nnext 'line'\n"),
        ("api_key='never ends", "api_key='***"),
        ("api_key=''", "api_key='***'"),
        ("a map of api", "a map of api"),
    ],
)
def test_forms(text: str, shown: str) -> None:
    assert whole(text) == shown


def test_an_unfinished_line_without_a_key_is_shown_at_once() -> None:
    assert KeyMask().feed("Loading shards:  12%\rLoading") == "Loading shards:  12%\rLoading"


def test_a_command_line_keeps_its_flags_and_loses_their_secrets() -> None:
    words = ["py", "--api-key", "sk-1", "--admin-api-key=sk-2", "--port", "1", "--hf_token", "t"]
    shown = ["py", "--api-key", "***", "--admin-api-key=***", "--port", "1", "--hf_token", "***"]
    assert masked_words(words) == shown
    plain = ["--max-total-tokens", "4096", "--tokenizer-path", "/x", "--api-key", "--port", "2"]
    assert masked_words(plain) == plain
    assert masked_words(["--api-key"]) == ["--api-key"]
