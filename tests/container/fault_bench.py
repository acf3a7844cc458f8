"""The whole `shards` step on this machine, one folder a case, and what can be seen from outside."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import json
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hub import Hub
from local_transport import LocalTransport, shell_path

from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.events import Bus, Event, JobStarted, Note
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Facts, Plan, PlanState, ProbeOutput, Where
from deployer.playbook import Playbook
from deployer.remote.jobs import Jobs
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps.base import StepContext
from deployer.steps.shards import ShardsStep

MARGIN = 1_000_000
"""The product keeps 5 GB free; a test machine may not have them."""


class Overdue(BaseException):
    """The test's own deadline; not an Exception, so that no code under test takes it for one."""


class LocalContext(StepContext):
    """Jobs below the test's own folder."""

    root = ""

    def jobs(self, where: Where) -> Jobs:
        return Jobs(self.on(where), self.root)


class CutTransport(LocalTransport):
    """Ends the controller at its next look once `cut` is set."""

    cut = False

    def run(self, script: str, **more: Any) -> Answer:
        if self.cut:
            raise Overdue
        answer = super().run(script, **more)
        if self.cut:
            raise Overdue
        return answer


@dataclass
class Bench:
    """One controller and one deployment whose guest is this machine."""

    url: str
    repo: str
    folder: Path
    token: str = ""
    download: dict[str, Any] = field(default_factory=dict)
    name: str = "tiny"
    jobs_root: str = ""
    model: Path = Path()
    revision: str = "main"
    environ: dict[str, str] = field(default_factory=dict)
    venv: str = "/nonexistent/venv"
    events: list[Event] = field(default_factory=list)
    state: DeploymentState = field(default_factory=DeploymentState)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.transport = CutTransport(shell_path("dash", self.folder), env=self.environ)
        self.step = ShardsStep()
        self.jobs_root = self.jobs_root or str(self.folder / "jobs")
        if self.model == Path():
            self.model = self.folder / "model"

    @property
    def want(self) -> Deployment:
        playbook = Playbook.model_validate(
            {
                "model": {
                    "repo": self.repo,
                    "path": str(self.model),
                    "served_name": "tiny",
                    "revision": self.revision,
                },
                "download": {"endpoint": self.url, "margin_bytes": MARGIN, **self.download},
                "driver": {"version": "580.1"},
                "engine": {"version": "0.5.11", "lock": "l.txt", "venv": self.venv},
            }
        )
        host = Host.model_validate({"ssh": {"address": "h"}, "gpus": [{"address": "0000:21:00.0"}]})
        return Deployment("box", self.name, host, DeploymentEntry(playbook="p"), playbook, "p", "")

    def facts(self) -> Facts:
        (probe,) = self.step.probes(self.want)
        answer = self.transport.run(probe.script)
        fact = probe.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
        return Facts({type(fact): fact})

    def plan(self) -> Plan:
        return self.step.plan(self.want, self.facts(), self.state)

    def context(self, run_id: str = "r1") -> LocalContext:
        context = LocalContext(
            self.want,
            run_id,
            Bus(self.events.append),
            {Where.HOST: self.transport, Where.GUEST: self.transport},
            self.facts,
            self.state,
            lambda: None,
            "shards",
            {"HF_TOKEN": self.token} if self.token else {},
        )
        context.root = self.jobs_root
        return context

    def run(self, run_id: str = "r1") -> None:
        """Probe, plan, apply, and the look afterwards that must find nothing left to do."""
        facts = self.facts()
        plan = self.step.plan(self.want, facts, self.state)
        if plan.state is PlanState.BLOCKED:
            raise StepBlocked(plan.reason, where=self.want.id, fix=plan.fix)
        if plan.state is PlanState.CHANGES:
            self.step.apply(self.context(run_id), facts, plan)
        after = self.plan()
        if after.state is not PlanState.NOTHING:
            raise AssertionError(f"the step is done and its plan is not empty: {after}")

    def run_within(self, seconds: float, run_id: str = "r1") -> None:
        """`run`, cut when it takes longer: raises Overdue, and nothing of it lives on."""

        def cut() -> None:
            self.transport.cut = True
            self.kill_tree()

        self.transport.cut = False
        timer = threading.Timer(seconds, cut)
        timer.start()
        try:
            self.run(run_id)
        finally:
            timer.cancel()
            if self.transport.cut:
                self.kill_tree()
                self.transport.cut = False

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    def starts(self) -> list[JobStarted]:
        return [event for event in self.events if isinstance(event, JobStarted)]

    def job_folders(self) -> list[Path]:
        """The folders of all jobs, oldest first."""
        found = [path.parent for path in Path(self.jobs_root).glob("*/*/script")]
        return sorted({path.resolve() for path in found}, key=lambda path: path.stat().st_mtime)

    def agent_log(self) -> str:
        """Everything that all jobs have logged."""
        logs = [path / "log" for path in self.job_folders() if (path / "log").exists()]
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def agent_ends(self) -> list[str]:
        """What ended jobs left: `code 0`, `signal 9`."""
        exits = [path / "exit" for path in self.job_folders() if (path / "exit").exists()]
        return [path.read_text().strip() for path in exits]

    def processes(self) -> dict[int, bytes]:
        """pid -> command line of every living process of our jobs (known by its JOB variable)."""
        found = {}
        mark = f"JOB={self.jobs_root}/".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(item.startswith(mark) for item in variables):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
        return found

    def kill_tree(self, which: bytes = b"", signum: int = signal.SIGKILL) -> list[int]:
        """Signals every process of our jobs whose command line has `which`; returns their pids."""
        pids = [pid for pid, line in self.processes().items() if which in line]
        for pid in pids:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
        return pids

    def leftovers(self, names: set[str]) -> list[str]:
        """What lies below the model's folder and belongs neither to the model nor to the record."""
        allowed = names | {".deployer/verified.json", ".deployer/lock"}
        found = (p.relative_to(self.model).as_posix() for p in self.model.rglob("*") if p.is_file())
        return sorted(set(found) - allowed)


def truth(hub: Hub) -> dict[str, str]:
    """name -> sha256 of the files that a server reads."""
    served = (".safetensors", ".json")
    return {name: b.sha256 for name, b in hub.repo.blobs.items() if name.endswith(served)}


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class FolderWatch:
    """Sees every file that gets a name in a folder, and hashes it at once.

    inotify, not a sampler: what has a name for a moment only is seen as well.
    """

    CREATE, MOVED_TO = 0x100, 0x80

    def __init__(self, folder: Path, right: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.right = folder, right
        self.named: list[str] = []
        self.wrong: list[str] = []
        libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = self.CREATE | self.MOVED_TO
        if self._handle < 0 or libc.inotify_add_watch(self._handle, bytes(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch after what is queued has been seen."""
        self._stop.set()
        self._thread.join(30)
        os.close(self._handle)

    def _watch(self) -> None:
        while True:
            stopping = self._stop.is_set()
            if select.select([self._handle], [], [], 0.1)[0]:
                data = os.read(self._handle, 1 << 16)
                while data:
                    size = struct.unpack_from("iIII", data)[3]
                    self._see(data[16 : 16 + size].rstrip(b"\0").decode(errors="replace"))
                    data = data[16 + size :]
            elif stopping:
                return

    def _see(self, name: str) -> None:
        if name not in self.right:
            return
        self.named.append(name)
        try:
            got = sha256(self.folder / name)
        except FileNotFoundError:
            return  # gone again: it was seen in `named`
        if got != self.right[name]:
            self.wrong.append(f"{name} had its name with {got}")


class SilenceWatch:
    """How long the client sat on a connection that had gone silent.

    Silence begins when the hub has sent what it will send (a drip's few bytes aside), and is over
    when the hub's end of the connection sees that the client has let go of it.
    """

    SILENT = ("stall", "drip", "hang")
    DRIPPED = 1000

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._seen: dict[int, list[tuple[float, int]]] = {}
        for server in hub.servers:
            self._tell_end(server.RequestHandlerClass)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _tell_end(kind: Any) -> None:
        """Requests of this hub's own handler class note when they were over."""
        honest = kind.route

        def route(self: Any) -> None:
            try:
                honest(self)
            finally:
                self.entry["over"] = time.time()

        kind.route = route

    def close(self) -> list[float]:
        """Seconds of each silence; the run is over."""
        time.sleep(0.5)  # the hub looks every 0.1 s whether its client has gone
        self._stop.set()
        self._thread.join(30)
        log, now = self.hub.stats()["log"], time.time()
        return [self._silence(log[i], seen, now) for i, seen in sorted(self._seen.items())]

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            now = time.time()
            for i, entry in enumerate(self.hub.stats()["log"]):
                if entry["fault"] in self.SILENT:
                    row = self._seen.setdefault(i, [])
                    if not row or row[-1][1] != entry["sent"]:
                        row.append((now, entry["sent"]))

    def _silence(self, entry: dict[str, Any], seen: list[tuple[float, int]], now: float) -> float:
        began = next(at for at, sent in seen if sent >= entry["sent"] - self.DRIPPED)
        return max(0.0, float(entry.get("over", now)) - began)


def wait_until(what: Callable[[], bool], seconds: float, why: str, every: float = 0.05) -> None:
    """Raises Overdue when it does not come true in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise Overdue(f"{why}: not within {seconds:g} s")
        time.sleep(every)


def main() -> int:
    """A controller as a process of its own: the bench of a JSON file, one run, the CLI's codes."""
    from deployer.errors import DeployError

    spec = json.loads(Path(sys.argv[1]).read_text())
    run_id = spec.pop("run_id")
    bench = Bench(**{**spec, "folder": Path(spec["folder"]), "model": Path(spec["model"])})
    try:
        bench.run(run_id)
    except DeployError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
