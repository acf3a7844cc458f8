"""How a process ended, as the shell, compose or systemd above it wrote at the end of its log."""

from __future__ import annotations

import json

import pytest

from deployer.sglang.carriers import uncarried
from deployer.sglang.diagnosis import diagnose
from deployer.sglang.endings import told_exit

LOG = "[2026-11-30 02:51:30] server_args=ServerArgs(model_path='/m')\n"
LOG += "[2026-11-30 02:51:49 TP0] Load weight begin. avail mem=46.20 GB\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("Killed", -9),
        ("run.sh: line 5:  1234 Killed                  python3 -m sglang.launch_server", -9),
        ("\u5df2\u6740\u6b7b", -9),
        ("[1]+  Killed                  python3 -m sglang.launch_server", -9),
        ("Segmentation fault (core dumped)", -11),
        ("Illegal instruction (core dumped)", -4),
        ("Speicherzugriffsfehler (Speicherabzug geschrieben)", -11),
        ("sglang-1 exited with code 137", -9),
        ("sglang-1 exited with code 1 (restarting)", 1),
        ("qwen.service: Main process exited, code=killed, status=9/KILL", -9),
        ("qwen.service: Main process exited, code=exited, status=3/NOTIMPLEMENTED", 3),
        ("Killed the old cache", None),
        ("Terminated by the user's request", None),
        ("", None),
    ],
)
def test_an_ending(line: str, code: int | None) -> None:
    assert told_exit(["one", line, ""]) == code


def test_the_ending_is_the_exit_code_of_a_log_without_one() -> None:
    found = diagnose(f"{LOG}sglang-1 exited with code 137\n".encode()).failure
    assert found is not None
    assert found.cls == "killed"
    assert diagnose(LOG.encode()).failure is None


def test_the_lines_of_dockers_files() -> None:
    text = "".join(json.dumps({"log": f"{line}\n"}) + "\n" for line in LOG.splitlines())
    assert uncarried(text) == LOG.split("\n")
    odd = ['{"log": 5}', '{"log": "cut', '{"log": {}}']
    assert uncarried("\n".join(odd)) == odd


def test_one_clients_text_is_no_carrier() -> None:
    said = "[2026-11-30 02:52:00] Receive: obj='[2026-11-30 02:51:30] The server is fired up'"
    lines = [*LOG.splitlines(), said, "plain", "plain", "plain"]
    assert uncarried("\n".join(lines)) == lines
