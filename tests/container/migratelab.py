"""What the tests of `deploy migrate` in the container lab share: project, router, client."""

from __future__ import annotations

import contextlib
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
from typing import Any, Self

import pytest
import yaml
from lab import HOSTS, INVENTORY, Lab, Result, eventually, run
from second import PROGRAM, Run
from sshd import free_port

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
EVERY_S = 0.05
LONG_TOKENS = 600
SRC, DST = "kpro6", "kpro5"
URLS = {"kpro5": "http://127.0.0.1:30105", "kpro6": "http://127.0.0.1:30106"}
MARK = "/var/lib/deployer/migrations/tiny.json"
GPUS = ("0000:21:00.0", "0000:41:00.0")
HOOK = """
import os, sys
from deployer.router import Router
from deployer.router_door import HereDoor
old, new = os.environ["DEPLOY_FROM_URL"], os.environ["DEPLOY_TO_URL"]
router = Router(HereDoor(sys.argv[1]), sys.argv[1])
router.take_in(new, 60, lambda *_: None)
router.remove(old)
print(os.environ["DEPLOY_DIRECTION"], os.environ["DEPLOY_FROM"], "to", os.environ["DEPLOY_TO"])
"""


class Move(Run):
    """`deploy migrate`, first of all with a driver, an environment and a copy to make."""

    DEADLINE_S = 600.0


class Project:
    """Both hosts of the lab in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(INVENTORY.parent / "playbooks", folder / "playbooks")
        path = folder / "playbooks" / "tiny-hybrid.yaml"
        playbook = yaml.safe_load(path.read_text(encoding="utf-8"))
        # One is enough to fail.
        playbook["variants"] = [one for one in playbook["variants"] if one["name"] == "no-mtp"]
        # How much is asked is not what is tested here: a migration has one proof or more.
        less = {"burst": 5, "alive_after_s": 0.5, "long_prompt_tokens": 0, "context_edge": False}
        playbook["gates"] = {**playbook["gates"], **less, "thinking": "default"}
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
        return run(self.argv(*words), timeout_s=600)

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

    def __init__(self, folder: Path, *workers: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
        argv += ["--prometheus-port", str(free_port())]
        argv += ["--worker-urls", *workers] if workers else []
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


@contextlib.contextmanager
def moving(lab: Lab, folder: Path) -> Iterator[tuple[Project, Router]]:
    """kpro6 serves and is the router's only worker; kpro5 is as delivered."""
    if SMG is None:
        pytest.skip("smg is not installed (pip install smg)")
    lab.reset()
    project = Project(folder)
    project.deploy("up", SRC, "--yes").ok()
    router = Router(folder, URLS[SRC])
    try:
        eventually(router.is_up, "the router finds kpro6 healthy", 20)
        project.cut_over(router={"url": router.url})
        yield project, router
    finally:
        os.killpg(router.process.pid, signal.SIGKILL)
        router.process.wait()


class Background:
    """Work beside a test, in a thread, until the block ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self) -> None:
        """Runs until `ended` is set."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()


class Client(Background):
    """Sends a request every EVERY_S seconds, now and then a long one; keeps every answer."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router
        self.problems: list[str] = []
        self.answers: list[tuple[float, float, int]] = []
        """Began, ended, tokens."""
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def work(self) -> None:
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

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for thread in self.threads:
            thread.join(60)


def served(lab: Lab, host: str) -> int:
    """Completions that the host's server has answered, by its log."""
    script = (
        "cat /var/lib/deployer/jobs/server-tiny/*/log 2>/dev/null | grep -c 'POST /v1/chat' || :"
    )
    return int(lab.guests[host].sh(script).out or 0)


def is_served(lab: Lab, host: str) -> bool:
    """Does a server of the lab's model run there?"""
    return lab.guests[host].sh("pgrep -f [s]glang.launch_server.*tiny-hybrid").exit == 0


OLD = "[s]glang.launch_server.*tiny-old"
"""The command line of the server that somebody left on kpro5."""


def old_answers(lab: Lab) -> bool:
    """Does the old server of kpro5 answer?"""
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:30000/v1/models').read())"
    return "tiny-old" in lab.guests[DST].sh('python3 -c "$1"', ask).out


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
