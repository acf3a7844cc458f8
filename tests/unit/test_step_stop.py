from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from serverworld import (
    BOOT,
    IDENTITY,
    Clock,
    FakeJobs,
    FakeTransport,
    context,
    deployment,
    fact,
    facts,
    owner,
    server_job,
    state,
)

from deployer.down import Down
from deployer.errors import StepBlocked, StepFailed
from deployer.inventory import Replica
from deployer.model import Facts, PlanState, ProbeOutput, Procedure
from deployer.remote.jobs import ROOT, StopProof
from deployer.remote.transport import Answer
from deployer.restart import RestartStop
from deployer.state import Launch
from deployer.steps import stop_leftovers
from deployer.steps.launch import LaunchStep
from deployer.steps.server_facts import (
    LeftBehind,
    ServerFact,
    parse_server,
)
from deployer.steps.server_script import server_script_text
from deployer.steps.server_wanted import LaunchNote, fingerprint, is_wanted
from deployer.steps.stop import StopStep
from deployer.steps.stop_argv import ArgvVerdict, parse_verdict
from deployer.steps.stop_gpu import parse_gpu_memory, pci_address
from deployer.steps.stop_told import StopAdopted, StopOurs
from tests.local_transport import SHELLS, LocalTransport, shell_path

STEP = StopStep(Clock().now, Clock().sleep)
WANT = deployment()
FREE = b"0000:21:00.0, 4\n00000000:41:00.0, 4\n--\n"


def test_nothing_runs() -> None:
    plan = STEP.plan(WANT, facts(fact()), state())
    assert plan.state is PlanState.NOTHING


def test_the_wanted_server_runs_or_still_starts() -> None:
    for owners in ((), (owner(),)):
        seen = fact(job=server_job(WANT), owners=owners, listening=bool(owners))
        plan = STEP.plan(WANT, facts(seen), state())
        assert plan.state is PlanState.NOTHING
        assert IDENTITY.id in plan.reason


def test_another_fingerprint_is_stopped() -> None:
    seen = fact(job=server_job(WANT, mark="old"), owners=(owner(),), listening=True)
    plan = STEP.plan(WANT, facts(seen), state())
    assert [type(one.action.data) for one in plan.changes if isinstance(one.action, Procedure)] == [
        StopOurs
    ]


def test_a_replicas_plan_tells_of_its_router() -> None:
    rules = Replica.model_validate({"router": {"url": "http://router:8080"}})
    entry = WANT.entry.model_copy(update={"replica": rules})
    want = dataclasses.replace(WANT, entry=entry)
    seen = facts(fact(job=server_job(want, mark="old"), owners=(owner(),), listening=True))
    assert STEP.plan(want, seen, state()).notes == (
        "before it: out of http://router:8080, while all other replicas get requests; "
        "0 s for the requests that it has",
        "after the gates: in http://router:8080 again",
    )
    [down] = Down().plan(want, seen, state()).notes
    assert down.startswith("before it: out of http://router:8080; ")
    assert STEP.plan(WANT, seen, state()).notes == ()


def test_a_lower_rung_that_the_ladder_reached_stays() -> None:
    seen = fact(job=server_job(WANT, "no-mtp", fell_from=("mtp",)))
    plan = STEP.plan(WANT, facts(seen), state())
    assert plan.state is PlanState.NOTHING
    assert "no-mtp runs in place of mtp" in plan.reason
    assert "--variant mtp" in plan.reason
    other = fact(job=server_job(WANT, "no-mtp"))
    assert STEP.plan(WANT, facts(other), state()).state is PlanState.CHANGES


def test_no_server_is_stopped_for_one_that_cannot_start() -> None:
    want = deployment(engine={"version": "0.5.9"})
    seen = fact(job=server_job(want, mark="old"), engine="0.5.9")
    plan = STEP.plan(want, facts(seen), state())
    assert plan.state is PlanState.BLOCKED
    assert "0.5.10" in plan.fix


def test_a_dead_launch_that_left_processes() -> None:
    seen = fact(job=server_job(WANT, alive=False, members=(4250,)))
    plan = STEP.plan(WANT, facts(seen), state())
    assert plan.state is PlanState.CHANGES
    assert "4250" in plan.reason


def test_processes_in_d_state_need_a_reboot() -> None:
    dead = fact(job=server_job(WANT, alive=False, members=(4250,), stuck=(4250,)))
    for step in (STEP, Down()):
        plan = step.plan(WANT, facts(dead), state())
        assert plan.state is PlanState.BLOCKED
        assert "reboot" in plan.fix


def test_a_server_that_reads_its_disk_at_this_moment_is_not_stuck() -> None:
    """State D is also how a process looks that loads its weights."""
    loads = facts(fact(job=server_job(WANT, stuck=(4250,))))
    assert STEP.plan(WANT, loads, state()).state is PlanState.NOTHING
    assert Down().plan(WANT, loads, state()).state is PlanState.CHANGES


def test_a_stranger_is_named_and_left() -> None:
    seen = fact(owners=(owner(7, "nginx: master"),), listening=True)
    plan = STEP.plan(deployment(stop={"old_server": "adopt"}), facts(seen), state())
    assert plan.state is PlanState.BLOCKED
    assert "pid 7 (nginx: master)" in plan.reason
    assert "kill 7" in plan.fix


@pytest.mark.parametrize(
    "command", ["python -m sglang.launch_server --port 30000", "python /x/bin/sglang serve -p"]
)
def test_an_old_server_is_adopted_only_when_allowed(command: str) -> None:
    seen = fact(owners=(owner(7, command),), listening=True)
    plan = STEP.plan(WANT, facts(seen), state())
    assert plan.state is PlanState.BLOCKED
    assert "adopt" in plan.fix
    plan = STEP.plan(deployment(stop={"old_server": "adopt"}), facts(seen), state())
    action = plan.changes[0].action
    assert isinstance(action, Procedure)
    assert action.data == StopAdopted(owner(7, command), BOOT)


def test_the_server_of_another_deployment_is_never_adopted() -> None:
    seen = fact(owners=(owner(7, job="server-other/1"),), listening=True)
    plan = STEP.plan(deployment(stop={"old_server": "adopt"}), facts(seen), state())
    assert plan.state is PlanState.BLOCKED
    assert "server-other/1" in plan.reason


def test_a_listener_that_cannot_be_seen() -> None:
    plan = STEP.plan(WANT, facts(fact(listening=True)), state())
    assert plan.state is PlanState.BLOCKED


def test_what_cannot_be_known_yet() -> None:
    assert STEP.plan(WANT, Facts(), state()).state is PlanState.UNKNOWN
    silent = ServerFact(asked=False, problem="timed out")
    assert STEP.plan(WANT, facts(silent), state()).state is PlanState.UNKNOWN
    running = facts(fact(job=server_job(WANT)))
    assert STEP.plan(WANT, running, state(None)).state is PlanState.UNKNOWN


def test_down_stops_the_wanted_server_too() -> None:
    seen = fact(job=server_job(WANT), owners=(owner(),), listening=True)
    assert STEP.down_plan(WANT, facts(seen)).state is PlanState.CHANGES
    assert STEP.down_plan(WANT, facts(fact())).state is PlanState.NOTHING


def test_stop_proves_port_and_gpu_memory() -> None:
    clock = Clock()
    own = state()
    own.launches.append(Launch(id=IDENTITY.id, variant="mtp", started=1.0, verdict="good"))
    answers = [b"0000:21:00.0, 45000\n0000:41:00.0, 4\n--\n", FREE]
    host = FakeTransport(lambda script: Answer(0, answers.pop(0), b""))
    guest = FakeTransport(lambda script: Answer(0, f"now_boot={BOOT}\n".encode(), b""))
    jobs = FakeJobs()
    made, _ = context(WANT, own, jobs, host=host, guest=guest)
    step = StopStep(clock.now, clock.sleep)
    seen = facts(fact(job=server_job(WANT, mark="old")))
    step.apply(made, seen, step.plan(WANT, seen, own))
    assert jobs.stopped == [IDENTITY.id]
    assert answers == []
    assert own.launches[0].verdict == "stopped"


def test_nothing_is_stopped_for_arguments_that_the_engine_refuses() -> None:
    refusal = b"usage: sglang\nsglang: error: unrecognized arguments: --warp\n"
    guest = FakeTransport(lambda script: Answer(2, b"", refusal))
    jobs = FakeJobs()
    made, _ = context(WANT, state(), jobs, guest=guest)
    seen = facts(fact(job=server_job(WANT, mark="old"), owners=(owner(),), listening=True))
    with pytest.raises(StepBlocked) as caught:
        STEP.apply(made, seen, STEP.plan(WANT, seen, state()))
    assert "--warp" in caught.value.evidence[0]
    assert jobs.stopped == []


def test_nothing_is_stopped_when_its_successor_would_have_no_key() -> None:
    want = deployment(serve={"api_key_env": "QWEN_KEY"})
    jobs = FakeJobs()
    made, _ = context(want, state(), jobs)
    seen = facts(fact(job=server_job(want, mark="old"), owners=(owner(),), listening=True))
    with pytest.raises(StepFailed, match="QWEN_KEY"):
        STEP.apply(made, seen, STEP.plan(want, seen, state()))
    assert jobs.stopped == []


def test_the_verdict_of_the_engines_parser() -> None:
    assert parse_verdict(Answer(0, b"noise\nDEPLOYER_ARGV_ACCEPTED\n", b"")) == ArgvVerdict(True)
    broken = parse_verdict(Answer(1, b"", b"ImportError: libx.so\n"))
    assert (broken.asked, broken.problem) == (False, "ImportError: libx.so")


def test_survivors_are_a_failure() -> None:
    jobs = FakeJobs(proof=StopProof(False, ("pid 4250 x (state D)",), "stuck in D state"))
    made, _ = context(WANT, state(), jobs)
    seen = facts(fact(job=server_job(WANT, mark="old")))
    with pytest.raises(StepFailed) as caught:
        STEP.apply(made, seen, STEP.plan(WANT, seen, state()))
    assert "reboot" in caught.value.fix
    assert "4250" in caught.value.evidence[0]


@pytest.mark.parametrize("holder", [b"", b"00000000:21:00.0, 99, python, 45000\n"])
def test_gpu_memory_that_stays(holder: bytes) -> None:
    clock = Clock()
    used = b"0000:21:00.0, 45000\n0000:41:00.0, 4\n--\n" + holder
    host = FakeTransport(lambda script: Answer(0, used, b""))
    guest = FakeTransport(lambda script: Answer(0, f"now_boot={BOOT}\n".encode(), b""))
    made, events = context(WANT, state(), FakeJobs(), host=host, guest=guest)
    step = StopStep(clock.now, clock.sleep)
    seen = facts(fact(job=server_job(WANT, mark="old")))
    plan = step.plan(WANT, seen, state())
    if holder:
        step.apply(made, seen, plan)
        assert any("left alone" in getattr(event, "text", "") for event in events)
    else:
        with pytest.raises(StepFailed, match="did not come back"):
            step.apply(made, seen, plan)
    # All of it is the stranger's, and stays so: nothing more will come back.
    assert 1005 <= clock.time < 1020 if holder else clock.time >= 1060


def test_memory_that_the_holders_do_not_account_for_is_waited_for() -> None:
    clock = Clock()
    used = b"0000:21:00.0, 45000\n0000:41:00.0, 4\n--\n00000000:21:00.0, 99, python, 20000\n"
    host = FakeTransport(lambda script: Answer(0, used, b""))
    guest = FakeTransport(lambda script: Answer(0, f"now_boot={BOOT}\n".encode(), b""))
    made, events = context(WANT, state(), FakeJobs(), host=host, guest=guest)
    step = StopStep(clock.now, clock.sleep)
    seen = facts(fact(job=server_job(WANT, mark="old")))
    step.apply(made, seen, step.plan(WANT, seen, state()))
    assert clock.time >= 1060
    assert any("left alone" in getattr(event, "text", "") for event in events)


def test_gpu_memory_texts() -> None:
    assert pci_address("00000000:C1:00.0") == "0000:c1:00.0"
    hung = parse_gpu_memory(Answer(124, b"", b""), ["0000:21:00.0"])
    assert not hung.known
    assert "hangs" in hung.problem
    absent = parse_gpu_memory(Answer(127, b"", b"sh: nvidia-smi: not found\n"), [])
    assert "not found" in absent.problem
    lost = parse_gpu_memory(Answer(0, b"0000:21:00.0, 4\n--\n", b""), WANT.gpus)
    assert not lost.known
    assert "0000:41:00.0" in lost.problem


def test_memory_that_nobody_saw_is_not_said_to_be_back() -> None:
    host = FakeTransport(lambda script: Answer(9, b"", b"no devices"))
    guest = FakeTransport(lambda script: Answer(0, f"now_boot={BOOT}\n".encode(), b""))
    made, events = context(WANT, state(), FakeJobs(), host=host, guest=guest)
    seen = facts(fact(job=server_job(WANT, mark="old")))
    STEP.apply(made, seen, STEP.plan(WANT, seen, state()))
    told = [getattr(event, "text", "") for event in events]
    assert any("GPU memory not known" in text for text in told)
    assert not any("GPU memory back" in text for text in told)


def test_the_fingerprint_covers_what_makes_a_server() -> None:
    manifest = state().manifest
    base = fingerprint(WANT, manifest, "mtp")
    assert base == fingerprint(deployment(), manifest, "mtp")
    assert base != fingerprint(WANT, manifest, "no-mtp")
    assert base != fingerprint(WANT, None, "mtp")
    assert base != fingerprint(deployment(serve={"env": {"A": "1"}}), manifest, "mtp")
    assert not is_wanted(WANT, manifest, "", LaunchNote("mtp"))


LISTENER = """
import socket, time
one = socket.socket()
one.bind(("127.0.0.1", 0))
one.listen()
print(one.getsockname()[1], flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_probe_sees_a_real_listener_and_our_job(shell: str, tmp_path: Path) -> None:
    folder = tmp_path / "server-qwen" / "l1"
    folder.mkdir(parents=True)
    (tmp_path / "server-qwen" / "current").symlink_to("l1")
    # Its own session, as a job has: that of the tests may lead from outside a PID namespace.
    server = subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert server.stdout is not None
    try:
        _see_listener(shell, tmp_path, folder, server.pid, int(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def _see_listener(shell: str, tmp_path: Path, folder: Path, pid: int, port: int) -> None:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    content = {
        "pid": f"{pid}\n",
        "start": f"{stat[19]}\n",
        "session": f"{stat[3]}\n",
        "boot": boot,
        "fingerprint": "abc\n",
        "launch": LaunchNote("mtp", ("x",)).line(),
    }
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")
    want = deployment(serve={"port": port})
    script = server_script_text(want).replace(ROOT, str(tmp_path))
    answer = LocalTransport(shell_path(shell, tmp_path)).run(script)
    seen = parse_server(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
    assert seen.asked
    assert seen.job is not None
    assert seen.job.alive
    assert seen.job.identity.id == "l1"
    assert seen.job.fingerprint == "abc"
    assert seen.job.launch == LaunchNote("mtp", ("x",))
    assert seen.listening
    assert [one.pid for one in seen.owners] == [pid]
    assert seen.serving
    # The number of its session belongs to another now: its leader started at another time.
    (folder / "leader").write_text("1\n", encoding="utf-8")
    (folder / "pid").write_text("4194304\n", encoding="utf-8")
    answer = LocalTransport(shell_path(shell, tmp_path)).run(script)
    seen = parse_server(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
    assert seen.job is not None and not seen.job.alive
    assert (seen.job.members, seen.leftovers) == ((), {})


def test_a_probe_without_an_answer() -> None:
    assert not parse_server(ProbeOutput(124, b"", b"", True)).asked
    broken = parse_server(ProbeOutput(2, b"", b"sh: syntax error\n"))
    assert "syntax error" in broken.problem


def test_a_reused_pid_is_not_our_job() -> None:
    text = f"now_boot={BOOT}\njob_id=l1\njob_pid=5\njob_start=10\njob_boot={BOOT}\njob_stat=11 S\n"
    seen = parse_server(ProbeOutput(0, text.encode(), b""))
    assert seen.job is not None
    assert not seen.job.alive


@pytest.mark.parametrize(("job", "stays"), [("-", True), ("server-qwen/other", False)])
def test_down_leaves_the_port_to_a_stranger_who_has_it(job: str, stays: bool) -> None:
    clock = Clock()
    own = state()
    own.launches.append(Launch(id=IDENTITY.id, variant="mtp", started=1.0, verdict="good"))
    seen_after = f"now_boot={BOOT}\nlisten=99\nowner=77 5 77 1 S {job} nginx -g daemon\n".encode()
    guest = FakeTransport(lambda script: Answer(0, seen_after, b""))
    host = FakeTransport(lambda script: Answer(0, FREE, b""))
    jobs = FakeJobs()
    made, events = context(WANT, own, jobs, host=host, guest=guest)
    step = StopStep(clock.now, clock.sleep)
    seen = facts(fact(job=server_job(WANT), owners=(owner(77, "nginx"),), listening=True))
    if not stays:
        # A process of ours that got away from its session is no stranger.
        with pytest.raises(StepFailed, match="could not be stopped"):
            step.apply(made, seen, step.down_plan(WANT, seen))
        return
    step.apply(made, seen, step.down_plan(WANT, seen))
    assert jobs.stopped == [IDENTITY.id]
    assert own.launches[0].verdict == "stopped"
    assert any("nginx -g daemon), which is left" in getattr(one, "text", "") for one in events)
    assert clock.time < 1010


OLD, NEW = "20261129-000000-0001", IDENTITY.id
LEFT = (LeftBehind(5001, 2000, "S", NEW), LeftBehind(77, 100, "S", OLD))


def test_down_stops_what_dead_launches_left() -> None:
    dead = fact(boot=BOOT, job=server_job(WANT, alive=False), left=LEFT)
    for step in (Down(), StopStep()):
        plan = step.plan(WANT, facts(dead), state())
        assert plan.state is PlanState.CHANGES
        jobs = [change.action.data.job for change in plan.changes]  # type: ignore[union-attr]
        assert [(job.id, job.session) for job in jobs] == [(NEW, 4240), (OLD, -1)]
        assert [change.reason.rpartition(": ")[2] for change in plan.changes] == ["5001", "77"]
    assert LaunchStep().plan(WANT, facts(dead), state()).state is PlanState.UNKNOWN
    never = fact(boot=BOOT, left=LEFT[1:])
    assert Down().plan(WANT, facts(never), state()).state is PlanState.CHANGES


def test_the_wanted_server_is_not_stopped_for_what_an_earlier_one_left() -> None:
    runs = fact(job=server_job(WANT), owners=(owner(),), listening=True, left=LEFT[1:])
    plan = StopStep().plan(WANT, facts(runs), state())
    assert plan.state is PlanState.NOTHING
    assert f"launch {OLD}, which is dead, left pid 77" in plan.reason
    assert len(Down().plan(WANT, facts(runs), state()).changes) == 2
    assert len(RestartStop().plan(WANT, facts(runs), state()).changes) == 2


def test_down_names_who_has_the_port_and_leaves_it() -> None:
    seen = fact(owners=(owner(99, "python -m http.server"),), listening=True)
    plan = Down().plan(WANT, facts(seen), state())
    assert plan.state is PlanState.NOTHING
    assert (
        "port 30000 is held by pid 99 (python -m http.server), which is left alone" in plan.reason
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"marked=5001 2000 5001 S {NEW}", (5001,)),
        (f"marked=5001 2000 5001 Z {NEW}", ()),
        (f"marked=5001 2000 5001 S {OLD}", (5001,)),
        ("marked=5001 2000", ()),
        ("marked=", ()),
    ],
)
def test_who_is_left_of_a_dead_launch(line: str, found: tuple[int, ...]) -> None:
    head = [f"now_boot={BOOT}", f"job_id={NEW}", f"job_boot={BOOT}", "job_pid=4242"]
    head += ["job_start=1000", "job_session=4240"]
    dead = parse_server(ProbeOutput(0, "\n".join([*head, line]).encode(), b""))
    assert tuple(one.pid for one in dead.left) == found
    living = parse_server(ProbeOutput(0, "\n".join([*head, "job_stat=1000 S", line]).encode(), b""))
    assert [one.launch for one in living.left] == ([OLD] if OLD in line else [])


def test_what_stays_is_told_only_where_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [
        {"path": "/tmp/tmpabcdefgh", "why": "cannot be looked into: 1", "bytes": 0},
        {"path": "/dev/shm/torch_1", "why": "a living process uses it", "bytes": 5_000_000},
    ]
    monkeypatch.setattr(stop_leftovers, "ask", lambda *w, **more: [{"kept": kept, "removed": []}])
    made, events = context(WANT, state(), FakeJobs())
    stop_leftovers.clear(made, IDENTITY, [])
    told = "not removed, 5.0 MB: /dev/shm/torch_1 (a living process uses it)"
    assert [getattr(event, "text", "") for event in events] == [told]
    del kept[1]
    stop_leftovers.clear(made, IDENTITY, [])
    assert len(events) == 1
