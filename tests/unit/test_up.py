"""One host's run: what it claims, what it records, and that no error hides another's result."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import serverworld as world

from deployer import up
from deployer.deployment import Deployment, worker_url
from deployer.engine import Outcome, Selection
from deployer.errors import CommandOverdue, Defect, LockUnknown, StepFailed
from deployer.events import Bus, Event, RunFinished
from deployer.locallock import LocalLock
from deployer.model import Change, Facts, Plan, Probe, Procedure, Where
from deployer.remote.transport import Transport
from deployer.state import DeploymentState, Launch
from deployer.steps.base import Step, StepContext
from deployer.steps.serving_fact import ServingFact
from deployer.steps.verify import VerifyStep
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult, address, proven

WANT = world.deployment()


class Session:
    """The double of HostSession: facts from a list, and whether the host lock was asked for."""

    facts: ClassVar[Facts] = Facts()
    locks: ClassVar[list[str]] = []

    def __init__(self, host: str, entry: object, base: Path, note: object) -> None:
        self.host = host

    def transports(self, want: Deployment) -> Mapping[Where, Transport]:
        return {}

    def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
        return self.facts

    def want_lock(self, run_id: str) -> None:
        self.locks.append(run_id)

    def entered(self, step: str) -> None:
        pass

    def wake(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self, on_problem: Callable[[str], None]) -> None:
        pass


class Fake(Step):
    """A step that has something to do until it ran; `error` is raised when it runs."""

    def __init__(self, name: str, error: BaseException | None = None, idle: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self.error = error
        self.idle = idle

    def probes(self, want: Deployment) -> list[Probe]:
        return []

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        if self.idle:
            return Plan.nothing("as wanted")
        return Plan.change("work", Change("work", "work", Procedure(Where.HOST, "work")))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        if self.error is not None:
            raise self.error
        self.idle = True


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> type[Session]:
    monkeypatch.setattr(up, "HostSession", Session)
    monkeypatch.setattr(Session, "facts", Facts())
    monkeypatch.setattr(Session, "locks", [])
    return Session


def run(
    tmp_path: Path,
    steps: list[Step],
    wants: Sequence[Deployment] = (WANT,),
    *,
    selection: Selection | None = None,
    dry_run: bool = False,
    confirm: up.Confirm | None = None,
) -> tuple[list[DeploymentResult], list[Event]]:
    events: list[Event] = []
    options = UpOptions(
        base=tmp_path / "inventory",
        dry_run=dry_run,
        selection=selection or Selection(),
        steps=lambda: steps,
        confirm=confirm,
        environ={},
    )
    return up.up_host("kpro5", wants, options, Bus(events.append)), events


def finished(events: Sequence[Event]) -> list[RunFinished]:
    return [event for event in events if isinstance(event, RunFinished)]


def test_an_unforeseen_error_is_a_result_and_ends_the_record(tmp_path: Path) -> None:
    [result], events = run(tmp_path, [Fake("a", KeyError("x"))])
    assert isinstance(result.error, Defect)
    assert "KeyError" in result.error.what and "test_up.py" in "\n".join(result.error.evidence)
    assert [one.exit_code for one in finished(events)] == [1]
    [record] = (tmp_path / ".deploy" / "runs").iterdir()
    last = json.loads(record.read_text().splitlines()[-1])
    assert last["event"] == "run_finished" and last["exit_code"] == 1


@pytest.mark.parametrize("owner", [True, False], ids=["no owner of the lock", "no record"])
def test_a_full_disk_of_this_machine_is_a_result_of_its_host(
    tmp_path: Path, owner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hosts of the run go on, also when nothing at all can be recorded of this one."""

    class Full:
        def write(self, line: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    opened = Path.open

    def opens(self: Path, *words: Any, **more: Any) -> Any:
        if self.suffix != ".jsonl":
            return opened(self, *words, **more)
        return Full() if owner else Full().write(b"")

    def no_lock(self: LocalLock) -> None:
        raise LockUnknown("the owner of the lock of kpro5 cannot be recorded: No space")

    monkeypatch.setattr(Path, "open", opens)
    monkeypatch.setattr(LocalLock, "acquire", no_lock)
    results, events = run(tmp_path, [Fake("a")], [WANT, WANT])
    what = "the owner of the lock" if owner else "the record of the run cannot be written: No space"
    assert all(what in str(one.error) for one in results) and len(results) == 2
    assert [what in one.summary for one in finished(events)] == [True]


def test_the_next_deployment_runs_after_a_failure_but_not_after_the_deadline(
    tmp_path: Path,
) -> None:
    results, events = run(tmp_path, [Fake("a", StepFailed("no"))], [WANT, WANT])
    assert len(finished(events)) == 2
    results, events = run(tmp_path, [Fake("a", CommandOverdue("late"))], [WANT, WANT])
    assert len(finished(events)) == 1
    assert [type(one.error) for one in results] == [CommandOverdue, CommandOverdue]


def test_an_interrupt_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [Fake("a", KeyboardInterrupt())])
    [record] = (tmp_path / ".deploy" / "runs").iterdir()
    assert json.loads(record.read_text().splitlines()[-1])["exit_code"] == 130


def test_a_dry_run_writes_nothing_and_tells_a_bad_state_file(tmp_path: Path) -> None:
    run(tmp_path, [Fake("a")], dry_run=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".deploy" / "state").mkdir(parents=True)
    (tmp_path / ".deploy" / "state" / "kpro5.json").write_text("{")
    [result], _ = run(tmp_path, [Fake("a")], dry_run=True)
    assert result.exit_code == 2


def test_a_record_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / ".deploy").write_text("a file")
    [result], _ = run(tmp_path, [Fake("a")])
    assert result.error is not None and "record of the run" in result.error.what


def test_only_asks_and_locks_for_the_chosen_step(tmp_path: Path, session: type[Session]) -> None:
    def never(want: Deployment, outcome: Outcome) -> bool:
        raise AssertionError("asked")

    steps: list[Step] = [Fake("a"), Fake("b", idle=True)]
    [result], events = run(tmp_path, steps, selection=Selection(only="b"), confirm=never)
    assert result.error is None and session.locks == []
    assert result.left == ["a"]
    assert finished(events)[0].summary == "nothing was changed; left to do: a"
    shown: list[Outcome] = []

    def note(want: Deployment, outcome: Outcome) -> bool:
        shown.append(outcome)
        return True

    run(tmp_path, steps, selection=Selection(only="a"), confirm=note)
    assert list(shown[0].plans) == ["a"] and len(session.locks) == 1


def test_only_the_launch_that_is_alive_is_claimed() -> None:
    steps: list[Step] = [VerifyStep()]
    own = world.state()
    own.launches = [Launch(id="old", variant="mtp", started=1.0, verdict="good")]
    own.known_good = "old"
    dead = world.facts(world.fact(job=world.server_job(WANT, alive=False)), ServingFact())
    assert proven(WANT, steps, dead, own) == {}
    job = world.server_job(WANT)
    server = world.fact(job=job, listening=True, owners=(world.owner(),))
    unjudged = world.facts(server, ServingFact(launch=job.identity.id))
    assert proven(WANT, steps, unjudged, own) == {}
    good = ServingFact(job.identity.id, "good", 5.0, {"tps": 2.0}, "")
    claim = proven(WANT, steps, world.facts(server, good), own)
    assert claim["launch"] == job.identity.id and claim["figures"] == {"tps": 2.0}
    assert claim["endpoint"] == "http://192.0.2.5:30000/v1"


@pytest.mark.parametrize("written", ["2001:db8::5", "[2001:db8::5]"])
def test_an_ipv6_address_stands_in_brackets_in_a_url(written: str) -> None:
    ssh = WANT.host.ssh.model_copy(update={"address": written})
    host = WANT.host.model_copy(update={"ssh": ssh, "containers": {}})
    entry = WANT.entry.model_copy(update={"container": None, "url": None})
    want = dataclasses.replace(WANT, host=host, entry=entry)
    assert address(want) == f"http://[2001:db8::5]:{want.port}/v1"
    assert worker_url(host, entry, want.playbook) == f"http://[2001:db8::5]:{want.port}"
