"""The stream of a job's state: its lines, its offsets through rotation, and when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer.agents.bundle import fetch_agent
from deployer.agents.fetch import attach as module
from deployer.agents.fetch.attach import JobFolder, whole

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def job_folder(folder: Path, pid: int, log: bytes = b"", boot: str = BOOT) -> Path:
    """A job as the mechanism leaves it; its process is `pid`, and no wrapper is there."""
    folder.mkdir()
    files = {"pid": str(pid), "start": start_of(pid), "boot": boot, "session": "1", "leader": "0"}
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    (folder / "log").write_bytes(log)
    return folder


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "fetch.pyz"
    path.write_bytes(fetch_agent())
    return path


def attached(agent: Path, folder: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(agent), "attach", str(folder), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def ends(process: subprocess.Popen[str], within_s: float) -> list[dict[str, object]]:
    """All lines of a stream that must end by itself."""
    text, errors = process.communicate(timeout=within_s)
    assert (process.returncode, errors) == (0, "")
    return rows(text)


def test_the_end_of_a_job_and_its_last_words(agent: Path, tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job", os.getpid(), b"one\ntwo\n")
    (folder / "exit").write_text("code 13\n")
    (folder / "progress").write_text('{"bytes": 3}\n')
    (line,) = ends(attached(agent, folder, 0, 0, 60), 5)
    inode = (folder / "log").stat().st_ino
    assert line == {
        "alive": False,
        "exit": 13,
        "inode": inode,
        "offset": 8,
        "log": "one\ntwo\n",
        "progress": '{"bytes": 3}',
    }
    (line,) = ends(attached(agent, folder, inode, 4, 60), 5)
    assert (line["log"], line["offset"]) == ("two\n", 8)


def test_a_running_job_is_told_once_a_second_until_the_time_is_over(
    agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = job_folder(tmp_path / "job", sleeper.pid, b"begin\n")
    lines = ends(attached(agent, folder, 0, 0, 2.5), 6)
    assert [line["alive"] for line in lines] == [True] * 4
    assert [line["log"] for line in lines] == ["begin\n", "", "", ""]
    assert {line["exit"] for line in lines} == {None}


def test_new_text_and_the_end_are_seen_at_once(
    agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = job_folder(tmp_path / "job", sleeper.pid, b"a\n")
    stream = attached(agent, folder, 0, 0, 60)
    assert stream.stdout is not None
    assert json.loads(stream.stdout.readline())["log"] == "a\n"
    with (folder / "log").open("ab") as log:
        log.write(b"b\n")
    assert json.loads(stream.stdout.readline())["log"] == "b\n"
    with (folder / "log").open("ab") as log:
        log.write(b"last\n")
    (folder / "exit").write_text("signal 9\n")
    began = time.monotonic()
    (line,) = ends(stream, 5)
    assert time.monotonic() - began < 1.0
    assert (line["alive"], line["exit"], line["log"]) == (False, -9, "last\n")


def test_a_process_that_died_without_a_word_is_not_alive(
    agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = job_folder(tmp_path / "job", sleeper.pid)
    sleeper.kill()  # nobody reaps it yet: a zombie
    (line,) = ends(attached(agent, folder, 0, 0, 60), 5)
    assert (line["alive"], line["exit"]) == (False, None)


@pytest.mark.parametrize("wrong", ["boot", "start"])
def test_a_bare_pid_proves_nothing(
    agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes], wrong: str
) -> None:
    folder = job_folder(tmp_path / "job", sleeper.pid)
    (folder / wrong).write_text("1\n")
    (line,) = ends(attached(agent, folder, 0, 0, 60), 5)
    assert line["alive"] is False


def test_alive_while_the_wrapper_has_yet_to_write_how_it_ended(
    agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = job_folder(tmp_path / "job", sleeper.pid)
    (folder / "pid").write_text("999999999\n")
    (folder / "session").write_text(f"{sleeper.pid}\n")
    (folder / "leader").write_text(start_of(sleeper.pid) + "\n")
    lines = ends(attached(agent, folder, 0, 0, 0.5), 5)
    assert {line["alive"] for line in lines} == {True}


def test_a_long_log_comes_whole_and_in_order(agent: Path, tmp_path: Path) -> None:
    text = "".join(f"line {number} äöü €\n" for number in range(30_000))
    folder = job_folder(tmp_path / "job", os.getpid(), text.encode())
    (folder / "exit").write_text("code 0\n")
    lines = ends(attached(agent, folder, 0, 0, 60), 20)
    assert len(lines) > 5
    assert "".join(str(line["log"]) for line in lines) == text
    assert [line["exit"] for line in lines[:-1]] == [None] * (len(lines) - 1)
    assert lines[-1]["exit"] == 0 and lines[-1]["offset"] == len(text.encode())


def test_any_place_to_go_on_from_gives_the_same_text(agent: Path, tmp_path: Path) -> None:
    """Rotation has taken 10 bytes away, of which log.1 has the last 6."""
    folder = job_folder(tmp_path / "job", os.getpid(), b"ABCDEF")
    (folder / "log.1").write_bytes(b"456789")
    (folder / "log.base").write_text("10\n")
    whole_log = b"????456789ABCDEF"
    job = JobFolder(str(folder))
    inode = (folder / "log").stat().st_ino
    for offset in range(17):
        text, at, more = b"", offset, True
        while more:
            _, begin, data, more = job.read(inode, at)
            text, at = text + data, begin + len(data)
        assert text == whole_log[max(4, offset) :]
        assert at == 16
    assert job.read(inode, 17)[1:3] == (10, b"ABCDEF"), "an offset that this log never had"
    assert job.read(inode + 1, 12)[1:3] == (10, b"ABCDEF"), "another log"


def test_a_rotation_under_way_is_waited_for(tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job", os.getpid(), b"old")
    (folder / "rotating").touch()

    def rotate() -> None:
        (folder / "log").rename(folder / "log.1")
        (folder / "log.base").write_text("3\n")
        (folder / "log").write_bytes(b"new")
        (folder / "rotating").unlink()

    timer = threading.Timer(0.2, rotate)
    timer.start()
    assert JobFolder(str(folder)).read(0, 0)[1:] == (0, b"old", True)
    timer.join()


def test_it_ends_when_nobody_reads_and_starts_nothing(
    agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = job_folder(tmp_path / "job", sleeper.pid)
    stream = attached(agent, folder, 0, 0, 600)
    assert stream.stdout is not None and stream.stderr is not None
    stream.stdout.readline()
    assert Path(f"/proc/{stream.pid}/task/{stream.pid}/children").read_text() == ""
    stream.stdout.close()
    began = time.monotonic()
    assert stream.wait(timeout=5) == 0
    assert time.monotonic() - began < 2.0
    assert stream.stderr.read() == ""
    stream.stderr.close()


def test_it_ends_by_sighup(agent: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stream = attached(agent, job_folder(tmp_path / "job", sleeper.pid), 0, 0, 600)
    assert stream.stdout is not None
    stream.stdout.readline()
    stream.send_signal(signal.SIGHUP)
    assert stream.wait(timeout=5) == -signal.SIGHUP
    stream.communicate()


def test_a_reader_that_takes_nothing_does_not_hold_it_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job_folder(tmp_path / "job", os.getpid(), b"x" * (1 << 20))
    code = (
        "import sys; from deployer.agents.fetch import attach as a; a.GRACE_S = 0.5; "
        f"a.attach([{str(folder)!r}, '0', '0', '0.2'])"
    )
    command = [sys.executable, "-c", code]
    root = str(Path(module.__file__).parents[3])
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as stream:
        assert stream.wait(timeout=10) == -signal.SIGALRM


@pytest.mark.parametrize("words", [["nowhere", "0", "0", "1"], ["/tmp", "x", "0", "1"], ["/tmp"]])
def test_what_makes_no_sense_is_named(agent: Path, words: list[str]) -> None:
    process = attached(agent, Path(words[0]), *words[1:])
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("attach JOBDIR INODE OFFSET SECONDS: ")


def test_a_job_without_a_log_yet(agent: Path, tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job", os.getpid())
    (folder / "log").unlink()
    with contextlib.suppress(FileNotFoundError):
        (folder / "progress").unlink()
    lines = ends(attached(agent, folder, 0, 0, 0.2), 5)
    assert (lines[0]["log"], lines[0]["inode"], lines[0]["offset"]) == ("", 0, 0)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", 0),
        (b"abc", 3),
        ("é".encode(), 2),
        ("é".encode()[:1], 0),
        ("a€".encode()[:3], 1),
        ("a€".encode(), 4),
        ("a😀".encode()[:4], 1),
        ("a😀".encode(), 5),
        (b"\x80\x80\x80\x80\x80", 5),
        (b"a\xff", 1),
    ],
)
def test_a_character_is_not_cut(data: bytes, length: int) -> None:
    assert whole(data) == length
