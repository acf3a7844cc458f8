"""One server of two nodes, each with one GPU: SGLang's multi-node mode under `deploy`."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

import environment
import hosts
import machine
import pools
from hosts import Host
from project import VARIANTS, Project, Ran, in_background, plain_host
from scene import FLOOR_MIB, Scene, ask, wait_for

TITLE = "one server of two nodes"
NAMES = ("node0", "node1")
DEPLOYMENT = "pair"
MODEL = "tiny-learned"
PORTS = (31510, 31511)
"""They share a network, so each has a port of its own."""
DIST_PORT = 31600
LOOPBACK = {
    # There is no other network between the hosts.
    "SGLANG_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
NO_MULTICAST = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)
END_S = 180.0
"""So long the rest of a server may take to end after one of its ranks was killed."""


@dataclasses.dataclass
class Pair:
    """The two hosts and what is asked of them."""

    project: Project
    hosts: list[Host]
    base_mib: list[int]

    def write(self) -> None:
        """Inventory and playbook."""
        project = self.project
        project.inventory.mkdir(parents=True, exist_ok=True)
        (project.folder / "playbooks/locks").mkdir(parents=True, exist_ok=True)
        lock = environment.make(project.folder / "wheels")
        (project.folder / "playbooks/locks/here.txt").write_text(lock)
        book = project.playbook("learned", VARIANTS)
        kept = {name: os.environ[name] for name in NO_MULTICAST if name in os.environ}
        book["nodes"] = list(NAMES)
        book["serve"] |= {
            "port": PORTS[0],
            "dist_port": DIST_PORT,
            "args": {**project.serve, "tp-size": len(NAMES)},
            "env": {**LOOPBACK, **kept},
        }
        project.put(f"playbooks/{DEPLOYMENT}.yaml", book)
        for host, port in zip(self.hosts, PORTS, strict=True):
            entry = {"playbook": DEPLOYMENT, "port": port, "node_address": "127.0.0.1"}
            body = {**plain_host(host.sshd, host.gpu), "deployments": {DEPLOYMENT: entry}}
            project.put(f"inventory/{host.name}.yaml", {"hosts": {host.name: body}})

    def up(self, scene: Scene, expected: int, limit_s: float = 420.0) -> Ran:
        """`deploy up` of rank 0, which means both."""
        ran = self.project.deploy("--jsonl", "--yes", "up", f"{NAMES[0]}/{DEPLOYMENT}",
                                  *self.project.selection, limit_s=limit_s)  # fmt: skip
        ends = ends_of(ran)
        scene.ran(
            ran,
            gates=ran.gates(),
            notes=[f"{one['host']}: {one['text']}" for one in ran.events if one["event"] == "note"],
            summary="; ".join(f"{host}: {end['summary']}" for host, end in ends.items()),
            fix="; ".join(end["fix"] for end in ends.values() if end.get("fix")),
        )
        scene.check(f"`deploy up` of both exits {expected}", ran.code == expected, ran.code)
        return ran

    def launches(self) -> list[dict[str, Any]]:
        """The newest launch of each host."""
        return [host.launch(DEPLOYMENT) for host in self.hosts]

    def alive(self) -> dict[str, dict[str, str]]:
        """Processes of the newest launch by host; those without any are left out."""
        found = {host.name: host.launch(DEPLOYMENT)["processes"] for host in self.hosts}
        return {name: processes for name, processes in found.items() if processes}

    def status(self, scene: Scene) -> dict[str, tuple[str, str]]:
        """State and verdict by host, as `deploy status` tells them."""
        ran = scene.ran(self.project.deploy("--json", "status", "--all"))
        try:
            told = json.loads(ran.out)["hosts"]
            return {
                one["host"]: (str(one["deployments"][0]["state"]),
                              str(one["deployments"][0]["verdict"]))
                for one in told
            }  # fmt: skip
        except (ValueError, KeyError, IndexError) as error:
            return {"error": (f"{type(error).__name__}: {error}", (ran.out + ran.err)[-300:])}

    def ended(self, scene: Scene) -> None:
        """Nothing of the launch is left on either host."""
        left = self.alive()
        scene.check("no process of the launch is left on either host", not left, left)

        def back() -> bool:
            return all(
                host.used_mib() <= base + FLOOR_MIB
                for host, base in zip(self.hosts, self.base_mib, strict=True)
            )

        wait_for(back, 20, 1.0)
        seen = [f"{host.used_mib()} MiB" for host in self.hosts]
        scene.check("the memory of both GPUs is back at its floor", back(), seen)

    def keep_logs(self) -> None:
        """Copies of both logs of the newest launch, without the API key."""
        folder = self.project.log.parent / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for host in self.hosts:
            seen = host.launch(DEPLOYMENT)
            text = seen["log"].replace(self.project.key, "***")
            (folder / f"{host.name}-{seen['id'] or 'none'}.log").write_text(text)


def ends_of(ran: Ran) -> dict[str, dict[str, Any]]:
    """The last event of each host."""
    return {one["host"]: one for one in ran.events if one["event"] == "run_finished"}


def nodes(project: Project, base_mib: int) -> Scene:
    """From a bare pair to a proven server, a killed rank, a rank killed at the start, `down`."""
    scene = Scene(TITLE)
    if reason := hosts.why_not(len(NAMES)):
        scene.skipped = reason
        return scene
    folder = project.folder.parent / "nodes"
    with hosts.hosts(folder / f"hosts-{os.getpid()}", NAMES) as found:
        pair = Pair(
            dataclasses.replace(project, folder=folder / "project"),
            found,
            [base_mib, *(machine.used_mib(host.index) for host in found[1:])],
        )
        pair.write()
        try:
            _proven(scene, pair)
            _killed_serving(scene, pair)
            _killed_starting(scene, pair)
            _again_and_down(scene, pair)
        finally:
            pair.keep_logs()
            scene.ran(pair.project.deploy("--yes", "down", f"{NAMES[0]}/{DEPLOYMENT}"))
    return scene


def _proven(scene: Scene, pair: Pair) -> None:
    before = [host.used_mib() for host in pair.hosts]
    shown = scene.ran(pair.project.deploy("plan", f"{NAMES[0]}/{DEPLOYMENT}"))
    scene.check("`deploy plan` exits 0", shown.code == 0, shown.code)
    ran = pair.up(scene, 0)
    good = [gate["gate"] for gate in ran.gates() if gate["passed"]]
    scene.check("all gates pass", len(good) >= 10 and len(good) == len(ran.gates()), ran.gates())
    first, second = pair.launches()
    scene.check("both have one launch", first["id"] == second["id"] != "",
                [first["id"], second["id"]])  # fmt: skip
    ranks = [processes(one, "--node-rank") for one in (first, second)]
    told = [[word for word in title.split() if word.isdigit()] for title in ranks]
    scene.check("rank 0 runs on the first, rank 1 on the second, of --nnodes 2",
                all("--nnodes 2" in title for title in ranks)
                and "--node-rank 0" in ranks[0] and "--node-rank 1" in ranks[1],
                told)  # fmt: skip
    held = [host.used_mib() - free for host, free in zip(pair.hosts, before, strict=True)]
    scene.check("each holds memory of its own GPU", min(held) > FLOOR_MIB,
                [f"{one} MiB" for one in held])  # fmt: skip
    scene.figures["processes"] = {
        host.name: sorted(title[:80] for title in one["processes"].values())
        for host, one in zip(pair.hosts, (first, second), strict=True)
    }
    scene.figures["pools"] = {
        host.name: pools.measured(one["log"])
        for host, one in zip(pair.hosts, (first, second), strict=True)
    }
    answer = ask(PORTS[0], MODEL, "What is 17 * 23? Answer with the number only.", 64,
                 pair.project.key)  # fmt: skip
    scene.check("it answers", "391" in str(answer.get("content")), answer)
    states = pair.status(scene)
    scene.check("`deploy status` says that both serve and are good",
                states == dict.fromkeys(NAMES, ("serving", "good")), states)  # fmt: skip
    again = pair.up(scene, 0)
    words = {host: end["summary"] for host, end in ends_of(again).items()}
    scene.check("a second `up` has nothing to do on either host",
                len(words) == len(NAMES) and all("nothing to do" in one for one in words.values()),
                words)  # fmt: skip
    scene.figures["no_op_seconds"] = round(again.seconds, 2)


def processes(launch: dict[str, Any], word: str) -> str:
    """The first command line of a launch with this word in it, '' when there is none."""
    return next((title for title in launch["processes"].values() if word in title), "")


def scheduler(launch: dict[str, Any]) -> str:
    """The scheduler's pid on its host, '' when it has none."""
    titles = launch["processes"].items()
    return next((pid for pid, title in titles if title.startswith("sglang::scheduler")), "")


def _killed_serving(scene: Scene, pair: Pair) -> None:
    """The scheduler of rank 1 is killed while the server answers."""
    from deployer.steps.verify_prompts import ESSAY

    before, key = pair.launches()[1], pair.project.key
    pid = scheduler(before)
    if not scene.check("rank 1 has a scheduler", bool(pid), pid):
        return
    thread, box = in_background(lambda: ask(PORTS[0], MODEL, ESSAY, 700, key))
    time.sleep(0.3)
    began = time.monotonic()
    pair.hosts[1].sh('kill -9 "$1"', pid)
    gone = wait_for(lambda: not pair.alive(), END_S, 0.5)
    scene.figures["seconds_until_all_gone"] = round(time.monotonic() - began, 2)
    scene.check("both ranks end", bool(gone), pair.alive())
    thread.join(130)
    scene.figures["request_in_flight"] = box.get("result")
    states = pair.status(scene)
    scene.check("`deploy status` says that both ended",
                {name: state for name, (state, _) in states.items()}
                == dict.fromkeys(NAMES, "ended"), states)  # fmt: skip
    told = pair.project.deploy("status", "--all")
    scene.figures["status_after_kill"] = told.out.splitlines()
    pair.keep_logs()
    pair.ended(scene)


def _killed_starting(scene: Scene, pair: Pair) -> None:
    """The next `up` starts both, and the scheduler of rank 1 is killed in graph capture."""
    old = pair.launches()[1]["id"]
    thread, box = in_background(lambda: pair.up(scene, 1))

    def capturing() -> dict[str, Any] | None:
        seen = pair.hosts[1].launch(DEPLOYMENT)
        begun = "apture cuda graph begin" in seen["log"]
        return seen if seen["id"] != old and begun and scheduler(seen) else None

    seen = wait_for(capturing, 150, 0.3)
    if scene.check("rank 1 came to graph capture", seen is not None, bool(seen)):
        pair.hosts[1].sh('kill -9 "$1"', scheduler(seen))
        began = time.monotonic()
        thread.join(200)
        scene.figures["seconds_until_told"] = round(time.monotonic() - began, 2)
    thread.join(250)
    ran = box.get("result")
    ends = ends_of(ran) if ran is not None else {}
    causes = [end["summary"] for end in ends.values() if "child-killed" in end["summary"]]
    scene.check("one cause is told, and it is rank 1's", len(causes) == 1
                and f"rank 1 on {NAMES[1]}" in causes[0], causes or ends)  # fmt: skip
    tried = [note for note in ran.notes() if "trying the next one" in note] if ran else []
    scene.check("no other variant is tried", ran is not None and not tried, tried)
    pair.keep_logs()
    pair.ended(scene)


def _again_and_down(scene: Scene, pair: Pair) -> None:
    pair.up(scene, 0)
    states = pair.status(scene)
    scene.check("`deploy status` says again that both serve and are good",
                states == dict.fromkeys(NAMES, ("serving", "good")), states)  # fmt: skip
    ran = scene.ran(pair.project.deploy("--jsonl", "--yes", "down", f"{NAMES[1]}/{DEPLOYMENT}"))
    scene.check("`deploy down` of rank 1 exits 0", ran.code == 0, ran.code)
    scene.runs[-1]["notes"] = [
        f"{one['host']}: {one['text']}" for one in ran.events if one["event"] == "note"
    ]
    pair.ended(scene)
    open_ports = [port for port in PORTS if hosts.listens(port)]
    scene.check("both ports are free", not open_ports, open_ports)
