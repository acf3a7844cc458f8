"""`deploy logs` on job folders as the job mechanism leaves them, read by dash and by busybox."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deployer import errors
from deployer.cli import logs as module
from deployer.cli.logs import LogReader
from deployer.cli.main import group
from deployer.remote.jobs import Jobs
from tests.local_transport import SHELLS, LocalTransport, boot_id, shell_path, start_time

SAMPLE = Path(__file__).parents[2] / "inventory"
NAME = "server-qwen"


class Target:
    """The jobs folder of a target and a reader of it; `sleep` runs the next of `happens`."""

    def __init__(self, root: Path, path: str) -> None:
        self.root = root
        self.transport = LocalTransport(path)
        self.out: list[str] = []
        self.said: list[str] = []
        self.happens: list[Callable[[], object]] = []
        self.now = 0.0
        jobs = Jobs(self.transport, str(root), sleep=self.sleep)
        self.reader = LogReader(
            jobs,
            NAME,
            "kpro5/qwen",
            self.out.append,
            self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if not self.happens:
            raise KeyboardInterrupt
        self.happens.pop(0)()

    def launch(self, launch: str, log: bytes, *, ended: str = "") -> Path:
        """A launch that becomes the current one; its process is ours unless it has ended."""
        folder = self.root / NAME / launch
        folder.mkdir(parents=True)
        own = os.getpid()
        for file, text in {
            "pid": str(own),
            "start": str(start_time(own)),
            "boot": boot_id(),
            "session": str(os.getsid(own)),
            "leader": "1",
        }.items():
            (folder / file).write_text(f"{text}\n")
        (folder / "log").write_bytes(log)
        if ended:
            self.end(folder, ended)
        link = folder.parent / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(launch)
        return folder

    @staticmethod
    def end(folder: Path, how: str) -> None:
        (folder / "exit").write_text(f"{how}\n")

    @staticmethod
    def append(folder: Path, raw: bytes) -> None:
        with (folder / "log").open("ab") as file:
            file.write(raw)

    @staticmethod
    def rotate(folder: Path) -> None:
        """What the wrapper does: copy, count, truncate."""
        log = (folder / "log").read_bytes()
        base = folder / "log.base"
        before = int(base.read_text()) if base.exists() else 0
        (folder / "log.1").write_bytes(log)
        base.write_text(f"{before + len(log)}\n")
        os.truncate(folder / "log", 0)

    def follow(self, *, pinned: bool = False) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.reader.follow(pinned=pinned)

    @property
    def text(self) -> str:
        return "".join(self.out)


@pytest.fixture(params=SHELLS)
def target(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Target:
    return Target(tmp_path / "jobs", shell_path(request.param, tmp_path_factory.getbasetemp()))


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, last + 1))


def test_the_last_lines(target: Target) -> None:
    target.launch("one", numbered(1, 500))
    target.reader.begin("", 3)
    assert target.text == "line 498\nline 499\nline 500\n"


def test_more_lines_than_there_are(target: Target) -> None:
    target.launch("one", b"first\nlast without end")
    target.reader.begin("", 100)
    assert target.text == "first\nlast without end"


def test_long_lines_are_read_until_there_are_enough(target: Target) -> None:
    target.launch("one", b"start\n" + b"x" * 5000 + b"\n" + b"y" * 5000 + b"\n")
    target.reader.begin("", 2)
    assert target.text == "x" * 5000 + "\n" + "y" * 5000 + "\n"


def test_a_carriage_return_ends_no_line(target: Target) -> None:
    target.launch("one", b"zero\n10%\r20%\r30%\ndone\n")
    target.reader.begin("", 2)
    assert target.text == "10%\r20%\r30%\ndone\n"


def test_the_last_lines_reach_into_the_rotated_log(target: Target) -> None:
    folder = target.launch("one", numbered(1, 4))
    target.rotate(folder)
    target.append(folder, b"line 5\n")
    target.reader.begin("", 3)
    assert target.text == "line 3\nline 4\nline 5\n"


def test_no_lines_and_an_empty_log(target: Target) -> None:
    target.launch("one", b"")
    target.reader.begin("", 10)
    target.reader.begin("", 0)
    assert target.text == ""


def test_undecodable_bytes_are_replaced(target: Target) -> None:
    target.launch("one", b"a\xffb \xc3\xa4\n")
    target.reader.begin("", 1)
    assert target.text == "a\ufffdb ä\n"


def test_an_older_launch_by_its_id(target: Target) -> None:
    target.launch("one", b"the first\n", ended="code 0")
    target.launch("two", b"the second\n")
    target.reader.begin("one", 10)
    assert target.text == "the first\n"


def test_a_launch_that_is_not_there(target: Target) -> None:
    with pytest.raises(errors.DeployError, match="no launch of kpro5/qwen is on the target"):
        target.reader.begin("", 10)
    target.launch("one", b"x\n")
    with pytest.raises(errors.UsageError, match="launch two is not on the target"):
        target.reader.begin("two", 10)
    with pytest.raises(errors.UsageError, match="no id of a launch"):
        target.reader.begin("../one", 10)
    assert target.out == []


def test_following_loses_no_byte_at_a_rotation(target: Target) -> None:
    folder = target.launch("one", numbered(1, 3))

    def rotated() -> None:
        target.append(folder, numbered(4, 5))
        target.rotate(folder)
        target.append(folder, numbered(6, 6))

    target.happens = [rotated, lambda: target.append(folder, numbered(7, 7))]
    target.reader.begin("", 2)
    target.follow()
    assert target.text == numbered(2, 7).decode()
    assert target.said == []


def test_a_character_cut_by_two_looks_is_whole(target: Target) -> None:
    folder = target.launch("one", b"")
    target.happens = [
        lambda: target.append(folder, b"\xe2\x82"),
        lambda: target.append(folder, b"\xac\n"),
    ]
    target.reader.begin("", 2)
    target.follow()
    assert target.text == "€\n"


def test_following_tells_the_end_once_and_goes_on_to_the_next_launch(target: Target) -> None:
    folder = target.launch("one", b"up\n")

    def crash() -> None:
        target.append(folder, b"Traceback\n")
        target.end(folder, "signal 9")

    target.happens = [crash, lambda: None, lambda: target.launch("two", b"again\n"), lambda: None]
    target.reader.begin("", 10)
    target.follow()
    assert target.text == "up\nTraceback\nagain\n"
    assert target.said == ["--- launch one has ended: signal 9 ---", "--- launch two ---"]


def test_following_a_named_launch_ends_with_it(target: Target) -> None:
    folder = target.launch("one", b"up\n")
    target.happens = [lambda: target.end(folder, "code 1")]
    target.reader.begin("one", 10)
    target.reader.follow(pinned=True)
    assert target.said == ["--- launch one has ended: exit code 1 ---"]


def test_following_outlives_a_lost_connection(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target.launch("one", b"up\n")
    real = target.transport.run
    dark = [True, True]

    def sometimes(*args: Any, **more: Any) -> Any:
        if dark and target.now >= 1:
            dark.pop()
            raise errors.ConnectionLost("the connection was closed", where="here")
        return real(*args, **more)

    monkeypatch.setattr(target.transport, "run", sometimes)
    target.happens = [lambda: target.append(folder, b"more\n"), *[lambda: None] * 3]
    target.reader.begin("", 10)
    target.follow()
    assert target.text == "up\nmore\n"
    assert target.said == ["--- here: the connection was closed; asking again ---"] * 2


def test_following_gives_up_on_a_target_that_stays_dark(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.launch("one", b"up\n")
    target.reader.begin("", 10)

    def dark(*args: Any, **more: Any) -> Any:
        raise errors.Unreachable("dark")

    monkeypatch.setattr(target.transport, "run", dark)
    target.happens = [lambda: None] * 100
    with pytest.raises(errors.Unreachable):
        target.reader.follow(pinned=False)
    assert target.now == 60


def test_a_deadline_ends_following(target: Target) -> None:
    target.launch("one", b"up\n")
    target.happens = [lambda: None] * 100
    target.reader.begin("", 0)
    target.reader.follow(pinned=False, timeout_s=5)
    assert target.now == 5


class Session:
    """Stands for HostSession: every target is this machine."""

    transport: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def transports(self, want: Any) -> Any:
        return {want.guest: self.transport}

    def close(self, on_problem: Any) -> None:
        pass


def test_the_command_prints_only_the_log(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.launch("one", b"caf\xc3\xa9 \xff\n")
    monkeypatch.setattr(Session, "transport", target.transport)
    monkeypatch.setattr(module, "HostSession", Session)
    monkeypatch.setattr(module, "Jobs", lambda transport: Jobs(transport, str(target.root)))
    done = CliRunner().invoke(group, ["-i", str(SAMPLE), "logs", "kpro5"])
    assert done.exception is None, done.output
    assert done.stdout_bytes == "café \ufffd\n".encode()
    assert done.stderr == ""


def test_the_command_has_no_json() -> None:
    done = CliRunner().invoke(group, ["-i", str(SAMPLE), "logs", "kpro5", "--json"])
    assert isinstance(done.exception, errors.UsageError)


def test_api_keys_are_masked_also_when_cut_between_two_reads(target: Target) -> None:
    folder = target.launch("1", b"args(api_key='s3cr")
    target.reader.begin("", 10)
    assert target.text == "args("
    target.happens = [lambda: target.append(folder, b"et', port=1)\nba")]
    target.follow()
    assert target.text == "args(api_key='***', port=1)\nb"
    target.reader.end()
    assert target.text == "args(api_key='***', port=1)\nba"
