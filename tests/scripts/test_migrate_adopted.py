"""A server that was not started by this tool: written down while it runs, started again later."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployer import migrate_adopted
from deployer.errors import StepFailed
from deployer.model import Facts
from deployer.steps import adopted
from deployer.steps.server_facts import PortOwner, ServerFact
from tests.local_transport import SHELLS, LocalTransport, shell_path

SERVER = """
import json, os, socket, sys, time
one = socket.create_server(("127.0.0.1", int(sys.argv[1])))
told = {"argv": sys.argv[2:], "cwd": os.getcwd(), "secret": os.environ.get("HF_TOKEN"),
        "job": os.environ.get("DEPLOYER_JOB"), "umask": os.environ.get("ODD")}
print(json.dumps(told), flush=True)
time.sleep(120)
"""


@pytest.fixture(params=SHELLS)
def shells(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return shell_path(request.param, tmp_path)


class Old:
    """The old server, and the side of a migration where it is."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as one:
            self.port = one.getsockname()[1]
        (folder / "its home").mkdir()
        script = folder / "its home" / "serve it.py"
        script.write_text(SERVER)
        self.log = folder / "log"
        environ = {"HF_TOKEN": "hf_secret", "ODD": "a\nb=c", "PATH": os.environ["PATH"]}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "serve it.py", str(self.port), "--model", "it's a; $model", ""],
                cwd=script.parent,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pids = [self.process.pid]
        self.said: list[tuple[str, str]] = []
        engine = SimpleNamespace(venv=sys.prefix)
        serve, model = SimpleNamespace(ready_timeout_s=60), SimpleNamespace(path="/nothing")
        playbook = SimpleNamespace(engine=engine, serve=serve, model=model)
        want = SimpleNamespace(name="qwen", id="kpro5/qwen", port=self.port, playbook=playbook)
        self.side: Any = SimpleNamespace(
            want=want,
            guest=LocalTransport(path),
            note=self.note,
            gather=self.facts,
            progress=lambda *seen: None,
        )

    def note(self, phase: str, text: str, level: str = "info") -> None:
        self.said.append((level, text))

    def lines(self, count: int) -> list[dict[str, Any]]:
        """What its starts have said, once there are so many."""
        deadline = time.monotonic() + 20
        while len(said := self.log.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        return [json.loads(line) for line in said]

    def facts(self) -> Facts:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with socket.socket() as one:
            listening = one.connect_ex(("127.0.0.1", self.port)) == 0
        pid = self.pids[-1]
        owners: tuple[PortOwner, ...] = ()
        if listening:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            owners = (PortOwner(pid, int(fields[19]), pid, 1, "", "python serve it.py"),)
        return Facts({ServerFact: ServerFact(boot=boot, listening=listening, owners=owners)})

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def old(tmp_path: Path, shells: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Old]:
    monkeypatch.setattr(adopted, "FOLDER", str(tmp_path / "adopted"))
    made = Old(tmp_path, shells)
    made.lines(1)
    yield made
    for pid in made.pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    made.process.wait()


def test_it_is_started_again_as_it_was(old: Old) -> None:
    command = migrate_adopted.keep(old.side, old.facts())
    assert command == "python serve it.py"
    assert "--abort starts it again: python serve it.py" in old.said[0][1]
    kept = old.folder / "adopted" / "qwen" / "kept"
    assert (kept / "environ").stat().st_mode & 0o077 == 0
    assert not any("hf_secret" in text for _, text in old.said)
    old.end()
    migrate_adopted.put_back(old.side)
    level, text = old.said[-1]
    assert level == "info" and text.startswith("what had the port before serves again: pid ")
    old.pids.append(int(text.rpartition(" ")[2]))
    first, second = old.lines(2)
    assert first == second
    assert second["argv"] == ["--model", "it's a; $model", ""] and second["umask"] == "a\nb=c"
    assert second["secret"] == "hf_secret" and second["job"] is None
    assert not (old.folder / "adopted").exists()


def test_one_that_dies_before_it_listens_keeps_what_is_written_down(old: Old) -> None:
    migrate_adopted.keep(old.side, old.facts())
    old.end()
    script = old.folder / "its home" / "serve it.py"
    script.write_text("import time; time.sleep(1.5); raise SystemExit('CUDA out of memory')")
    migrate_adopted.put_back(old.side)
    level, text = old.said[-1]
    assert level == "warning" and "could not be started again: it ended before it listened" in text
    assert (old.folder / "adopted" / "qwen" / "kept" / "words").exists()


def test_a_worker_is_what_its_parent_started(old: Old) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code, child, "sglang.launch_server"]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    old.pids.append(parent.pid)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    facts = old.facts().need(ServerFact)
    owner = PortOwner(pid, int(fields[19]), parent.pid, parent.pid, "", "a worker")
    seen = Facts({ServerFact: ServerFact(boot=facts.boot, listening=True, owners=(owner,))})
    assert migrate_adopted.keep(old.side, seen) == "a worker"
    kept = (old.folder / "adopted" / "qwen" / "kept" / "words").read_bytes()
    assert kept.split(b"\0")[4] == b"sglang.launch_server"
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    old.pids.pop()


def test_a_port_that_is_taken_again_is_left(old: Old) -> None:
    migrate_adopted.keep(old.side, old.facts())
    migrate_adopted.put_back(old.side)
    assert "is held by pid" in old.said[-1][1]
    assert len(old.lines(1)) == 1


def test_what_is_gone_or_another_by_now_is_not_written_down(old: Old) -> None:
    facts = old.facts()
    [owner] = facts.need(ServerFact).owners
    boot = facts.need(ServerFact).boot
    for other in (
        PortOwner(owner.pid, owner.start + 1, 1, 1, "", "x"),
        PortOwner(2**22 + 5, owner.start, 1, 1, "", "x"),
    ):
        seen = Facts({ServerFact: ServerFact(boot=boot, listening=True, owners=(other,))})
        assert migrate_adopted.keep(old.side, seen) == ""
    rebooted = Facts({ServerFact: ServerFact(boot="other", listening=True, owners=(owner,))})
    assert migrate_adopted.keep(old.side, rebooted) == ""
    assert migrate_adopted.keep(old.side, Facts({ServerFact: ServerFact()})) == ""
    assert not (old.folder / "adopted").exists()


def test_what_cannot_be_written_down_is_not_touched(old: Old) -> None:
    (old.folder / "adopted").write_text("a file where the folder should be")
    with pytest.raises(StepFailed, match="cannot be written down"):
        migrate_adopted.keep(old.side, old.facts())


def test_one_that_does_not_start_is_told_and_its_words_are_kept(old: Old) -> None:
    migrate_adopted.keep(old.side, old.facts())
    old.end()
    (old.folder / "its home" / "serve it.py").write_text("raise SystemExit(3)")
    migrate_adopted.put_back(old.side)
    level, text = old.said[-1]
    assert level == "warning" and "ended at once with status 3" in text
    assert (old.folder / "adopted" / "qwen" / "kept" / "words").exists()
