"""After a failed gate of `up`: which side is broken, and what serves then."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from gateworld import WANT, Model, Reply, ready
from serverworld import (
    BOOT,
    IDENTITY,
    MTP,
    Context,
    FakeJobs,
    Script,
    deployment,
    fact,
    facts,
    owner,
    server_job,
    state,
)

from deployer.errors import ConnectionLost, GateFailed, RemoteCommandFailed
from deployer.events import Event, GateChecked, Note
from deployer.model import Facts
from deployer.playbook import Variant
from deployer.remote.transport import Answer
from deployer.state import DeploymentState, Launch
from deployer.steps import gates_bench, launch_wait, verify_fallback
from deployer.steps.failed_want import failed_before
from deployer.steps.server_wanted import LaunchNote, is_wanted
from deployer.steps.serving_fact import ServingFact
from deployer.steps.verify import VerifyStep
from deployer.steps.verify_fallback import Fallback

SERVING = fact(job=server_job(WANT), owners=(owner(),), listening=True)
UP = [b"[x] Load weight begin.\n", b"[x] The server is fired up and ready to roll!\n"]
OOM = b"[x] RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n"


class World:
    """`mtp` runs and is bad; what a later launch says is up to `later`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        later: bool,
        *,
        jobs: FakeJobs | None = None,
        own: DeploymentState | None = None,
        variants: list[dict[str, Any]] | None = None,
        **rules: Any,
    ) -> None:
        gates = {"burst": 3, "min_tokens": 40, "alive_after_s": 1, **rules}
        want = deployment(gates=gates)
        if variants:
            found = [Variant.model_validate(one) for one in variants]
            playbook = want.playbook.model_copy(update={"variants": found})
            want = dataclasses.replace(want, playbook=playbook)
        self.jobs = jobs or FakeJobs([Script(list(UP))])
        self.ended: list[str] = []

        def speak(request: Reply, reply: Reply) -> Reply | None:
            launched = len(self.jobs.started)
            bad = launched == 0 or not later
            essay = str(request["prompt"]).startswith("Explain")
            return {**reply, "content": "thinking\n\n" * 60} if bad and essay else None

        self.model = Model(speak)
        made, events, guest, clock = ready(
            monkeypatch, self.model, self.jobs, want=want, own=own, smi=lambda: b""
        )
        self.context: Context = made
        self.events: list[Event] = events
        self.guest = guest
        usual = Model().ask(None, None, [{"do": "ready"}])[0]
        monkeypatch.setattr(launch_wait, "ask", lambda *words, **more: [usual])
        answer = {"ok": True, "alive": True, "owned": True, "models": {"ids": ["tiny"]}}
        self.light: Reply = {**answer, "completion": {"status": 200, "content": "Hello"}}
        monkeypatch.setattr(verify_fallback, "ask", lambda *words, **more: [self.light])
        monkeypatch.setattr(Fallback, "end_launch", lambda one: self.end())
        self.step = VerifyStep(clock.now, clock.sleep)

    def end(self) -> None:
        state = self.context.state
        self.ended.append(state.launches[-1].id)
        for launch in state.launches:
            if launch.verdict in {"starting", "ready", "good"}:
                launch.verdict = "stopped"

    def fail(self) -> GateFailed:
        want = self.context.want
        job = server_job(want)
        seen: Facts = facts(fact(job=job, owners=(owner(),), listening=True), ServingFact())
        plan = self.step.plan(self.context.want, seen, self.context.state)
        with pytest.raises(GateFailed) as caught:
            self.step.apply(self.context, seen, plan)
        assert caught.value.exit_code == 5
        return caught.value

    def verdicts(self) -> list[tuple[str, str]]:
        return [(one.variant, one.verdict[:40]) for one in self.context.state.launches]


def known_good() -> DeploymentState:
    own = state()
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
    good.verdict = "stopped"
    own.launches.append(good)
    own.known_good = "old"
    return own


def test_speculation_is_the_broken_side(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True)
    error = world.fail()
    assert "gate 'quality' failed" in error.what
    assert "speculation is the broken side" in error.what
    assert "has passed all gates and serves now" in error.what
    assert "mend variant mtp" in error.fix
    assert world.ended == [IDENTITY.id]
    assert [variant for variant, _ in world.verdicts()] == ["mtp", "no-mtp"]
    assert world.verdicts()[0][1].startswith("failed: gate 'quality'")
    launch = world.context.state.launches[-1]
    assert (launch.verdict, world.context.state.known_good) == ("good", launch.id)
    note = json.loads(world.jobs.started[0]["files"]["launch"])
    assert (note["variant"], note["fell_from"]) == ("no-mtp", ["mtp"])
    gates = [one for one in world.events if isinstance(one, GateChecked)]
    assert [one.gate for one in gates if not one.passed] == ["quality"]


def test_the_same_without_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=False)
    error = world.fail()
    assert "the same prompts fail too" in error.what
    assert "speculation is not the broken side" in error.what
    assert "still runs, marked as failed" in error.what
    assert "doctor" in error.fix
    assert [verdict[:6] for _, verdict in world.verdicts()] == ["failed", "failed"]
    assert world.context.state.known_good == ""


def test_without_speculation_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True, jobs=FakeJobs([Script([OOM], -9, True)]))
    error = world.fail()
    assert "without speculation (variant no-mtp) it did not start: not-enough-memory" in error.what


def test_the_known_good_launch_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs([Script(list(UP)), Script(list(UP))])
    world = World(monkeypatch, later=False, jobs=jobs, own=known_good())
    error = world.fail()
    assert "the last known-good arguments (launch old) run again" in error.what
    assert "it answers" in error.what
    assert "exec py --old" in jobs.started[1]["script"]
    assert len(world.ended) == 2
    assert world.context.state.known_good == "old"


def test_a_playbook_without_another_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same variant less its speculative-* arguments is asked."""
    world = World(monkeypatch, later=True, variants=[{"name": "mtp", "args": MTP}])
    error = world.fail()
    assert "speculation is the broken side" in error.what
    assert "variant mtp~no-spec" in error.what
    script = world.jobs.started[0]["script"]
    assert "--speculative" not in script
    assert "--mamba-scheduler-strategy extra_buffer" in script
    note = LaunchNote.parse(world.jobs.started[0]["files"]["launch"].decode())
    launch = world.context.state.launches[-1]
    assert is_wanted(world.context.want, world.context.state.manifest, launch.fingerprint, note)


def test_the_same_arguments_are_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    own = known_good()
    now = Launch(id=IDENTITY.id, variant="mtp", started=2.0, fingerprint="f", verdict="ready")
    own.launches.append(now)
    world = World(monkeypatch, later=False, own=own)
    assert "run again" not in world.fail().what
    assert len(world.jobs.started) == 1


def test_the_failed_launch_is_ended_and_that_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Fallback.end_launch
    world = World(monkeypatch, later=True)
    monkeypatch.setattr(Fallback, "end_launch", stop)
    world.context.reprobe = lambda: facts(SERVING)
    world.guest.answer = lambda script: Answer(
        0, f"now_boot={BOOT}\n".encode() if "now_boot" in script else b"", b""
    )
    error = world.fail()
    assert "speculation is the broken side" in error.what
    assert world.jobs.stopped == [IDENTITY.id]
    assert world.verdicts()[0][1].startswith("failed: gate 'quality'")


def test_no_comparison_when_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True, own=known_good(), ab_on_failure=False)
    error = world.fail()
    assert "broken side" not in error.what
    assert "run again as launch" in error.what
    assert len(world.jobs.started) == 1


def test_a_restored_launch_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True, own=known_good(), ab_on_failure=False)
    world.light["completion"] = {"status": 503}
    assert "but: a short request failed: 503" in world.fail().what


@pytest.mark.parametrize(
    ("rule", "ended", "words"),
    [("stop", 1, "was stopped (gates.on_failure: stop)"), ("leave", 0, "gate 'quality' failed")],
)
def test_what_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch, rule: str, ended: int, words: str
) -> None:
    world = World(monkeypatch, later=True, ab_on_failure=False, on_failure=rule)
    assert words in world.fail().what
    assert len(world.ended) == ended
    assert world.jobs.started == []


def test_what_cannot_be_done_does_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True)

    def refuse(*words: Any, **more: Any) -> Any:
        raise RemoteCommandFailed("no space left")

    monkeypatch.setattr(world.jobs, "start", refuse)
    world.context.reprobe = lambda: facts(fact())
    error = world.fail()
    assert error.what.startswith("gate 'quality' failed")
    assert "it could not be compared: no space left; no server runs now" in error.what


def test_a_dead_server_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True, jobs=FakeJobs([], running=Script([], -9, True)))
    error = world.fail()
    assert "the server died during this gate" in error.what
    assert world.jobs.started == []
    told = [one.text for one in world.events if isinstance(one, Note)]
    assert not any("without it" in text for text in told)


def test_a_comparison_that_fails_leaves_the_good_one_to_be_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, later=True, own=known_good())
    start, calls = world.jobs.start, []

    def first_refused(*words: Any, **more: Any) -> Any:
        calls.append(words)
        if len(calls) == 1:
            raise RemoteCommandFailed("no process left")
        return start(*words, **more)

    monkeypatch.setattr(world.jobs, "start", first_refused)
    error = world.fail()
    assert error.what.startswith("gate 'quality' failed")
    assert "could not be compared: no process left" in error.what
    assert "the last known-good arguments (launch old) run again" in error.what


def test_what_does_not_run_is_not_said_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, later=True, jobs=FakeJobs([Script([OOM], -9, True)]))
    world.context.reprobe = lambda: facts(fact())
    error = world.fail()
    assert "it did not start" in error.what
    assert "still runs" not in error.what
    assert "no server runs now" in error.what


def test_another_server_without_an_answer_says_nothing_about_speculation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, later=True)
    speak = world.model.ask

    def refused(*words: Any, **more: Any) -> Any:
        answers = speak(*words, **more)
        essay = str(words[2][0].get("prompt", "")).startswith("Explain")
        if world.jobs.started and essay:
            return [{**answers[0], "status": 500, "content": None, "error": "out of memory"}]
        return answers

    monkeypatch.setattr(gates_bench, "ask", refused)
    error = world.fail()
    assert "which side is broken is not known" in error.what
    assert "not the broken side" not in error.what
    assert world.verdicts()[-1][1].startswith("failed: ")


def test_a_verdict_that_cannot_be_delivered_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, later=True, ab_on_failure=False, on_failure="leave")

    def lost(script: str) -> Answer:
        if "verdict.new" in script:
            raise ConnectionLost("the connection is lost", where="kpro5")
        return Answer(0, b"", b"")

    world.guest.answer = lost
    assert world.fail().what.startswith("gate 'quality' failed")
    told = [one.text for one in world.events if isinstance(one, Note)]
    assert any("verdict could not be written" in text for text in told)


def test_a_failed_gate_is_remembered_and_a_good_verdict_forgets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, later=False, jobs=FakeJobs([]), ab_on_failure=False)
    error = world.fail()
    want, own = world.context.want, world.context.state
    found = failed_before(own, want)
    assert found is not None and found.exit_code == 5
    assert found.cause.startswith("gate 'quality' failed") and found.cause in error.what
    world.step.replaces = False  # type: ignore[misc]
    world.step._record(world.context, IDENTITY.id, "good", {}, required=False)
    assert failed_before(own, want) is not None, "`verify` may judge another launch"
    world.step.replaces = True  # type: ignore[misc]
    world.step._record(world.context, IDENTITY.id, "good", {}, required=False)
    assert failed_before(own, want) is None


def test_a_rung_that_failed_to_launch_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mtp` did not start, `no-mtp` fails its gates; the last good launch was that very `mtp`."""
    own = known_good()
    world = World(monkeypatch, later=False, own=own, jobs=FakeJobs([]), ab_on_failure=False)
    note = LaunchNote("no-mtp", ("mtp",), ("not-enough-memory",), ("f",))
    gone = dataclasses.replace(server_job(world.context.want, "no-mtp"), launch=note)
    seen: Facts = facts(fact(job=gone, owners=(owner(),), listening=True), ServingFact())
    with pytest.raises(GateFailed):
        world.step.apply(world.context, seen, world.step.gates_plan(world.context.want, seen))
    assert world.jobs.started == []
