"""`deploy migrate kpro6 kpro5` with clients at a real router for the whole time.

The tests run in order: the story under load, the way back, gates that fail, a kill and an abort.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import HOSTS, INVENTORY, Lab, Result, eventually, run
from second import PROGRAM, Event, Run
from sshd import free_port

pytestmark = pytest.mark.container

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
EVERY_S = 0.05
LONG_TOKENS = 600
SRC, DST = "kpro6", "kpro5"
URLS = {"kpro5": "http://127.0.0.1:30105", "kpro6": "http://127.0.0.1:30106"}
MARK = "/var/lib/deployer/migrations/tiny.json"


class Project:
    """Both hosts of the lab in a folder of its own, with a cut-over through the router."""

    def __init__(self, folder: Path, router: str) -> None:
        self.folder = folder
        shutil.copytree(INVENTORY.parent / "playbooks", folder / "playbooks")
        (folder / "inventory").mkdir()
        cutover = {"router": {"url": router}, "settle_s": 2, "drain_s": 30}
        for host in HOSTS:
            document = yaml.safe_load((INVENTORY / f"{host}.yaml").read_text(encoding="utf-8"))
            entry = document["hosts"][host]
            guest = entry["containers"][129]
            for ssh in filter(None, (entry["ssh"], guest.get("ssh"))):
                for key in ("identity_file", "known_hosts"):
                    ssh[key] = str((INVENTORY / ssh[key]).resolve())
                ssh["peer_address"] = host
            if "ssh" in guest:
                guest["ssh"]["peer_port"] = 2222
            entry["deployments"]["tiny"]["cutover"] = cutover
            text = yaml.safe_dump(document, sort_keys=False)
            (folder / "inventory" / f"{host}.yaml").write_text(text, encoding="utf-8")

    def argv(self, *words: str) -> list[str]:
        return [PROGRAM, *words, "-i", str(self.folder / "inventory")]

    def deploy(self, *words: str) -> Result:
        return run(self.argv(*words), timeout_s=180)

    def start(self, *words: str) -> Run:
        return Run(self.argv("--jsonl", *words, "--yes"))

    def gates(self, **changes: Any) -> None:
        """Changes the gates of the playbook."""
        path = self.folder / "playbooks" / "tiny-hybrid.yaml"
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        document["gates"] |= changes
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


class Router:
    """A running smg."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
        argv += ["--prometheus-port", str(free_port()), "--worker-urls", URLS[SRC]]
        with (folder / "smg.log").open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)

    def workers(self) -> dict[str, str]:
        """URL -> status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/workers")
            rows = json.loads(connection.getresponse().read())["workers"]
        finally:
            connection.close()
        return {row["url"]: row["status"] for row in rows}

    def is_up(self) -> bool:
        try:
            return "ready" in self.workers().values()
        except (OSError, http.client.HTTPException):
            return False


class Client:
    """Sends a short request every 50 ms, and now and then a long one; keeps every answer."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.problems: list[str] = []
        self.answers: list[tuple[float, float, int]] = []
        """Began, ended, tokens."""
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.threads: list[threading.Thread] = []
        self.clock = threading.Thread(target=self.beat, daemon=True)

    def beat(self) -> None:
        number = 0
        while not self.ended.wait(EVERY_S):
            tokens = LONG_TOKENS if number % 10 == 0 else 4
            thread = threading.Thread(target=self.one, args=(tokens,), daemon=True)
            thread.start()
            self.threads.append(thread)
            number += 1

    def one(self, tokens: int) -> None:
        began = time.monotonic()
        body = {"model": "tiny-hybrid", "max_tokens": tokens, "temperature": 0}
        body["messages"] = [{"role": "user", "content": "Count upwards."}]
        connection = http.client.HTTPConnection("127.0.0.1", self.router.port, timeout=60)
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            text = answer.read()
            problem = "" if answer.status == 200 else f"{answer.status} {text[:200]!r}"
            if not problem and not json.loads(text)["choices"]:
                problem = f"no choice: {text[:200]!r}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        with self.lock:
            if problem:
                self.problems.append(problem)
            else:
                self.answers.append((began, time.monotonic(), tokens))

    def __enter__(self) -> Client:
        self.clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.clock.join()
        for thread in self.threads:
            thread.join(60)


def served(lab: Lab, host: str) -> int:
    """Completions that the host's server has answered, by its log."""
    script = (
        "cat /var/lib/deployer/jobs/server-tiny/*/log 2>/dev/null | grep -c 'POST /v1/chat' || :"
    )
    return int(lab.guests[host].sh(script).out or 0)


@pytest.fixture(scope="module")
def box(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Router]]:
    """kpro6 serves and is the router's only worker; kpro5 is as delivered."""
    if SMG is None:
        pytest.skip("smg is not installed (pip install smg)")
    lab.reset()
    folder = tmp_path_factory.mktemp("migrate")
    project = Project(folder, "http://127.0.0.1:1")
    project.deploy("up", SRC, "--yes").ok()
    router = Router(folder)
    try:
        eventually(router.is_up, "the router finds kpro6 healthy", 20)
        for host in HOSTS:
            path = folder / "inventory" / f"{host}.yaml"
            path.write_text(path.read_text().replace("http://127.0.0.1:1\n", f"{router.url}\n"))
        yield project, router
    finally:
        os.killpg(router.process.pid, signal.SIGKILL)
        router.process.wait()


def test_dry_run_touches_nothing(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    seen = project.deploy("migrate", SRC, DST, "--dry-run", "--retire").ok()
    for word in ("POST /workers http://127.0.0.1:30105", "stop container 129", "to vfio-pci"):
        assert word in seen.out
    assert "! " not in seen.out
    assert lab.hosts[DST].sh('ls "$1"', MARK).exit != 0
    assert router.workers() == {URLS[SRC]: "ready"}


def test_no_request_fails_while_the_model_moves(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    moments: dict[str, float] = {}
    with Client(router) as client:
        move = project.start("migrate", SRC, DST)
        for event in move:
            if event["event"] in ("step_started", "step_done"):
                moments[f"{event['event']} {event['step']}"] = time.monotonic()
            if event["event"] == "step_started" and event["step"] == "migrate:launch":
                assert URLS[DST] not in router.workers()
            if event["event"] == "step_done" and event["step"] == "verify":
                # Gated now; not before.
                assert URLS[DST] not in router.workers()
        assert move.end() == 0, move.said
    assert client.problems == [], Counter(client.problems).most_common(3)
    assert len(client.answers) > 100
    cut = moments["step_done migrate:cutover"]
    across = [one for one in client.answers if one[0] < cut < one[1] and one[2] == LONG_TOKENS]
    assert across, "a long request was under way at the cut-over, and ended well"
    assert router.workers() == {URLS[DST]: "ready"}
    assert "kpro5/tiny serves tiny-hybrid" in move.named("run_finished")[-1]["summary"]
    assert lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").exit != 0
    assert served(lab, DST) > 20
    chosen = [event["text"] for event in move.named("note") if "comes first" in event["text"]]
    assert chosen and "from kpro6/tiny: " in chosen[0] and "; from the Hub: " in chosen[0]
    for host in HOSTS:
        lefts = "cat /root/.ssh/authorized_keys; ls /var/lib/deployer/lending"
        assert "deployer-migrate" not in lab.hosts[host].sh(lefts).out
        assert json.loads(lab.hosts[host].read(MARK))["outcome"] == "done"


def test_abort_after_the_end_brings_the_source_back(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    with Client(router) as client:
        back = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
    assert client.problems == [], Counter(client.problems).most_common(3)
    assert "kpro6/tiny serves as before" in back.out
    eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "only kpro6 is left", 30)
    assert lab.guests[DST].sh("pgrep -f [s]glang.launch_server").exit != 0
    for host in HOSTS:
        assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0


def test_failed_gates_end_with_5_and_the_source_was_never_touched(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    before = lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").out
    lab.fault("server-degenerate", host=DST)
    try:
        failed = project.deploy("migrate", SRC, DST, "--yes")
    finally:
        lab.fault("server-degenerate", on=False, host=DST)
    assert failed.exit == 5, failed.err
    assert "was not touched and serves" in failed.err
    assert lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").out == before
    assert router.workers() == {URLS[SRC]: "ready"}
    project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
    assert lab.guests[DST].sh("pgrep -f [s]glang.launch_server").exit != 0


POINTS: list[tuple[str, Callable[[Event], bool]]] = [
    ("launch", lambda event: event["event"] == "job_started" and event["step"] == "launch"),
    ("cutover", lambda event: event.get("step") == "migrate:cutover"),
]


@pytest.mark.parametrize(("name", "point"), POINTS, ids=[name for name, _ in POINTS])
def test_killed_then_the_same_command_then_back(
    lab: Lab, box: tuple[Project, Router], name: str, point: Callable[[Event], bool]
) -> None:
    project, router = box
    with Client(router) as client:
        killed = project.start("migrate", SRC, DST)
        assert killed.until(point) is not None, killed.said
        killed.signal(signal.SIGKILL)
        assert killed.end() == -signal.SIGKILL
        if name == "launch":
            project.deploy("migrate", SRC, DST, "--yes").ok()
            eventually(lambda: router.workers() == {URLS[DST]: "ready"}, "moved", 30)
        project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "back", 30)
    assert client.problems == [], Counter(client.problems).most_common(3)
    assert lab.guests[DST].sh("pgrep -f [s]glang.launch_server").exit != 0
