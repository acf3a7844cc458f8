"""The ladder: which worker runs, what its end means, what is killed, and what outlives a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fetchworld import ROOT, World, gone, wait_for


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


HANG = 'put("b.txt", 3); say(bytes=3, received=3, moved=3, phase="downloading"); time.sleep(60)'
WORK = "put_all()"
GIVE_UP = 'fail(14, "a.txt: gave up: connection refused")'


def test_one_worker_brings_it_all(world: World) -> None:
    world.method("range", "say(bytes=0, received=12, moved=12, retries=2); put_all()")
    code, text = world.run()
    assert code == 0, text
    assert world.complete()
    assert "range: 2 files to go, 0 of 12 bytes" in text
    assert text.endswith("complete: every file is verified\n")
    row = world.progress()
    assert (row["bytes"], row["total"], row["files_done"], row["files"]) == (12, 12, 2, 2)
    assert (row["received"], row["retries"], row["stalls"], row["eta"]) == (12, 2, 0, 0)


def test_a_complete_model_costs_stats_only(world: World) -> None:
    world.contents = {f"model-{n:05}.bin": str(n) * 100 for n in range(15)}
    world.method("range", WORK)
    assert world.run()[0] == 0
    world.ladder.clear()
    world.method("range", 'open("started", "w").write("x")')
    began = time.monotonic()
    code, text = world.run()
    assert time.monotonic() - began < 1.0
    assert (code, text) == (0, "complete: every file is verified\n")
    assert not (world.folder / "started").exists()


def test_a_file_touched_since_is_hashed_without_a_network(world: World) -> None:
    world.method("range", WORK)
    assert world.run()[0] == 0
    (world.root / "a.txt").touch()
    world.ladder.clear()
    code, text = world.run()
    assert code == 0, text


def test_a_stall_kills_the_whole_group_and_the_next_method_goes_on(world: World) -> None:
    code = f"""
import subprocess
grandchild = subprocess.Popen(["sleep", "60"])
open("pids", "w").write(f"{{os.getpid()}} {{grandchild.pid}}")
{HANG}
"""
    world.method("range", code)
    world.method("hf-xet", 'assert os.path.getsize(job["path"] + "/b.txt.part") == 3; put_all()')
    exit_code, text = world.run()
    assert exit_code == 0, text
    assert world.complete()
    assert "warning: range stalled at 3 of 12 bytes for 0 s; killed, going on with hf-xet" in text
    assert all(gone(int(pid), 0) for pid in (world.folder / "pids").read_text().split())
    assert world.progress()["stalls"] == 1


def test_two_stalls_bar_a_method(world: World) -> None:
    world.method("range", HANG)
    code, text = world.run()
    assert code == 14
    lines = text.splitlines()
    assert sum("range: 2 files to go" in line for line in lines) == 2
    assert "killed, going on with range" in text
    assert lines[-1] == (
        "error: no method is left at 3 of 12 bytes: "
        "range: stalled at 3 of 12 bytes for 0 s, its stall number 2"
    )


def test_a_stall_names_the_last_trouble_of_its_worker(world: World) -> None:
    world.method("range", 'say(phase="downloading", trouble="a: refused")\ntime.sleep(60)')
    code, text = world.run()
    assert code == 14 and text.splitlines()[-1].endswith(
        "stalled at 0 of 12 bytes for 0 s, last trouble: a: refused, its stall number 2"
    )


def test_stalls_go_round_and_round_until_all_are_barred(world: World) -> None:
    world.limits["stalls_per_method"] = 2
    world.method("range", HANG)
    world.method("hf-xet", HANG)
    _, text = world.run()
    order = [line.split(":")[0] for line in text.splitlines() if "files to go" in line]
    assert order == ["range", "hf-xet", "range", "hf-xet"]


def test_a_worker_below_the_floor_is_too_slow(world: World) -> None:
    world.limits |= {"floor_bytes_per_s": 1000, "floor_window_s": 0.5, "stall_s": 10}
    drip = """
for count in range(1000):
    say(bytes=0, received=count, moved=count, phase="downloading"); time.sleep(0.05)
"""
    world.method("range", drip)
    world.method("peer", WORK)
    code, text = world.run()
    assert code == 0, text
    assert "warning: range brought only " in text and "; killed, going on with peer" in text


@pytest.mark.parametrize("say", ['say(phase="metadata")', "pass"])
def test_a_worker_that_never_gets_going_is_overdue(world: World, say: str) -> None:
    world.limits["stall_s"] = 0.1
    world.method("range", f"{say}; time.sleep(60)")
    world.method("peer", WORK)
    code, text = world.run()
    assert code == 0, text
    assert "range did not get past its phase" in text


def test_a_pause_that_the_hub_asked_for_is_waited_for(world: World) -> None:
    pause = """
for count in range(15):
    say(bytes=0, received=0, moved=0, phase="downloading", pause=1); time.sleep(0.1)
put_all()
"""
    world.method("range", pause)
    code, text = world.run()
    assert code == 0, text
    assert "warning" not in text


def test_a_method_that_gives_up_is_barred_at_once(world: World) -> None:
    world.method("range", GIVE_UP)
    world.method("peer", WORK)
    code, text = world.run()
    assert code == 0, text
    said = "warning: range failed: a.txt: gave up: connection refused, going on with peer"
    assert said in text


def test_what_no_method_can_cure_ends_the_job(world: World) -> None:
    for code in (10, 11, 12, 13, 17, 18):
        world.ladder.clear()
        world.method("range", f'fail({code}, "the reason")')
        world.method("peer", WORK)
        exit_code, text = world.run()
        assert exit_code == code
        assert text.splitlines()[-1] == "error: the reason"
        assert not (world.root / "a.txt").exists()


def test_another_source_that_lacks_the_repository_ends_only_itself(world: World) -> None:
    world.method("mirror http://m", 'fail(12, "404 from the hub")', passing=(11, 12))
    world.method("range", WORK)
    code, text = world.run()
    assert code == 0, text
    assert "warning: mirror http://m failed: 404 from the hub, going on with range" in text


def test_all_barred_names_every_method_and_why(world: World) -> None:
    world.method("range", GIVE_UP)
    world.method("hf-xet", "", obstacle="no venv is configured")
    world.method("mirror", "", obstacle="none is configured")
    world.method("peer", "print('a bug', file=sys.stderr); sys.exit(1)")
    code, text = world.run()
    assert code == 14
    assert text.splitlines()[-1] == (
        "error: no method is left at 0 of 12 bytes: "
        "range: failed: a.txt: gave up: connection refused; "
        "peer: failed: ended with code 1, see the lines above; "
        "hf-xet: no venv is configured; mirror: none is configured"
    )
    assert "hf-xet cannot be used: no venv is configured" in text
    assert text.count("error: ") == 1


def test_a_certificate_that_nobody_trusts_is_named_when_nothing_else_helped(world: World) -> None:
    world.method("range", 'fail(16, "https://hub: self-signed certificate")')
    world.method("peer", "", obstacle="none is configured")
    code, text = world.run()
    assert code == 16
    assert "self-signed certificate" in text.splitlines()[-1]


def test_a_worker_that_says_done_and_is_not(world: World) -> None:
    world.method("range", 'put("a.txt")')
    world.method("peer", WORK)
    code, text = world.run()
    assert code == 0, text
    assert "warning: range ended without 1 files, first b.txt, going on with peer" in text


def test_wrong_bytes_never_get_the_name(world: World) -> None:
    wrong = 'open(job["path"] + "/a.txt.part", "w").write("aaab"); put("b.txt")'
    world.method("range", wrong)
    assert world.run()[0] == 14
    assert not (world.root / "a.txt").exists()
    assert (world.root / "b.txt").read_text() == "bbbbbbbb"


def test_a_worker_killed_from_outside_gets_another_turn(world: World) -> None:
    world.method("range", 'put("a.txt"); os.kill(os.getpid(), signal.SIGKILL)')
    code, text = world.run()
    assert code == 14
    killed = "was killed by signal 9 at 4 of 12 bytes"
    assert text.count(f"warning: range {killed}, going on with range") == 5
    assert f"range: {killed}, for the 5. time in a row without a new byte" in text


def test_a_worker_that_brings_bytes_may_be_killed_any_number_of_times(world: World) -> None:
    one_byte = """
part = job["path"] + "/b.txt.part"
there = os.path.getsize(part) if os.path.exists(part) else 0
put("a.txt")
with open(part, "a") as stream:
    stream.write("b")
if there < 7:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    world.method("range", one_byte)
    code, text = world.run()
    assert code == 0, text
    assert text.count("was killed by signal 9") == 7


@pytest.mark.parametrize(("deaths", "code"), [(4, 0), (5, 14)])
def test_a_killed_check_of_what_is_there_is_done_again(
    world: World, deaths: int, code: int
) -> None:
    dying = f"""
with open("deaths", "a+") as stream:
    stream.write("x")
    stream.seek(0)
    if len(stream.read()) <= {deaths}:
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.executable, [sys.executable, "-I", "-S", "fetch.pyz", "settle"])
"""
    world.settle(dying)
    world.method("range", WORK)
    exit_code, text = world.run()
    assert exit_code == code, text
    killed = "checking what is there: its worker was killed by signal 9"
    assert text.count(f"warning: {killed}") == deaths
    if code:
        assert text.splitlines()[-1] == f"error: {killed}, 5 times in a row"
    else:
        assert world.complete()


def test_figures_add_up_over_methods(world: World) -> None:
    world.method("range", "say(bytes=0, received=700, moved=900, retries=1); time.sleep(60)")
    world.method("peer", "say(bytes=0, received=12, moved=12, retries=1); put_all()")
    assert world.run()[0] == 0
    row = world.progress()
    assert (row["received"], row["retries"]) == (712, 2)
    assert row["moved"] >= 912
    assert row["tick"] > 5


def test_odd_lines_of_a_worker_do_no_harm(world: World) -> None:
    odd = r"""
os.write(3, b'not json\n[1, 2]\n"text"\n')
os.write(3, b'{"bytes": "x", "received": -5, "moved": null, "pause": []}\n')
os.write(3, b'\xff\xfe\n' + b'y' * 100000 + b'\n{"cut')
time.sleep(0.2)
put_all()
"""
    world.method("range", odd)
    code, text = world.run()
    assert code == 0, text


def test_a_worker_has_what_it_needs_and_no_more(world: World) -> None:
    look = """
import stat
fds = sorted(int(n) for n in os.listdir("/proc/self/fd"))
links = {}
for n in fds:
    try:
        links[n] = os.readlink(f"/proc/self/fd/{n}")
    except OSError:
        pass
facts = {"links": links, "group": os.getpgrp() == os.getpid(), "session": os.getsid(0)}
facts["masks"] = [line for line in open("/proc/self/status") if line.startswith("SigIgn")]
open("facts", "w").write(json.dumps(facts))
put_all()
"""
    world.method("range", look)
    process = world.start()
    process.communicate(timeout=30)
    facts = json.loads((world.folder / "facts").read_text())
    kinds = {name.partition("[")[0].rpartition("/")[2] for name in facts["links"].values()}
    assert facts["links"]["0"] == "/dev/null"
    assert facts["links"]["3"].startswith("pipe:")
    assert "lock" in kinds
    assert len(facts["links"]) == 5
    assert facts["group"] is True
    # The same session: the job mechanism finds it there.
    assert facts["session"] == int(
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[3]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_worker_and_supervisor_and_keeps_the_bytes(
    world: World, number: signal.Signals
) -> None:
    world.limits["stall_s"] = 60
    world.method("range", 'open("pid", "w").write(str(os.getpid()));' + HANG)
    process = world.start()
    worker = int(wait_for(world.folder / "pid"))
    wait_for(world.root / "b.txt.part")
    process.send_signal(number)
    text, _ = process.communicate(timeout=5)
    assert process.returncode == 128 + number
    assert f"stopped by signal {int(number)}" in text
    assert gone(worker, 0)
    assert (world.root / "b.txt.part").read_text() == "bbb"


def test_kill_9_takes_the_worker_along_frees_the_lock_and_loses_nothing(world: World) -> None:
    world.limits["stall_s"] = 60
    world.method("range", 'open("pid", "w").write(str(os.getpid()));' + HANG)
    process = world.start()
    worker = int(wait_for(world.folder / "pid"))
    wait_for(world.root / "b.txt.part")
    process.kill()
    process.communicate()
    assert gone(worker, 1.0)
    world.ladder.clear()
    world.method("range", 'assert os.path.getsize(job["path"] + "/b.txt.part") == 3; put_all()')
    code, text = world.run()
    assert code == 0, text


def test_a_second_supervisor_names_the_first(world: World) -> None:
    world.limits["stall_s"] = 60
    world.method("range", 'open("pid", "w").write(str(os.getpid()));' + HANG)
    process = world.start()
    wait_for(world.folder / "pid")
    code, text = world.run()
    assert code == 15
    assert f"pid {process.pid}" in text and sys.executable in text
    process.terminate()
    process.communicate(timeout=5)


def test_a_worker_that_cannot_be_killed_is_named_and_nothing_else_starts() -> None:
    """State D cannot be made here: the look at the group says it."""
    code = """
import os, sys, time
from deployer.agents.fetch import child
from deployer.agents.fetch.common import Fatal
handle = os.open("/dev/null", os.O_RDONLY)
one = child.Child(["/bin/sleep", "60"], {}, handle)
child.group_members = lambda group: [(4711, "D")]
try:
    one.clear(0.3)
except Fatal as error:
    print(error.code, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=10
    )
    assert done.stdout.startswith("18 a killed worker does not end (pid 4711 in state D)"), done


def test_a_program_that_is_not_there(world: World) -> None:
    code = """
import os
from deployer.agents.fetch.child import Child
one = Child(["/no/such/program"], {}, os.open("/dev/null", os.O_RDONLY))
while not one.ended():
    pass
print(one.status)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=10
    )
    assert done.stdout == "127\n"
    assert "/no/such/program could not be started" in done.stderr
