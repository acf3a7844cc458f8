"""Down the ladder: what is derived, what is remembered, and what the next run begins with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from serverworld import (
    IDENTITY,
    MTP,
    READY,
    UP,
    Clock,
    FakeJobs,
    Script,
    context,
    deployment,
    fact,
    facts,
    state,
)

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.gpu import SmiGpu
from deployer.model import Facts, PlanState
from deployer.sglang.derive import Seen, derive
from deployer.sglang.fit import Gpu, Load, Machine
from deployer.sglang.modelconfig import shape_of
from deployer.state import DeploymentState, HostState, Launch
from deployer.steps import launch_wait
from deployer.steps.driver_facts import HostSmi
from deployer.steps.known_good import preferred, remember, validated, why_preferred
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_ladder import Fall
from deployer.steps.server_facts import ServerJob
from deployer.steps.server_wanted import LaunchNote, Rung, is_wanted
from deployer.steps.stop import StopStep

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sglang-plan" / "hybrid.json"
CONFIG = next(iter(json.loads(FIXTURE.read_text())["models"].values()))["config"]
STORY: dict[str, Any] = {
    "tp-size": 2,
    "context-length": 32768,
    "mem-fraction-static": 0.88,
    "max-running-requests": 16,
    "mamba-full-memory-ratio": 0.5,
}
WANT = deployment(serve={"args": STORY})
BEGIN = (
    "[x TP0] Load weight begin. avail mem={0} GB\n[x TP1] Load weight begin. avail mem={0} GB\n"
    "[x TP0] Load weight end. elapsed=1 s, type=Q, avail mem=20 GB, mem usage=25.64 GB.\n"
    "[x TP0] Using KV cache dtype: torch.bfloat16\n"
)
FULL = "[x] Received sigquit from a child process.\n"
SHORT = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n"
GRAPHS = "[x TP0] Capture cuda graph begin. This can take. avail mem=1.00 GB\n"
OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total "
    "capacity of 47.41 GiB of which 100.00 MiB is free.\n"
)


def cards() -> HostSmi:
    rows = [
        SmiGpu(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA RTX A6000",
            driver="580.126.09",
            memory_total_mib=49140,
            memory_used_mib=4,
            compute_cap="8.6",
            address=address,
        )
        for index, address in enumerate(WANT.gpus)
    ]
    return HostSmi(0, "", tuple(rows))


def world(**values: Any) -> Facts:
    return facts(fact(config=json.dumps(CONFIG), **values), cards())


def kv_failure(free: float) -> Script:
    return Script([(BEGIN.format(free) + SHORT + FULL).encode()], -9, True)


def graph_failure(mib: float = 470.0) -> Script:
    return Script([(BEGIN.format(46.31) + GRAPHS + OUT.format(mib) + FULL).encode()], -9, True)


def lines(events: list[Any]) -> str:
    return "\n".join(getattr(event, "text", "") for event in events)


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_wait, "ask", lambda *rest, **more: [READY])


def run(
    want: Deployment, own: DeploymentState, *scripts: Script, seen: Facts | None = None
) -> tuple[FakeJobs, list[Any]]:
    clock = Clock()
    step = LaunchStep(clock.now, clock.sleep)
    jobs = FakeJobs(list(scripts))
    made, events = context(want, own, jobs)
    there = seen or world()
    step.apply(made, there, step.plan(want, there, own))
    return jobs, events


def note(jobs: FakeJobs, index: int = -1) -> LaunchNote:
    return LaunchNote.parse(jobs.started[index]["files"]["launch"].decode())


def running(jobs: FakeJobs, verdict: str = "") -> ServerJob:
    """The newest job, as the probe sees it."""
    started = jobs.started[-1]
    identity = dataclasses.replace(IDENTITY, id=started["id"])
    mark = started["files"]["fingerprint"].decode().strip()
    return ServerJob(identity, True, "", mark, note(jobs), verdict, (4242,), ())


def machine(free: float = 46.31) -> Machine:
    return Machine(shape_of(CONFIG), "0.5.11", Gpu(49140, free), Load(25.64, 0.45))


# What is derived


def test_pools_that_do_not_fit_want_the_fraction_up() -> None:
    args = {**STORY, **MTP, "mem-fraction-static": 0.66}
    found = derive(machine(), args, "not-enough-memory", SHORT, "kv", Seen())
    assert found is not None
    assert found.way == "up"
    assert found.label in {"mem+0.02", "mem+0.04"}
    assert found.changes["mem-fraction-static"] in {0.68, 0.7}
    assert "KV tokens" in found.words


def test_graphs_that_do_not_fit_want_it_down_by_what_was_lacking() -> None:
    args = {**STORY, **MTP}
    cls = "graph-capture-out-of-memory"
    little = derive(machine(), args, cls, OUT.format(470), "graphs", Seen())
    assert little is not None
    assert (little.label, little.changes) == ("mem-0.02", {"mem-fraction-static": 0.86})
    more = derive(machine(), args, cls, OUT.format(1400), "graphs", Seen())
    assert more is not None and more.label == "mem-0.04"
    assert derive(machine(), args, cls, OUT.format(9000), "graphs", Seen()) is None


def test_nothing_small_helps_where_the_weights_do_not_fit() -> None:
    args = {**STORY, **MTP}
    assert derive(machine(20.0), args, "not-enough-memory", SHORT, "kv", Seen()) is None
    assert derive(machine(), args, "out-of-memory", OUT.format(9), "weights", Seen()) is None
    assert derive(machine(), args, "cuda-fault", "", "graphs", Seen()) is None
    assert derive(machine(), {"tp-size": "x"}, "not-enough-memory", "", "kv", Seen()) is None


def test_what_the_failed_launch_measured_counts() -> None:
    args = {**STORY, **MTP, "mem-fraction-static": 0.66}
    assert derive(machine(), args, "not-enough-memory", "", "kv", Seen(28.0, 25.64)) is None


def test_fewer_requests_where_the_fraction_is_at_its_end() -> None:
    args = {**STORY, **MTP, "mem-fraction-static": 0.94, "max-running-requests": 512}
    found = derive(machine(), args, "not-enough-memory", "", "kv", Seen())
    assert found is not None
    assert found.label == f"requests={found.changes['max-running-requests']}"
    assert found.changes == {"max-running-requests": 32}


# What the step does with it


def test_a_derived_step_comes_before_the_next_variant() -> None:
    own = state()
    jobs, events = run(WANT, own, graph_failure(), Script(list(UP)))
    assert [launch.variant for launch in own.launches] == ["mtp", "mtp~mem-0.02"]
    assert "--mem-fraction-static 0.86" in jobs.started[1]["script"]
    assert "--speculative-algorithm NEXTN" in jobs.started[1]["script"]
    assert own.launches[1].changes == {"mem-fraction-static": 0.86}
    assert own.launches[1].instead_of == {"mtp": "graph-capture-out-of-memory"}
    assert note(jobs).rung == Rung("mtp~mem-0.02", (("mem-fraction-static", 0.86),))
    assert "degraded: mtp~mem-0.02 runs in place of mtp" in lines(events)
    wanted = running(jobs)
    assert is_wanted(WANT, own.manifest, wanted.fingerprint, wanted.launch)
    edited = deployment(serve={"args": {**STORY, "mem-fraction-static": 0.87}})
    assert not is_wanted(edited, own.manifest, wanted.fingerprint, wanted.launch)


def test_one_step_each_way_at_most() -> None:
    own = state()
    want = deployment(
        serve={"args": STORY}, variants=[{"name": "mtp", "args": MTP}, {"name": "b"}, {"name": "c"}]
    )
    _, events = run(want, own, graph_failure(), graph_failure(), graph_failure(), Script(list(UP)))
    assert [launch.variant for launch in own.launches] == ["mtp", "mtp~mem-0.02", "b", "c"]
    assert list(own.launches[-1].instead_of) == ["mtp", "mtp~mem-0.02", "b"]
    assert lines(events).count("once more") == 1


def test_the_playbook_may_forbid_it() -> None:
    own = state()
    run(
        deployment(serve={"args": STORY, "memory_step": "never"}),
        own,
        graph_failure(),
        Script(list(UP)),
    )
    assert [launch.variant for launch in own.launches] == ["mtp", "no-mtp"]


def test_no_arithmetic_no_step() -> None:
    own = state()
    run(WANT, own, graph_failure(), Script(list(UP)), seen=facts(fact()))
    assert [launch.variant for launch in own.launches] == ["mtp", "no-mtp"]


def test_a_class_that_allows_no_move_derives_nothing() -> None:
    own = state()
    text = BEGIN.format(46.31) + "SafetensorError: header too large\n" + FULL
    with pytest.raises(StepFailed, match="weights-corrupt"):
        run(WANT, own, Script([text.encode()], -9, True))
    assert len(own.launches) == 1


def test_a_derived_launch_is_joined_after_a_lost_controller() -> None:
    own = state()
    jobs, _ = run(WANT, own, graph_failure(), Script(list(UP)))
    job = running(jobs)
    clock = Clock()
    step = LaunchStep(clock.now, clock.sleep)
    seen = world(job=job)
    again = FakeJobs([Script(list(UP))])
    again.running = graph_failure()
    fresh = state()
    made, _ = context(WANT, fresh, again)
    plan = step.plan(WANT, seen, fresh)
    assert plan.changes[0].title.startswith("wait for launch")
    step.apply(made, seen, plan)
    # It failed downwards before: no second step that way, the next variant comes.
    assert [launch.variant for launch in fresh.launches] == ["mtp~mem-0.02", "no-mtp"]
    assert list(fresh.launches[-1].instead_of) == ["mtp", "mtp~mem-0.02"]


# What is remembered


def proven(want: Deployment = WANT) -> DeploymentState:
    """mtp has failed for memory, no-mtp has passed its gates."""
    own = state()
    run(want, own, kv_failure(20.0), Script(list(UP)))
    assert own.launches[-1].variant == "no-mtp"
    own.launches[-1].verdict = "good"
    remember(own, want, own.launches[-1])
    own.launches[-1].verdict = "stopped"
    return own


def test_the_proven_one_is_started_first_and_said_why() -> None:
    own = proven()
    plan = LaunchStep().plan(WANT, world(), own)
    assert "starts with no-mtp, proven here on" in plan.reason
    assert "after mtp had failed (not-enough-memory)" in plan.reason
    assert "`--variant mtp` tries mtp again" in plan.reason
    assert "NEXTN" not in plan.changes[0].action.describe()
    jobs, events = run(WANT, own, Script(list(UP)))
    assert len(jobs.started) == 1
    assert note(jobs).preferred
    assert note(jobs).instead_of == {"mtp": "not-enough-memory"}
    assert "starts with no-mtp" in lines(events)
    job = running(jobs)
    assert is_wanted(WANT, own.manifest, job.fingerprint, job.launch)
    stopped = StopStep().plan(WANT, world(job=job), own)
    assert stopped.state is PlanState.NOTHING
    assert "degraded: no-mtp runs in place of mtp (not-enough-memory)" in stopped.reason
    # Asked for by name, the first is tried again; and once it was, the fall counts.
    named = dataclasses.replace(WANT, variant="mtp")
    assert not is_wanted(named, own.manifest, job.fingerprint, job.launch)
    tried, _ = run(named, own, kv_failure(20.0), Script(list(UP)))
    job = running(tried)
    assert is_wanted(named, own.manifest, job.fingerprint, job.launch)


@pytest.mark.parametrize(
    "changes",
    [
        {"serve": {"args": {**STORY, "context-length": 16384}}},
        {"engine": {"version": "0.5.12"}},
        {"variants": [{"name": "mtp", "args": {**MTP, "speculative-num-steps": 2}}, {"name": "x"}]},
    ],
)
def test_it_is_outdated_when_what_it_was_proven_for_changes(changes: dict[str, Any]) -> None:
    own = proven()
    assert preferred(own, WANT) is not None
    other = deployment(**{"serve": {"args": STORY}, **changes})
    assert preferred(own, other) is None
    assert validated(own, other) is None


def test_also_by_the_weights_the_lock_and_the_gpus() -> None:
    own = proven()
    assert preferred(own, dataclasses.replace(WANT, lock_text="torch==2.12.0")) is None
    entry = WANT.entry.model_copy(update={"gpus": ["0000:21:00.0"]})
    assert preferred(own, dataclasses.replace(WANT, entry=entry)) is None
    assert own.manifest is not None
    own.manifest = own.manifest.model_copy(update={"commit": "beef"})
    assert preferred(own, WANT) is None


def test_the_first_proven_again_is_preferred_no_more() -> None:
    own = proven()
    own.launches.append(Launch(id="l9", variant="mtp", started=1.0, argv=["x"]))
    remember(own, WANT, own.launches[-1])
    assert preferred(own, WANT) is None
    assert len(own.validated) == 1


def test_a_derived_set_is_preferred_with_its_changes() -> None:
    own = state()
    run(WANT, own, graph_failure(), Script(list(UP)))
    remember(own, WANT, own.launches[-1])
    jobs, _ = run(WANT, own, Script(list(UP)))
    assert "--mem-fraction-static 0.86" in jobs.started[0]["script"]
    assert own.launches[-1].variant == "mtp~mem-0.02"


def test_a_rung_that_was_only_left_out_is_tried_when_nothing_speaks_against_it() -> None:
    own = state()
    launch = Launch(id="l", variant="no-mtp", started=1.0, instead_of={"mtp": "left-out"})
    remember(own, WANT, launch)
    assert preferred(own, WANT) is None


@pytest.mark.parametrize(("cls", "said"), [("", "had failed;"), ("nccl", "had failed (nccl);")])
def test_why_another_is_preferred(cls: str, said: str) -> None:
    own = state()
    remember(own, WANT, Launch(id="l", variant="no-mtp", started=1.0, instead_of={"mtp": cls}))
    found = preferred(own, WANT)
    assert found is not None
    assert said in why_preferred(WANT, found)


def test_a_changed_first_choice_is_tried_although_a_lower_rung_runs() -> None:
    own = state()
    jobs, _ = run(WANT, own, kv_failure(20.0), Script(list(UP)))
    job = running(jobs)
    assert is_wanted(WANT, own.manifest, job.fingerprint, job.launch)
    eased = deployment(
        serve={"args": STORY},
        variants=[{"name": "mtp", "args": {**MTP, "max-running-requests": 4}}, {"name": "no-mtp"}],
    )
    assert not is_wanted(eased, own.manifest, job.fingerprint, job.launch)
    old = LaunchNote.parse('{"variant": "no-mtp", "fell_from": ["mtp"]}')
    assert is_wanted(WANT, own.manifest, job.fingerprint, old)


def test_the_state_file_keeps_it_and_refuses_what_it_does_not_know() -> None:
    own = proven()
    whole = HostState(host="kpro5", deployments={"qwen": own})
    again = HostState.model_validate_json(whole.model_dump_json())
    assert preferred(again.deployments["qwen"], WANT) == preferred(own, WANT)
    document = json.loads(whole.model_dump_json())
    document["deployments"]["qwen"]["validated"][0]["surprise"] = 1
    with pytest.raises(ValueError, match="surprise"):
        HostState.model_validate(document)
    old = {"host": "kpro5", "deployments": {"qwen": {"launches": []}}}
    assert HostState.model_validate(old).deployments["qwen"].validated == []


def test_a_fall_begins_below_what_was_proven() -> None:
    want = deployment(
        serve={"args": STORY},
        variants=[{"name": "mtp", "args": MTP}, {"name": "no-mtp"}, {"name": "c"}],
    )
    fall = Fall.begin(want, proven(want))
    assert [rung.variant for rung in fall.left] == ["no-mtp", "c"]
    assert fall.reasons == {"mtp": "not-enough-memory"}


def test_a_launch_note_survives_its_file() -> None:
    whole = LaunchNote(
        "a~mem-0.02", ("a",), ("cls",), ("f",), (("mem-fraction-static", 0.86),), True
    )
    assert LaunchNote.parse(whole.line()) == whole
    assert LaunchNote.parse("garbage") == LaunchNote()
