from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serverworld import deployment

from deployer.remote.transport import Answer
from deployer.sglang.argv import API_KEY_ENV, command, server_argv
from deployer.steps.stop_argv import PARSE, parse_verdict


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


def refused(words: str, flags: list[str]) -> Answer:
    said = "DEPLOYER_FLAGS " + json.dumps(flags) + "\n"
    return Answer(2, said.encode(), f"usage: sglang\nsglang: error: {words}\n".encode())


def test_the_parsers_own_names_are_offered() -> None:
    flags = ["-h", "--mamba-radix-cache-strategy", "--tp-size", "--cuda-graph-max-bs-decode"]
    verdict = parse_verdict(
        refused("unrecognized arguments: --mamba-scheduler-strategy extra_buffer", flags)
    )
    assert verdict.asked
    assert "mamba-radix-cache-strategy" in verdict.fix
    verdict = parse_verdict(refused("unrecognized arguments: --tp_size 2 --tp-sise 2", flags))
    assert "tp_size: serve.args tp-size" in verdict.fix
    assert "tp-sise: one of serve.args tp-size" in verdict.fix
    verdict = parse_verdict(
        refused("ambiguous option: --cuda-graph could match --cuda-graph-max-bs-decode, --x", flags)
    )
    assert verdict.fix == "cuda-graph: one of serve.args cuda-graph-max-bs-decode"
    assert parse_verdict(refused("argument --tp-size: invalid int value: 'x'", flags)).fix == ""
    assert parse_verdict(Answer(2, b"", b"sglang: error: unrecognized arguments: --x")).fix == ""


def test_the_question_tells_a_parsers_flags_when_it_refuses(tmp_path: Path) -> None:
    module = tmp_path / "sglang" / "srt" / "server_args.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "class ServerArgs:\n"
        "    @staticmethod\n"
        "    def add_cli_args(parser):\n"
        "        parser.add_argument('--tp-size', type=int)\n"
    )
    words = [sys.executable, "-c", PARSE, "--tp_size", "2"]
    done = subprocess.run(
        words, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, check=False
    )
    verdict = parse_verdict(Answer(done.returncode, done.stdout, done.stderr))
    assert "unrecognized arguments" in verdict.refused
    assert verdict.fix == "tp_size: serve.args tp-size (dashes)"
