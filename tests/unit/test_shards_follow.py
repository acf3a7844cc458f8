"""How the stream of a download job is read, joined again, and judged for silence."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deployer import errors
from deployer.remote.jobs import JobStatus
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps.shards_download import download
from deployer.steps.shards_figures import Figures, read_figures, size_text, time_text
from deployer.steps.shards_follow import Mute, Stream, Watch, attach_script, mute_after
from tests.unit.downloadworld import INODE, World, identity, manifest


def row(log: str = "", offset: int = 0, **more: Any) -> bytes:
    told = {"alive": True, "exit": None, "inode": INODE, "offset": offset, "log": log}
    return json.dumps({**told, "progress": '{"tick": 1}\n', **more}).encode() + b"\n"


@pytest.mark.parametrize("seed", range(20))
def test_lines_survive_any_cut(seed: int) -> None:
    texts = [f"12:00:{n:02d} líne {n}\n" for n in range(30)]
    lines, offset = b"", 0
    for text in texts:
        offset += len(text.encode())
        lines += row(text, offset)
    dice = random.Random(seed)
    stream, got = Stream(identity()), b""
    while lines:
        size = dice.randint(1, 90)
        got += b"".join(status.log for status in stream.feed(lines[:size]))
        lines = lines[size:]
    assert got.decode() == "".join(texts)
    assert (stream.inode, stream.offset, stream.count) == (INODE, offset, 30)


def test_half_a_line_of_a_lost_exec_is_no_line() -> None:
    stream = Stream(identity())
    stream.begin()
    assert [status.log for status in stream.feed(row("one\n", 4) + row("two\n", 8)[:-9])] == [
        b"one\n"
    ]
    stream.begin()
    assert stream.offset == 4
    assert [status.log for status in stream.feed(row("two\n", 8))] == [b"two\n"]


def test_a_repeated_and_an_old_line_bring_no_log_twice() -> None:
    stream = Stream(identity(), INODE, 4)
    repeated = stream.feed(row("two\n", 8) + row("two\n", 8) + row("one\n", 4))
    assert [status.log for status in repeated] == [b"two\n", b""]
    assert stream.offset == 8


def test_a_new_log_file_starts_at_its_own_offset() -> None:
    stream = Stream(identity(), INODE, 400)
    (status,) = stream.feed(row("new\n", 4, inode=9))
    assert (status.log, stream.inode, stream.offset) == (b"new\n", 9, 4)


@pytest.mark.parametrize(
    "line",
    [
        b"Traceback (most recent call last):\n",
        b"[]\n",
        b"{}\n",
        b"null\n",
        row(alive=1),
        row(exit="0"),
        row(exit=True),
        row(inode=None),
        row(offset=1.5),
        row(log=None),
        row(progress={}),
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_line_of_attach_is_left(line: bytes) -> None:
    stream = Stream(identity())
    assert stream.feed(line) == [] and stream.count == 0 and stream.offset == 0


def test_bytes_that_are_no_text_come_back_as_they_were() -> None:
    stream = Stream(identity())
    surrogates = b"caf\xe9\n".decode("utf-8", "surrogateescape")
    assert stream.feed(row(surrogates, 5))[0].log == b"caf\xe9\n"
    assert stream.feed(row("\ud800\n", 7))[0].log == b"?\n"


def test_an_endless_line_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployer.steps.shards_follow.LONGEST_LINE", 100)
    stream = Stream(identity())
    assert stream.feed(b"x" * 101) == [] and stream.feed(b"\n") == []
    assert len(stream.feed(row("a\n", 2))) == 1


def test_the_end_is_seen() -> None:
    stream = Stream(identity())
    (status,) = stream.feed(row("", 0, alive=False, exit=-9))
    assert stream.ended and (status.alive, status.exit) == (False, -9)


# ---- Watch


def watch(world: World, mute_s: float = 30.0, earlier: bytes = b"") -> Watch:
    return Watch(world.context(), mute_s, world.clock, earlier)


def status(world: World, log: bytes = b"", *, alive: bool = True, **figures: Any) -> JobStatus:
    world.now += 1.0
    world.log += log
    line = json.dumps({"bytes": 1, "total": 2, **figures})
    return JobStatus(identity(), alive, None, log, INODE, len(world.log), line)


def test_warnings_become_notes_once_however_they_are_cut() -> None:
    world = World()
    eye = watch(world)
    log = b"12:00:00 warning: range stalled; killed, going on with hf-xet\n12:00:01 2 files\n"
    log += b"12:00:02 a warning: no\nwarning: neither\n12:00:03 warning: caf\xe9 \x1b[2J\r\n"
    for tick, at in enumerate(range(0, len(log), 7)):
        eye.see(status(world, log[at : at + 7], tick=tick))
    assert world.notes == [
        "range stalled; killed, going on with hf-xet",
        "caf\ufffd \x1b[2J",
    ]
    assert eye.lines(1)[0].startswith("12:00:03")


def test_progress_is_told_once_a_second_and_at_the_end() -> None:
    world = World()
    eye = watch(world)
    for tick in range(10):
        world.now -= 0.75
        eye.see(status(world, tick=tick, bytes=tick))
    assert [event.done for event in world.progress] == [0, 4, 8]
    eye.see(status(world, tick=99, bytes=50))
    world.now -= 1.0
    eye.see(status(world, tick=100, bytes=100, alive=False))
    assert [event.done for event in world.progress[-2:]] == [50, 100]


def test_parts_and_figures_are_in_the_event() -> None:
    world = World()
    shards = [["b.safetensors", 5, 10], ["a.safetensors", 1, 10], "junk", ["c"]]
    more = {"mean": 1e6, "eta": 47, "method": "range", "retries": 1, "stalls": 2, "files": 3}
    watch(world).see(status(world, tick=1, speed=2e6, shards=shards, **more))
    (event,) = world.progress
    assert [(part.name, part.done, part.total) for part in event.parts] == [
        ("b.safetensors", 5, 10),
        ("a.safetensors", 1, 10),
    ]
    assert event.detail == (
        "2.0 MB/s, mean 1.0 MB/s, 0:47 left, 0 of 3 files, range, 1 retry, 2 stalls"
    )
    told = event.to_dict()
    assert told["figures"]["eta_s"] == 47 and told["figures"]["method"] == "range"
    assert told["parts"][0] == {"name": "b.safetensors", "done": 5, "total": 10}
    json.dumps(told)


def test_mute_needs_time_and_looks() -> None:
    world = World()
    eye = watch(world)
    eye.see(status(world, tick=1))
    world.now += 500  # the controller slept
    for _ in range(9):
        eye.see(status(world, tick=1))
    eye.see(status(world, tick=2))
    for _ in range(30):
        eye.see(status(world, tick=2))
    with pytest.raises(Mute):
        eye.see(status(world, tick=2))


def test_a_log_does_not_hide_a_supervisor_without_a_tick() -> None:
    world = World()
    eye = watch(world)
    with pytest.raises(Mute):
        for _ in range(40):
            eye.see(status(world, b"12:00:00 a child says something\n", tick=3))


def test_a_job_that_says_nothing_at_all_is_mute() -> None:
    world = World()
    eye = watch(world)
    quiet = JobStatus(identity(), True, None, b"", INODE, 0, "")
    with pytest.raises(Mute):
        for _ in range(40):
            world.now += 1.0
            eye.see(quiet)


def test_an_old_tick_changes_nothing() -> None:
    world = World()
    eye = watch(world)
    eye.see(status(world, tick=9, bytes=9))
    eye.see(status(world, tick=8, bytes=8))
    assert eye.done == 9


def test_a_supervisor_may_be_silent_for_two_stalls() -> None:
    assert (mute_after(45), mute_after(2)) == (90, 30)


# ---- follow


def run(world: World, **settings: Any) -> None:
    download(
        world.context(DeploymentState(manifest=manifest()), **settings),
        manifest(),
        clock=world.clock,
        sleep=world.sleep,
    )


def test_a_lost_connection_is_joined_where_the_log_was_read_to() -> None:
    world = World()
    first = [world.line("12:00:00 warning: one\n"), world.line("12:00:01 two\n")]
    read = len(world.log)
    rest = [world.line("12:00:02 warning: three\n"), world.end(0)]
    world.execs = [[*first, rest[0][:40], errors.ConnectionLost("cut")], rest]
    run(world)
    lost = "the target is lost, the download goes on there: cut"
    assert world.notes == ["one", lost, "three"] and len(world.ids) == 1
    assert world.asked[1][1:3] == (str(INODE), str(read))


def test_a_target_that_stays_dark_is_given_up_after_a_minute() -> None:
    world = World()
    dark = errors.Unreachable("no route", where="box")
    world.execs = [[world.line(), dark], *[[9.0, dark] for _ in range(20)]]
    with pytest.raises(errors.Unreachable, match="no route"):
        run(world)
    assert 60 <= world.now <= 80 and world.stopped == 0 and len(world.notes) == 1


def test_a_refusal_ends_at_once() -> None:
    world = World()
    world.execs = [[world.line(), errors.HostKeyChanged("changed")]]
    with pytest.raises(errors.HostKeyChanged):
        run(world)
    assert world.now < 5


def test_an_exec_a_minute_is_joined_again_without_a_word() -> None:
    world = World()
    world.execs = [[world.line() for _ in range(30)] for _ in range(3)] + [[world.end(0)]]
    run(world)
    assert world.notes == [] and len(world.asked) == 4 and world.polled == 1


def test_what_cannot_stream_is_polled_and_said() -> None:
    world = World(ended=[0])
    world.log = b"12:00:00 warning: seen by the poll\n"
    world.execs = [[Answer(2, b"", b"x\nunknown mode: attach\n")]]
    run(world)
    assert world.notes == [
        "the download cannot be streamed, so it is polled: unknown mode: attach",
        "seen by the poll",
    ]


def test_execs_that_keep_ending_early_are_not_tried_for_ever() -> None:
    world = World(ended=[0])
    world.execs = [[world.line()] for _ in range(3)]
    run(world)
    assert world.polled == 1 and world.execs == [] and "is polled" in world.notes[0]


def test_a_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployer.steps.shards_follow.LONGEST_S", 20.0)
    world = World(ended=[0])
    world.execs = [[world.line() for _ in range(30)]]
    run(world)
    assert world.polled == 1 and world.execs == []


def test_the_script_says_what_lacks(tmp_path: Any) -> None:
    script = attach_script("/nonexistent")
    done = subprocess.run(["dash", "-c", script, "sh", str(tmp_path / "it's")], capture_output=True)
    assert done.returncode == 127 and b"there is no" in done.stderr and b"it's" in done.stderr
    env = {"PATH": str(tmp_path)}
    bare = subprocess.run(["/bin/dash", "-c", script, "sh", "x"], capture_output=True, env=env)
    assert bare.returncode == 127 and b"no python3" in bare.stderr


def test_a_python_that_is_too_old_for_the_agent_is_none(tmp_path: Path) -> None:
    old = tmp_path / "bin" / "python3"
    new = tmp_path / "venv" / "bin" / "python"
    tells = 'case $* in *version_info*) ;; *) echo "$0" ;; esac'
    for path, text in ((old, "exit 1"), (new, tells)):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "fetch.pyz").touch()
    env = {"PATH": str(old.parent)}
    for venv, code, said in (
        (tmp_path / "venv", 0, str(new)),
        (tmp_path / "none", 127, "no python3 (3.9 or newer) on this machine"),
    ):
        words = ["/bin/dash", "-c", attach_script(str(venv)), "sh", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        assert (done.returncode, (done.stdout + done.stderr).strip()) == (code, said)


# ---- figures


def test_words_for_sizes_and_times() -> None:
    assert [size_text(n) for n in (0, 999, 1e6, 52.1e9, 2e12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 MB",
        "52.1 GB",
        "2.0 TB",
    ]
    assert [time_text(n) for n in (0, 47.4, 725, 12010, 183_600)] == [
        "0:00",
        "0:47",
        "12:05",
        "3:20:10",
        "2 d 3 h",
    ]


def test_a_broken_progress_line_is_none_and_a_wrong_figure_is_zero() -> None:
    assert [read_figures(text) for text in ("", "[1]", "{", "null")] == [None] * 4
    odd = '{"tick": "x", "bytes": -5, "speed": NaN, "eta": null, "total": true, "shards": 5}'
    assert read_figures(odd) == Figures(tick=0)


def test_a_pause_and_a_phase_are_said() -> None:
    away = Figures(pause=30, offline=True, files=2).words()
    assert "out of reach" in away and "as the Hub asked" not in away
    words = Figures(pause=12, phase="hashing", files=2).words()
    assert words == "0 bytes/s, 0 of 2 files, hashing, waiting 12 s as the Hub asked"
