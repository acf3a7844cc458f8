"""A server that this tool did not start and ended for its own: it comes back when that fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from serverworld import (
    BOOT,
    MANIFEST,
    Clock,
    FakeJobs,
    Script,
    context,
    deployment,
    fact,
    facts,
    owner,
    server_job,
    state,
)

from deployer.errors import StepFailed, Unreachable
from deployer.events import Event, Note
from deployer.model import PlanState, ProbeOutput
from deployer.remote.transport import Answer
from deployer.rollback_steps import AdoptedAgain, WrittenDown, rollback_steps, written_probe
from deployer.state import Launch, Migration
from deployer.steps import adopted, stop, verify
from deployer.steps.failed_want import remember_failure
from deployer.steps.launch import LaunchStep
from deployer.steps.order import all_steps
from deployer.steps.stop import StopStep
from deployer.steps.stop_proof import StopProven

WANT = deployment(stop={"old_server": "adopt"})
COMMAND = "/usr/bin/python3 -m sglang.launch_server --port 30000 --chat-template 'a b'"
WORDS = "/usr/bin/python3\0-m\0sglang.launch_server\0--port\x0030000\0--chat-template\0a b\0"


class Guest:
    """The target: what is written down there, and how a start ends."""

    name = "kpro5/129"

    def __init__(self, *, kept: str = WORDS, said: str = "", listens: int = 2) -> None:
        self.kept, self.listens = kept, listens
        self.said = said or json.dumps({"pid": 77, "start": 5})
        self.lives = True
        self.unit = ""
        self.ran: list[str] = []

    def run(self, script: str, *, args: Sequence[str] = (), **more: Any) -> Answer:
        if script == adopted.KEEP:
            assert list(args) == ["/var/lib/deployer/adopted/qwen", "7", "1000", BOOT]
            return self._did("keep", self.unit)
        if "kept/words" in script and len(script) < 80:
            return self._did("kept", self.kept)
        if script == adopted.FORGET:
            self.kept = ""
            return self._did("forget")
        if args and "Popen" in args[0]:
            return self._did("start", self.said)
        if "systemctl stop" in script:
            return self._did(f"stop {args[0]}")
        if '"/proc/$1/stat"' in script and len(script) < 200:
            return Answer(0 if self.lives else 1, b"", b"")
        if "now_boot" in script:
            self.listens -= 1
            listen = "listen=x\n" if self.listens <= 0 else ""
            return Answer(0, f"now_boot={BOOT}\n{listen}".encode(), b"")
        return Answer(0, b"", b"")

    def _did(self, what: str, said: str = "") -> Answer:
        self.ran.append(what)
        return Answer(0, said.encode(), b"")

    def close(self) -> None: ...


def failing(guest: Guest, own: Any = None, jobs: FakeJobs | None = None) -> tuple[str, list[Event]]:
    """What a launch says whose every rung dies at once."""
    own = own or state()
    jobs = jobs or FakeJobs([Script([], 3, True), Script([], 3, True)])
    made, events = context(WANT, own, jobs, guest=guest)  # type: ignore[arg-type]
    clock = Clock()
    step = LaunchStep(clock.now, clock.sleep)
    seen = facts(fact())
    with pytest.raises(StepFailed, match="died-silent") as caught:
        step.apply(made, seen, step.plan(WANT, seen, own))
    return caught.value.what, events


def test_a_launch_that_fails_brings_back_what_had_the_port() -> None:
    guest = Guest()
    what, events = failing(guest)
    assert what.endswith(
        "what had port 30000 before, which this tool did not start, serves again as pid 77: "
        + COMMAND
    )
    assert guest.ran == ["kept", "start", "forget"]
    assert any(isinstance(one, Note) and "serves again as pid 77" in one.text for one in events)
    guest = Guest(kept="")
    what, _ = failing(guest)
    assert "what had port" not in what and guest.ran == ["kept"]


@pytest.mark.parametrize("how", ["at once", "before it listens", "never listens"])
def test_one_that_does_not_come_back_is_told_with_its_command_line(how: str) -> None:
    guest = Guest(listens=10**9)
    if how == "at once":
        guest.said = json.dumps({"problem": "it ended at once with\nstatus 3"})
    guest.lives = how == "never listens"
    what, _ = failing(guest)
    expected = {
        "at once": "could not be started again: it ended at once with status 3; its command line: ",
        "before it listens": "could not be started again: it ended before it listened; its command",
        "never listens": "it lives, and does not listen on port 30000 after 1800 s; its command",
    }
    assert expected[how] in what and COMMAND in what and "\n" not in what
    assert guest.ran == ["kept", "start"], "it stays written down"


def test_a_known_good_launch_of_ours_comes_first() -> None:
    own = state()
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
    good.verdict, own.known_good = "stopped", "old"
    own.launches.append(good)
    jobs = FakeJobs([Script([], 3, True), Script([], 3, True)])
    what, _ = failing(Guest(), own, jobs)
    assert "launch old did not start again either (died-silent); what had port 30000" in what


def test_a_connection_that_is_lost_meanwhile_does_not_hide_the_failure() -> None:
    class Cut(Guest):
        def run(self, script: str, *, args: Sequence[str] = (), **more: Any) -> Answer:
            if "kept/words" in script:
                raise Unreachable("cut")
            return super().run(script, args=args, **more)

    what, _ = failing(Cut())
    assert what.endswith("whether anything else had the port before could not be seen: cut")


def test_it_is_written_down_before_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    guest, order = Guest(), list[str]()
    guest.unit = "old.service\n"

    def ask(*words: Any, **more: Any) -> Any:
        order.extend(guest.ran)
        return [{"stopped": True, "how": "TERM"}]

    monkeypatch.setattr(stop, "ask", ask)
    monkeypatch.setattr(StopProven, "port_is_free", lambda *words, **more: "free")
    monkeypatch.setattr(StopProven, "gpu_memory", lambda *words: "back")
    seen = facts(fact(owners=(owner(7),), listening=True))
    step = StopStep()
    made, events = context(WANT, state(), FakeJobs(), guest=guest)  # type: ignore[arg-type]
    plan = step.plan(WANT, seen, made.state)
    assert "if no launch comes up in its place it is started again" in plan.changes[0].undo
    monkeypatch.setattr(StopStep, "_arguments_are_accepted", lambda *words: None)
    step.apply(made, seen, plan)
    assert order == ["keep", "stop old.service"]
    said = [one.text for one in events if isinstance(one, Note)]
    assert any("`systemctl disable old.service`" in text for text in said)
    # What a dead launch of ours left is no server of somebody else.
    guest.ran.clear()
    ours = facts(fact(owners=(owner(7, job="server-qwen/20261130-065012-zz"),), listening=True))
    step.apply(made, ours, step.plan(WANT, ours, made.state))
    assert guest.ran == []


@pytest.mark.parametrize("left", ["", "listening", "alive", "nothing served", "down"])
def test_a_stop_that_fails_at_its_end_brings_back_what_it_ended(left: str) -> None:
    """GPU memory that nobody holds did not come back: the launch is not even tried."""
    guest, own, clock = Guest(), state(), Clock()
    before = fact(owners=(owner(7),), listening=True)
    if left == "nothing served":
        before = fact()
    after = {
        "listening": fact(owners=(owner(9, "nginx"),), listening=True),
        "alive": fact(job=server_job(WANT)),
    }.get(left, fact())
    made, _ = context(WANT, own, FakeJobs(), guest=guest)  # type: ignore[arg-type]
    made.reprobe = lambda: facts(after)
    own.launches.append(Launch(id="x", variant="mtp", started=1.0, verdict="good"))
    step = StopStep(clock.now, clock.sleep, restores=left != "down")
    error = StepFailed("GPU memory did not come back")
    step.undo(made, facts(before), step.plan(WANT, facts(before), own), error)
    if left:
        assert error.what == "GPU memory did not come back" and guest.ran == []
        return
    assert "come back; what had port 30000 before, which" in error.what
    assert guest.ran == ["kept", "start", "forget"] and own.launches[0].verdict == "stopped"
    assert next(one for one in all_steps() if one.name == "stop").restores  # type: ignore[attr-defined]


def test_what_failed_does_not_end_it_again() -> None:
    own = state()
    seen = facts(fact(owners=(owner(7, "python -m sglang.launch_server"),), listening=True))
    assert StopStep().plan(WANT, seen, own).state is PlanState.CHANGES
    remember_failure(own, WANT, "not-enough-memory: x", 1, "less")
    plan = StopStep().plan(WANT, seen, own)
    assert plan.state is PlanState.BLOCKED and plan.exit_code == 1
    assert "exactly this (variant mtp) failed at" in plan.reason
    assert (
        "pid 7 (python -m sglang.launch_server) has port 30000, and was left alone" in plan.reason
    )
    assert "change the playbook (less); `deploy up kpro5/qwen --retry`" in plan.fix
    assert StopStep(retry=True).plan(WANT, seen, own).state is PlanState.CHANGES
    # The wanted launch that lost its port to it has not failed.
    both = fact(job=server_job(WANT), owners=(owner(7),), listening=True)
    own.failed.clear()
    assert StopStep().plan(WANT, facts(both), own).state is PlanState.CHANGES


def test_a_rollback_that_fails_brings_it_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch of ours had served: what the rollback ended was somebody else's."""
    own_step = next(
        one
        for one in rollback_steps(Launch(id="a", variant="mtp", started=1.0))
        if isinstance(one, LaunchStep)
    )
    own_guest = Guest()
    one, _ = context(WANT, state(), FakeJobs(), guest=own_guest)  # type: ignore[arg-type]
    assert own_step.restore(one, "", ()) == "" and own_guest.ran == [], "once is enough"
    clock, guest, ended = Clock(), Guest(), list[str]()
    step, nothing, there = AdoptedAgain(), WrittenDown(""), WrittenDown(COMMAND)
    step.now, step.sleep = clock.now, clock.sleep
    free = fact()
    assert step.plan(WANT, facts(), state()).state is PlanState.UNKNOWN
    assert step.plan(WANT, facts(free, nothing), state()).reason == "nothing had served before"
    taken = fact(owners=(owner(9, "nginx"),), listening=True)
    assert "is held by pid 9" in step.plan(WANT, facts(taken, there), state()).reason
    assert "is held by pid 9" in step.holder
    runs = facts(fact(job=server_job(WANT), owners=(owner(),), listening=True), there)
    plan = step.plan(WANT, runs, state())
    assert [one.title for one in plan.changes][1:] == ["start what had the port"]
    monkeypatch.setattr(StopStep, "apply", lambda *words: ended.append("ours"))
    made, _ = context(WANT, state(), FakeJobs(), guest=guest)  # type: ignore[arg-type]
    step.apply(made, runs, plan)
    assert ended == ["ours"] and guest.ran == ["kept", "start", "forget"]
    after = step.plan(WANT, facts(free, nothing), state())
    assert after.state is PlanState.NOTHING and "serves again as pid 77" in after.reason
    step, guest.kept, guest.listens, guest.lives = AdoptedAgain(), WORDS, 10**9, False
    step.now, step.sleep = clock.now, clock.sleep
    with pytest.raises(StepFailed, match="it ended before it listened; its command line"):
        step.apply(made, facts(free, there), plan)


def test_its_words_travel_through_a_look() -> None:
    output = ProbeOutput(0, WORDS.encode(), b"")
    probe = written_probe(WANT)
    assert probe.parse(output) == WrittenDown(COMMAND)
    assert probe.parse(ProbeOutput(0, b"", b"")) == WrittenDown("")


def test_a_good_verdict_ends_the_need_but_not_while_a_migration_may_be_taken_back() -> None:
    own = state(MANIFEST)
    made, _ = context(WANT, own, FakeJobs())
    needless = verify._needless
    assert needless(made, "good") == "/var/lib/deployer/adopted/qwen"
    assert needless(made, "failed: x") == ""
    own.migration = Migration(id="m", source="a/q", destination="kpro5/qwen", phase="prepare")
    assert needless(made, "good") == ""
    own.migration.outcome = "done"
    assert needless(made, "good") != ""
    own.migration.adopted = "python serve.py"
    assert needless(made, "good") == "", "its --abort starts that again"
