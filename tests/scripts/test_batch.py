"""One script for all probes, run by the real shells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployer import errors
from deployer.model import Probe, ProbeOutput, Where
from deployer.remote.batch import (
    ProbeFailed,
    batch_script,
    gather,
    new_nonce,
    parse_batch,
    parse_outputs,
    prelude_output,
)
from deployer.remote.transport import Answer
from tests.local_transport import SHELLS, LocalTransport, ScriptedTransport, shell_path


@pytest.fixture(params=SHELLS)
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return LocalTransport(shell_path(request.param, tmp_path_factory.getbasetemp()))


def probe(name: str, script: str, timeout_s: float = 10.0, parse=lambda out: out) -> Probe:
    return Probe(name, Where.HOST, script, parse, timeout_s)


def outputs(transport: LocalTransport, *probes: Probe) -> dict[str, ProbeOutput]:
    nonce = new_nonce()
    answer = transport.run(batch_script(probes, nonce))
    assert answer.exit == 0, answer.error_text
    assert answer.error_text == ""
    return parse_outputs(probes, answer.stdout, nonce)


def leftovers() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("deployer-probe.*")}


def processes_with(word: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if line.startswith(word) and state not in "ZX":
            found.append(line)
    return found


def test_frames_keep_streams_and_exits_apart(transport: LocalTransport) -> None:
    got = outputs(
        transport,
        probe("both", "echo out; echo err >&2; exit 3"),
        probe("silent", ""),
        probe("no newline", "printf x"),
        probe("binary", r"printf 'a\000\377\n\n'"),
        probe("stdin is empty", "wc -c"),
        probe("quotes", """x='it'\\''s "fine"'; echo "$x" `echo back`"""),
    )
    assert got["both"] == ProbeOutput(3, b"out\n", b"err\n")
    assert got["silent"] == ProbeOutput(0, b"", b"")
    assert got["no newline"].stdout == b"x"
    assert got["binary"].stdout == b"a\0\xff\n\n"
    assert got["stdin is empty"].text.strip() == "0"
    assert got["quotes"].text == 'it\'s "fine" back\n'


def test_one_bad_snippet_does_not_spoil_the_rest(transport: LocalTransport) -> None:
    got = outputs(
        transport,
        probe("syntax", "if then ((("),
        probe("killed", "kill -9 $(sh -c 'echo $PPID'); sleep 30"),
        probe("set -e", "set -eu; false; echo unreachable"),
        probe("missing", "no-such-command-here"),
        probe("closes", "exec 1>&- 2>&- 3>&-"),
        probe("talks to fd 3", "echo 'd 6 0' >&3"),
        probe("traps", "trap 'echo bye' EXIT; trap '' TERM"),
        probe("fine", "echo fine"),
    )
    assert got["syntax"].exit != 0
    assert got["killed"].exit == 137
    assert got["set -e"].exit == 1 and got["set -e"].stdout == b""
    assert got["missing"].exit == 127
    assert got["closes"].exit == 0
    assert got["talks to fd 3"].exit != 0
    assert got["traps"].text == "bye\n"
    assert got["fine"] == ProbeOutput(0, b"fine\n", b"")


def test_a_hanging_probe_is_cut_off_and_its_children_killed(transport: LocalTransport) -> None:
    before = leftovers()
    began = time.monotonic()
    got = outputs(
        transport,
        probe("hangs", "echo before; sh -c 'sleep 7301; echo no'; echo no", 0.3),
        probe("deaf", "trap '' TERM HUP INT; sleep 7301", 0.2),
        probe("fine", "sleep 0.4; echo fine", 10.0),
        probe("quick", "echo quick", 10.0),
    )
    assert time.monotonic() - began < 5
    assert got["hangs"].timed_out and got["hangs"].stdout == b"before\n"
    assert got["deaf"].timed_out and got["deaf"].exit == 124
    assert got["fine"] == ProbeOutput(0, b"fine\n", b"")
    assert not got["quick"].timed_out
    assert processes_with("sleep 7301") == []
    assert leftovers() <= before


def test_a_background_child_of_a_probe_does_not_hold_the_answer(
    transport: LocalTransport,
) -> None:
    began = time.monotonic()
    got = outputs(transport, probe("forks", "sleep 3 & echo forked"))
    assert got["forks"].text == "forked\n"
    assert time.monotonic() - began < 2


def test_the_timer_does_not_outlive_the_script(transport: LocalTransport) -> None:
    # A length of its own: other runs of this test share the machine.
    nap = 700000 + os.getpid()
    outputs(transport, probe("quick", "echo quick", float(nap)))
    deadline = time.monotonic() + 30
    while processes_with(f"sleep {nap}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_with(f"sleep {nap}") == []


def test_a_cut_connection_leaves_no_folder(transport: LocalTransport, tmp_path: Path) -> None:
    """Nobody reads the answer any more when it is printed."""
    file = tmp_path / "script"
    file.write_text(batch_script([probe("slow", "sleep 0.3")], new_nonce()), encoding="utf-8")
    before = leftovers()
    answer = transport.run('{ sh "$1"; echo "ended $?" >&2; } | :', args=(str(file),))
    assert answer.error_text.endswith("ended 141\n")
    assert leftovers() <= before


def test_endless_output_is_limited(transport: LocalTransport) -> None:
    got = outputs(transport, probe("yes", "yes"), probe("fine", "echo fine"))
    assert got["yes"].exit != 0
    assert len(got["yes"].stdout) <= 16 * 1024 * 1024
    assert got["fine"].text == "fine\n"


def test_twelve_probes_run_side_by_side_and_fast(transport: LocalTransport) -> None:
    many = [probe(f"p{index}", "sleep 0.1; cat /proc/version") for index in range(12)]
    best = 9.0
    for _ in range(3):
        began = time.monotonic()
        outputs(transport, *many)
        best = min(best, time.monotonic() - began)
    assert best < 0.7


def test_a_prelude_is_framed(transport: LocalTransport) -> None:
    nonce = new_nonce()
    script = batch_script([probe("a", "echo a")], nonce, "echo first")
    out = transport.run(script).stdout
    assert prelude_output(out, nonce) == b"first\n"
    assert parse_batch([probe("a", "")], out, nonce)[ProbeOutput].text == "a\n"


def test_no_probes_is_an_answer_too(transport: LocalTransport) -> None:
    assert gather(transport, []) == {}


@dataclass(frozen=True)
class Fact:
    text: str


def fact(output: ProbeOutput) -> Fact:
    return Fact(output.text)


def frames(*parts: str, nonce: str = "n1") -> bytes:
    return "".join(f"\n@{nonce}:{part}" for part in parts).encode()


def test_noise_around_the_frames_is_ignored() -> None:
    answer = b"Welcome to PVE\n" + frames("out:0\nhi\n", "err:0\n", "exit:0:0\n", "end\n") + b"bye"
    assert parse_batch([probe("a", "", parse=fact)], answer, "n1") == {Fact: Fact("hi\n")}


def test_a_cut_answer_is_a_lost_connection() -> None:
    with pytest.raises(errors.ConnectionLost):
        parse_batch([probe("a", "", parse=fact)], frames("out:0\nhi\n"), "n1")


def test_a_failing_parser_is_named() -> None:
    def broken(output: ProbeOutput) -> object:
        raise KeyError("x")

    answer = frames("out:0\nhi\n", "err:0\n", "exit:0:0\n", "end\n")
    with pytest.raises(ProbeFailed, match=r"probe gpus: its parser failed: KeyError") as caught:
        gather(ScriptedTransport(answer), [probe("gpus", "", parse=broken)], nonce="n1")
    assert caught.value.where == "scripted"
    assert caught.value.evidence == ("hi",)


def test_two_probes_of_one_fact_are_refused() -> None:
    answer = frames("out:0\n", "err:0\n", "exit:0:0\n", "out:1\n", "err:1\n", "exit:1:0\n", "end\n")
    two = [probe("a", "", parse=fact), probe("b", "", parse=fact)]
    with pytest.raises(ProbeFailed, match="a and b both return Fact"):
        parse_batch(two, answer, "n1")


def test_no_place_for_temporary_files_is_said() -> None:
    with pytest.raises(ProbeFailed, match="cannot be looked at: no folder"):
        parse_batch([], frames("fail:no folder\n"), "n1")


def test_names_must_be_unique() -> None:
    with pytest.raises(ValueError, match="not unique"):
        batch_script([probe("a", ""), probe("a", "")], "n1")


def test_on_prelude_may_refuse() -> None:
    def refuse(answer: Answer, printed: bytes) -> None:
        raise errors.LockHeld(printed.decode())

    check: Callable[[Answer, bytes], None] = refuse
    with pytest.raises(errors.LockHeld, match="held by x"):
        gather(ScriptedTransport(frames("prelude\nheld by x")), [], on_prelude=check, nonce="n1")
