"""The local lock: one holder, told by name; a killed holder holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deployer.errors import LockHeld, LockUnknown
from deployer.locallock import LocalLock, Owner, read_owner, start_of


def lock(folder: Path, host: str = "kpro5", run_id: str = "r1") -> LocalLock:
    return LocalLock(folder, host, command=f"deploy up {host}", run_id=run_id)


def test_held_names_the_owner(tmp_path: Path) -> None:
    with lock(tmp_path) as held:
        held.enter("shards")
        with pytest.raises(LockHeld) as caught:
            lock(tmp_path, run_id="r2").acquire()
    what = caught.value.what
    assert f"pid {os.getpid()} (deploy up kpro5), run r1, at step shards, since " in what
    assert caught.value.exit_code == 4
    assert caught.value.fix


def test_released_and_taken_again(tmp_path: Path) -> None:
    with lock(tmp_path) as held:
        assert read_owner(held.record) is not None
    assert read_owner(held.record) is None
    with lock(tmp_path, run_id="r2") as held:
        owner = read_owner(held.record)
        assert owner is not None
        assert owner.run_id == "r2"
    held.release()


def test_release_of_one_that_was_refused_keeps_the_record(tmp_path: Path) -> None:
    with lock(tmp_path) as held:
        other = lock(tmp_path, run_id="r2")
        with pytest.raises(LockHeld):
            other.acquire()
        other.release()
        assert read_owner(held.record) is not None
        with pytest.raises(LockHeld):
            other.acquire()


def test_hosts_have_locks_of_their_own(tmp_path: Path) -> None:
    with lock(tmp_path, "kpro5"), lock(tmp_path, "kpro6"):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"pid": "x"}', b"\xff"])
def test_a_spoilt_record_decides_nothing(tmp_path: Path, content: bytes) -> None:
    with lock(tmp_path) as held:
        held.record.write_bytes(content)
        with pytest.raises(LockHeld, match="not written its record"):
            lock(tmp_path).acquire()
    held.record.write_bytes(content)
    with lock(tmp_path):
        pass


def test_could_not_ask_is_not_held(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file where the folder should be")
    with pytest.raises(LockUnknown) as caught:
        lock(tmp_path).acquire()
    assert caught.value.exit_code == 3


def test_a_record_that_cannot_be_written_frees_the_lock(tmp_path: Path) -> None:
    refused = lock(tmp_path)
    refused.record.mkdir(parents=True)
    with pytest.raises(LockUnknown, match="cannot be recorded"):
        refused.acquire()
    refused.record.rmdir()
    with lock(tmp_path):
        pass


def test_how_long_ago() -> None:
    owner = Owner(4711, 1000.0, "deploy up kpro5", "1a2b", "venv")
    assert owner.describe(1000.0 + 750).endswith("(12 min)")
    assert owner.describe(900.0).endswith("(just now)")


HOLDER = """
import sys
from dataclasses import replace
from pathlib import Path
from deployer.locallock import LocalLock
with LocalLock(Path(sys.argv[1]), "kpro5", command="deploy up kpro5", run_id="old") as lock:
    lock.enter("shards")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_frees_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LockHeld, match=f"pid {holder.pid} .*run old, at step shards"):
        lock(tmp_path).acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    holder.stdout.close()
    holder.stdin.close()
    with lock(tmp_path, run_id="new") as held:
        owner = read_owner(held.record)
        assert owner is not None
        assert (owner.run_id, owner.step) == ("new", "look")


def test_a_reused_pid_is_not_the_owner() -> None:
    me = os.getpid()
    owner = Owner(me, 1000.0, "deploy up kpro5", "1a2b", start=start_of(me) or 0)
    assert owner.alive
    assert not replace(owner, start=owner.start - 1).alive
    assert not replace(owner, start=0).alive
