from __future__ import annotations

import pytest
from serverworld import deployment

from deployer.sglang.argv import API_KEY_ENV, command, server_argv


def test_the_model_and_the_arguments_of_the_variant() -> None:
    argv = server_argv(deployment(), "no-mtp")
    assert argv == [
        *("--model-path", "/srv/models/tiny"),
        *("--served-model-name", "tiny"),
        *("--host", "0.0.0.0"),
        *("--port", "30000"),
        *("--tp-size", "2"),
        *("--context-length", "32768"),
    ]
    assert "--speculative-algorithm" in server_argv(deployment(), "mtp")


def test_flags_true_false_and_values_with_a_dash() -> None:
    args = {"trust-remote-code": True, "sleep-on-idle": False, "random-seed": -1}
    argv = server_argv(deployment(serve={"args": args}), "no-mtp")
    assert argv[8:] == ["--trust-remote-code", "--random-seed=-1"]


@pytest.mark.parametrize("flag", ["port", "api-key", "model-path"])
def test_flags_with_a_field_of_their_own_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        server_argv(deployment(serve={"args": {flag: "x"}}))


def test_the_command_without_and_with_a_key() -> None:
    assert command(deployment(), ["--x"]) == [
        *("/opt/venvs/qwen/bin/python", "-m", "sglang.launch_server", "--x")
    ]
    whole = command(deployment(serve={"api_key_env": "KEY"}), ["--x"])
    assert whole[1] == "-c"
    assert API_KEY_ENV in whole[2]
    assert whole[3:] == ["--x"]
