"""Detached jobs, run for real by dash with GNU tools and by a pure busybox."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deployer import errors
from deployer.model import Facts, Where
from deployer.remote.batch import gather
from deployer.remote.jobs import (
    JobIdentity,
    Jobs,
    JobStatus,
    job_probe,
    new_job_id,
    parse_status,
)
from tests.local_transport import (
    SHELLS,
    LocalTransport,
    ScriptedTransport,
    boot_id,
    environment,
    shell_path,
    start_time,
)

FOREVER = "while :; do sleep 7400; done"


def until(condition: Callable[[], object], what: str = "condition") -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in time: {what}")
        time.sleep(0.01)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def jobs(shell: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    transport = LocalTransport(shell_path(shell, tmp_path_factory.getbasetemp()))
    made = Jobs(transport, str(tmp_path / "jobs"), rotate_every_s=1)
    yield made
    for folder in (tmp_path / "jobs").glob("*/*/pid"):
        name, job_id = folder.parts[-3:-1]
        if folder.parts[-2] == "current":
            continue
        read = {key: (folder.parent / key).read_text().strip() for key in ("start", "session")}
        pid = int(folder.read_text())
        identity = JobIdentity(
            name, job_id, pid, int(read["start"]), boot_id(), int(read["session"])
        )
        assert made.stop(identity, grace_s=0, kill_s=30).stopped


def folder(jobs: Jobs, job: JobIdentity) -> Path:
    return Path(jobs.root) / job.name / job.id


def ended(jobs: Jobs, job: JobIdentity) -> JobStatus:
    until(lambda: not jobs.poll(job).alive, "end of the job")
    return jobs.poll(job)


def test_a_job_has_a_session_an_identity_and_a_clean_stdin(jobs: Jobs) -> None:
    job = jobs.start("build", "one", f"readlink /proc/$$/fd/0; pwd; echo $DEPLOYER_JOB; {FOREVER}")
    assert start_time(job.pid) == job.start
    assert job.boot == boot_id()
    assert os.getsid(job.pid) == job.session == os.getpgid(job.pid)
    assert os.getsid(job.session) == job.session
    until(lambda: jobs.poll(job).log.count(b"\n") == 3)
    here = folder(jobs, job)
    assert jobs.poll(job).log.decode().split("\n") == ["/dev/null", str(here), "build/one", ""]
    flags = Path(f"/proc/{job.pid}/fdinfo/1").read_text().split("flags:")[1].split()[0]
    assert int(flags, 8) & os.O_APPEND
    held = {str(fd.readlink()) for fd in Path(f"/proc/{job.pid}/fd").iterdir()}
    assert held == {"/dev/null", str(here / "log"), str(here / "script")}
    assert (here / "pid").read_text() == f"{job.pid}\n"
    found = jobs.find("build")
    assert found is not None and found.alive and found.identity == job


def test_the_end_is_written(jobs: Jobs) -> None:
    ok = ended(jobs, jobs.start("a", "1", "echo out; echo err >&2"))
    assert (ok.alive, ok.exit) == (False, 0)
    assert sorted(ok.log.split()) == [b"err", b"out"]
    assert ended(jobs, jobs.start("a", "2", "exit 7")).exit == 7
    assert ended(jobs, jobs.start("a", "3", "kill -9 $$")).exit == -9
    assert ended(jobs, jobs.start("a", "4", "if ((")).exit == 2
    found = jobs.find("a")
    assert found is not None and found.identity.id == "4"
    assert (folder(jobs, found.identity) / "exit").read_text() == "code 2\n"


def test_there_never_was_one(jobs: Jobs) -> None:
    assert jobs.find("nothing") is None
    first = jobs.start("a", "1", "true")
    ended(jobs, first)
    jobs.start("a", "2", "true")
    assert jobs.find("a", job_id="3") is None
    found = jobs.find("a", job_id="1")
    assert found is not None and found.identity == first


def test_an_alive_job_is_joined(jobs: Jobs) -> None:
    first = jobs.start("server", "1", FOREVER)
    assert jobs.start("server", "2", FOREVER) == first
    assert not (Path(jobs.root) / "server" / "2").exists()
    other = jobs.start("other", "1", FOREVER)
    assert other.pid != first.pid


def test_an_id_is_used_once(jobs: Jobs) -> None:
    ended(jobs, jobs.start("a", "1", "true"))
    with pytest.raises(errors.RemoteCommandFailed) as caught:
        jobs.start("a", "1", "true")
    assert caught.value.evidence == ("job a/1 exists already",)


def test_twenty_starts_at_once_make_one_job(jobs: Jobs) -> None:
    got: list[JobIdentity] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(jobs.start("server", f"id{i}", FOREVER)))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 20
    assert len(set(got)) == 1
    made = [path.name for path in (Path(jobs.root) / "server").glob("id*")]
    assert made == [got[0].id]


def test_secrets_reach_the_script_and_nothing_else(jobs: Jobs) -> None:
    secret = 'it\'s $a `secret`\n"two lines"'
    job = jobs.start("a", "1", f'printf "%s" "$TOKEN" >seen; {FOREVER}', secrets={"TOKEN": secret})
    seen = folder(jobs, job) / "seen"
    until(lambda: seen.exists() and seen.read_text() == secret)
    assert not (folder(jobs, job) / "secrets").exists()
    for file in folder(jobs, job).iterdir():
        assert file == seen or b"secret`" not in file.read_bytes()
    assert "TOKEN" not in environment(job.session)
    assert b"secret`" not in Path(f"/proc/{job.pid}/cmdline").read_bytes()


def test_files_come_with_the_job(jobs: Jobs) -> None:
    content = bytes(range(256)) * 5000
    job = jobs.start("a", "1", "cat data.bin >copy", files={"data.bin": content, "x.py": b""})
    assert ended(jobs, job).exit == 0
    assert (folder(jobs, job) / "copy").read_bytes() == content
    assert (folder(jobs, job) / "x.py").read_bytes() == b""
    for bad in ("../x", "log", "a/b", ""):
        with pytest.raises(ValueError, match="not a name for a file"):
            jobs.start("a", "2", "true", files={bad: b""})


def test_names_are_words(jobs: Jobs) -> None:
    for bad in ("", "../x", "a b", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="not a job name"):
            jobs.start(bad, "1", "true")
        with pytest.raises(ValueError, match="not a job name"):
            jobs.find(bad)


def test_killed_wrapper_leaves_a_job_that_is_still_known(jobs: Jobs) -> None:
    job = jobs.start("a", "1", FOREVER)
    os.kill(job.session, signal.SIGKILL)
    until(lambda: start_time(job.session) is None)
    assert jobs.poll(job).alive
    assert jobs.start("a", "2", FOREVER) == job
    assert jobs.stop(job, grace_s=5).how == "TERM"
    status = jobs.poll(job)
    assert (status.alive, status.exit) == (False, None)


def test_a_vanished_job_is_dead_without_an_end(jobs: Jobs) -> None:
    job = jobs.start("a", "1", FOREVER)
    os.kill(job.session, signal.SIGKILL)
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: start_time(job.pid) is None)
    status = jobs.poll(job)
    assert (status.alive, status.exit) == (False, None)
    assert jobs.start("a", "2", FOREVER).id == "2"


def test_a_reused_pid_is_not_the_job(jobs: Jobs) -> None:
    job = jobs.start("a", "1", FOREVER)
    assert not jobs.poll(replace(job, start=job.start - 1, session=1)).alive
    assert not jobs.poll(replace(job, boot="another-boot")).alive
    assert jobs.stop(replace(job, boot="another-boot"), grace_s=1).how == "already gone"
    assert jobs.poll(job).alive


def test_odd_command_names_do_not_confuse(jobs: Jobs, tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    job = jobs.start("a", "1", f"exec '{odd}' 7401")
    until(lambda: Path(f"/proc/{job.pid}/comm").read_text() == "a) S 1 (b\n")
    assert jobs.poll(job).alive
    assert jobs.start("a", "2", FOREVER) == job
    assert jobs.stop(job, grace_s=5).how == "TERM"


def test_a_command_name_with_a_newline(jobs: Jobs, tmp_path: Path) -> None:
    odd = tmp_path / "x\n) S 1"
    odd.symlink_to("/bin/sleep")
    job = jobs.start("a", "1", "exec \"$(printf 'x\\n) S 1')\" 7402", files={})
    ended(jobs, job)
    job = jobs.start("a", "2", f"cd '{tmp_path}'; exec \"./$(printf 'x\\n) S 1')\" 7402")
    until(lambda: "x\n" in Path(f"/proc/{job.pid}/comm").read_text())
    assert jobs.poll(job).alive
    assert jobs.stop(job, grace_s=5).how == "TERM"


def test_stop_is_gentle_first(jobs: Jobs) -> None:
    job = jobs.start("a", "1", "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done")
    until(lambda: b"up" in jobs.poll(job).log)
    proof = jobs.stop(job, grace_s=10)
    assert (proof.stopped, proof.survivors, proof.how) == (True, (), "TERM")
    status = jobs.poll(job)
    assert status.exit == 3 and b"bye" in status.log
    assert jobs.stop(job, grace_s=1).how == "already gone"


def test_stop_is_firm_then(jobs: Jobs) -> None:
    job = jobs.start("a", "1", f"trap '' TERM; echo up; (trap '' TERM; {FOREVER}) & {FOREVER}")
    until(lambda: b"up" in jobs.poll(job).log)
    proof = jobs.stop(job, grace_s=0.1)
    assert (proof.stopped, proof.how) == (True, "KILL")
    assert jobs.poll(job).exit == -9


def test_stop_finds_what_left_the_session(jobs: Jobs) -> None:
    job = jobs.start(
        "a", "1", "(setsid sh -c 'trap \"\" TERM; echo $$ >child; sleep 7403; sleep 7403' &) & wait"
    )
    child = folder(jobs, job) / "child"
    until(lambda: child.exists() and child.read_text())
    pid = int(child.read_text())
    assert ended(jobs, job).exit == 0
    assert os.getsid(pid) != job.session
    proof = jobs.stop(job, grace_s=0.1)
    assert (proof.stopped, proof.how) == (True, "KILL")
    assert start_time(pid) is None


def test_stop_takes_the_orphans_of_a_killed_script(jobs: Jobs) -> None:
    """Their environment is gone (a process title overwrites it): session and cgroup decide."""
    job = jobs.start("a", "1", "env -i sleep 7404 & echo $! >child; wait")
    child = folder(jobs, job) / "child"
    until(lambda: child.exists() and child.read_text())
    pid = int(child.read_text())
    for victim in (job.session, job.pid):
        os.kill(victim, signal.SIGKILL)
    until(lambda: start_time(job.pid) is None and start_time(job.session) is None)
    assert start_time(pid) is not None
    assert jobs.stop(job, grace_s=5).how == "TERM"
    assert start_time(pid) is None


def test_stop_finds_what_only_holds_the_log(jobs: Jobs) -> None:
    """Its environment is gone and it has left the session; who only reads the log is a reader."""
    job = jobs.start("a", "1", "setsid env -i sh -c 'echo $$ >child; exec sleep 7406' & wait")
    child = folder(jobs, job) / "child"
    until(lambda: child.exists() and child.read_text())
    pid = int(child.read_text())
    with (folder(jobs, job) / "log").open("rb") as log:
        reader = subprocess.Popen(["sleep", "7407"], stdin=log)
    try:
        for victim in (job.session, job.pid):
            os.kill(victim, signal.SIGKILL)
        until(lambda: start_time(job.pid) is None and start_time(job.session) is None)
        assert start_time(pid) is not None
        proof = jobs.stop(job, grace_s=5)
        assert (proof.stopped, proof.how) == (True, "TERM")
        assert start_time(pid) is None
        assert reader.poll() is None
    finally:
        for left in (pid, reader.pid):
            if start_time(left) is not None:
                os.kill(left, signal.SIGKILL)
        reader.wait()


def test_stop_leaves_strangers_alone(jobs: Jobs) -> None:
    job = jobs.start("a", "1", FOREVER)
    similar = jobs.start("a1", "1", FOREVER)
    longer = jobs.start("b", "11", FOREVER)
    short = jobs.start("b2", "1", FOREVER)
    assert jobs.stop(job, grace_s=5).stopped
    assert all(jobs.poll(other).alive for other in (similar, longer, short))


def test_the_main_process_may_stop_its_children_itself(jobs: Jobs) -> None:
    job = jobs.start(
        "a",
        "1",
        "(trap 'echo child got it' TERM; while :; do sleep 0.02; done) & kid=$!\n"
        "trap 'echo main got it; kill -9 $kid; exit 0' TERM; echo up; wait",
    )
    until(lambda: b"up" in jobs.poll(job).log)
    assert jobs.stop(job, grace_s=5, main_first=True).how == "TERM"
    assert b"main got it" in jobs.poll(job).log
    assert b"child got it" not in jobs.poll(job).log


def test_log_bytes_come_once(jobs: Jobs) -> None:
    job = jobs.start("a", "1", "echo one; until [ -e go ]; do sleep 0.02; done; printf 'two\\377'")
    until(lambda: jobs.poll(job).log)
    first = jobs.poll(job)
    assert (first.log, first.offset) == (b"one\n", 4)
    nothing = jobs.poll(job, inode=first.inode, offset=first.offset)
    assert (nothing.log, nothing.offset, nothing.inode) == (b"", 4, first.inode)
    (folder(jobs, job) / "go").touch()
    ended(jobs, job)
    second = jobs.poll(job, inode=first.inode, offset=first.offset)
    assert (second.log, second.offset) == (b"two\xff", 8)
    found = jobs.find("a", tail_bytes=3)
    assert found is not None and (found.log, found.offset) == (b"wo\xff", 8)


def test_a_truncated_or_replaced_log_is_read_from_its_start(jobs: Jobs) -> None:
    job = jobs.start("a", "1", FOREVER)
    log = folder(jobs, job) / "log"
    log.write_bytes(b"0123456789")
    status = jobs.poll(job)
    log.write_bytes(b"new")
    assert jobs.poll(job, inode=status.inode, offset=status.offset).log == b"new"
    log.rename(log.with_name("away"))
    log.write_bytes(b"a new file, longer")
    fresh = jobs.poll(job, inode=status.inode, offset=status.offset)
    assert fresh.log == b"a new file, longer" and fresh.inode != status.inode


def test_a_growing_log_is_rotated_and_no_byte_is_missed(jobs: Jobs) -> None:
    script = (
        # In one piece: a rotation in the middle would be a second one.
        "i=0; while [ $i -lt 400 ]; do echo line $i; i=$((i+1)); done >lines; cat lines\n"
        "until [ -e go ]; do sleep 0.02; done; echo last"
    )
    job = jobs.start("a", "1", script, log_max_bytes=1000)
    here = folder(jobs, job)
    until(lambda: b"line 399" in jobs.poll(job).log)
    first = jobs.poll(job)
    half = first.log[: len(first.log) // 2]
    until(lambda: (here / "log.1").exists() and not (here / "log").stat().st_size, "rotation")
    until(lambda: not (here / "rotating").exists())
    rest = jobs.poll(job, inode=first.inode, offset=len(half))
    assert half + rest.log == first.log
    assert rest.offset == first.offset
    (here / "go").touch()
    ended(jobs, job)
    last = jobs.poll(job, inode=rest.inode, offset=rest.offset)
    assert last.log == b"last\n"
    until(lambda: not jobs._survey(job, "none"), "the monitor is gone too")


def test_on_a_full_disk_older_logs_make_room_for_the_rotation(
    shell: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    full = tmp_path / "full"
    full.touch()
    cp = tmp_path / "tools" / "cp"
    cp.parent.mkdir()
    cp.write_text(f'#!/bin/sh\n[ ! -e {full} ] || exit 1\nPATH=${{PATH#*:}}\nexec cp "$@"\n')
    cp.chmod(0o755)
    path = f"{cp.parent}:{shell_path(shell, tmp_path_factory.getbasetemp())}"
    jobs = Jobs(LocalTransport(path), str(tmp_path / "jobs"), rotate_every_s=1)
    job = jobs.start("a", "1", "until [ -e go ]; do sleep 0.02; done", log_max_bytes=1000)
    here = folder(jobs, job)
    for old in ("log.1", "log.2", "log.3"):
        (here / old).write_bytes(b"old")
    (here / "log").write_bytes(b"x" * 2000)
    until(lambda: sorted(one.name for one in here.glob("log*")) == ["log"], "room")
    assert (here / "log").stat().st_size == 2000
    full.unlink()
    until(lambda: (here / "log.1").exists() and not (here / "log").stat().st_size, "rotation")
    assert (here / "log.1").read_bytes() == b"x" * 2000
    (here / "go").touch()
    ended(jobs, job)
    until(lambda: not jobs._survey(job, "none"), "the monitor is gone too")


def test_progress_is_the_last_line(jobs: Jobs) -> None:
    job = jobs.start(
        "a", "1", """echo '{"done": 1}' >progress; echo '{"done": 2}' >>$JOB/progress"""
    )
    assert ended(jobs, job).progress == '{"done": 2}'


@dataclass(frozen=True)
class Seen:
    status: JobStatus | None


def test_a_probe_sees_the_job(jobs: Jobs) -> None:
    probe = job_probe("server", Where.GUEST, Seen, jobs.root)
    assert Facts(gather(jobs.transport, [probe])).need(Seen).status is None
    job = jobs.start("server", "1", f"echo hello; {FOREVER}")
    until(lambda: jobs.poll(job).log)
    status = Facts(gather(jobs.transport, [probe])).need(Seen).status
    assert status is not None and status.alive
    assert (status.identity, status.log) == (job, b"hello\n")


def test_prune_keeps_the_newest(jobs: Jobs) -> None:
    for number in range(4):
        job = jobs.start("a", f"n{number}", "true")
        ended(jobs, job)
        os.utime(folder(jobs, job), (1000 + number, 1000 + number))
    assert sorted(jobs.prune("a", 2)) == ["n0", "n1"]
    assert jobs.prune("a", 0) == ("n2",)
    assert jobs.prune("none", 1) == ()
    assert jobs.find("a") is not None


class Clock:
    """Time that only a sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


JOB = JobIdentity("a", "1", 10, 20, "b", 9)


def report(
    alive: str = "yes", ended: str = "", log: str = "", start: int = 0, progress: str = ""
) -> str:
    return (
        f"id 1\npid 10\nstart 20\nboot b\nsession 9\nalive {alive}\nexit {ended}\n"
        f"inode 5\nfrom {start}\nprogress {progress}\n\n{log}"
    )


def follower(*replies: object) -> tuple[Jobs, ScriptedTransport, Clock]:
    transport, clock = ScriptedTransport(*replies), Clock()  # type: ignore[arg-type]
    return Jobs(transport, clock=clock, sleep=clock.sleep), transport, clock


def test_follow_hands_on_everything_and_ends_with_the_job() -> None:
    jobs, transport, clock = follower(
        report(log="a\n\nb"),
        report("no", "code 3", log="c", start=4),
        report("no", "code 3", start=5),
    )
    seen: list[bytes] = []
    status = jobs.follow(JOB, timeout_s=60, stall_s=60, on_status=lambda s: seen.append(s.log))
    assert status.exit == 3
    assert b"".join(seen) == b"a\n\nbc"
    assert [call.args[-3:-1] for call in transport.calls] == [("0", "0"), ("5", "4"), ("5", "5")]
    assert clock.now == 1.0


def test_follow_says_a_stall() -> None:
    jobs, _, clock = follower(*[report(progress="1")] * 5, *[report(progress="2")] * 50)
    with pytest.raises(errors.DeadlineExceeded, match=r"a/1 \(pid 10\) wrote no log or progress"):
        jobs.follow(JOB, timeout_s=600, stall_s=10)
    assert clock.now == 15


def test_follow_has_a_deadline() -> None:
    jobs, _, clock = follower(*[report(log="x")] * 99)
    with pytest.raises(errors.DeadlineExceeded, match="still runs after 30 s"):
        jobs.follow(JOB, timeout_s=30, stall_s=10)
    assert clock.now == 30


def test_follow_outlives_a_short_cut() -> None:
    lost = errors.ConnectionLost("gone")
    jobs, _, _ = follower(report(), *[lost] * 30, report("no", "code 0"))
    assert jobs.follow(JOB, timeout_s=600, stall_s=600).exit == 0
    jobs, _, _ = follower(report(), *[lost] * 90)
    with pytest.raises(errors.ConnectionLost):
        jobs.follow(JOB, timeout_s=600, stall_s=600)
    jobs, _, clock = follower(errors.HostKeyChanged("changed"))
    with pytest.raises(errors.HostKeyChanged):
        jobs.follow(JOB, timeout_s=600, stall_s=600)
    assert clock.now == 0


def test_stop_names_who_is_stuck() -> None:
    stuck = "member 10 D main nvidia-smi\nend\n"
    jobs, transport, clock = follower(*[stuck] * 200)
    proof = jobs.stop(JOB, grace_s=5, kill_s=2)
    assert not proof.stopped
    assert proof.how == "stuck in D state"
    assert proof.survivors == ("pid 10 nvidia-smi (main, state D)",)
    assert 7 <= clock.now < 9
    actions = [call.args[-1] for call in transport.calls]
    assert actions[:2] == ["none", "TERM"] and "KILL" in actions


def test_damaged_records_are_not_believed() -> None:
    for raw in (b"", b"id 1\n", report().replace("pid 10", "pid x").encode(), b"none"):
        with pytest.raises(errors.RemoteCommandFailed, match="damaged"):
            parse_status("a", raw)


def test_a_late_end_beats_alive() -> None:
    status = parse_status("a", report("yes", "signal 9").encode())
    assert status is not None and not status.alive and status.exit == -9


def test_ids_differ() -> None:
    assert new_job_id() != new_job_id()
