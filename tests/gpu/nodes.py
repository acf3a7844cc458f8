"""One server of two nodes, each with one GPU: SGLang's multi-node mode under `deploy`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from typing import Any

import hosts
import machine
import pools
from pair import DEPLOYMENT, NAMES, PORTS, Pair, ends_of
from project import Project, in_background
from scene import FLOOR_MIB, Scene, ask, wait_for

TITLE = "one server of two nodes"
MODEL = "tiny-learned"
END_S = 60.0
"""So long the rest of a server may take to end after one of its ranks was killed."""
APART = re.compile(r"\((?:(\d+\.\d+)% (?:more|fewer) than planned|as planned)\)")


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
            _killed_serving(scene, pair, 1)
            _killed_starting(scene, pair)
            _other_variant(scene, pair)
            _killed_serving(scene, pair, 0)
            _back(scene, pair)
            _down(scene, pair)
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
    scene.figures["first_launch"] = first["id"]
    apart = [float(one or 0) for note in ran.notes() for one in APART.findall(note)]
    scene.check("pools and requests within 1 % of the plan",
                len(apart) > 1 and max(apart) <= 1.0, ran.notes())  # fmt: skip
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


def _killed_serving(scene: Scene, pair: Pair, rank: int) -> None:
    """The scheduler of this rank is killed while the server answers."""
    from deployer.steps.verify_prompts import ESSAY

    before, key = pair.launches()[rank], pair.project.key
    pid = scheduler(before)
    if not scene.check(f"rank {rank} has a scheduler", bool(pid), pid):
        return
    thread, box = in_background(lambda: ask(PORTS[0], MODEL, ESSAY, 700, key))
    time.sleep(0.3)
    began = time.monotonic()
    pair.hosts[rank].sh('kill -9 "$1"', pid)
    gone = wait_for(lambda: not pair.alive(), END_S, 0.5)
    told = scene.figures[f"rank_{rank}_killed"] = {
        "seconds_until_all_gone": round(time.monotonic() - began, 2)
    }
    scene.check(f"both ranks end when that of rank {rank} is killed", bool(gone), pair.alive())
    thread.join(130)
    told["request_in_flight"] = box.get("result")
    states = pair.status(scene)
    scene.check("`deploy status` says that both ended",
                {name: state for name, (state, _) in states.items()}
                == dict.fromkeys(NAMES, "ended"), states)  # fmt: skip
    told["status"] = pair.project.deploy("status", "--all").out.splitlines()
    pair.keep_logs()
    path = pair.project.log.parent / "logs" / f"{NAMES[rank]}-{before['id']}.log"
    shown = scene.ran(pair.project.deploy("--json", "explain", str(path)))
    try:
        cause = json.loads(shown.out).get("class")
    except ValueError:
        cause = (shown.out + shown.err)[-300:]
    scene.check(f"`deploy explain` names a killed child in the log of rank {rank}",
                cause == "child-killed", cause)  # fmt: skip
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


def _other_variant(scene: Scene, pair: Pair) -> None:
    """Up again, without speculation."""
    ran = pair.up(scene, 0, "--variant", "no-mtp")
    good = [gate["gate"] for gate in ran.gates() if gate["passed"]]
    scene.check("all gates pass without speculation, too",
                len(good) >= 9 and len(good) == len(ran.gates()), ran.gates())  # fmt: skip
    plain = [not processes(one, "--speculative-algorithm") for one in pair.launches()]
    scene.check("neither rank speculates", all(plain), plain)


def _back(scene: Scene, pair: Pair) -> None:
    """`deploy rollback` to the first launch, which speculated."""
    first = scene.figures["first_launch"]
    pair.brings(scene, 0, "rollback", first)
    states = pair.status(scene)
    scene.check("`deploy status` says again that both serve and are good",
                states == dict.fromkeys(NAMES, ("serving", "good")), states)  # fmt: skip
    launches = pair.launches()
    drafts = [bool(processes(one, "--speculative-algorithm NEXTN")) for one in launches]
    scene.check("both ranks speculate again, in one launch",
                all(drafts) and launches[0]["id"] == launches[1]["id"],
                [drafts, [one["id"] for one in launches]])  # fmt: skip


def _down(scene: Scene, pair: Pair) -> None:
    ran = scene.ran(pair.project.deploy("--jsonl", "--yes", "down", f"{NAMES[1]}/{DEPLOYMENT}"))
    scene.check("`deploy down` of rank 1 exits 0", ran.code == 0, ran.code)
    scene.runs[-1]["notes"] = [
        f"{one['host']}: {one['text']}" for one in ran.events if one["event"] == "note"
    ]
    pair.ended(scene)
    open_ports = [port for port in PORTS if hosts.listens(port)]
    scene.check("both ports are free", not open_ports, open_ports)
