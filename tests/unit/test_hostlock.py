"""The host lock: atomic, readable, stolen only from the dead."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from deployer import errors
from deployer.model import Probe, ProbeOutput, Where
from deployer.remote.hostlock import (
    Controller,
    Held,
    HostLock,
    LockRecord,
    NotAsked,
    Taken,
    is_stale,
    parse_outcome,
    parse_record,
    read_lock,
    refuse_unless_taken,
    this_controller,
    unlock,
)
from tests.local_transport import SHELLS, LocalTransport, ScriptedTransport, shell_path

ME = Controller("desk", "m1", "b1", "pid:[1]", {77: 500}.get)
RECORD = LockRecord("o'neil \"é\n$(x)@desk", "kpro5", 77, "b1", 500, "m1", "pid:[1]", "r1", "", 0.0)
OTHER = dataclasses.replace(RECORD, run_id="r2", owner="ann@laptop", machine="m2", step="venv")


@pytest.fixture(params=SHELLS)
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return LocalTransport(shell_path(request.param, tmp_path_factory.getbasetemp()))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lib" / "lock")


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
    held = read_lock(transport, path)
    assert held == Held(dataclasses.replace(RECORD, step="shards"), "r1")
    mine.release(transport)
    mine.release(transport)
    assert read_lock(transport, path) is None
    assert other.acquire(transport) == Taken()
    with pytest.raises(errors.LockHeld, match=r"taken away \(now: r2\)"):
        mine.enter(transport, "venv")
    assert [file.name for file in Path(path).parent.iterdir()] == ["lock"]


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
    held = read_lock(transport, path)
    assert held is not None and got == [held.run_id]


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
    held = read_lock(transport, path)
    assert held is not None and held.run_id == "r1"
    assert [file.name for file in Path(path).parent.iterdir()] == ["lock"]


def test_a_lock_that_changed_hands_is_not_stolen(transport: LocalTransport, path: str) -> None:
    """Between the proof and the theft someone else replaced the dead one."""
    HostLock(OTHER, ME, path).acquire(transport)
    dead = dataclasses.replace(RECORD, pid=78, run_id="dead")
    with pytest.raises(errors.LockHeld, match="ann@laptop"):
        HostLock(RECORD, ME, path).settle(transport, Held(dead, "dead"))
    held = read_lock(transport, path)
    assert held is not None and held.run_id == "r2"


def test_unlock_says_who(transport: LocalTransport, path: str) -> None:
    assert unlock(transport, path) is None
    HostLock(OTHER, ME, path).acquire(transport)
    assert unlock(transport, path) == Held(OTHER, "r2")
    assert read_lock(transport, path) is None


def test_could_not_ask(transport: LocalTransport, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.LockUnknown, match="cannot make"):
        HostLock(RECORD, ME, str(tmp_path / "file" / "lock")).acquire(transport)
    (tmp_path / "lock").mkdir()
    with pytest.raises(errors.LockUnknown, match="is a folder"):
        HostLock(RECORD, ME, str(tmp_path / "lock")).acquire(transport)
    cut = ScriptedTransport(errors.ConnectionLost("gone"))
    with pytest.raises(errors.LockUnknown, match="gone"):
        HostLock(RECORD, ME).acquire(cut)


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
    Path(path).write_text("")
    with pytest.raises(errors.LockHeld):
        HostLock(RECORD, ME, path).acquire(transport)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"boot": "b0"}, "desk has been rebooted since"),
        ({"pid": 78}, "pid 78 on desk is gone"),
        ({"start": 499}, "pid 77 on desk is another process now"),
        ({"machine": "m2", "boot": "b0"}, None),
        ({"machine": "", "boot": "b0"}, None),
        ({"owner": "ann@laptop", "boot": "b0"}, None),
        ({"machine": "m2", "pid": 78}, "pid 78 on desk is gone"),
        ({"namespace": "pid:[2]", "pid": 78}, None),
        ({"boot": "", "pid": 78}, None),
        ({"start": 0, "pid": 78}, None),
    ],
)
def test_stale_only_if_proven(changes: dict[str, str], reason: str | None) -> None:
    assert is_stale(dataclasses.replace(RECORD, **changes), ME) == reason  # type: ignore[arg-type]


def test_nothing_is_proven_where_nothing_is_known() -> None:
    nobody = Controller("desk", "", "", "")
    assert is_stale(dataclasses.replace(RECORD, machine="", boot=""), nobody) is None


def test_our_own_record_is_alive() -> None:
    record = LockRecord.mine("kpro5", "r1", "venv")
    assert is_stale(record, this_controller()) is None
    assert parse_record(record.line()) == record
    assert "in step venv" in record.describe()


def test_outcomes() -> None:
    assert parse_outcome(b"noise\ndeployer-lock taken\n") == Taken()
    assert parse_outcome(b"deployer-lock held r1 x\n") == Held(None, "r1")
    assert parse_outcome(b"deployer-lock unknown no space\n") == NotAsked("no space")
    assert parse_outcome(b"") == NotAsked("the target did not say")
    refuse_unless_taken(Taken(), "kpro5")
