"""What status shows and doctor finds, from facts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from typing import Any

import pytest

from deployer import gpu, observe
from deployer.errors import HostKeyChanged, StepFailed
from deployer.findings import Finding, Level, examine, in_order, of_error, of_lock
from deployer.model import Change, Facts, Plan, Probe, ProbeOutput, Shell, Where
from deployer.observe import ClockFact, GpuLinks, LockSeen, Sight
from deployer.remote.jobs import JobIdentity
from deployer.remote.lock_record import Held, LockRecord, this_controller
from deployer.state import DeploymentState, Launch, Manifest, ManifestFile
from deployer.steps.base import Step
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.server_facts import PortOwner, ServerFact, ServerJob
from deployer.steps.server_wanted import LaunchNote
from deployer.steps.serving_fact import ServingFact
from deployer.steps.shards_facts import ShardsFact, Verified
from deployer.steps.stop import StopStep
from deployer.steps.venv_facts import ComputeFact
from tests.unit.hoststeps import SHELLS, A, B, deployment, facts, output, run_script

LAUNCH = "20261130-070000-ab12"
GOOD = json.dumps(
    {"verdict": "good", "launch": LAUNCH, "verified": 5.0, "figures": {"tokens_per_s": 2}}
)
OURS = PortOwner(70, 900, 69, 69, f"server-qwen/{LAUNCH}", "python -m sglang.launch_server")
STRANGER = PortOwner(26, 5, 26, 1, "", "python3 -m http.server 30000")


def job(*, alive: bool = True, exit: str = "", verdict: str = GOOD) -> ServerJob:
    identity = JobIdentity("server-qwen", LAUNCH, 70, 1000, "b", 69)
    return ServerJob(identity, alive, exit, "f", LaunchNote("mtp"), verdict, (69, 70), ())


def seen(*values: object, silent: str = "") -> dict[str, Any]:
    return observe.deployment_document(deployment(), facts(*values, silent=silent), state())


def state(manifest: Manifest | None = None) -> DeploymentState:
    return DeploymentState(manifest=manifest)


def test_a_serving_launch() -> None:
    document = seen(
        ServerFact(job=job(), listening=True, owners=(OURS,), venv=True, engine="0.5.11"),
        ServingFact(LAUNCH, "good", 5.0, {"tokens_per_s": 2}, ""),
        ClockFact(now=13_000, per_second=100),
        ContainerFacts(status="running"),
    )
    assert document["state"] == "serving"
    assert (document["launch"], document["variant"], document["pid"]) == (LAUNCH, "mtp", 70)
    assert document["uptime_s"] == 120.0
    assert (document["listening"], document["answers"]) == (True, True)
    assert (document["verdict"], document["verified"]) == ("good", 5.0)
    assert document["figures"] == {"tokens_per_s": 2.0}
    assert document["engine"]["version"] == "0.5.11"
    assert document["container"] == {
        "vmid": 129,
        "status": "running",
        "problem": "",
        "silent": "",
    }


def test_a_good_launch_that_does_not_answer_any_more() -> None:
    document = seen(
        ServerFact(job=job(), listening=True, owners=(OURS,)),
        ServingFact(LAUNCH, "good", 5.0, {}, "a short request failed: 500"),
    )
    assert document["answers"] is False
    assert document["answer_problem"] == "a short request failed: 500"


@pytest.mark.parametrize(
    ("server", "name"),
    [
        (ServerFact(job=job()), "starting"),
        (ServerFact(job=job(alive=False, exit="signal 9")), "ended"),
        (ServerFact(), "none"),
        (ServerFact(owners=(STRANGER,), listening=True), "foreign"),
        (ServerFact(asked=False, problem="timed out"), "unknown"),
    ],
)
def test_states(server: ServerFact, name: str) -> None:
    document = seen(server)
    assert document["state"] == name
    if name != "starting":
        assert document["pid"] is None
        assert document["uptime_s"] is None


def test_a_dead_launch_tells_how_it_ended() -> None:
    assert seen(ServerFact(job=job(alive=False, exit="signal 9")))["exit"] == "signal 9"


@pytest.mark.parametrize(("owners", "name"), [((), "stopped"), ((STRANGER,), "foreign")])
def test_what_this_tool_has_stopped_is_no_crash_whoever_has_the_port_now(
    owners: tuple[PortOwner, ...], name: str
) -> None:
    server = ServerFact(job=job(alive=False, exit="signal 9"), owners=owners)
    told = Launch(id=LAUNCH, variant="mtp", started=1.0, fingerprint="1", verdict="stopped")
    known = DeploymentState(launches=[told])
    document = observe.deployment_document(deployment(), facts(server), known)
    assert (document["state"], document["stopped"]) == (name, True)
    assert not seen(server)["stopped"]


def test_a_silent_guest() -> None:
    document = seen(ContainerFacts(status="stopped"), silent="connection refused")
    assert document["state"] == "unknown"
    assert document["problem"] == "connection refused"
    assert document["listening"] is None
    assert document["container"]["silent"] == "connection refused"
    assert document["container"]["status"] == "stopped"
    assert document["weights"]["state"] == "unknown"


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("", ""),
        ("{", "unreadable"),
        ("[]", "unreadable"),
        (json.dumps({"verdict": "good", "launch": "other", "verified": 1, "figures": {}}), ""),
        (
            json.dumps({"verdict": "failed:gate", "launch": LAUNCH, "verified": 1, "figures": {}}),
            "failed:gate",
        ),
    ],
)
def test_a_verdict_belongs_to_its_launch(line: str, verdict: str) -> None:
    assert seen(ServerFact(job=job(verdict=line)))["verdict"] == verdict


def test_weights_are_compared_with_the_pinned_list() -> None:
    want = deployment()
    model = want.playbook.model
    files = [ManifestFile(path=name, size=3, sha256="a" * 64) for name in ("a", "b")]
    manifest = Manifest(repo=model.repo, asked=model.revision, commit="c", files=files)
    row = Verified(3, 7, "a" * 64, "")

    def weights(fact: ShardsFact, manifest: Manifest | None) -> tuple[str, int, int]:
        found = observe.deployment_document(want, facts(fact), state(manifest))["weights"]
        return found["state"], found["verified"], found["files"]

    both = ShardsFact(files={"a": (3, 7), "b": (3, 7)}, record={"a": row, "b": row})
    assert weights(both, manifest) == ("verified", 2, 2)
    assert weights(dataclasses.replace(both, record={"a": row}), manifest) == ("incomplete", 1, 2)
    assert weights(both, None) == ("present", 0, 2)
    assert weights(ShardsFact(), manifest) == ("absent", 0, 2)
    assert weights(ShardsFact(problem="hung mount"), manifest) == ("unknown", 0, 0)


def test_gpus_of_the_inventory_with_what_is_known() -> None:
    row = gpu.SmiGpu(0, "u", "NVIDIA RTX A6000", "580", 49140, 512, "8.6", A)
    known = facts(GpuLinks(((A, "nvidia"),)), HostSmi(0, "", (row,)))
    first, second = observe.gpus_document(deployment().host, known)
    assert (first["address"], first["driver"], first["present"]) == (A, "nvidia", True)
    assert (first["memory_used_mib"], first["memory_total_mib"]) == (512, 49140)
    assert (second["address"], second["present"], second["memory_total_mib"]) == (B, False, None)
    nothing = observe.gpus_document(deployment().host, Facts())
    assert [one["present"] for one in nothing] == [None, None]


def test_the_host_lock() -> None:
    me = this_controller()
    record = LockRecord.mine("kpro5", "r1", "venv")
    assert observe.lock_document(facts(LockSeen()), me) is None
    held = observe.lock_document(facts(LockSeen(Held(record, "r1"))), me)
    assert held is not None
    assert "run r1" in held["holder"]
    assert held["stale"] == ""
    me = dataclasses.replace(me, machine="m", hardware=frozenset({"mac"}))
    dead = dataclasses.replace(record, machine="m", boot="another", hardware="mac")
    left = observe.lock_document(facts(LockSeen(Held(dead, "r1"))), me)
    assert left is not None
    assert "rebooted" in left["stale"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_probes_of_the_sight(shell: list[str], tmp_path: Any) -> None:
    links, lock, clock = Sight().probes(deployment())
    found = links.parse(output(run_script(links.script, shell)))
    assert isinstance(found, GpuLinks)
    free = output(run_script(lock.script.replace("/var/lib/deployer", str(tmp_path)), shell))
    assert lock.parse(free) == LockSeen()
    record = LockRecord.mine("kpro5", "r1")
    (tmp_path / "lock").write_text(f"r1\n{record.line()}\n")
    taken = output(run_script(lock.script.replace("/var/lib/deployer", str(tmp_path)), shell))
    assert lock.parse(taken) == LockSeen(Held(record, "r1"))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        stat = open(f"/proc/{process.pid}/stat").read()  # noqa: PTH123, SIM115
        now = clock.parse(output(run_script(clock.script, shell)))
        process.communicate()
    assert isinstance(now, ClockFact)
    age = now.seconds_since(int(stat.rpartition(")")[2].split()[19]))
    assert age is not None
    assert 0 <= age < 30
    assert now.per_second == os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("text", ["", "100\n", "0\n1 (a) S\n", "x\ny\n"])
def test_a_clock_that_cannot_be_read_gives_no_uptime(text: str) -> None:
    fact = observe.parse_clock(ProbeOutput(1, text.encode(), b""))
    assert fact.seconds_since(5) is None


def test_a_lock_that_cannot_be_read_is_a_problem() -> None:
    fact = observe.parse_lock(ProbeOutput(1, b"", b"cat: lock: Permission denied\n"))
    assert fact.held is None
    assert "Permission denied" in fact.problem
    assert observe.parse_lock(ProbeOutput(0, b"1 2 3\n7\n?\nnoise\n", b"")).held == Held(None)


def planning(name: str, plan: Plan | Exception) -> Step:
    class Planned(Step):
        def probes(self, want: Any) -> list[Probe]:
            return []

        def plan(self, want: Any, facts: Facts, state: Any) -> Plan:
            if isinstance(plan, Exception):
                raise plan
            return plan

    step = Planned()
    step.name = name  # type: ignore[misc]
    return step


CHANGE = Plan.change("it is missing", Change("do", "why", Shell(Where.HOST, "true")))


def found(values: Facts, *steps: Step) -> list[Finding]:
    return examine(deployment(), values, state(), steps)


def test_findings_are_worst_first() -> None:
    ones = found(
        facts(HostDriver(rivals=("nouveau",))),
        planning("driver", Plan.nothing("580 is loaded")),
        planning("gpus", CHANGE),
        planning("container", Plan.unknown("gpus")),
        planning("stop", Plan.blocked("VM 101 holds it", "stop VM 101")),
    )
    assert [(one.level.name, one.where) for one in ones] == [
        ("BLOCKED", "kpro5/qwen stop"),
        ("WARNING", "kpro5/qwen driver"),
        ("PENDING", "kpro5/qwen gpus"),
        ("UNKNOWN", "kpro5/qwen container"),
        ("FINE", "kpro5/qwen driver"),
    ]
    assert ones[0].fix == "stop VM 101"
    assert ones[2].what == "1 change: it is missing"
    assert "deploy up kpro5/qwen" in ones[2].fix


def test_a_plan_that_fails_is_a_block() -> None:
    [one] = found(facts(), planning("shards", StepFailed("no list", fix="mend it")))
    assert (one.level, one.what, one.fix) == (Level.BLOCKED, "no list", "mend it")


def test_what_a_plan_says_is_not_said_again() -> None:
    fact = ShardsFact(problem="a hung mount")
    assert len(found(facts(fact), planning("shards", Plan.blocked("a hung mount", "x")))) == 1
    assert len(found(facts(fact), planning("driver", Plan.nothing("fine")))) == 2


def test_warnings_inside_facts() -> None:
    ones = found(
        facts(
            HostSmi(15, "GPU is lost"),
            CudaProof(999, "CUDA_ERROR_UNKNOWN"),
            ComputeFact(problem="nvidia-smi hangs in the guest"),
            ServerFact(job=job(), owners=(STRANGER,)),
            ServingFact(LAUNCH, "good", 5.0, {}, "it does not own its port"),
            ContainerFacts(timed_out=True),
            silent="",
        )
    )
    text = "\n".join(one.what for one in ones)
    for part in (
        "fallen off the bus",
        "999",
        "nvidia-smi hangs",
        "held by pid 26",
        "passed its gates, but now",
        "ContainerFacts",
    ):
        assert part in text
    assert {one.level for one in ones} == {Level.WARNING}


@pytest.mark.parametrize("alive", [True, False])
def test_state_d_is_told_of_a_dead_launch_only_and_once(alive: bool) -> None:
    """So looks a process too that reads its weights."""
    stuck = dataclasses.replace(job(), alive=alive, stuck=(70,))
    ones = found(facts(ServerFact(job=stuck)), StopStep())
    told = [one.level for one in ones if "D state" in one.what]
    assert told == ([] if alive else [Level.BLOCKED])


def test_a_silent_guest_is_a_warning() -> None:
    [one] = found(facts(silent="connection refused"))
    assert one.level is Level.WARNING
    assert "129" in one.fix


def test_the_lock_as_a_finding() -> None:
    me, record = this_controller(), LockRecord.mine("kpro5", "r1", "venv")
    assert of_lock("kpro5", facts(LockSeen()), me) == []
    [busy] = of_lock("kpro5", facts(LockSeen(Held(record, "r1"))), me)
    assert "another run is at work" in busy.what
    me = dataclasses.replace(me, machine="m", hardware=frozenset({"mac"}))
    gone = dataclasses.replace(record, machine="m", boot="another", hardware="mac")
    [left] = of_lock("kpro5", facts(LockSeen(Held(gone, "r1"))), me)
    assert "left behind" in left.what
    [odd] = of_lock("kpro5", facts(LockSeen(Held(None, "r9"))), me)
    assert "deploy unlock kpro5" in odd.fix


def test_errors_as_findings() -> None:
    assert of_error(HostKeyChanged("changed", where="kpro5"), "x").level is Level.UNREACHABLE
    assert of_error(StepFailed("odd"), "x") == Finding(Level.BLOCKED, "x", "odd")
    twice = Finding(Level.WARNING, "a", "b")
    assert in_order([twice, Finding(Level.BLOCKED, "a", "c"), twice])[1:] == [twice]
