"""The scripts of `gc` on real trees, with live holders, under dash and busybox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployer.gc_found import Found, GcFact, HostUsed, Kind, Through
from deployer.gc_look import host_probe, look_probe, parse_host, parse_look
from deployer.gc_scripts import MARK, TRASH, removal
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
        (path / ".deployer" / "verified.json").write_text(
            json.dumps({"version": 1, "files": {"a.bin": {"size": 1}}}, indent=1)
        )
        for file in ("a.bin", "a.bin.part", "a.bin.bad", *foreign):
            (path / file).write_text("x")
        return path

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "uv"

    def look(self, *names: Path) -> GcFact:
        models = [str(path) for path in sorted((self.folder / "models").glob("*"))]
        jobs = ["server-q", "venv-q", "absent"]
        probe = look_probe(
            *([str(self.builds)], [str(self.link)], models, jobs, Where.GUEST, str(self.jobs)),
            cache=str(self.cache),
            names=[str(name) for name in names],
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
    world.model("z")
    (world.jobs / "server-other" / "1").mkdir(parents=True)
    (world.jobs / "server-other" / "1" / "script").write_text(
        f"x --model-path '{world.folder}/models/m'\n"
    )
    hold("file", world.builds / "two", holders)
    fact = world.look()
    told = {one.id: one for one in fact.found}
    assert {name: one.ours for name, one in told.items()} == {
        **{"one": True, "two": True, "half": True, "strange": False},
        **{"m": True, "odd": True, "bare": False, "z": True},
    }
    assert told["one"].size >= 5000 and told["one"].changed > 1_700_000_000
    assert (told["m"].foreign, told["odd"].foreign, told["bare"].foreign) == (0, 2, 0)
    assert fact.links == {str(world.link): str(first)}
    assert fact.used == (f"{world.builds}/two/lib/a.py",)
    assert fact.named == {f"{world.folder}/models/m": ("server-other",)}
    assert fact.free[str(world.builds)] > 0


def test_what_a_process_holds_stays(world: World, holders: list[subprocess.Popen[bytes]]) -> None:
    paths = [world.build(how) for how in HOLD]
    for how, path in zip(HOLD, paths, strict=True):
        hold(how, path, holders)
    assert {Path(one).relative_to(world.builds).parts[0] for one in world.look().used} == set(HOLD)
    for path in paths:
        assert world.remove("venv", path) == "held a process uses it"
        assert (path / "lib" / "a.py").exists()
    for process in holders:
        process.kill()
        process.wait()
    assert [world.remove("venv", path) for path in paths] == ["removed"] * 3
    assert list(world.builds.iterdir()) == []
    assert world.remove("venv", paths[0]) == "gone"


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
        one = world.found("1")
        assert one.alive and one.current
        assert world.remove("launch", where) == "held it is the newest"
        (world.jobs / "server-q" / "current").unlink()
        assert world.remove("launch", where) == "held its job runs"
    finally:
        assert jobs.stop(old, grace_s=5).stopped
    deadline = time.monotonic() + 10
    while (said := world.remove("launch", where)) != "removed":
        assert said.startswith("held ") and time.monotonic() < deadline, "its wrapper stays"
        time.sleep(0.05)


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
    world.model("m")
    world.model("n")
    left = world.folder / "models" / TRASH / "of-both"
    left.mkdir(parents=True)
    (left.parent / MARK).touch()
    assert world.found("of-both").kind == "trash", "it is found once"


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


def test_by_its_real_name_too(world: World, holders: list[subprocess.Popen[bytes]]) -> None:
    """The folder of the builds is a symlink to another disk: processes show the real path."""
    real = world.folder / "disk"
    world.builds.rmdir()
    real.mkdir()
    world.builds.symlink_to(real)
    path = world.build("one")
    world.link.symlink_to(real / "one")
    hold("map", real / "one", holders)
    fact = world.look(world.builds / "one", Path("/nowhere/x"))
    [one] = fact.found
    assert (one.path, one.real, one.mounted) == (str(path), str(real / "one"), False)
    assert fact.used == (f"{real}/one/lib/a.py",) and one.holds(fact.used[0])
    assert fact.real[str(path)] == str(real / "one")
    world.link.unlink()
    assert world.remove("venv", path) == "held a process uses it"


def test_started_through_the_link(world: World, holders: list[subprocess.Popen[bytes]]) -> None:
    """`engine.venv/bin/python` is the system's program: nothing shows the build behind it."""
    first = world.build("one")
    (first / "bin").mkdir()
    (first / "bin" / "python").symlink_to(sys.executable)
    world.link.symlink_to(first)
    code = "import sys; f = sys.argv[1:] and open(sys.argv[1]); print(1, flush=True); input()"
    program = f"{world.link}/bin/python"
    for job, *words in (("server-q/l1",), ("",), ("x/1", f"{first}/lib/a.py")):
        process = subprocess.Popen(
            [program, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"DEPLOYER_JOB": job} if job else {},
        )
        holders.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
    ours, strange, seen = holders
    assert set(world.look().through) == {
        Through(str(world.link), ours.pid, "server-q/l1"),
        Through(str(world.link), strange.pid),
    }, seen.pid


def test_what_has_another_name_stays_on_the_disk(world: World) -> None:
    """As a hub's cache that shares its blobs: names in the folder, and one elsewhere."""
    path = world.model("m")
    blob, own = world.folder / "blob", path / "big"
    blob.write_bytes(b"x" * 300_000)
    os.link(blob, path / "shard")
    own.write_bytes(b"y" * 200_000)
    os.link(own, path / "again")
    one = world.found("m")
    assert 300_000 <= one.shared < 320_000 and 500_000 <= one.size < 600_000
    assert one.foreign == 3 and 200_000 <= one.freed < 300_000


def test_the_cache(world: World, holders: list[subprocess.Popen[bytes]]) -> None:
    world.cache.mkdir(parents=True)
    (world.cache / "wheel").write_text("x")
    assert not world.found("uv").ours
    assert world.remove("cache", world.cache) == "held not known to be ours"
    (world.cache / "CACHEDIR.TAG").touch()
    assert world.found("uv").kind == "cache" and world.found("uv").ours
    assert world.remove("cache", world.cache) == "removed"
    assert list(world.cache.parent.iterdir()) == []


def test_a_build_of_anybody_is_seen(world: World) -> None:
    jobs = Jobs(world.transport, str(world.jobs))
    job = jobs.start("venv-other", "1", "sleep 60")
    try:
        assert world.look().building == ("venv-other",)
    finally:
        assert jobs.stop(job, grace_s=5).stopped


def test_two_looks_at_once_are_no_use(world: World) -> None:
    """What a look runs holds the folders that it looks at; another does not take it for a user."""
    for number in range(100):
        (world.build("one") if not number else world.builds / "one" / str(number)).mkdir(
            exist_ok=True
        )
    stop, fault = threading.Event(), []

    def other() -> None:
        while not stop.is_set():
            fault.extend(world.look().used)

    threads = [threading.Thread(target=other)]
    for thread in threads:
        thread.start()
    script = host_probe([str(world.builds), str(world.folder / "models")]).script
    for _ in range(2):
        answer = world.transport.run(script, timeout_s=60)
        fault.extend(parse_host(ProbeOutput(answer.exit, answer.stdout, answer.stderr)).used)
    stop.set()
    for thread in threads:
        thread.join()
    assert fault == []


def test_the_host_tells_who_uses_a_folder(
    world: World, holders: list[subprocess.Popen[bytes]]
) -> None:
    path = world.model("m")
    holders.append(
        subprocess.Popen(["sh", "-c", "read x", "sh", f"--model={path}"], stdin=subprocess.PIPE)
    )
    script = host_probe([str(path), "/nowhere"]).script

    def seen() -> HostUsed:
        answer = world.transport.run(script, timeout_s=60)
        return parse_host(ProbeOutput(answer.exit, answer.stdout, answer.stderr))

    deadline = time.monotonic() + 20
    while not seen().used and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen() == HostUsed(used=(str(path),))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_where_another_user_has_files_stays(world: World) -> None:
    path = world.build("one")
    assert world.found("one").user == ""
    os.chown(path / "lib" / "a.py", 4711, -1)
    assert world.found("one").user == "4711"
    assert world.remove("venv", path) == "held files of user 4711 are in it"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_what_something_is_mounted_in_stays(world: World) -> None:
    path = world.build("one")
    inner = path / "lib" / "a b"
    inner.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "none", str(inner)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        assert world.found("one").mounted
        assert world.remove("venv", path) == "held something is mounted in it, or it elsewhere"
    finally:
        subprocess.run(["umount", str(inner)], check=True)
    assert not world.found("one").mounted and world.remove("venv", path) == "removed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("part", ["", "lib"])
def test_what_is_mounted_at_another_place_stays(world: World, part: str) -> None:
    """A bind mount: who uses it there shows other paths."""
    path, beside = world.build("one"), world.build("one more")
    there = world.folder / "else where"
    there.mkdir()
    done = subprocess.run(["mount", "--bind", str(path / part), str(there)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        assert world.found("one").mounted and not world.found("one more").mounted
        assert world.remove("venv", path).startswith("held something is mounted in it, or it else")
        assert world.remove("venv", beside) == "removed"
    finally:
        subprocess.run(["umount", str(there)], check=True)
    assert world.remove("venv", path) == "removed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_a_folder_that_is_shared_as_a_whole_is_no_reason(world: World) -> None:
    """As a container has it: one bind mount of a folder of the host, with all models in it."""
    there = world.folder / "venvs here.builds"
    there.mkdir()
    world.build("one")
    done = subprocess.run(["mount", "--bind", str(world.builds), str(there)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        assert world.remove("venv", there / "one") == "removed"
    finally:
        subprocess.run(["umount", str(there)], check=True)


def test_a_trash_that_leads_elsewhere_is_not_followed(world: World) -> None:
    """Somebody who may write beside the models would have root remove what is not theirs."""
    path, victim = world.build("one"), world.folder / "victim"
    victim.mkdir()
    (victim / MARK).touch()
    (victim / "data").mkdir()
    (world.builds / TRASH).symlink_to(victim)
    assert [one.id for one in world.look().found] == ["one"]
    assert world.remove("venv", path) == f"held {world.builds / TRASH} is a symlink"
    assert world.remove("trash", world.builds / TRASH / "data").startswith("held not known")
    assert (victim / "data").is_dir() and path.is_dir()


@pytest.mark.parametrize("name", ["size", "files", "a.bin\na.bin", "-rf", "a\\b", 'a"b', " a.bin"])
def test_a_file_that_only_looks_recorded_keeps_the_model(world: World, name: str) -> None:
    world.model("m", name)
    assert world.found("m").foreign >= 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("kind", ["venv", "weights"])
def test_a_full_disk_is_no_reason_to_keep(world: World, kind: Kind) -> None:
    """No name can be made there, not even that of the trash: it goes where it is."""
    where = str(world.builds if kind == "venv" else world.folder / "models")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=20", "none", where], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        path = world.build("one") if kind == "venv" else world.model("m")
        (path / "complete").touch()
        (path / ".hidden").mkdir()
        with pytest.raises(OSError, match="No space left"):
            for number in range(20):
                (Path(where) / str(number)).touch()
        assert world.remove(kind, path) == "removed"
        assert not path.exists() and not (Path(where) / TRASH).exists()
    finally:
        subprocess.run(["umount", where], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="root alone may become another user")
def test_without_permission_nothing_goes_and_the_reason_is_told(world: World) -> None:
    path = world.build("one")
    for folder in (world.folder, *world.folder.parents):
        if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    for one in (path, *path.rglob("*")):
        os.chown(one, 65534, 65534)
    script = removal(Found("venv", str(path), 1), [])
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-c", script],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )
    assert done.returncode == 1 and b"Permission denied" in done.stderr, done
    assert (path / "lib" / "a.py").exists() and not (world.builds / TRASH).exists()
