"""The scripts of `gc` on real trees, with live holders, under dash and busybox."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployer.gc import Found, GcFact, Kind
from deployer.gc_scripts import MARK, TRASH, look_probe, parse_look, removal
from deployer.model import ProbeOutput, Where
from deployer.remote.jobs import Jobs
from tests.local_transport import SHELLS, LocalTransport, shell_path


@dataclass
class World:
    """A target: builds, models and jobs below one folder."""

    transport: LocalTransport
    folder: Path

    @property
    def builds(self) -> Path:
        return self.folder / "venvs" / "q x.builds"

    @property
    def link(self) -> Path:
        return self.folder / "venvs" / "q x"

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def build(self, name: str, mark: str = "deployer.json") -> Path:
        path = self.builds / name
        (path / "lib").mkdir(parents=True)
        (path / "lib" / "a.py").write_text("x" * 5000)
        if mark:
            (path / mark).write_text("{}")
        return path

    def model(self, name: str, *foreign: str) -> Path:
        path = self.folder / "models" / name
        (path / ".deployer").mkdir(parents=True)
        (path / ".deployer" / "verified.json").write_text('{"files": {"a.bin": {"size": 1}}}')
        for file in ("a.bin", "a.bin.part", "a.bin.bad", *foreign):
            (path / file).write_text("x")
        return path

    def look(self) -> GcFact:
        models = [str(path) for path in sorted((self.folder / "models").glob("*"))]
        names = ["server-q", "venv-q", "absent"]
        probe = look_probe(
            [str(self.builds)], [str(self.link)], models, names, Where.GUEST, str(self.jobs)
        )
        answer = self.transport.run(probe.script, timeout_s=60)
        assert answer.exit == 0, answer.error_text
        fact = parse_look(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
        assert fact.problem == ""
        return fact

    def found(self, name: str) -> Found:
        [one] = [one for one in self.look().found if one.id == name]
        return one

    def remove(self, kind: Kind, path: Path) -> str:
        script = removal(Found(kind, str(path), 1), [str(self.link)])
        answer = self.transport.run(script, timeout_s=60)
        assert answer.exit == 0, answer.error_text
        return answer.text.strip()


@pytest.fixture(params=SHELLS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    path = shell_path(request.param, tmp_path / "sh")
    made = World(LocalTransport(path), tmp_path / "target")
    made.builds.mkdir(parents=True)
    (made.folder / "models").mkdir()
    return made


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


HOLD = {
    "file": "f = open(sys.argv[1] + '/lib/a.py')",
    "cwd": "os.chdir(sys.argv[1] + '/lib')",
    "map": "m = mmap.mmap(os.open(sys.argv[1] + '/lib/a.py', os.O_RDONLY), 0, prot=mmap.PROT_READ)",
}


def hold(how: str, path: Path, holders: list[subprocess.Popen[bytes]]) -> None:
    """The path is not on its command line."""
    code = f"import mmap, os, sys; sys.argv = ['', input()]; {HOLD[how]}; print('held'); input()"
    process = subprocess.Popen(
        [sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holders.append(process)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{path}\n".encode())
    process.stdin.flush()
    assert process.stdout.readline() == b"held\n"


def test_the_look(world: World, holders: list[subprocess.Popen[bytes]]) -> None:
    first = world.build("one")
    world.build("two", "complete")
    world.build("half", "deployer.build")
    world.build("strange", "")
    (world.builds / "ln").symlink_to(first)
    world.link.symlink_to(first)
    world.model("m")
    world.model("odd", "notes.txt", ".hidden")
    (world.folder / "models" / "bare").mkdir()
    (world.jobs / "server-other" / "1").mkdir(parents=True)
    (world.jobs / "server-other" / "1" / "script").write_text(
        f"x --model-path '{world.folder}/models/m'\n"
    )
    hold("file", world.builds / "two", holders)
    fact = world.look()
    told = {one.id: one for one in fact.found}
    assert {name: one.ours for name, one in told.items()} == {
        **{"one": True, "two": True, "half": True, "strange": False},
        **{"m": True, "odd": True, "bare": False},
    }
    assert told["one"].size >= 5000 and told["one"].changed > 1_700_000_000
    assert (told["m"].foreign, told["odd"].foreign, told["bare"].foreign) == (0, 2, 0)
    assert fact.links == {str(world.link): str(first)}
    assert fact.used == (f"{world.builds}/two/lib/a.py",)
    assert fact.named == {f"{world.folder}/models/m": ("server-other",)}
    assert fact.free[str(world.builds)] > 0


@pytest.mark.parametrize("how", HOLD)
def test_what_a_process_holds_stays(
    world: World, how: str, holders: list[subprocess.Popen[bytes]]
) -> None:
    path = world.build("one")
    hold(how, path, holders)
    assert world.look().used and world.remove("venv", path) == "held a process uses it"
    assert (path / "lib" / "a.py").exists()
    holders[0].kill()
    holders[0].wait()
    assert world.remove("venv", path) == "removed"
    assert list(world.builds.iterdir()) == []
    assert world.remove("venv", path) == "gone"


def test_what_a_command_line_names_stays(
    world: World, holders: list[subprocess.Popen[bytes]]
) -> None:
    """As `BUILD/bin/python`, whose program lies elsewhere."""
    path = world.build("one")
    holders.append(
        subprocess.Popen(["sh", "-c", "read x", f"{path}/bin/python"], stdin=subprocess.PIPE)
    )
    line = Path(f"/proc/{holders[-1].pid}/cmdline")
    deadline = time.monotonic() + 20
    while not line.read_bytes().startswith(b"sh\0") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert world.look().used == (f"{path}/bin/python",)
    assert world.remove("venv", path) == "held a process uses it"


def test_links_strangers_and_symlinks_stay(world: World) -> None:
    path, strange = world.build("one"), world.build("strange", "")
    world.link.symlink_to(path)
    assert world.remove("venv", path).startswith("held ")
    assert world.remove("venv", strange) == "held not known to be ours"
    (world.builds / "ln").symlink_to(path)
    assert world.remove("venv", world.builds / "ln") == "gone"
    assert path.exists() and strange.exists()


def test_a_model_goes_with_all_of_it(world: World) -> None:
    path = world.model("m")
    assert world.remove("weights", path) == "removed"
    assert list((world.folder / "models").iterdir()) == []


def test_jobs(world: World) -> None:
    jobs = Jobs(world.transport, str(world.jobs))
    old = jobs.start("server-q", "1", "sleep 60")
    try:
        where = world.jobs / "server-q" / "1"
        assert world.found("1").alive and world.found("1").current
        assert world.remove("launch", where) == "held it is the newest"
        (world.jobs / "server-q" / "current").unlink()
        assert not world.found("1").current
        assert world.remove("launch", where) == "held its job runs"
    finally:
        assert jobs.stop(old, grace_s=5).stopped
    deadline = time.monotonic() + 10
    while world.found("1").alive or world.look().used:
        assert time.monotonic() < deadline, "its wrapper stays"
        time.sleep(0.05)
    assert world.found("1").ours and world.remove("launch", where) == "removed"


def test_what_a_kill_left_is_found_again(world: World) -> None:
    """Killed while it deletes: nothing has the old name, and the next run frees the rest."""
    path = world.build("one")
    for number in range(3000):
        (path / "lib" / str(number)).write_text("")
    trash = world.builds / TRASH
    program = ["sh", "-c", removal(Found("venv", str(path), 1), [])]
    with subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True) as process:
        while not list(trash.glob("one.*")):
            assert process.poll() is None, "it was too fast to be killed"
        os.killpg(process.pid, 9)
    assert not path.exists()
    [left] = [one for one in world.look().found if one.kind == "trash"]
    assert left.ours and left.id.startswith("one.")
    assert world.remove("trash", Path(left.path)) == "removed"
    assert not trash.exists()


def test_a_trash_that_is_not_ours_is_not_looked_at(world: World) -> None:
    other = world.builds / TRASH / "theirs"
    other.mkdir(parents=True)
    assert world.look().found == ()
    assert world.remove("trash", other) == "held not known to be ours"
    (world.builds / TRASH / MARK).touch()
    assert world.found("theirs").kind == "trash"


def test_who_opens_it_in_between_keeps_it(world: World) -> None:
    """A process that opens a file all the time never loses it half."""
    path = world.build("one")
    stop = threading.Event()
    lost: list[str] = []

    def use() -> None:
        with (path / "lib" / "a.py").open() as file:
            stop.wait()
            lost.extend([] if file.read() else ["empty"])

    user = threading.Thread(target=use)
    user.start()
    try:
        assert world.remove("venv", path) == "held a process uses it"
    finally:
        stop.set()
        user.join()
    assert lost == [] and path.exists()
