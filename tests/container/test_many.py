"""Fifty targets in one run: four of them broken, a canary, an interrupt, two runs at once."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleetlab import Fleet, fleet, why_not
from lab import Result, run
from sshd import free_port, silent_server

SCRIPT = Path(__file__).parent / "fleet_up.py"
NAMES = [f"h{number:02}" for number in range(1, 51)]
HANGS, REFUSES, FULL, CHANGED = "h07", "h13", "h23", "h31"
BROKEN = (HANGS, REFUSES, FULL, CHANGED)
HANG_S = 12

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.long]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Fifty, four of them broken."""
    with fleet(tmp_path_factory.mktemp("many")) as made, silent_server() as silent:
        made.start([n for n in NAMES if n not in (HANGS, REFUSES)], full=frozenset([FULL]))
        made.place(HANGS, silent, connect_timeout_s=HANG_S)
        made.place(REFUSES, free_port())
        made.write(changed_keys={CHANGED: made.other_key})
        yield made


def up(made: Fleet, mark: str, *words: str, timeout_s: float = 60) -> Result:
    """To its end. Its events are in the records of the run."""
    return run(
        [sys.executable, str(SCRIPT), str(made.inventory), mark, *words],
        timeout_s=timeout_s,
        CI="1",
    )


def ends(made: Fleet) -> dict[str, dict[str, Any]]:
    """Host -> its last `run_finished`, from the records of the runs."""
    found = {}
    for path in sorted((made.folder / ".deploy" / "runs").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "run_finished":
                found[event["host"]] = event
    return found


def test_four_broken_ones_of_fifty(many: Fleet) -> None:
    done = up(many, "one", "--all", "--yes")
    assert done.exit == 1, done.err
    assert "46 of 50 deployments done, 4 failed" in done.err
    marks = {name: target.own / "mark" for name, target in many.targets.items()}
    fine = [name for name in NAMES if name not in BROKEN]
    assert [name for name in fine if marks[name].read_text() == "one"] == fine
    assert all(many.targets[name].lock_is_free for name in fine)

    lines = done.err.splitlines()
    heads = [line for line in lines if line.startswith("deploy: ")]
    assert [re.match(r"deploy: (h\d\d)", line)[1] for line in heads] == list(BROKEN)  # type: ignore[index]
    said = dict(zip(BROKEN, heads, strict=True))
    assert f"no SSH banner comes within {HANG_S} s" in said[HANGS]
    assert "refuses the connection" in said[REFUSES]
    assert "the disk below /var/lib/deployer is full" in said[FULL]
    assert "the host key of 127.0.0.1:" in said[CHANGED] and "has CHANGED" in said[CHANGED]
    for head in heads:
        after = lines[lines.index(head) + 1 :]
        assert next(line for line in after if not line.startswith("  |")).startswith("  -> ")

    ended = ends(many)
    late = ended[HANGS]["time"]
    assert all(ended[name]["time"] < late for name in NAMES if name != HANGS), (
        "nobody waited for it"
    )


def test_again_nothing_is_to_do_and_status_sees_them(many: Fleet) -> None:
    limit = ("--limit", ",".join(f"!{name}" for name in BROKEN))
    again = up(many, "one", "--all", "--yes", *limit)
    assert again.exit == 0, again.err
    assert again.err.count("m: changed: nothing") == 46, again.err
    assert "canary" not in again.err
    argv = [sys.executable, "-c", "from deployer.cli.main import main; main()"]
    argv += ["-i", str(many.inventory), "status", "--all", "--limit", "h1?", "--json"]
    seen = run(argv)
    assert seen.exit == 3, seen.err
    hosts = {one["host"]: one for one in json.loads(seen.out)["hosts"]}
    assert list(hosts) == NAMES[9:19]
    assert [name for name, one in hosts.items() if not one["reachable"]] == [REFUSES]


def test_the_others_wait_for_a_canary_that_fails(many: Fleet) -> None:
    """The first that acts has no room for its mark: nobody else is touched."""
    names = NAMES[:3]
    (many.targets["h01"].own / "mark").unlink()
    (many.targets["h01"].own / "mark").mkdir()
    try:
        done = up(many, "two", "--yes", *names, REFUSES)
        assert done.exit == 1, done.err
        assert "waits for the canary h01/m" in done.err
        assert "deploy: h02/m, h03/m: not started: the canary h01/m failed" in done.err
        assert [(many.targets[name].own / "mark").read_text() for name in names[1:]] == ["one"] * 2
    finally:
        (many.targets["h01"].own / "mark").rmdir()


def test_no_more_are_begun_after_so_many_failures(many: Fleet) -> None:
    done = up(
        many, "three", "--yes", "--max-failures=1", "--parallel=1", REFUSES, CHANGED, *NAMES[1:3]
    )
    assert done.exit == 3, done.err
    assert f"{REFUSES} failed, and --max-failures is 1" in done.err
    assert CHANGED not in ends_of(done)
    assert [(many.targets[name].own / "mark").read_text() for name in NAMES[1:3]] == ["one"] * 2


def ends_of(done: Result) -> list[str]:
    """Hosts that the lines call failed."""
    return re.findall(r"^(h\d\d)\S* +FAILED", done.err, re.M)


def test_an_interrupt_ends_all_of_them_and_frees_their_locks(many: Fleet) -> None:
    names = NAMES[7:12]
    argv = [sys.executable, str(SCRIPT), str(many.inventory), "four", "--hold"]
    process = subprocess.Popen(
        [*argv, "--yes", "--no-canary", HANGS, *names],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while any(many.targets[name].lock_is_free for name in names):
        assert time.monotonic() < deadline, "the locks are never taken"
        time.sleep(0.05)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - began < 10, "one hangs: nobody waits for it"
    assert process.returncode == 130, said
    assert all(many.targets[name].lock_is_free for name in names)
    assert "interrupted" in said and "run the same command again" in said
    assert "0 of 6 deployments done, 6 not done" in said


@pytest.mark.parametrize("kind", ["one controller folder", "two controller folders"])
def test_two_runs_in_the_same_moment_twenty_times(many: Fleet, kind: str, tmp_path: Path) -> None:
    target = many.targets["h40"]
    folders = [many.folder, many.folder]
    if kind == "two controller folders":
        folders[1] = tmp_path / "second"
        folders[1].mkdir()
        for name in ("inventory", "playbooks"):
            shutil.copytree(many.folder / name, folders[1] / name)
    argv = [sys.executable, str(SCRIPT), "-", "pair", "--pairs", "20", *map(str, folders)]
    done = run([*argv, "--yes", "h40"], timeout_s=60, CI="1").ok()
    rounds = [json.loads(line) for line in done.out.splitlines()]
    assert len(rounds) == 20
    for one in rounds:
        (_, refused, said), (winner, stopped, heard) = one["refused"], one["winner"]
        assert (refused, stopped) == (4, 130), (said, heard)
        if kind == "one controller folder":
            who = rf"in use by pid {winner} \(up h40/m\), run \S+, at step (look|mark), since 2"
        else:
            who = rf"run is at work: \S+ \(.*, pid {winner}\) since 2.* UTC, in step (look|mark)"
        assert re.search(who, said), said
        assert "\n  -> wait for it" in said
    assert target.lock_is_free


def test_the_lock_of_a_run_before_the_controllers_reboot_is_taken_over(many: Fleet) -> None:
    """As it lies there after a power cut of the controller: its boot id is another one now."""
    from deployer.remote.lock_record import LockRecord, this_controller

    me = this_controller()
    if not me.machine or not me.hardware:
        pytest.skip("no machine-id, or nothing of its own: its boots cannot be told from a clone's")
    target = many.targets["h41"]
    old = LockRecord.mine("h41", "run-before", "venv")
    record = LockRecord(**{**old.__dict__, "boot": "0" * 36, "pid": 4242})
    (target.own / "lock").write_text(f"run-before\n{record.line()}\n")
    done = up(many, "five", "--yes", "h41")
    assert done.exit == 0, done.err
    said = " ".join(done.err.split())
    assert "took over the lock of a dead run: " in said
    assert "(run run-before, pid 4242) since " in said and "in step venv" in said
    assert f"{me.host} has been rebooted since" in said
    assert target.lock_is_free
