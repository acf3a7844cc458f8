"""Changes run as they were shown: events, evidence, jobs joined or ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer import errors
from deployer.deployment import Deployment
from deployer.events import Bus, ChangeDone, ChangeStarted, Event, JobStarted, Progress
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Change, Facts, Plan, Procedure, RunJob, Shell, Where, WriteFile
from deployer.playbook import Playbook
from deployer.remote.jobs import Jobs
from deployer.remote.transport import Transport
from deployer.state import DeploymentState
from deployer.steps.apply import run_changes
from deployer.steps.base import StepContext
from tests.local_transport import LocalTransport, ScriptedTransport, shell_path

ADDRESS = "0000:21:00.0"
WANT = Deployment(
    host_name="kpro5",
    name="qwen",
    host=Host.model_validate({"ssh": {"address": "x"}, "gpus": [{"address": ADDRESS}]}),
    entry=DeploymentEntry(playbook="p"),
    playbook=Playbook.model_validate(
        {
            "model": {"repo": "a/b", "path": "/m", "served_name": "b"},
            "driver": {"version": "1.2"},
            "engine": {"version": "0.5.11", "lock": "l", "venv": "/v"},
        }
    ),
    playbook_name="p",
    lock_text="",
)


class Clock:
    """Time that only a sleep moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Context(StepContext):
    """Jobs in a folder of the test, with a short poll."""

    root = "/nowhere"
    options: dict[str, Any] = {}  # noqa: RUF012

    def jobs(self, where: Where) -> Jobs:
        return Jobs(self.on(where), self.root, **self.options)


def context(transport: Transport) -> tuple[Context, list[Event]]:
    events: list[Event] = []
    made = Context(
        WANT,
        "r1",
        Bus(events.append),
        {Where.HOST: transport, Where.GUEST: transport},
        Facts,
        DeploymentState(),
        lambda: None,
        step="venv",
    )
    return made, events


@pytest.fixture
def local(tmp_path: Path) -> Iterator[tuple[Context, list[Event]]]:
    made, events = context(LocalTransport(shell_path("dash", tmp_path), name="kpro5/129"))
    made.root = str(tmp_path / "jobs")
    made.options = {"sleep": lambda seconds: None}
    yield made, events
    for name in ("build",):
        status = made.jobs(Where.GUEST).find(name)
        if status is not None:
            assert made.jobs(Where.GUEST).stop(status.identity, grace_s=0, kill_s=5).stopped


def plan(*actions: Shell | WriteFile | RunJob | Procedure) -> Plan:
    return Plan.change(
        "because", *(Change(f"change {n}", "why", action) for n, action in enumerate(actions))
    )


def test_changes_run_in_order_and_are_told(
    local: tuple[Context, list[Event]], tmp_path: Path
) -> None:
    made, events = local
    target = tmp_path / "file"
    run_changes(
        made,
        plan(
            WriteFile(Where.HOST, str(target), b"one\n", 0o600),
            Shell(Where.GUEST, f"cat >>{target}", stdin=b"two\n"),
        ),
    )
    assert target.read_text() == "one\ntwo\n" and target.stat().st_mode & 0o777 == 0o600
    told = [(type(event), getattr(event, "title", "")) for event in events]
    assert told == [
        (ChangeStarted, "change 0"),
        (ChangeDone, "change 0"),
        (ChangeStarted, "change 1"),
        (ChangeDone, "change 1"),
    ]
    assert (events[0].host, events[0].deployment) == ("kpro5", "kpro5/qwen")


def test_a_job_for_want_of_room_says_what_frees_some(local: tuple[Context, list[Event]]) -> None:
    made, _ = local
    for said, expected in (
        ("OSError: [Errno 28] No space left on device", "`deploy gc kpro5/qwen` shows"),
        ("it broke", "the whole log: "),
    ):
        job = RunJob(Where.GUEST, "build", f"echo '{said}'; exit 3")
        with pytest.raises(errors.StepFailed, match="build") as caught:
            run_changes(made, plan(job))
        assert expected in caught.value.fix and "/log on kpro5/129" in caught.value.fix
        assert ("deploy gc" in caught.value.fix) is ("gc" in expected)


def test_a_failing_command_stops_the_plan(local: tuple[Context, list[Event]]) -> None:
    made, events = local
    script = "i=0; while [ $i -lt 30 ]; do echo line $i >&2; i=$((i+1)); done; exit 9"
    with pytest.raises(errors.RemoteCommandFailed, match=r"change 0: .* status 9") as caught:
        run_changes(made, plan(Shell(Where.GUEST, script), Shell(Where.GUEST, "true")))
    assert caught.value.where == "kpro5/129"
    assert caught.value.evidence[-1] == "line 29" and len(caught.value.evidence) == 20
    assert [type(event) for event in events] == [ChangeStarted]


def test_a_job_is_followed_to_its_end(local: tuple[Context, list[Event]], tmp_path: Path) -> None:
    made, events = local
    script = (
        'echo \'{"what": "wheels", "done": 3, "total": 5, "unit": "files"}\' >progress\n'
        "cat input >" + str(tmp_path / "out")
    )
    job = RunJob(Where.GUEST, "build", script, files={"input": b"hello"})
    run_changes(made, plan(job))
    assert (tmp_path / "out").read_text() == "hello"
    started = next(event for event in events if isinstance(event, JobStarted))
    assert started.job.startswith("build/") and started.pid > 1 and not started.attached
    figures = [event for event in events if isinstance(event, Progress)]
    assert [(p.what, p.done, p.total, p.unit) for p in figures] == [("wheels", 3, 5, "files")]


def test_an_alive_job_is_joined(local: tuple[Context, list[Event]], tmp_path: Path) -> None:
    made, events = local
    go = tmp_path / "go"
    first = made.jobs(Where.GUEST).start("build", "1", f"until [ -e {go} ]; do sleep 0.02; done")
    made.options = {"sleep": lambda seconds: go.touch()}
    run_changes(made, plan(RunJob(Where.GUEST, "build", "exit 9")))
    started = next(event for event in events if isinstance(event, JobStarted))
    assert (started.job, started.pid, started.attached) == ("build/1", first.pid, True)


@pytest.mark.parametrize(
    ("script", "how"),
    [("echo why; exit 3", "ended with status 3"), ("echo why; kill -9 $$", "by signal 9")],
)
def test_a_failing_job_shows_its_last_lines(
    local: tuple[Context, list[Event]], script: str, how: str
) -> None:
    made, _ = local
    with pytest.raises(errors.StepFailed, match=how) as caught:
        run_changes(made, plan(RunJob(Where.GUEST, "build", script)))
    assert caught.value.evidence[0] == "why"
    assert made.root in caught.value.fix


def test_a_job_that_stands_still_is_ended(local: tuple[Context, list[Event]]) -> None:
    made, _ = local
    clock = Clock()
    made.options = {"clock": clock, "sleep": clock.sleep}
    with pytest.raises(errors.StepFailed, match=r"for 30 s; it was stopped") as caught:
        run_changes(
            made,
            plan(RunJob(Where.GUEST, "build", "echo stuck; exec sleep 7500", stall_s=30)),
        )
    assert caught.value.evidence == ("stuck",)
    status = made.jobs(Where.GUEST).find("build")
    assert status is not None and not status.alive


def report(alive: str, ended: str, log: str, progress: str) -> str:
    return (
        f"id 1\npid 10\nstart 20\nboot b\nsession 9\nalive {alive}\nexit {ended}\n"
        f"inode 5\nfrom 0\nprogress {progress}\n\n{log}"
    )


def test_any_progress_line_can_be_shown() -> None:
    lines = ["half a li", "[1]", '{"done": "x", "total": 1e999}', '{"done": 1}', '{"done": 1}']
    transport = ScriptedTransport(
        "attached\n" + report("yes", "", "", ""),
        *[report("yes", "", "", line) for line in lines],
        report("no", "code 0", "", '{"done": 1}'),
        "",
    )
    made, events = context(transport)
    made.options = {"sleep": lambda seconds: None}
    run_changes(made, plan(RunJob(Where.GUEST, "build", "x")))
    shown = [(p.what, p.done, p.detail) for p in events if isinstance(p, Progress)]
    assert shown == [
        ("change 0", 0, "half a li"),
        ("change 0", 0, "[1]"),
        ("change 0", 0, ""),
        ("change 0", 1, ""),
    ]


def test_old_jobs_are_removed_after_a_success(
    local: tuple[Context, list[Event]], tmp_path: Path
) -> None:
    made, _ = local
    for _ in range(7):
        run_changes(made, plan(RunJob(Where.GUEST, "build", "true")))
    kept = [path for path in (tmp_path / "jobs" / "build").iterdir() if path.name[0] == "2"]
    assert len(kept) == 5


def test_a_vanished_job_is_a_failure() -> None:
    transport = ScriptedTransport("started\n" + report("yes", "", "", ""), report("no", "", "", ""))
    with pytest.raises(errors.StepFailed, match="vanished without writing its end"):
        run_changes(context(transport)[0], plan(RunJob(Where.GUEST, "build", "x")))


def test_a_lost_connection_leaves_the_job_alone() -> None:
    clock = Clock()
    transport = ScriptedTransport(
        "started\n" + report("yes", "", "", ""), *[errors.DeadlineExceeded("no answer")] * 99
    )
    made, _ = context(transport)
    made.options = {"clock": clock, "sleep": clock.sleep}
    with pytest.raises(errors.DeadlineExceeded, match="no answer"):
        run_changes(made, plan(RunJob(Where.GUEST, "build", "x")))


def test_a_procedure_is_the_steps_own_work() -> None:
    made, _ = context(ScriptedTransport())
    with pytest.raises(errors.StepFailed, match="step venv must override apply"):
        run_changes(made, plan(Procedure(Where.HOST, "do it")))


def test_a_file_is_shown_as_a_diff_and_written_while_it_is_still_that(
    local: tuple[Context, list[Event]], tmp_path: Path
) -> None:
    path = tmp_path / "vfio.conf"
    path.write_text("options a\nids\n")
    action = WriteFile(Where.HOST, str(path), b"options a\n# ids\n", before=b"options a\nids\n")
    assert action.describe().splitlines() == [
        f"write {path} (16 bytes, mode 0644)",
        f"--- a{path}",
        f"+++ b{path}",
        "@@ -1,2 +1,2 @@",
        " options a",
        "-ids",
        "+# ids",
    ]
    run_changes(local[0], Plan.change("x", Change("edit", "x", action)))
    assert path.read_text() == "options a\n# ids\n"
    with pytest.raises(errors.StepFailed, match="no longer what the plan was made from"):
        run_changes(local[0], Plan.change("x", Change("edit", "x", action)))
    new = WriteFile(Where.HOST, str(tmp_path / "new"), b"x\n", before=b"")
    assert new.diff()[-1] == "+x"
    run_changes(local[0], Plan.change("x", Change("new", "x", new)))
