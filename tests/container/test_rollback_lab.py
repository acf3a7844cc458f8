"""Back to an earlier launch, in the lab: done, undone by nothing, killed, and failing.

The tests of this file run in order and share one deployment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, Machine, Result, eventually
from project import Project, complete, pristine

pytestmark = [pytest.mark.container, pytest.mark.long]

ARGS = "sglang[.]launch_server"
VENV = "/opt/deployer/venvs/tiny"
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"


@dataclass(frozen=True)
class Two:
    """Two launches that have passed: `old` with another lock, context and port of the playbook."""

    project: Project
    guest: Machine
    lab: Lab
    old: dict[str, Any]
    new: dict[str, Any]

    def deploy(self, *words: str) -> Result:
        """Builds and launches take their time on a busy machine."""
        return self.project.deploy(*words, timeout_s=600)

    def served(self) -> str:
        """The command line of the server that runs."""
        [pid] = self.guest.pids(ARGS)[:1]
        return self.guest.sh(f"tr '\\0' ' ' </proc/{pid}/cmdline").ok().out

    def kill_in(self, step: str, *words: str) -> None:
        """Kills the controller once it has begun this step, if it gets so far."""
        program = str(Path(sys.executable).parent / "deploy")
        begins = [program, "-i", str(self.project.folder / "inventory"), "--jsonl", *words]
        with subprocess.Popen(begins, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event.get("event") == "step_started" and event.get("step") == step:
                    time.sleep(0.5)
                    process.kill()

    def models(self) -> str:
        """What the server on the port says that it serves; '' when none answers."""
        url = "http://127.0.0.1:30000/v1/models"
        return self.guest.sh(f"{VENV}/bin/python -c '{ASK}' {url}").out

    def build(self) -> str:
        """What engine.venv points to."""
        return self.guest.sh(f"readlink -f {VENV}").ok().out.strip()


@pytest.fixture(scope="module")
def two(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """The second `up` changed the lock and the arguments."""
    _, guest = pristine(lab)
    project = Project(tmp_path_factory.mktemp("rollback"))
    project.deploy("up", "kpro5", timeout_s=600).ok()
    lock = project.folder / "playbooks" / "locks" / "lab.txt"
    lock.write_text(f"# another\n{lock.read_text()}")
    document = {"args": {**ARGUMENTS, "context-length": 2048}}
    project.playbook(serve=document)
    project.deploy("up", "kpro5", timeout_s=600).ok()
    old, new = project.state()["launches"]
    assert (old["verdict"], new["verdict"]) == ("stopped", "good")
    assert old["venv"] != new["venv"]
    yield Two(project, guest, lab, old, new)


ARGUMENTS = {
    "tp-size": 2,
    "mem-fraction-static": 0.88,
    "mamba-full-memory-ratio": 0.5,
    "max-running-requests": 16,
    "reasoning-parser": "qwen3",
}


def test_it_says_where_it_would_go(two: Two) -> None:
    done = two.deploy("rollback", "kpro5").ok()
    assert f"kpro5/tiny: goes back to launch {two.old['id']}" in done.out
    assert "venv: there; weights: there" in done.out
    assert "add --yes" in done.err
    told = json.loads(two.deploy("--json", "rollback", "kpro5").ok().out)
    assert (told["to"], told["now"]) == (two.old["id"], two.new["id"])
    assert "2048" in two.served()


def test_a_kill_at_the_launch_and_the_same_command_finishes(two: Two) -> None:
    """Build and weights of that time are gone too: from the kept lock, and at its commit."""
    two.guest.sh('rm -rf "$1" /srv/models/tiny-hybrid', two.old["venv"]).ok()
    again = two.deploy("rollback", "kpro5").ok()
    assert "venv: is built from its lock; weights: " in again.out
    assert " files to fetch (" in again.out
    program = str(Path(sys.executable).parent / "deploy")
    words = ["-i", str(two.project.folder / "inventory"), "--jsonl", "rollback", "kpro5", "--yes"]
    with subprocess.Popen([program, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "job_started" and event.get("step") == "launch":
                process.kill()
    assert process.returncode == -9
    blocked = two.deploy("up", "kpro5")
    assert blocked.exit == 1 and "(not finished)" in blocked.err, blocked.err
    told = json.loads(two.deploy("--json", "rollback", "kpro5").ok().out)
    assert told["to"] == two.old["id"] and "goes on" in told["why"]
    two.deploy("rollback", "kpro5", "--yes").ok()
    own = two.project.state()
    last = own["launches"][-1]
    assert (last["verdict"], last["fingerprint"]) == ("good", two.old["fingerprint"])
    assert (last["argv"], last["variant"]) == (two.old["argv"], two.old["variant"])
    assert own["known_good"] == last["id"] and own["rollback"]["outcome"] == "done"
    assert "4096" in two.served() and len(complete()) > 5
    record = json.loads(two.guest.read(f"{VENV}/deployer.json"))
    assert two.build() == two.old["venv"] and record["lock"]
    same = two.deploy("rollback", "kpro5", "--yes").ok()
    assert "rolled back to launch" in same.out + same.err
    assert two.project.state()["launches"][-1]["id"] == last["id"]
    back = f"rolled back to launch {two.old['id']}, from launch {two.new['id']}, asked for by "
    seen = two.deploy("status", "kpro5").ok().out
    assert back in seen and f"rollback   done: to launch {two.old['id']}, from launch" in seen
    assert back in two.deploy("history", "kpro5").ok().out
    [one] = json.loads(two.deploy("--json", "status", "kpro5").ok().out)["hosts"][0]["deployments"]
    assert (one["back"]["from"], one["back"]["automatic"]) == (two.new["id"], False)
    assert one["rollback"]["outcome"] == "done" and "@" in one["rollback"]["by"]


def test_up_does_not_undo_it(two: Two) -> None:
    before = two.served()
    for words in (("up", "kpro5"), ("restart", "kpro5")):
        done = two.deploy(*words)
        assert done.exit == 1 and "rolled back to launch" in done.err and "--retry" in done.err
    assert two.served() == before and two.build() == two.old["venv"]


def test_a_rollback_that_fails_puts_back_what_served(two: Two) -> None:
    before = two.project.state()["launches"][-1]["id"]
    two.lab.fault("server-degenerate")
    try:
        done = two.deploy("rollback", "kpro5", two.new["id"], "--yes")
    finally:
        two.lab.fault("server-degenerate", on=False)
    assert done.exit == 5, done.err
    assert f"what served before (launch {before}) serves again as launch" in done.err
    assert "4096" in two.served() and two.build() == two.old["venv"]
    own = two.project.state()
    assert own["rollback"]["outcome"] == "failed"
    failed, again = own["launches"][-2:]
    assert failed["back"]["asked"] and failed["back"]["left"] == before
    seen = two.deploy("status", "kpro5").ok().out
    assert f"launch {before} again, automatically after launch {failed['id']} had failed" in seen
    assert f"rollback   failed: to launch {two.new['id']}, from launch {before}" in seen
    told = json.loads(two.deploy("--json", "history", "kpro5").ok().out)["kpro5/tiny"]
    assert told["launches"][-1]["id"] == again["id"] and told["launches"][-1]["back"]["automatic"]


def test_an_up_that_fails_goes_back_by_itself_and_says_so(two: Two) -> None:
    """The old server had to stop for it; its gates are not passed."""
    before = two.project.state()["launches"][-1]["id"]
    two.lab.fault("server-degenerate")
    try:
        done = two.deploy("up", "kpro5", "--retry")
    finally:
        two.lab.fault("server-degenerate", on=False)
    assert done.exit == 5 and "run again as launch" in done.err, done.err
    own = two.project.state()
    tried, again = own["launches"][-2:]
    assert tried["verdict"].startswith("failed") and tried["back"] is None
    assert (again["back"]["left"], again["back"]["asked"]) == (tried["id"], False)
    assert again["id"] != before and "4096" in two.served() and len(complete()) > 5
    words = f"again, automatically after launch {tried['id']} had failed (run of "
    assert words in two.deploy("status", "kpro5").ok().out
    assert words in two.deploy("history", "kpro5").ok().out
    # What was brought back is no place to go back to.
    told = json.loads(two.deploy("--json", "rollback", "kpro5").ok().out)
    assert told["to"] not in (again["id"], again["back"]["to"])
    # With the server running, gc tells of what it runs in, and frees nothing that it needs.
    rows = json.loads(two.deploy("--json", "gc", "kpro5").ok().out)["deployments"]["kpro5/tiny"]
    needed = {row["path"]: row for row in rows if row["kind"] in ("venv", "weights")}
    assert two.build() in needed and "/srv/models/tiny-hybrid" in needed
    assert not any(row["goes"] for row in needed.values()), needed


def test_it_needs_no_playbook(two: Two) -> None:
    """Only what was kept says what `new` was; the playbook is not even YAML, then gone."""
    path = two.project.folder / "playbooks" / "tiny-hybrid.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text("model: [", encoding="utf-8")
    shown = two.deploy("rollback", "kpro5").ok()
    assert "in its place: what is kept of launch" in shown.err and two.new["id"] in shown.out
    path.unlink()
    assert two.deploy("up", "kpro5").exit == 2
    two.deploy("history", "kpro5").ok()
    two.deploy("rollback", "kpro5", two.new["id"], "--yes").ok()
    assert "2048" in two.served() and len(complete()) > 5
    path.write_text(text, encoding="utf-8")
    assert "changed: nothing" in two.deploy("up", "kpro5").ok().err


def test_at_another_port_and_what_looks_at_it_meanwhile(two: Two) -> None:
    two.project.playbook(serve={"args": {**ARGUMENTS, "context-length": 2048}, "port": 31000})
    two.deploy("up", "kpro5").ok()
    assert "--port 31000" in two.served()
    two.deploy("rollback", "kpro5", "--yes").ok()
    assert "--port 30000" in two.served() and len(complete()) > 5
    [one] = json.loads(two.deploy("--json", "status", "kpro5").ok().out)["hosts"][0]["deployments"]
    assert (one["port"], one["state"], one["answers"]) == (30000, "serving", True), one
    assert one["verdict"] == "good"
    two.deploy("verify", "kpro5").ok()
    assert two.project.state()["known_good"] == two.project.state()["launches"][-1]["id"]
    assert two.deploy("up", "kpro5").exit == 1
    assert "--port 30000" in two.served()


@pytest.mark.parametrize("step", ["venv", "shards", "stop", "launch", "verify"])
def test_killed_twice_in_a_step_the_same_command_finishes(two: Two, step: str) -> None:
    """Each time to the other of the two; what the step has to bring is taken away before."""
    target = two.old if "2048" in two.served() or "31000" in two.served() else two.new
    if step == "venv":
        two.guest.sh('rm -rf "$1"', target["venv"]).ok()
    if step == "shards":
        two.guest.sh("rm -f /srv/models/tiny-hybrid/*.safetensors").ok()
    words = ["rollback", "kpro5", target["id"], "--yes"]
    for _ in range(2):
        two.kill_in(step, *words)
    two.deploy(*words).ok()
    own = two.project.state()
    last = own["launches"][-1]
    assert (last["verdict"], last["fingerprint"]) == ("good", target["fingerprint"])
    assert own["rollback"]["outcome"] == "done" and len(two.guest.pids(ARGS)) > 0
    assert two.deploy("rollback", "kpro5", "--yes").exit == 0
    assert two.project.state()["launches"][-1]["id"] == last["id"]


BY_HAND = """
cd /root && setsid nohup "$1" -m sglang.launch_server --model-path /srv/models/tiny-hybrid \
  --served-model-name by-hand --host 0.0.0.0 --port 30000 --tp-size 2 --context-length 1024 \
  </dev/null >/root/by-hand.log 2>&1 &
"""


def test_what_somebody_started_by_hand_comes_back(
    two: Two, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No launch of ours is known: `up` ends it, fails, and starts it again."""
    two.deploy("down", "kpro5").ok()
    two.guest.sh(BY_HAND, f"{VENV}/bin/python").ok()
    eventually(lambda: "by-hand" in two.models(), "it answers", 120)
    [first] = two.guest.pids(ARGS)[:1]
    project = Project(tmp_path_factory.mktemp("adopting"))
    project.playbook(stop={"old_server": "adopt"})
    two.lab.fault("server-degenerate")
    try:
        done = project.deploy("up", "kpro5", timeout_s=600)
    finally:
        two.lab.fault("server-degenerate", on=False)
    assert done.exit == 5, done.err
    assert "what had port 30000 before, which this tool did not start, serves again" in done.err
    eventually(lambda: "by-hand" in two.models(), "it answers again", 60)
    [second] = two.guest.pids(ARGS)[:1]
    assert second != first
    same = project.deploy("up", "kpro5")
    assert same.exit == 5 and "was left alone" in same.err, same.err
    assert two.guest.pids(ARGS)[:1] == [second]
    assert two.guest.sh("ls -A /var/lib/deployer/adopted 2>/dev/null").out.strip() == ""
    project.deploy("up", "kpro5", "--retry", timeout_s=600).ok()
    assert "by-hand" not in two.models()
    assert two.guest.sh("ls -A /var/lib/deployer/adopted 2>/dev/null").out.strip() == ""
