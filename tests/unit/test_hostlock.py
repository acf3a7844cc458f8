"""The host lock: atomic, readable, stolen only from the dead."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deployer import errors
from deployer.locallock import UNSEEN, start_of
from deployer.model import Probe, ProbeOutput, Where
from deployer.remote import lock_scripts
from deployer.remote.hostlock import HostLock, read_lock, refuse_unless_taken, unlock
from deployer.remote.lock_record import (
    Controller,
    Held,
    LockRecord,
    age_text,
    hardware,
    is_stale,
    parse_record,
    this_controller,
)
from deployer.remote.lock_scripts import NotAsked, Taken, acquire_prelude, held, parse_outcome
from tests.local_transport import SHELLS, LocalTransport, ScriptedTransport, shell_path

HIDDEN = 99
ME = Controller(
    "desk", "m1", "b1", "pid:[1]", {77: 500, HIDDEN: UNSEEN}.get, frozenset({"card", "dock"})
)
RECORD = LockRecord(
    *("o'neil \"é\n$(x)@desk", "kpro5", 77, "b1", 500, "m1", "pid:[1]", "r1", "", 0.0, "board card")
)
OTHER = dataclasses.replace(RECORD, run_id="r2", owner="ann@laptop", machine="m2", step="venv")


@pytest.fixture(params=SHELLS)
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return LocalTransport(shell_path(request.param, tmp_path_factory.getbasetemp()))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lib" / "lock")


def names(path: str) -> list[str]:
    return sorted(file.name for file in Path(path).parent.iterdir())


def holder(transport: LocalTransport, path: str) -> Held:
    seen = read_lock(transport, path)
    assert seen is not None
    return seen.held


def test_taken_held_released(transport: LocalTransport, path: str) -> None:
    mine, other = (HostLock(record, ME, path) for record in (RECORD, OTHER))
    assert mine.acquire(transport) == Taken()
    assert mine.acquire(transport) == Taken()
    with pytest.raises(errors.LockHeld) as caught:
        other.acquire(transport)
    assert "o'neil \"é\n$(x)@desk (run r1, pid 77) since 1970-01-01 00:00:00 UTC" in str(
        caught.value
    )
    assert "deploy unlock kpro5" in caught.value.fix
    other.release(transport)
    mine.enter(transport, "shards")
    assert holder(transport, path) == Held(dataclasses.replace(RECORD, step="shards"), "r1")
    mine.release(transport)
    mine.release(transport)
    assert read_lock(transport, path) is None
    assert other.acquire(transport) == Taken()
    with pytest.raises(errors.LockHeld, match=r"taken away \(now: r2\)"):
        mine.enter(transport, "venv")
    assert names(path) == [".spare", "lock"]


def test_one_of_twenty_gets_it(transport: LocalTransport, path: str) -> None:
    got: list[str] = []

    def take(run_id: str) -> None:
        lock = HostLock(dataclasses.replace(OTHER, run_id=run_id), ME, path)
        try:
            lock.acquire(transport)
        except errors.LockHeld:
            return
        got.append(run_id)

    threads = [threading.Thread(target=take, args=(f"r{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [holder(transport, path).run_id]


def test_it_travels_with_the_probes(transport: LocalTransport, path: str) -> None:
    probe = Probe("a", Where.HOST, "echo hi", lambda output: output)
    lock = HostLock(RECORD, ME, path)
    before = transport.runs
    facts = lock.acquire_and_gather(transport, [probe])
    assert facts == {ProbeOutput: ProbeOutput(0, b"hi\n", b"")}
    assert transport.runs == before + 1
    other = HostLock(OTHER, ME, path)
    with pytest.raises(errors.LockHeld):
        other.acquire_and_gather(transport, [probe])


def test_the_probes_still_run_when_a_dead_holder_was_replaced(
    transport: LocalTransport, path: str
) -> None:
    dead = dataclasses.replace(RECORD, pid=78, run_id="dead")
    HostLock(dead, ME, path).acquire(transport)
    lock = HostLock(RECORD, ME, path)
    probe = Probe("a", Where.HOST, "echo hi", lambda output: output)
    facts = lock.acquire_and_gather(transport, [probe])
    assert facts == {ProbeOutput: ProbeOutput(0, b"hi\n", b"")}


def test_a_dead_holder_is_replaced(transport: LocalTransport, path: str) -> None:
    dead = dataclasses.replace(RECORD, pid=78, run_id="dead")
    HostLock(dead, ME, path).acquire(transport)
    taken = HostLock(RECORD, ME, path).acquire(transport)
    assert taken == Taken("pid 78 on desk is gone")
    assert holder(transport, path).run_id == "r1"
    assert names(path) == ["lock"]


def test_a_lock_that_changed_hands_is_not_stolen(transport: LocalTransport, path: str) -> None:
    """Between the proof and the theft someone else replaced the dead one."""
    HostLock(OTHER, ME, path).acquire(transport)
    dead = dataclasses.replace(RECORD, pid=78, run_id="dead")
    with pytest.raises(errors.LockHeld, match="ann@laptop"):
        HostLock(RECORD, ME, path).settle(transport, Held(dead, "dead"))
    assert holder(transport, path).run_id == "r2"


def test_unlock_takes_only_what_was_shown(transport: LocalTransport, path: str) -> None:
    assert read_lock(transport, path) is None
    lock = HostLock(OTHER, ME, path)
    lock.acquire(transport)
    os.utime(path, (time.time() - 7200,) * 2)
    seen = read_lock(transport, path)
    assert seen is not None and seen.held == Held(OTHER, "r2")
    assert seen.held.describe().endswith(", in step venv (for 2 h)")
    lock.enter(transport, "shards")
    with pytest.raises(errors.LockHeld, match="nothing was removed"):
        unlock(transport, seen, path)
    seen = read_lock(transport, path)
    assert seen is not None and unlock(transport, seen, path)
    assert read_lock(transport, path) is None
    assert not unlock(transport, seen, path)


def test_a_user_who_is_not_root_is_told_so() -> None:
    asked = NotAsked("cannot make /var/lib/deployer as ubuntu, who is not root")
    with pytest.raises(errors.LockUnknown, match="as ubuntu, who is not root") as caught:
        refuse_unless_taken(asked, "kpro5")
    assert "user: root" in caught.value.fix
    with pytest.raises(errors.LockUnknown) as caught:
        refuse_unless_taken(NotAsked("cannot make /var/lib/deployer"), "kpro5")
    assert "writable on kpro5" in caught.value.fix


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, setpriv")
def test_the_script_says_who_cannot_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    script = acquire_prelude(RECORD, path=str(tmp_path / "none" / "lock"))
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    for shell in (["dash"], ["busybox", "sh"]):
        done = subprocess.run(
            [*user, *shell, "-c", f"cd /; {script}"], capture_output=True, check=False
        )
        outcome = parse_outcome(done.stdout)
        assert isinstance(outcome, NotAsked)
        assert "none as nobody, who is not root" in outcome.reason


def test_could_not_ask(transport: LocalTransport, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.LockUnknown, match="cannot make"):
        HostLock(RECORD, ME, str(tmp_path / "file" / "lock")).acquire(transport)
    cut = ScriptedTransport(errors.ConnectionLost("gone"))
    with pytest.raises(errors.LockUnknown, match="gone"):
        HostLock(RECORD, ME).acquire(cut)


def test_a_folder_without_hard_links_is_told(
    transport: LocalTransport, path: str, tmp_path: Path
) -> None:
    """As FAT and many FUSE filesystems have none."""
    fake = tmp_path / "bin" / "ln"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'ln: lock: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    script = f"PATH={fake.parent}:$PATH\nln() {{ {fake}; }}\n" + acquire_prelude(RECORD, path=path)
    outcome = parse_outcome(transport.run(script).stdout)
    assert outcome == NotAsked(f"cannot link {path}: ln: lock: Operation not permitted")
    with pytest.raises(errors.LockUnknown) as caught:
        refuse_unless_taken(outcome, "kpro5")
    assert "filesystem with hard links" in caught.value.fix
    assert names(path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_a_read_only_folder_is_told(transport: LocalTransport, path: str) -> None:
    folder = Path(path).parent
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        with pytest.raises(errors.LockUnknown, match=r"cannot write .*Read-only file system"):
            HostLock(RECORD, ME, path).acquire(transport)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("text", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_is_no_unreachable_host(text: str) -> None:
    said = f"deployer-lock unknown cannot write /x/lock: cat: write error: {text}\n"
    with pytest.raises(errors.DiskFull, match="is full") as caught:
        refuse_unless_taken(parse_outcome(said.encode()), "kpro5")
    assert caught.value.exit_code == 1
    assert "df -h" in caught.value.fix


def test_an_unreadable_record_is_held_not_free(transport: LocalTransport, path: str) -> None:
    Path(path).parent.mkdir()
    Path(path).write_text("junk\nnot base64\n")
    with pytest.raises(errors.LockHeld, match="run junk"):
        HostLock(RECORD, ME, path).acquire(transport)
    os.utime(path, (time.time() - 7200,) * 2)
    Path(path).write_bytes(b"r9\n" + dataclasses.replace(RECORD, pid=78).line().encode())
    # The record of a dead run under another's name proves nothing.
    with pytest.raises(errors.LockHeld, match="run r9"):
        HostLock(RECORD, ME, path).acquire(transport)
    for content in (b"", b"\n\n", b"\0\0\0\0", b"? x"):
        Path(path).write_bytes(content)
        os.utime(path, (time.time() - 7200,) * 2)
        with pytest.raises(errors.LockHeld, match="does not say whose it is, written 2 h ago"):
            HostLock(RECORD, ME, path).acquire(transport)
    seen = read_lock(transport, path)
    assert seen is not None and unlock(transport, seen, path)


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "dangling link", "link"])
def test_what_is_no_file_is_neither_read_nor_taken(
    transport: LocalTransport, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "lock"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    else:
        path.symlink_to(tmp_path / "target")
        if kind == "link":
            (tmp_path / "target").write_text("r1\nx\n")
    with pytest.raises(errors.LockUnknown, match="is no regular file") as caught:
        HostLock(RECORD, ME, str(path)).acquire(transport)
    assert caught.value.fix == "move it away on kpro5, then run again"
    if kind != "link":
        with pytest.raises(errors.LockUnknown, match="could not be read"):
            read_lock(transport, str(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"boot": "b0"}, "desk has been rebooted since"),
        # A clone: machine id and name are the same, the network card is not.
        ({"boot": "b0", "hardware": "board2 card2"}, None),
        ({"boot": "b0", "hardware": ""}, None),
        ({"pid": 78}, "pid 78 on desk is gone"),
        ({"start": 499}, "pid 77 on desk is another process now"),
        ({"machine": "m2", "boot": "b0"}, None),
        ({"machine": "", "boot": "b0"}, None),
        ({"owner": "ann@laptop", "boot": "b0"}, None),
        ({"machine": "m2", "pid": 78}, "pid 78 on desk is gone"),
        # Containers of one kernel, each a pid 1 of its own.
        ({"namespace": "pid:[2]", "pid": 78}, None),
        ({"namespace": "pid:[2]", "pid": 1, "start": 499}, None),
        ({"namespace": "pid:[2]", "boot": "b0", "pid": 1, "hardware": ""}, None),
        ({"pid": HIDDEN, "start": 499}, None),
        ({"boot": "", "pid": 78}, None),
        ({"start": 0, "pid": 78}, None),
    ],
)
def test_stale_only_if_proven(changes: dict[str, str], reason: str | None) -> None:
    assert is_stale(dataclasses.replace(RECORD, **changes), ME) == reason  # type: ignore[arg-type]


def test_nothing_is_proven_where_nothing_is_known() -> None:
    bare = Controller("desk", "", "b1", "pid:[1]", hardware=frozenset({"card"}))
    rebooted = dataclasses.replace(RECORD, machine="", boot="b0")
    assert is_stale(rebooted, bare) == "desk has been rebooted since"
    assert is_stale(rebooted, dataclasses.replace(bare, hardware=frozenset())) is None
    nobody = Controller("desk", "", "", "")
    assert is_stale(dataclasses.replace(RECORD, machine="", boot=""), nobody) is None


def test_our_own_record_is_alive() -> None:
    record = LockRecord.mine("kpro5", "r1", "venv")
    assert is_stale(record, this_controller()) is None
    assert parse_record(record.line()) == record
    assert "in step venv" in record.describe()


def test_outcomes() -> None:
    assert parse_outcome(b"noise\ndeployer-lock taken\n") == Taken()
    assert parse_outcome(b"deployer-lock held r1 x \n") == Held(None, "r1")
    seen = parse_outcome(f"deployer-lock held r2 {OTHER.line()} 750\n".encode())
    assert isinstance(seen, Held) and seen == Held(OTHER, "r2")
    assert seen.describe().endswith(" since 1970-01-01 00:00:00 UTC, in step venv (for 12 min)")
    assert parse_outcome(b"deployer-lock odd x is no regular file\n") == NotAsked(
        "x is no regular file", True
    )
    assert parse_outcome(b"deployer-lock unknown no space\n") == NotAsked("no space")
    assert parse_outcome(b"") == NotAsked("the target did not say")
    refuse_unless_taken(Taken(), "kpro5")


DEAD = dataclasses.replace(RECORD, pid=78, run_id="dead")


@pytest.mark.parametrize("heirs", [(), ("h1",), ("h1", "h2")])
def test_of_twenty_heirs_one_gets_it(
    transport: LocalTransport, path: str, heirs: tuple[str, ...]
) -> None:
    """Also after heirs that were killed between their link and its rename."""
    HostLock(DEAD, ME, path).acquire(transport)
    for before, run_id in zip(("dead", *heirs), heirs, strict=False):
        record = dataclasses.replace(DEAD, run_id=run_id)
        Path(f"{path}.heir.{before}").write_text(f"{run_id}\n{record.line()}\n")
    got: list[str] = []
    lost: list[str] = []
    notes: list[str] = []
    barrier = threading.Barrier(20)

    def take(run_id: str) -> None:
        mine = dataclasses.replace(RECORD, run_id=run_id)
        lock = HostLock(mine, ME, path, notes.append)
        barrier.wait()
        try:
            lock.acquire(transport)
        except errors.LockHeld as error:
            lost.append(error.what)
            return
        got.append(run_id)

    threads = [threading.Thread(target=take, args=(f"r{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [holder(transport, path).run_id] and len(lost) == 19
    assert names(path) == ["lock"]
    assert all("(run r" in said for said in lost), lost
    assert [f"(run {name}, pid 78)" in note for name in ("dead", *heirs) for note in notes].count(
        True
    ) == 1 + len(heirs)


def test_a_heir_that_lives_is_named(transport: LocalTransport, path: str) -> None:
    HostLock(DEAD, ME, path).acquire(transport)
    Path(f"{path}.heir.dead").write_text(f"r2\n{OTHER.line()}\n")
    with pytest.raises(errors.LockHeld, match="ann@laptop"):
        HostLock(RECORD, ME, path).acquire(transport)
    assert holder(transport, path).run_id == "dead"
    Path(f"{path}.heir.dead").write_text("dead\nnonsense\n")
    with pytest.raises(errors.LockHeld):
        HostLock(RECORD, ME, path).acquire(transport)
    with pytest.raises(ValueError, match="not a run id"):
        acquire_prelude(RECORD, stale=["../x"])


@pytest.mark.parametrize(
    "changes",
    [
        {"since": float("inf")},
        {"since": float("nan")},
        {"since": 1e300},
        {"since": -5},
        {"since": "x"},
        {"pid": "77"},
        {"pid": -1},
        {"start": 1.5},
        {"owner": 7},
        {"owner": None},
        {"boot": ["b1"]},
        {"run_id": "a b"},
        {"run_id": "../x"},
    ],
)
def test_a_record_of_wrong_values_is_none(changes: dict[str, Any]) -> None:
    values = {**dataclasses.asdict(RECORD), **changes}
    line = base64.b64encode(json.dumps(values).encode()).decode()
    assert parse_record(line) is None
    assert held("r1", line).describe() == "run r1"


def test_what_is_no_record_is_none() -> None:
    deep = base64.b64encode(b"[" * 100_000).decode()
    for text in (
        "",
        "x",
        deep,
        base64.b64encode(b"[1]").decode(),
        base64.b64encode(b"\xff").decode(),
    ):
        assert parse_record(text) is None
    # An older version has no word of the hardware: it is a record, and proves no reboot.
    values = {k: v for k, v in dataclasses.asdict(RECORD).items() if k != "hardware"}
    old = parse_record(base64.b64encode(json.dumps({**values, "boot": "b0"}).encode()).decode())
    assert old is not None and is_stale(old, ME) is None


def test_the_hardware_is_what_a_clone_does_not_share(tmp_path: Path) -> None:
    def card(name: str, address: str, kind: str, device: bool = True) -> None:
        folder = tmp_path / "net" / name
        folder.mkdir(parents=True)
        (folder / "address").write_text(f"{address}\n")
        (folder / "addr_assign_type").write_text(f"{kind}\n")
        if device:
            (folder / "device").mkdir()

    assert list(hardware(tmp_path)) == []
    card("eth0", "02:42:ac:11:00:02", "0", device=False)
    card("wlan0", "5e:11:22:33:44:55", "3")
    card("dummy0", "00:00:00:00:00:00", "0")
    assert list(hardware(tmp_path)) == []
    card("enp1s0", "52:54:00:AB:cd:01", "0")
    [one] = hardware(tmp_path)
    assert len(one) == 16
    (tmp_path / "dmi" / "id").mkdir(parents=True)
    (tmp_path / "dmi" / "id" / "product_uuid").write_text("4C4C4544-0042\n")
    assert len(set(hardware(tmp_path))) == 2
    (tmp_path / "dmi" / "id" / "product_uuid").write_text("00000000-0000\n")
    assert list(hardware(tmp_path)) == [one]


def test_a_process_that_is_hidden_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc with hidepid: another user's processes have no folder there."""

    def kill(pid: int, number: int) -> None:
        if pid != 77:
            raise ProcessLookupError
        raise PermissionError

    def hidden(path: Path, **more: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(os, "kill", kill)
    assert (start_of(77), start_of(78), start_of(0), start_of(-1)) == (UNSEEN, None, None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (720, "12 min"), (1e4, "3 h"), (1e6, "12 days")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_a_full_disk_has_room_for_one_lock(transport: LocalTransport, path: str) -> None:
    """What frees space needs it; `enter` writes its next version beside it."""
    folder = Path(path).parent
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        lock = HostLock(RECORD, ME, path)
        lock.acquire(transport)
        assert names(path) == ["lock"]
        lock.enter(transport, "shards")
        lock.release(transport)
        with (folder / "rest").open("wb", buffering=0) as file, pytest.raises(OSError, match="No"):
            while True:
                file.write(b"x" * 4096)
        again = HostLock(OTHER, ME, path)
        assert again.acquire(transport) == Taken()
        again.enter(transport, "gc")
        again.enter(transport, "gc again")
        assert holder(transport, path).record == dataclasses.replace(OTHER, step="gc again")
        again.release(transport)
        with (folder / "rest").open("ab", buffering=0) as file, pytest.raises(OSError, match="No"):
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(errors.DiskFull):
            again.acquire(transport)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class Cut:
    """A connection that is cut before its script begins; `late` runs it nevertheless."""

    name = "kpro5"

    def __init__(self, transport: LocalTransport) -> None:
        self.transport = transport
        self.scripts: list[str] = []

    def run(self, script: str, **words: Any) -> Any:
        self.scripts.append(script)
        raise errors.ConnectionLost("cut")

    def late(self) -> Any:
        return self.transport.run(self.scripts.pop())


@pytest.mark.parametrize("what", ["acquire", "gather", "enter", "inherit"])
def test_a_script_that_comes_after_the_release_leaves_no_lock(
    transport: LocalTransport, path: str, what: str
) -> None:
    """Interrupted, its connection is closed, and the lock given back over a new one."""
    cut, lock = Cut(transport), HostLock(RECORD, ME, path)
    if what == "enter":
        lock.acquire(transport)
        with pytest.raises(errors.ConnectionLost):
            lock.enter(cut, "venv")  # type: ignore[arg-type]
    elif what == "gather":
        with pytest.raises(errors.ConnectionLost):
            lock.acquire_and_gather(cut, [])  # type: ignore[arg-type]
    else:
        with pytest.raises(errors.LockUnknown):
            lock.acquire(cut)  # type: ignore[arg-type]
    if what == "inherit":
        dead = dataclasses.replace(OTHER, run_id="r0")
        HostLock(dead, ME, path).acquire(transport)
        cut.scripts = [acquire_prelude(RECORD, stale=("r0",), path=path)]
    release = threading.Thread(target=lock.release, args=(transport,))
    release.start()
    until = time.monotonic() + 10
    while not Path(f"{path}.gone.r1").exists():
        assert time.monotonic() < until and release.is_alive()
    if what != "inherit":
        # Else either may come first: the lock of the dead one is none of the release's business.
        assert read_lock(transport, path) is None or what == "enter"
    cut.late()
    release.join(10)
    assert read_lock(transport, path) is None
    assert not [name for name in names(path) if "gone" in name or "new" in name]
    HostLock(OTHER, ME, path).acquire(transport)
    lock.release(transport)
    assert holder(transport, path).run_id == "r2"


def test_a_script_that_never_came_is_not_waited_for_long(
    transport: LocalTransport, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_scripts, "CUT_TURNS", 1)
    lock = HostLock(RECORD, ME, path)
    with pytest.raises(errors.LockUnknown):
        lock.acquire(Cut(transport))  # type: ignore[arg-type]
    lock.release(transport)
    assert names(path) == []


def test_the_marks_of_cut_runs_do_not_pile_up(transport: LocalTransport, path: str) -> None:
    """As of a release that was cut off itself."""
    Path(path).parent.mkdir()
    Path(f"{path}.gone.r1").touch()
    lock = HostLock(OTHER, ME, path)
    lock.acquire(transport)
    assert names(path) == ["lock", "lock.gone.r1"]
    os.utime(f"{path}.gone.r1", (time.time() - 7200,) * 2)
    lock.acquire(transport)
    assert names(path) == ["lock"]


def test_a_machine_of_two_names_is_told_as_such(transport: LocalTransport, path: str) -> None:
    """Both names in one run: it holds the lock itself, and waits for nobody."""
    HostLock(RECORD, ME, path).acquire(transport)
    again = dataclasses.replace(RECORD, host="kpro5b", run_id="r2", step="look")
    with pytest.raises(errors.LockHeld) as caught:
        HostLock(again, ME, path).acquire(transport)
    assert str(caught.value) == (
        "kpro5b: it is the same machine as kpro5, which this run is at work on"
    )
    assert "describe the machine once" in caught.value.fix
    for other in ({"pid": 78}, {"start": 501}, {"namespace": "pid:[2]"}, {"host": "kpro5"}):
        with pytest.raises(errors.LockHeld, match="another run is at work"):
            HostLock(dataclasses.replace(again, **other), ME, path).acquire(transport)
