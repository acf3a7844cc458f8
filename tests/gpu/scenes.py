"""The scenes of a run. Each does one thing to the machine and says what it expected and saw."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import nodes
import pools
from project import HOST, JOBS, PORTS, Project, Ran, in_background
from scene import FLOOR_MIB, Scene, ask, wait_for

LEFT_GIB = 24
"""What the second process leaves free on the card."""
HOLD = """
import sys, torch
left, held = int(sys.argv[1]) << 30, []
while torch.cuda.mem_get_info()[0] > left + (1 << 30):
    held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
print(len(held), flush=True)
sys.stdin.read()
"""


def up(scene: Scene, project: Project, kind: str, expected: int, *words: str) -> Ran:
    """`deploy up` with all that it said."""
    ran = project.up(kind, *words, *project.selection)
    end = ran.finished()
    scene.ran(
        ran,
        steps=ran.steps(),
        gates=ran.gates(),
        notes=ran.notes(),
        summary=end.get("summary", ""),
        fix=end.get("fix", ""),
        result=end.get("result", {}),
    )
    scene.check(f"`deploy up {kind}` exits {expected}", ran.code == expected, ran.code)
    return ran


def chat(project: Project, kind: str, prompt: str, tokens: int, key: str | None) -> dict[str, Any]:
    """One completion by our own hand."""
    return ask(PORTS[kind], f"tiny-{kind}", prompt, tokens, key)


def down(scene: Scene, project: Project, kind: str, base_mib: int) -> None:
    """`deploy down`, and the machine's own word that it is true."""
    session = project.launch_session(kind)
    ran = scene.ran(project.deploy("--jsonl", "--yes", "down", f"{HOST}/{kind}"))
    scene.check(f"`deploy down {kind}` exits 0", ran.code == 0, ran.code)
    scene.runs[-1]["notes"] = ran.notes()
    left = machine.session_members(session)
    scene.check("no process of the launch is left", not left, left)
    used = machine.used_mib()
    scene.check("GPU memory is back at its floor", used <= base_mib + FLOOR_MIB, f"{used} MiB")


def scheduler(project: Project, kind: str) -> int:
    """The scheduler's pid in the newest launch, 0 when it has none."""
    session = project.launch_session(kind)
    for pid, title in machine.session_members(session).items():
        if title.startswith("sglang::scheduler"):
            return pid
    return 0


def plan(scene: Scene, project: Project, kind: str, variant: str, *words: str) -> dict[str, Any]:
    """`deploy fit --json` against the card as it is now."""
    config = project.models[kind] / "config.json"
    ran = scene.ran(
        project.deploy("--json", "fit", kind, f"{HOST}/{kind}", "--variant", variant,
                       "--config", str(config), *words)
    )  # fmt: skip
    try:
        return dict(json.loads(ran.out))
    except ValueError:
        scene.check("`deploy fit` gives JSON", False, (ran.out + ran.err)[-500:])
        return {}


def compare(scene: Scene, project: Project, kind: str, variant: str, before: Any) -> None:
    """Plan against actual: with what was known before the launch, and with the log's own inputs."""
    actual = pools.measured(project.launch_log(kind))
    given = [f"--{flag}={actual[name]}" for flag, name in (("free-gib", "free_gib"),)
             if name in actual]  # fmt: skip
    again = plan(scene, project, kind, variant, *given)
    early, late = pools.planned(before), pools.planned(again)
    scene.figures[f"plan_{variant}"] = {
        "actual": actual,
        "planned_before": early,
        "error_percent_before": pools.errors(early, actual),
        "planned_with_measured_free": late,
        "error_percent_with_measured_free": pools.errors(late, actual),
        "assumed": before.get("assumed", []),
    }
    wrong = {name: off for name, off in pools.errors(early, actual).items() if name != "free_gib"}
    for name in ("running", "slots", "tokens"):
        off = abs(pools.errors(early, actual).get(name, 100.0))
        seen = f"{early.get(name)} planned, {actual.get(name)} real: {off} %"
        scene.check(f"planned {name} within 1 % of the server's own", off <= 1.0, seen)
    scene.figures[f"plan_{variant}"]["worst_error_percent"] = max(
        (abs(value) for value in wrong.values()), default=None
    )


def rubbish(project: Project, base_mib: int) -> Scene:
    """Random weights: the server must come up, and must be refused."""
    scene = Scene("random weights: everything starts, the gates refuse it, `deploy down` ends it")
    shown = scene.ran(project.deploy("plan", f"{HOST}/random"))
    scene.check("`deploy plan` exits 0", shown.code == 0, shown.code)
    before = plan(scene, project, "random", "mtp")
    ran = up(scene, project, "random", 5)
    bad = [gate for gate in ran.gates() if not gate["passed"]]
    scene.check("exactly one gate fails, and says why", len(bad) == 1, bad)
    scene.check(
        "the server itself was found ready", any("is ready" in note for note in ran.notes()),
        ran.notes(),
    )  # fmt: skip
    compare(scene, project, "random", "mtp", before)
    scene.figures["serving_mib"] = machine.used_mib()
    held = scene.figures["serving_mib"] - base_mib
    scene.check("it holds GPU memory before `deploy down`", held > FLOOR_MIB, f"{held} MiB")
    scene.figures["answer"] = chat(project, "random", "Say hello.", 32, project.key)
    down(scene, project, "random", base_mib)
    return scene


def learned(project: Project, base_mib: int) -> Scene:
    """The good case: launch with NEXTN, all gates, a no-op, the key, the figures."""
    scene = Scene("learned weights: proven good")
    before = plan(scene, project, "learned", "mtp")
    ran = up(scene, project, "learned", 0)
    good = [gate["gate"] for gate in ran.gates() if gate["passed"]]
    scene.check("all gates pass", len(good) >= 10 and len(good) == len(ran.gates()), ran.gates())
    compare(scene, project, "learned", "mtp", before)
    scene.figures["serving_mib"] = machine.used_mib()
    scene.figures["holders"] = machine.holders()
    session = project.launch_session("learned")
    scene.figures["processes"] = sorted(
        title[:80] for title in machine.session_members(session).values()
    )
    answer = chat(project, "learned", "What is 17 * 23? Answer with the number only.", 64,
                  project.key)  # fmt: skip
    parsed = "391" in (answer.get("content") or "") and "340" in (answer.get("reasoning") or "")
    scene.check("reasoning and answer come apart", parsed, answer)
    refused = chat(project, "learned", "Say hello.", 8, None)
    scene.check("without the key it answers 401", refused.get("status") == 401, refused)
    scene.check("no command line shows the key", not machine.leaks(project.key),
                machine.leaks(project.key))  # fmt: skip
    again = up(scene, project, "learned", 0)
    changed = again.finished().get("summary", "")
    scene.check("a second `up` has nothing to do", "nothing to do" in changed, changed)
    scene.figures["no_op_seconds"] = round(again.seconds, 2)
    status = scene.ran(project.deploy("status", f"{HOST}/learned"))
    scene.figures["status"] = status.out.splitlines()
    return scene


def killed_serving(project: Project, base_mib: int) -> Scene:
    """The scheduler is killed while it answers."""
    scene = Scene("scheduler killed while serving")
    log = project.launch_log("learned")
    pid, session = scheduler(project, "learned"), project.launch_session("learned")
    if not scene.check("a scheduler runs", pid > 0, pid):
        return scene
    from deployer.steps.verify_prompts import ESSAY

    thread, box = in_background(lambda: chat(project, "learned", ESSAY, 700, project.key))
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    gone = wait_for(lambda: not machine.session_members(session), 30)
    scene.figures["seconds_until_all_gone"] = round(time.monotonic() - began, 2)
    thread.join(130)
    scene.figures["request_in_flight"] = box.get("result")
    scene.check("the whole server ends", bool(gone), machine.session_members(session))
    status = scene.ran(project.deploy("status", f"{HOST}/learned"))
    scene.figures["status"] = status.out.splitlines()
    ended = next((line for line in status.out.splitlines() if "ended" in line), "")
    scene.check("`deploy status` says that it ended", bool(ended), ended.strip())
    told = explain(scene, project, project.launch_log("learned"), -9, "killed-serving.log")
    scene.check("`deploy explain` names it", told.get("class") == "child-killed", told)
    scene.check("the log grew by it", len(project.launch_log("learned")) > len(log), None)
    used = wait_for(lambda: machine.used_mib() <= base_mib + FLOOR_MIB, 20, 1.0)
    scene.check("GPU memory is back at its floor", bool(used), f"{machine.used_mib()} MiB")
    return scene


def killed_starting(project: Project, base_mib: int) -> Scene:
    """The next `up` starts it again, and the scheduler is killed in graph capture."""
    scene = Scene("scheduler killed while starting")
    old = project.launch_id("learned")
    thread, box = in_background(lambda: up(scene, project, "learned", 1))

    def capturing() -> bool:
        new = project.launch_id("learned")
        return new != old and "apture cuda graph begin" in project.launch_log("learned")

    wait_for(capturing, 150)
    pid = scheduler(project, "learned")
    if scene.check("it came to graph capture", pid > 0 and capturing(), pid):
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        thread.join(200)
        scene.figures["seconds_until_told"] = round(time.monotonic() - began, 2)
    thread.join(200)
    ran = box.get("result")
    end = ran.finished() if ran is not None else {}
    scene.check("it is told as a killed worker", "child-killed" in end.get("summary", ""), end)
    new = project.launch_id("learned")
    tried = [note for note in ran.notes() if "trying the next one" in note] if ran else []
    scene.check("no other variant is tried", not tried and new != old, tried)
    left = machine.session_members(project.launch_session("learned"))
    scene.check("no process of the launch is left", not left, left)
    used = wait_for(lambda: machine.used_mib() <= base_mib + FLOOR_MIB, 20, 1.0)
    scene.check("GPU memory is back at its floor", bool(used), f"{machine.used_mib()} MiB")
    return scene


@contextlib.contextmanager
def holder(left_gib: int) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the card but for `left_gib`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(left_gib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is None or not process.stdout.readline().strip().isdigit():
            raise RuntimeError(f"the second process did not get its memory: {process.poll()}")
        yield process
    finally:
        process.kill()
        process.wait()


def crowded(project: Project, base_mib: int) -> Scene:
    """A stranger holds the card: the plan says so, the launch really fails, and he is named."""
    scene = Scene("not enough memory: a second process holds the card")
    with holder(LEFT_GIB) as stranger:
        scene.figures["used_before_mib"] = machine.used_mib()
        scene.figures["holders"] = machine.holders()
        early = plan(scene, project, "learned", "mtp")
        refusal = (early.get("refusal") or {}).get("error", "")
        scene.check("`deploy fit` foresees it", "Not enough memory" in refusal, refusal)
        later = plan(scene, project, "learned", "no-mtp")
        fits = later.get("effective")
        scene.check("`deploy fit` says that no-mtp would fit", bool(fits), fits)
        ran = up(scene, project, "learned", 1)
        told = ran.finished().get("summary", "")
        real = "Not enough memory" in project.launch_log("learned")
        scene.check("the server itself said `Not enough memory`", real, told)
        scene.check("it is told as an occupied card", "gpu-occupied" in told, told)
        scene.check("the stranger is named", f"pid {stranger.pid} " in told, told)
        scene.check("and left alone", stranger.poll() is None, stranger.poll())
        left = machine.session_members(project.launch_session("learned"))
        scene.check("no process of the launch is left", not left, left)
    used = wait_for(lambda: machine.used_mib() <= base_mib + FLOOR_MIB, 20, 1.0)
    scene.check("GPU memory is back at its floor", bool(used), f"{machine.used_mib()} MiB")
    return scene


def default_strategy(project: Project, base_mib: int) -> Scene:
    """NEXTN without extra_buffer: refused before a start; and what the engine itself says."""
    scene = Scene("speculation without extra_buffer")
    ran = up(scene, project, "default-strategy", 1)
    told = ran.finished().get("summary", "")
    scene.check("the refusal names the cause", "mamba strategy" in told, ran.finished())
    scene.check("nothing was started", not project.launch_id("default-strategy"), None)
    from deployer.catalog import Catalog
    from deployer.sglang.argv import server_argv

    want = Catalog.load(project.inventory).select([f"{HOST}/default-strategy"])[0]
    python = f"{want.playbook.engine.venv}/bin/python"
    argv = [python, "-m", "sglang.launch_server", *server_argv(want)]
    began = time.monotonic()
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **want.playbook.serve.env},
    )  # fmt: skip
    scene.figures["engine"] = {
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }
    scene.check("the engine itself refuses", done.returncode == 1, done.returncode)
    log = done.stdout.decode(errors="replace")
    told = explain(scene, project, log, done.returncode, "default-strategy.log")
    scene.check("`deploy explain` names the cause of its log",
                told.get("class") == "speculation-needs-extra-buffer", told)  # fmt: skip
    return scene


def explain(scene: Scene, project: Project, log: str, code: int, name: str) -> dict[str, Any]:
    """`deploy explain --json` on a log that is kept."""
    path = project.folder / name
    path.write_text(log)
    ran = scene.ran(project.deploy("--json", "explain", str(path), "--exit", str(code)))
    try:
        document = json.loads(ran.out)
    except ValueError:
        return {"error": (ran.out + ran.err)[-500:]}
    keys = ("outcome", "phase", "class", "cause_line", "line", "action")
    return {key: document.get(key) for key in keys}


ALL: dict[str, Callable[[Project, int], Scene]] = {
    "learned": learned,
    "killed-serving": killed_serving,
    "killed-starting": killed_starting,
    "crowded": crowded,
    "default-strategy": default_strategy,
    "rubbish": rubbish,
    "nodes": nodes.nodes,
}
"""In order; killed-serving needs the server that learned leaves. All but the last use one GPU."""


def keep_logs(folder: Path, key: str) -> None:
    """Copies of every launch's log; SGLang writes the API key into it, which is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(JOBS.glob("server-*/2*/log")):
        name = f"{path.parent.parent.name}-{path.parent.name}.log"
        (folder / name).write_bytes(path.read_bytes().replace(key.encode(), b"***"))
