"""The command line: cheap start, exit codes, one clear line for bad input."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[2]

INVENTORY = """\
hosts:
  box:
    ssh: {address: 127.0.0.1, port: 1}
    gpus:
      - address: "0000:21:00.0"
    containers:
      129: {}
    deployments:
      m: {container: 129, playbook: PLAYBOOK}
"""


def deploy(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`deploy WORDS`, with the streams apart."""
    return subprocess.run(
        [sys.executable, "-c", "from deployer.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


def test_help_loads_neither_fabric_nor_pydantic_nor_paramiko() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['deploy', '--help']\n"
        "from deployer.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(' '.join(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert not loaded & {"fabric", "pydantic", "paramiko", "rich", "huggingface_hub", "yaml"}


@pytest.mark.parametrize(
    "name",
    ["up", "plan", "verify", "down", "restart", "status", "logs", "history", "doctor", "unlock"],
)
def test_dash_h_is_help_everywhere(name: str) -> None:
    done = deploy(name, "-h")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")


@pytest.mark.parametrize("topic", ["inventory", "playbook"])
def test_the_samples_are_the_documentation(topic: str) -> None:
    done = deploy("help", topic)
    assert done.returncode == 0
    assert "Unknown keys are errors" in done.stdout


def write(folder: Path, text: str, playbook: str | None = None) -> Path:
    """An inventory folder, with playbooks beside it."""
    (folder / "inventory").mkdir()
    (folder / "inventory" / "box.yaml").write_text(text)
    (folder / "playbooks" / "locks").mkdir(parents=True)
    if playbook is not None:
        (folder / "playbooks" / "p.yaml").write_text(playbook)
        lock = SAMPLES / "playbooks/locks/sglang-0.5.11.txt"
        (folder / "playbooks/locks/sglang-0.5.11.txt").write_text(lock.read_text())
    return folder / "inventory"


GOOD = INVENTORY.replace("PLAYBOOK", "p")
PLAYBOOK = (SAMPLES / "playbooks/qwen3.6-27b.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("gpus:", "gpuss:"), "did you mean `gpus`"),
        (GOOD.replace("      129: {}", "      129: {}\n      129: {}"), "129"),
        (GOOD.replace("0000:21:00.0", "21:00.0"), "0000:21:00.0"),
        (GOOD.replace("playbook: p", "playbook: absent"), "absent"),
        (GOOD.replace("    ssh:", "\tssh:"), "tab"),
        ("", "empty"),
        ("x: y\n" * 2_500_000, "large"),
    ],
    ids=["unknown-key", "duplicate-vmid", "pci-form", "no-playbook", "tabs", "empty", "10-MB"],
)
def test_bad_input_is_exit_2_with_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    inventory = write(tmp_path, text, PLAYBOOK)
    done = deploy("-i", str(inventory), "up", "box")
    assert done.returncode == 2, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("deploy: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".deploy").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["up"],
        ["up", "nowhere"],
        ["up", "box", "--from", "venv", "--only", "venv"],
        ["up", "box", "--only", "nostep"],
        ["up", "box", "--json"],
        ["--json", "--jsonl", "up", "box"],
        ["nonsense"],
        ["up", "box", "--variant", "nope"],
    ],
)
def test_usage_errors_are_exit_2(tmp_path: Path, words: list[str]) -> None:
    inventory = write(tmp_path, GOOD, PLAYBOOK)
    done = deploy("-i", str(inventory), *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_port_is_exit_3_and_json_stays_one_document(tmp_path: Path) -> None:
    inventory = write(tmp_path, GOOD, PLAYBOOK)
    done = deploy("-i", str(inventory), "plan", "box", "--json")
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["exit_code"] == 3
    assert document["deployments"][0]["error"]["fix"]
    assert "127.0.0.1:1" in done.stderr
    assert "refuses the connection" in done.stderr


@pytest.mark.parametrize("name", ["trust", "unlock", "logs"])
def test_a_host_that_never_answers_ends_with_the_timeout(tmp_path: Path, name: str) -> None:
    """`--timeout` holds for every command that asks a host."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        inventory = write(tmp_path, GOOD.replace("port: 1}", f"port: {port}}}"), PLAYBOOK)
        begun = time.monotonic()
        done = deploy("-i", str(inventory), name, "box", "--timeout", "1")
    assert done.returncode in (1, 3), done.stderr
    assert "--timeout of 1 s" in done.stderr + done.stdout
    assert time.monotonic() - begun < 12


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["stats", "box"], "see `deploy --help`"),
        (["up", "--vebrose", "box"], "see `deploy up --help`"),
        (["logs"], "see `deploy logs --help`"),
        (["up", "box", "--timeout", "x"], "see `deploy up --help`"),
    ],
)
def test_a_wrong_word_is_two_lines(words: list[str], fix: str) -> None:
    done = deploy(*words)
    assert done.returncode == 2
    what, what_to_do = done.stderr.splitlines()
    assert what.startswith("deploy: ")
    assert what_to_do == f"  -> {fix}"
    assert done.stdout == ""
    if words[0] == "stats":
        assert "did you mean `status`?" in what


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("| true", 128 + signal.SIGPIPE, ""),
        ("2>&1 | true", 128 + signal.SIGPIPE, ""),
        (">/dev/full", 1, "deploy: stdout cannot be written: No space left on device"),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
    ],
)
def test_output_that_goes_nowhere_ends_as_with_other_tools(
    tmp_path: Path, where: str, code: int, said: str
) -> None:
    main = "from deployer.cli.main import main; main()"
    script = f'{{ "$1" -c "$2" --help; echo $? >"$3"; }} {where}'
    words = [script, "bash", sys.executable, main, str(tmp_path / "code")]
    done = subprocess.run(
        ["bash", "-c", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert int((tmp_path / "code").read_text()) == code
    assert done.stderr.partition("\n")[0] == said


def test_a_usage_error_keeps_its_code_where_nobody_can_be_told() -> None:
    script = 'exec "$1" -c "from deployer.cli.main import main; main()" nonsense 2>"$2"'
    for place in ("/dev/full", "/dev/null"):
        done = subprocess.run(["sh", "-c", script, "sh", sys.executable, place], check=False)
        assert done.returncode == 2
