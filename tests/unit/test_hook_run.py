"""A hook may fail, hang, flood, leave children, print secrets, and outlive a killed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployer import hook_run
from deployer.errors import StepFailed
from deployer.hook_run import run_hook, unrunnable
from deployer.inventory import HookCutover


def sh(script: str, timeout_s: float = 30.0) -> HookCutover:
    return HookCutover(command=["/bin/sh", "-c", script], timeout_s=timeout_s)


def run(rules: HookCutover, **environ: str) -> list[str]:
    return run_hook(rules, {}, {"PATH": os.environ["PATH"], **environ})


def is_gone(pid: int) -> bool:
    """Within two seconds."""
    ends = time.monotonic() + 2
    while time.monotonic() < ends:
        if hook_run.start_of(pid) is None:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo bad >&2; exit 3", "ended with status 3"),
        ("echo bad; kill -SEGV $$", r"ended by signal 11 \(Segmentation fault\)"),
        ("echo bad; exec /nowhere/x", "ended with status 127"),
    ],
)
def test_how_it_ended_is_told_with_its_output(script: str, said: str) -> None:
    with pytest.raises(StepFailed, match=said) as caught:
        run(sh(script))
    assert caught.value.evidence[0] == "bad" and "--abort" in caught.value.fix


def test_one_that_hangs_and_ignores_term_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_run, "GRACE_S", 0.3)
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 60 & echo $! $$ > {pids}; echo slow; wait; wait; sleep 60"
    seen: list[str] = []
    with pytest.raises(StepFailed, match=r"still ran after 0\.5 s") as caught:
        run_hook(sh(script, 0.5), {}, dict(os.environ), tick=lambda what, *rest: seen.append(what))
    assert caught.value.evidence == ("slow",) and seen[0] == "the hook runs"
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    pid, mark = tmp_path / "pid", tmp_path / "hooks" / "m.json"

    def interrupted(what: str, spent: float, limit: float) -> None:
        if pid.exists() and pid.read_text().endswith("\n"):
            assert json.loads(mark.read_text())["pid"] == int(pid.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_hook(
            sh(f"echo $$ > {pid}; exec sleep 60"),
            {},
            dict(os.environ),
            mark=mark,
            tick=interrupted,
        )
    assert is_gone(int(pid.read_text())) and not mark.exists()


def test_what_it_leaves_in_the_background_is_not_waited_for_and_goes_on(tmp_path: Path) -> None:
    """A hook may start the very process that forwards the traffic."""
    pid, beat = tmp_path / "pid", tmp_path / "beat"
    script = f"(while :; do echo noise; date >> {beat}; sleep 0.05; done) & echo $! > {pid}"
    began = time.monotonic()
    run(sh(script, 20))
    try:
        assert time.monotonic() - began < 10

        def beats() -> int:
            return len(beat.read_text().splitlines()) if beat.exists() else 0

        ends, before = time.monotonic() + 10, beats()
        while beats() < before + 4 and time.monotonic() < ends:
            time.sleep(0.02)
        assert beats() >= before + 4, "its output did not end it"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_flood_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_run, "MOST", 1024 * 1024)
    with pytest.raises(StepFailed, match="more than 1 MiB") as caught:
        run(sh("exec yes", 20))
    assert caught.value.evidence == ("y",) * hook_run.LINES


def test_only_the_end_of_much_or_binary_output_is_told() -> None:
    said = run(sh("head -c 3000000 /dev/urandom; echo; printf '%0500d\\n' 7; echo last"))
    assert said[-1] == "last" and said[-2] == "0" * hook_run.WIDTH + "..."
    assert len(said) <= hook_run.LINES
    assert run(sh(":")) == []


def test_values_of_secret_variables_are_not_told() -> None:
    said = run(
        sh('set -x; curl() { :; }; curl -H "Bearer $HF_TOKEN"; echo $DB_PASSWORD $COLOUR $KEY'),
        HF_TOKEN="hf_abcdef",
        DB_PASSWORD="hf_abcdef-longer",
        COLOUR="green-blue",
        KEY="us",
    )
    text = "\n".join(said)
    assert "abcdef" not in text and "longer" not in text
    assert "green-blue us" in text and "Bearer ***" in text


def test_the_hook_of_a_killed_run_ends_before_another_one_begins(tmp_path: Path) -> None:
    """Else a late `forward` would undo the `back` of --abort."""
    mark, order = tmp_path / "hooks" / "m.json", tmp_path / "order"
    controller = (
        "import sys, os; from pathlib import Path; from deployer.hook_run import run_hook;"
        "from deployer.inventory import HookCutover;"
        "run_hook(HookCutover(command=['/bin/sh', '-c', sys.argv[2]]), {}, dict(os.environ),"
        " mark=Path(sys.argv[1]))"
    )
    slow = f"echo begun >> {order}; sleep 1; echo forward >> {order}"
    killed = subprocess.Popen([sys.executable, "-c", controller, str(mark), slow])
    ends = time.monotonic() + 20
    while not (order.exists() and mark.exists()) and time.monotonic() < ends:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    waits: list[str] = []
    run_hook(
        sh(f"echo back >> {order}"),
        {},
        dict(os.environ),
        mark=mark,
        tick=lambda what, *rest: waits.append(what),
    )
    assert order.read_text().split() == ["begun", "forward", "back"]
    assert waits[0].startswith("the hook of a run that was killed still runs (pid ")
    assert not mark.exists()


def test_a_hook_of_a_killed_run_that_hangs_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "m.json"
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as former:
        mark.write_text(json.dumps(hook_run._identity(former.pid)))
        run_hook(sh("echo done", 0.4), {}, dict(os.environ), mark=mark)
        assert former.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1, "start": 2}'])
def test_a_mark_that_names_nobody_who_runs_is_no_reason_to_wait(tmp_path: Path, text: str) -> None:
    mark = tmp_path / "m.json"
    mark.write_text(text)
    assert run_hook(sh("echo done", 5), {}, dict(os.environ), mark=mark) == ["done"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"#!/bin/sh\necho\n", ""),
        (b"#! /usr/bin/env python3\n", ""),
        (b"\x7fELF...", ""),
        (b"echo hello\n", "no #! line"),
        (b"", "no #! line"),
        (b"#!/bin/sh\r\necho\r\n", "carriage return"),
        (b"#!/nowhere/python\n", "names /nowhere/python"),
        (b"#!\n", "names nothing"),
    ],
)
def test_what_the_kernel_would_not_run_is_known_before(
    tmp_path: Path, content: bytes, said: str
) -> None:
    program = tmp_path / "hook"
    program.write_bytes(content)
    found = unrunnable(program)
    assert said in found and bool(found) is bool(said)
