"""`deploy migrate kpro6 kpro5` with clients at a real router for the whole time.

The tests run in order, on one `up` of kpro6: gates that fail, two kills and the way back, a kill
and the same command to the end with --retire, the way back from there.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import HOSTS, INVENTORY, Lab, Result, eventually, run
from second import PROGRAM, Run
from sshd import free_port

pytestmark = [pytest.mark.container, pytest.mark.long]

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
EVERY_S = 0.1
LONG_TOKENS = 600
SRC, DST = "kpro6", "kpro5"
URLS = {"kpro5": "http://127.0.0.1:30105", "kpro6": "http://127.0.0.1:30106"}
MARK = "/var/lib/deployer/migrations/tiny.json"
GPUS = ("0000:21:00.0", "0000:41:00.0")
HOOK = """
import os, sys
from deployer.router import HereDoor, Router
old, new = os.environ["DEPLOY_FROM_URL"], os.environ["DEPLOY_TO_URL"]
router = Router(HereDoor(sys.argv[1]), sys.argv[1])
router.await_ready(new, router.add(new), 60, lambda *_: None)
router.remove(old)
print(os.environ["DEPLOY_DIRECTION"], os.environ["DEPLOY_FROM"], "to", os.environ["DEPLOY_TO"])
"""


class Move(Run):
    """`deploy migrate`, first of all with a driver, an environment and a copy to make."""

    DEADLINE_S = 240.0


class Project:
    """Both hosts of the lab in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(INVENTORY.parent / "playbooks", folder / "playbooks")
        path = folder / "playbooks" / "tiny-hybrid.yaml"
        playbook = yaml.safe_load(path.read_text(encoding="utf-8"))
        # One is enough to fail.
        playbook["variants"] = playbook["variants"][:1]
        path.write_text(yaml.safe_dump(playbook, sort_keys=False), encoding="utf-8")
        (folder / "inventory").mkdir()
        (folder / "hook.py").write_text(HOOK, encoding="utf-8")
        self.cut_over()

    def cut_over(self, **cutover: Any) -> None:
        """Writes the inventory with this `cutover`."""
        for host in HOSTS:
            document = yaml.safe_load((INVENTORY / f"{host}.yaml").read_text(encoding="utf-8"))
            entry = document["hosts"][host]
            guest = entry["containers"][129]
            for ssh in filter(None, (entry["ssh"], guest.get("ssh"))):
                for key in ("identity_file", "known_hosts"):
                    ssh[key] = str((INVENTORY / ssh[key]).resolve())
            entry["deployments"]["tiny"]["cutover"] = {"settle_s": 1, "drain_s": 30, **cutover}
            text = yaml.safe_dump(document, sort_keys=False)
            (self.folder / "inventory" / f"{host}.yaml").write_text(text, encoding="utf-8")

    def argv(self, *words: str) -> list[str]:
        return [PROGRAM, *words, "-i", str(self.folder / "inventory")]

    def deploy(self, *words: str) -> Result:
        return run(self.argv(*words), timeout_s=240)

    def start(self, *words: str) -> Move:
        return Move(self.argv("--jsonl", *words, "--yes"))

    def kill_at(self, event: str, step: str, *words: str) -> Move:
        """Starts `migrate WORDS` and ends it by SIGKILL at that event."""
        move = self.start("migrate", *words)
        seen = move.until(lambda one: one["event"] == event and one.get("step") == step)
        assert seen is not None, move.said or move.events[-1]
        move.signal(signal.SIGKILL)
        assert move.end() == -signal.SIGKILL
        return move


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
    """Sends a request every EVERY_S seconds, now and then a long one; keeps every answer."""

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


def is_served(lab: Lab, host: str) -> bool:
    return lab.guests[host].sh("pgrep -f [s]glang.launch_server").exit == 0


def drivers(lab: Lab, host: str) -> set[str]:
    return {lab.hosts[host].driver(address) for address in GPUS}


def assert_none_failed(client: Client) -> None:
    assert client.problems == [], Counter(client.problems).most_common(3)
    assert len(client.answers) > 20


def assert_nothing_is_left(lab: Lab) -> None:
    """No key for the copy, on either host."""
    for host in HOSTS:
        lefts = "cat /root/.ssh/authorized_keys; ls /var/lib/deployer/lending"
        assert "deployer-migrate" not in lab.hosts[host].sh(lefts).out


@pytest.fixture(scope="module")
def box(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Router]]:
    """kpro6 serves and is the router's only worker; kpro5 is as delivered."""
    if SMG is None:
        pytest.skip("smg is not installed (pip install smg)")
    lab.reset()
    folder = tmp_path_factory.mktemp("migrate")
    project = Project(folder)
    project.deploy("up", SRC, "--yes").ok()
    router = Router(folder)
    try:
        eventually(router.is_up, "the router finds kpro6 healthy", 20)
        project.cut_over(router={"url": router.url})
        yield project, router
    finally:
        os.killpg(router.process.pid, signal.SIGKILL)
        router.process.wait()


def test_dry_run_touches_nothing(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    seen = project.deploy("migrate", SRC, DST, "--dry-run", "--retire").ok()
    for word in (f"POST /workers {URLS[DST]}", "stop container 129", "to vfio-pci"):
        assert word in seen.out
    assert "! " not in seen.out
    assert lab.hosts[DST].sh('ls "$1"', MARK).exit != 0
    assert router.workers() == {URLS[SRC]: "ready"}


def test_failed_gates_end_with_5_and_the_source_was_never_touched(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    before = lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").out
    lab.fault("server-degenerate", host=DST)
    try:
        with Client(router) as client:
            failed = project.start("migrate", SRC, DST)
            assert failed.end() == 5, failed.said
    finally:
        lab.fault("server-degenerate", on=False, host=DST)
    assert_none_failed(client)
    assert "was not touched and serves" in "".join(one["text"] for one in failed.named("note"))
    assert lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").out == before
    assert router.workers() == {URLS[SRC]: "ready"}
    chosen = [event["text"] for event in failed.named("note") if "comes first" in event["text"]]
    assert chosen and "from kpro6/tiny: " in chosen[0] and "; from the Hub: " in chosen[0]
    assert_nothing_is_left(lab)
    project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
    assert is_served(lab, SRC) and not is_served(lab, DST)


def test_killed_twice_with_a_hook_and_taken_back(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    command = [sys.executable, str(project.folder / "hook.py"), router.url]
    project.cut_over(hook={"command": command, "probe_url": router.url})
    with Client(router) as client:
        project.kill_at("job_started", "launch", SRC, DST)
        assert router.workers() == {URLS[SRC]: "ready"}
        moved = project.kill_at("step_started", "migrate:settle", SRC, DST)
        said = [event["text"] for event in moved.named("note") if event["step"] == "cutover"]
        assert said[0] == "hook: forward kpro6/tiny to kpro5/tiny"
        assert said[1].startswith("no gap: all of "), said
        eventually(lambda: router.workers() == {URLS[DST]: "ready"}, "moved", 30)
        back = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "back", 30)
    assert_none_failed(client)
    assert "kpro6/tiny serves as before" in back.out
    assert not is_served(lab, DST)
    for host in HOSTS:
        assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0


def test_no_request_fails_while_the_model_moves(lab: Lab, box: tuple[Project, Router]) -> None:
    """Killed at the cut-over; the same command ends it and retires the source."""
    project, router = box
    project.cut_over(router={"url": router.url})
    cut = 0.0
    with Client(router) as client:
        for event in (killed := project.start("migrate", SRC, DST, "--retire")):
            if (event["event"], event.get("step")) == ("step_done", "verify"):
                # Gated now; not before.
                assert URLS[DST] not in router.workers()
            if (event["event"], event.get("step")) == ("step_started", "migrate:cutover"):
                killed.signal(signal.SIGKILL)
        assert killed.end() == -signal.SIGKILL, killed.said
        move = project.start("migrate", SRC, DST, "--retire")
        for event in move:
            if (event["event"], event.get("step")) == ("step_done", "migrate:cutover"):
                cut = time.monotonic()
        assert move.end() == 0, move.said
    assert_none_failed(client)
    across = [one for one in client.answers if one[0] < cut < one[1] and one[2] == LONG_TOKENS]
    assert across, "a long request was under way at the cut-over, and ended well"
    assert router.workers() == {URLS[DST]: "ready"}
    assert "kpro5/tiny serves tiny-hybrid" in move.named("run_finished")[-1]["summary"]
    assert served(lab, DST) > 20
    assert_nothing_is_left(lab)
    for host in HOSTS:
        assert json.loads(lab.hosts[host].read(MARK))["outcome"] == "done"
    assert lab.hosts[SRC].sh("pct status 129").out == "status: stopped\n"
    assert drivers(lab, SRC) == {"vfio-pci"}


def test_abort_after_the_end_brings_the_retired_source_back(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    with Client(router) as client:
        back = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "only kpro6 is left", 30)
    assert_none_failed(client)
    assert "kpro6/tiny serves as before" in back.out
    assert drivers(lab, SRC) == {"nvidia"}
    assert is_served(lab, SRC) and not is_served(lab, DST)
    for host in HOSTS:
        assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0
