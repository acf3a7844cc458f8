"""Harm in the middle of a migration's phase, and what is watched meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from lab import HOSTS, INVENTORY, Lab, run
from migratelab import (
    EVERY_S,
    URLS,
    Background,
    Client,
    Project,
    Router,
    assert_none_failed,
    assert_nothing_is_left,
)


def serving(router: Router) -> str:
    """The host whose server is the only one that gets requests."""
    [url] = [url for url, status in router.workers().items() if status == "ready"]
    return next(host for host in HOSTS if URLS[host] == url)


class Watch(Background):
    """Asks the router all the time who gets requests: only a server that has passed its gates may.

    What passed is what the state file says of a host's newest launch.
    """

    def __init__(self, project: Project, router: Router) -> None:
        super().__init__()
        self.project, self.router = project, router
        self.unproven: list[str] = []
        self.looks = 0

    def work(self) -> None:
        while not self.ended.wait(EVERY_S):
            try:
                workers = self.router.workers()
            except (OSError, http.client.HTTPException):
                continue
            self.looks += 1
            for host in HOSTS:
                if workers.get(URLS[host]) == "ready" and (verdict := self.verdict(host)) != "good":
                    self.unproven.append(f"{host}: {verdict}")

    def verdict(self, host: str) -> str:
        path = self.project.folder / ".deploy" / "state" / f"{host}.json"
        launches = json.loads(path.read_text(encoding="utf-8"))["deployments"]["tiny"]["launches"]
        return str(launches[-1]["verdict"]) if launches else "none"


@contextlib.contextmanager
def watched(project: Project, router: Router) -> Iterator[Client]:
    """Clients all the time; at the end none has failed, and no unproven server got a request."""
    with Watch(project, router) as watch, Client(router) as client:
        yield client
    assert_none_failed(client)
    assert watch.looks > 20 and not watch.unproven, Counter(watch.unproven)


def ports_of(host: str) -> list[str]:
    """Where the controller reaches the host and its guest by SSH."""
    entry = yaml.safe_load((INVENTORY / f"{host}.yaml").read_text(encoding="utf-8"))["hosts"][host]
    logins = [entry["ssh"], *(one.get("ssh") for one in entry["containers"].values())]
    return [str(ssh["port"]) for ssh in logins if ssh]


WAYS = {"dark": ("DROP",), "refused": ("REJECT", "--reject-with", "tcp-reset")}


class Cut:
    """The network between the controller and a host: dark (no packet comes) or refused (reset).

    Requests of clients do not go that way.
    """

    def __init__(self, host: str, how: str) -> None:
        target = WAYS[how]
        self.rules = [
            ["INPUT", "-i", "lo", "-p", "tcp", side, port, "-j", *target]
            for port in ports_of(host)
            for side in ("--dport", "--sport")
        ]
        self.made: list[list[str]] = []

    def cut(self) -> None:
        for rule in self.rules:
            run(["iptables", "-w", "5", "-I", *rule]).ok()
            self.made.append(rule)

    def mend(self) -> None:
        for rule in self.made:
            run(["iptables", "-w", "5", "-D", *rule]).ok()
        self.made = []


def why_no_cuts() -> str:
    """Why the network cannot be cut here; '' when it can."""
    if shutil.which("iptables") is None:
        return "no iptables here"
    tried = run(["iptables", "-w", "5", "-S", "INPUT"])
    return "" if tried.exit == 0 else f"iptables: {tried.err.strip()}"


def assert_idle(lab: Lab) -> None:
    """No lock, no key for the copy, and no job that runs but a server."""
    assert_nothing_is_left(lab)
    for host in HOSTS:
        assert lab.hosts[host].sh("ls -d /var/lib/deployer/lock*").out == ""
        jobs = (
            "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep ^DEPLOYER_JOB= | sort -u"
        )
        running = lab.guests[host].sh(jobs).out.split()
        assert all(one.startswith("DEPLOYER_JOB=server-tiny/") for one in running), running


Happened = Callable[[dict[str, Any]], bool]


def after(event: str, **words: str) -> Happened:
    """Accepts the first such event; `text` and `reason` need only contain the word."""

    def happened(one: dict[str, Any]) -> bool:
        return one["event"] == event and all(
            word in str(one.get(key)) if key in ("text", "reason") else one.get(key) == word
            for key, word in words.items()
        )

    return happened


def then(first: Happened, second: Happened) -> Happened:
    """The second one, once the first has come."""
    seen = [False]

    def happened(one: dict[str, Any]) -> bool:
        seen[0] = seen[0] or first(one)
        return seen[0] and second(one)

    return happened


def moment(phase: str) -> Happened:
    """In the middle of the phase's work."""
    begins = after("step_started", step=f"migrate:{phase}")
    inside = {
        "prepare": after("step_started", step="container"),
        "weights": after("job_started", step="shards"),
        "launch": after("job_started", step="launch"),
        # In the router's list are both now.
        "cutover": after("note", text="finds it healthy"),
        "settle": begins,
        "stop": after("step_started", step="stop"),
        "retire": after("change_started", step="retire"),
    }[phase]
    return then(begins, inside)
