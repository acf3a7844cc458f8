"""Going back to a launch that has passed: which, from what it was made, and that it stays so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from serverworld import (
    MANIFEST,
    READY,
    UP,
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

from deployer import rollback, up
from deployer.as_running import as_running, running
from deployer.engine import Engine, Outcome
from deployer.errors import (
    CommandOverdue,
    DeployError,
    GateFailed,
    LockHeld,
    StepBlocked,
    StepFailed,
    Unreachable,
    UsageError,
)
from deployer.events import Bus
from deployer.kept import Kept
from deployer.model import Change, Facts, Plan, PlanState, ProbeOutput, Shell, Where
from deployer.recipe import as_made, playbook_of, recipe_of
from deployer.restart import RestartStop
from deployer.rollback import RollBack, made_of, then
from deployer.rollback_choice import choices, choose
from deployer.rollback_sight import There, builds_probe, described, parse_builds, unable
from deployer.rollback_steps import (
    AsRecorded,
    DriverAsItIs,
    LaunchAgain,
    StopOther,
    rollback_steps,
)
from deployer.sglang.argv import command, server_argv
from deployer.state import (
    Back,
    DeploymentState,
    HostState,
    Launch,
    Manifest,
    ManifestFile,
    RolledBack,
)
from deployer.state_file import StateFile
from deployer.steps import launch_wait
from deployer.steps.base import Step
from deployer.steps.driver_facts import HostDriver
from deployer.steps.launch import LaunchStep
from deployer.steps.rolled_back import rolled_back, wish_key
from deployer.steps.server_wanted import LaunchNote, Rung, fingerprint
from deployer.steps.shards_facts import ShardsFact, Verified
from deployer.steps.stop import StopStep
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult

OLD = deployment("no-mtp", serve={"args": {"tp-size": 2, "context-length": 4096, "chunked": -1}})
NOW = dataclasses.replace(
    deployment(engine={"version": "0.5.12", "lock": "y.txt"}, gates={"burst": 3}),
    lock_text="torch==2.12.0",
)
NEWER = MANIFEST.model_copy(update={"commit": "beef"})


def launch(name: str, mark: str, verdict: str = "stopped", **more: Any) -> Launch:
    given = {"variant": "mtp", "started": 1.0, "argv": ["py"], "verified": 9.0, **more}
    return Launch(id=name, fingerprint=mark, verdict=verdict, **given)


def history(*launches: Launch, good: str = "") -> DeploymentState:
    own = state()
    own.launches = list(launches)
    own.known_good = good
    return own


# Which.


def test_the_default_is_the_last_other_wish_that_passed() -> None:
    own = history(
        launch("a", "1"),
        launch("b", "2"),
        launch("b2", "2"),
        launch("x", "3", "failed: died", verified=0.0),
        launch("y", "5", verified=0.0),
        launch("c", "4", "good"),
        good="c",
    )
    assert [one.id for one in choices(own)] == ["b2", "a"]
    assert choose(own, "", "h/n").launch is own.launches[2]
    # What runs now has failed its gates: the known-good one is meant.
    own.launches[-1].verdict, own.known_good = "failed: gate", "b2"
    chosen = choose(own, "", "h/n")
    assert chosen.launch is own.launches[2] and chosen.why == "the last known-good launch"
    assert choose(history(launch("a", "1", "good"), good="a"), "", "h/n").launch is None
    assert choose(state(), "", "h/n").launch is None


def test_what_was_brought_back_by_itself_is_not_gone_back_to() -> None:
    """The good one, a failure, and the good one's wish again: that serves, though not judged."""
    own = history(
        launch("a", "1"),
        launch("b", "2"),
        launch("x", "3", "failed: died", verified=0.0),
        launch("b2", "2", "ready", verified=0.0),
        good="b",
    )
    assert [one.id for one in choices(own)] == ["a"]
    own.launches[-1].verdict = "failed: died"
    assert [one.id for one in choices(own)] == ["b", "a"]


def test_to_what_serves_already(tmp_path: Path) -> None:
    """As after a failed `up` that brought it back: the playbook's wish stays another one."""
    one = aim(tmp_path)
    mark = one.launch.fingerprint
    own = history(one.launch, launch("20261130-065012-ab12", mark, "ready"))
    told = begun(one, own, mark)
    assert told.left == "20261130-065012-ab12"


def test_a_launch_is_named_by_the_beginning_of_its_id() -> None:
    own = history(launch("20261101-a", "1"), launch("20261102-b", "2", "failed: x"))
    assert choose(own, "20261102", "h/n").launch is own.launches[1]
    with pytest.raises(UsageError, match="2 launches of h/n begin with 2026") as caught:
        choose(own, "2026", "h/n")
    assert "20261101-a" in caught.value.fix
    with pytest.raises(UsageError, match="no launches"):
        choose(own, "zzz", "h/n")


def record(outcome: str = "", **more: Any) -> RolledBack:
    given: dict[str, Any] = {
        "to": "a",
        "mark": "1",
        "left": "b",
        "wish": wish_key(NOW),
        "commits": ["c0ffee"],
        "when": 5.0,
        "outcome": outcome,
        **more,
    }
    return RolledBack(**given)


def test_an_interrupted_one_goes_on_and_a_done_one_is_not_turned_round() -> None:
    own = history(launch("a", "1"), launch("b", "2"), launch("a2", "1", "starting", verified=0.0))
    own.rollback = record()
    assert choose(own, "", "h/n").launch is own.launches[0]
    own.launches[-1].verdict = "good"
    own.rollback = record("done")
    chosen = choose(own, "", "h/n")
    assert chosen.launch is None and "rolled back to launch a already" in chosen.why
    assert choose(own, "b", "h/n").launch is own.launches[1]
    own.rollback = record("failed")
    assert choose(own, "", "h/n").launch is own.launches[1]


# From what.


def test_a_recipe_makes_the_same_command_lock_and_weights(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    mark = fingerprint(OLD, MANIFEST, "no-mtp")
    key = kept.add(recipe_of(OLD, MANIFEST), OLD.lock_text)
    assert kept.add(recipe_of(OLD, MANIFEST), OLD.lock_text) == key
    assert kept.has(key) and not kept.has("") and not kept.has("0" * 64)
    old = launch("a", mark, variant="no-mtp", recipe=key)
    recipe, lock_text = made_of(kept, old, "kpro5/qwen")
    made = then(NOW, recipe, lock_text, old)
    assert fingerprint(made, recipe.manifest, made.variant_name) == mark
    assert command(made, server_argv(made)) == command(OLD, server_argv(OLD))
    assert (made.lock_text, made.playbook.engine.version) == ("torch==2.11.0", "0.5.11")
    # How it is judged is as now, but it replaces nothing by itself.
    assert made.playbook.gates.burst == 3 and made.playbook.gates.on_failure == "leave"
    assert [one.name for one in made.playbook.variants] == ["no-mtp"]


def test_a_derived_rung_is_made_again_as_it_was(tmp_path: Path) -> None:
    want = deployment(serve={"api_key_env": "KEY"})
    rung = Rung("mtp~mem-0.02", (("mem-fraction-static", 0.86),))
    mark = rung.fingerprint(want, MANIFEST)
    old = launch("a", mark, variant=rung.variant, changes=dict(rung.changes))
    made = as_made(want, recipe_of(want, MANIFEST), want.lock_text, old)
    assert fingerprint(made, MANIFEST, made.variant_name) == mark
    job = dataclasses.replace(
        server_job(want, mark=mark), launch=LaunchNote(rung.variant, changes=rung.changes)
    )
    seen = facts(fact(job=job, owners=(owner(),), listening=True))
    assert StopStep(retry=True).plan(made, seen, state()).state is PlanState.NOTHING


def test_nothing_secret_is_kept_and_what_was_changed_is_not_believed(tmp_path: Path) -> None:
    want = deployment(
        engine={"index_url": "https://me:secret@x/simple"}, serve={"api_key_env": "K"}
    )
    kept = Kept(tmp_path / "kept")
    key = kept.add(recipe_of(want, MANIFEST), want.lock_text)
    names = {path.name for path in kept.folder.iterdir()}
    assert all("secret" not in path.read_text() for path in kept.folder.iterdir())
    assert names == {f"{key}.json", f"{recipe_of(want, MANIFEST).lock}.lock"}
    made = as_made(want, *kept.load(key), launch("a", "1"))
    assert made.playbook.engine.index_url == "https://me:secret@x/simple"
    assert made.playbook.serve.api_key_env == "K"
    (kept.folder / f"{recipe_of(want, MANIFEST).lock}.lock").write_text("torch==1.0\n")
    with pytest.raises(DeployError, match="changed since"):
        kept.load(key)
    with pytest.raises(DeployError, match="cannot be read"):
        kept.load("0" * 64)
    with pytest.raises(DeployError, match="older version launched it"):
        made_of(kept, launch("a", "1"), "kpro5/qwen")


def test_another_container_and_another_version_are_refused() -> None:
    recipe = recipe_of(OLD, MANIFEST)
    with pytest.raises(StepBlocked, match="ran in container 7, and kpro5/qwen is container 129"):
        then(NOW, recipe.model_copy(update={"vmid": 7}), "", launch("a", "1"))
    odd = recipe.model_copy(update={"serve": {**recipe.serve, "later": 1}})
    with pytest.raises(DeployError, match=r"cannot read: serve\.later"):
        as_made(NOW, odd, "", launch("a", "1"))


def test_kept_files_that_no_launch_needs(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    assert kept.unused([]) == []
    one = kept.add(recipe_of(OLD, MANIFEST), OLD.lock_text)
    two = kept.add(recipe_of(NOW, MANIFEST), NOW.lock_text)
    assert {path.stem for path in kept.unused([one])} == {two, recipe_of(NOW, MANIFEST).lock}
    assert kept.unused([one, two]) == []


def test_a_launch_keeps_its_recipe_and_an_old_record_none() -> None:
    kept: list[str] = []

    def keep(want: Any, manifest: Manifest) -> str:
        kept.append(want.id)
        return "key"

    for again, expected in (("", "key"), ("old-key", "old-key")):
        own = state()
        made, _ = context(OLD, own, FakeJobs([Script([])]))
        made.keep = keep
        step: Any = LaunchAgain(launch("a", "1", recipe=again)) if again else LaunchStep()
        step.see(facts(fact()))
        step.start_rung(made, Rung("no-mtp"), LaunchNote("no-mtp"), "")
        assert own.launches[-1].recipe == expected
    assert kept == ["kpro5/qwen"]


def test_what_had_failed_before_it_then_is_told_again() -> None:
    own = state()
    made, _ = context(OLD, own, FakeJobs([Script([])]))
    old = launch("a", "1", variant="no-mtp", instead_of={"mtp": "not-enough-memory"})
    LaunchAgain(old).start_rung(made, Rung("no-mtp"), LaunchNote("no-mtp"), "")
    assert own.launches[-1].instead_of == {"mtp": "not-enough-memory"}


# It stays.


def serves(mark: str) -> Facts:
    return facts(fact(job=server_job(NOW, mark=mark), owners=(owner(),), listening=True))


def test_up_and_restart_do_not_undo_it_until_something_changes() -> None:
    own = state()
    own.rollback = record("done")
    for step in (StopStep(), RestartStop()):
        plan = step.plan(NOW, serves("1"), own)
        assert plan.state is PlanState.BLOCKED and plan.stands
        assert "rolled back to launch a at 1970-01-01 00:00:05 UTC" in plan.reason
        assert "--retry" in plan.fix and "deploy rollback" not in plan.fix
        dead = step.plan(NOW, facts(fact()), own)
        assert dead.state is PlanState.BLOCKED
        assert "`deploy rollback kpro5/qwen a` launches that again" in dead.fix
    asked: Plan = StopStep(retry=True).plan(NOW, serves("1"), own)
    assert asked.state is PlanState.CHANGES
    changed = dataclasses.replace(NOW, lock_text="torch==2.13.0")
    assert StopStep().plan(changed, serves("1"), own).state is PlanState.CHANGES
    own.rollback = record()
    assert "finishes the rollback" in StopStep().plan(NOW, serves("1"), own).fix


def test_another_commit_or_a_failure_ends_it() -> None:
    own = state()
    own.rollback = record("done")
    assert rolled_back(own, NOW) is not None
    own.rollback = record("failed")
    assert rolled_back(own, NOW) is None
    own.rollback = record("done", commits=["beef", "f00"])
    assert rolled_back(own, NOW) is None
    # Only the commit was gone back: that is what the playbook launches now.
    own.rollback = record("done", mark=fingerprint(NOW, MANIFEST, "mtp"))
    assert rolled_back(own, NOW) is None
    assert StopStep().plan(NOW, facts(fact()), own).state is PlanState.NOTHING


# The aim.


def aim(tmp_path: Path) -> RollBack:
    recipe = recipe_of(OLD, MANIFEST)
    kept = Kept(tmp_path / "kept")
    kept.add(recipe, OLD.lock_text)
    old = launch("a", fingerprint(OLD, MANIFEST, "no-mtp"), variant="no-mtp", recipe=recipe.key)
    return RollBack(NOW, old, recipe, kept, lambda: 77.0)


class Runner:
    """A double of the engine: `serves` is what a look shows after it."""

    def __init__(self, serves: Facts, error: DeployError | None = None) -> None:
        self.serves, self.error = serves, error
        self.wants: list[Any] = []
        self.steps: list[str] = []

    def __call__(self, want: Any, steps: Any) -> Engine:
        self.wants.append(want)
        self.steps = [type(step).__name__ for step in steps]
        return self  # type: ignore[return-value]

    def look(self, reason: str) -> Facts:
        return self.serves

    def apply(self, outcome: Outcome, facts: Facts, selection: Any) -> Facts:
        if self.error is not None:
            raise self.error
        return self.serves


def begun(one: RollBack, own: DeploymentState, mark: str = "bad") -> RolledBack:
    want = then(one.now, *one.kept.load(one.launch.recipe), one.launch)
    one.begin(want, own)
    one.seen(want, own, serves(mark) if mark else facts(fact()))
    assert own.rollback is not None
    return own.rollback


def test_the_record_says_what_served_and_survives_a_kill(tmp_path: Path) -> None:
    own = history(launch("a", "1"))
    own.manifest = NEWER
    one = aim(tmp_path)
    told = begun(one, own)
    assert own.manifest == MANIFEST and told.manifest == NEWER
    assert (told.to, told.left, told.outcome) == ("a", "20261130-065012-ab12", "")
    assert told.commits == ["c0ffee", "beef"] and told.wish == wish_key(NOW)
    # Killed: the old server is stopped, and a new run sees none, or the new one.
    for mark in ("", told.mark):
        again = begun(aim(tmp_path), own, mark)
        assert (again.left, again.manifest) == (told.left, NEWER)
    one.done(NOW, own)
    assert own.rollback is not None and own.rollback.outcome == "done"


def test_what_served_before_serves_again(tmp_path: Path) -> None:
    one = aim(tmp_path)
    key = one.kept.add(recipe_of(NOW, NEWER), NOW.lock_text)
    former = launch("20261130-065012-ab12", fingerprint(NOW, NEWER, "mtp"), recipe=key)
    own = history(launch("a", "1"), former)
    own.manifest = NEWER
    begun(one, own, former.fingerprint)
    runner = Runner(serves(former.fingerprint))
    error = one.failed(NOW, own, GateFailed("gate 'quality' failed", fix="x"), runner)
    assert (error.exit_code, error.fix) == (5, "x")
    assert error.what.endswith(
        "failed; launch 20261130-065012-ab12, which served before, serves on"
    )
    assert own.manifest == NEWER and own.rollback is not None and own.rollback.outcome == "failed"
    assert "VerifyStep" not in runner.steps and "LaunchAgain" in runner.steps
    assert runner.wants[0].lock_text == NOW.lock_text
    # Its record lacks what it was made from, or its lock is gone.
    lock = one.kept.folder / f"{recipe_of(NOW, NEWER).lock}.lock"
    for lacking in ("lock", "recipe"):
        lock.unlink(missing_ok=True)
        if lacking == "recipe":
            former.recipe = ""
        begun(one, own, former.fingerprint)
        one.failed(NOW, own, StepFailed("no"), runner)
        assert runner.steps == ["StopOther", "AsRecorded"]


def test_what_cannot_be_brought_back_is_told_and_stays_open(tmp_path: Path) -> None:
    one, own = aim(tmp_path), history(launch("a", "1"))
    own.manifest = MANIFEST
    begun(one, own)
    error = one.failed(NOW, own, StepFailed("it died"), Runner(facts()))
    assert "it died; and what served before" in error.what and "not in the state" in error.what
    assert "`deploy rollback kpro5/qwen a` goes on" in error.fix
    assert own.rollback is not None and own.rollback.outcome == ""
    for kind in (Unreachable, LockHeld, CommandOverdue):
        runner = Runner(facts())
        lost = one.failed(NOW, own, kind("dark", fix="look"), runner)
        assert lost.what == "dark" and lost.fix.startswith("look; `deploy rollback")
        assert runner.steps == [] and own.rollback.outcome == "", "nothing is done now"
    own = history(launch("a", "1"))
    begun(one, own, "")
    assert "nothing had served" in one.failed(NOW, own, StepFailed("x"), Runner(facts())).what
    begun(one, own, "")
    told = one.failed(NOW, own, GateFailed("x"), Runner(serves("y"))).what
    assert "launch 20261130-065012-ab12 still runs, marked as failed; `deploy down" in told


def test_by_its_recorded_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = launch("f", "good", argv=["py", "--port", "1"], env={"A": "1"})
    step, other = AsRecorded(former), StopOther(former)
    own = history(former)
    assert step.plan(NOW, serves("good"), own).state is PlanState.NOTHING
    assert other.plan(NOW, serves("good"), own).state is PlanState.NOTHING
    assert other.plan(NOW, serves("bad"), own).state is PlanState.CHANGES
    plan = step.plan(NOW, facts(fact()), own)
    assert plan.state is PlanState.CHANGES
    monkeypatch.setattr(launch_wait, "ask", lambda *words, **more: [READY])
    clock, jobs = Clock(), FakeJobs([Script(list(UP))])
    step.now, step.sleep = clock.now, clock.sleep
    made, _ = context(NOW, own, jobs)
    step.apply(made, facts(fact()), plan)
    assert "exec py --port 1" in jobs.started[0]["script"]
    assert own.launches[-1].fingerprint == "good" and own.launches[-1].recipe == ""


def test_no_driver_is_changed_and_one_that_is_too_old_refused_first() -> None:
    steps: list[Step] = rollback_steps(launch("a", "1"))
    assert [step.name for step in steps] == [
        *("driver", "gpus", "container", "venv", "shards", "stop", "launch", "verify"),
    ]
    driver = steps[0]
    assert isinstance(driver, DriverAsItIs)
    assert driver.plan(NOW, facts(), state()).state is PlanState.NOTHING
    for version, expected in (
        ("575.51.03", PlanState.BLOCKED),
        ("580.126.09", PlanState.NOTHING),
        ("", PlanState.NOTHING),
    ):
        plan = driver.plan(CUDA13, facts(fact(), HostDriver(loaded=version)), state())
        assert plan.state is expected, version
    refused = driver.plan(CUDA13, facts(fact(), HostDriver(on_disk="575.51.03")), state())
    assert refused.stands and "driver 575.51.03 is too old for the engine" in refused.reason
    assert "name another launch" in refused.fix and "580" in refused.fix
    # What it was made from serves already: then the driver will do.
    there = facts(
        fact(job=server_job(NOW, mark="1"), owners=(owner(),), listening=True),
        HostDriver(loaded="575.51.03"),
    )
    assert driver.plan(CUDA13, there, state()).state is PlanState.NOTHING


CUDA13 = dataclasses.replace(NOW, lock_text="torch==2.11.0+cu130\n")


def test_a_launch_that_is_gone_back_to_tells_from_where_and_by_whom(tmp_path: Path) -> None:
    one = aim(tmp_path)
    own = history(launch("a", "1"), launch("20261130-065012-ab12", "bad", "good"))
    own.manifest = MANIFEST
    record = begun(one, own, "bad")
    assert "@" in record.by
    for asked in (True, False):
        left = "20261130-065012-ab12" if asked else own.launches[-1].id
        jobs = FakeJobs([Script([])])
        made, _ = context(OLD, own, jobs)
        step = LaunchAgain(one.launch, asked=asked)
        step.start_rung(made, Rung("no-mtp"), LaunchNote("no-mtp"), "")
        back = own.launches[-1].back
        assert back == Back(to="a", left=left, asked=asked, by=record.by)
        assert LaunchNote.parse(jobs.started[0]["files"]["launch"].decode()).back == back


def test_launches_that_a_rollback_goes_on_with_are_not_forgotten() -> None:
    own = history(*(launch(f"l{number:03}", str(number)) for number in range(60)), good="l003")
    own.rollback = record(to="l001", left="l002")
    made, _ = context(OLD, own, FakeJobs([Script([])]))
    LaunchStep().start_rung(made, Rung("no-mtp"), LaunchNote("no-mtp"), "")
    assert [one.id for one in own.launches[:4]] == ["l001", "l002", "l003", "l011"]
    assert len(own.launches) == 53


def test_fewer_gpus_than_then_are_refused() -> None:
    recipe = recipe_of(OLD, MANIFEST)
    more = recipe.model_copy(update={"gpus": [*recipe.gpus, "0000:e1:00.0"]})
    with pytest.raises(StepBlocked, match=r"ran on 3 GPUs .*0000:e1:00.0.*, and .* has 2 now"):
        then(NOW, more, "", launch("a", "1"))


def test_what_was_never_ended_serves_on_though_its_steps_fail(tmp_path: Path) -> None:
    one = aim(tmp_path)
    key = one.kept.add(recipe_of(NOW, NEWER), NOW.lock_text)
    former = launch("20261130-065012-ab12", "bad", "good", recipe=key)
    own = history(launch("a", "1"), former)
    own.manifest = NEWER
    begun(one, own, "bad")
    runner = Runner(serves("bad"), StepBlocked("0000:21:00.0 has fallen off the bus", fix="reboot"))
    error = one.failed(NOW, own, StepFailed("gpus", fix="x"), runner)
    assert "fallen off the bus; it was not ended, and serves on" in error.what
    assert own.rollback is not None and own.rollback.outcome == ""


# What is there.


def test_what_of_a_choice_is_on_the_target(tmp_path: Path) -> None:
    file = ManifestFile(path="a.safetensors", size=7, sha256="s")
    kept = Kept(tmp_path / "kept")
    recipe = recipe_of(OLD, MANIFEST.model_copy(update={"files": [file]}))
    key = kept.add(recipe, OLD.lock_text)
    old = launch("a", "1", venv="/v.builds/x", recipe=key)
    line = f'/v.builds/x\t{{"lock": "{recipe.lock}"}}\nodd\n/v.builds/y\tnot json\n'
    builds = parse_builds(ProbeOutput(0, line.encode(), b""))
    assert dict(builds.locks) == {"/v.builds/x": recipe.lock}
    whole = ShardsFact(files={file.path: (7, 1)}, record={file.path: Verified(7, 1, "s", "")})
    choice = described([old], kept, There(builds, {"/srv/models/tiny": whole}))[0]
    assert (choice.venv, choice.weights) == ("there", "there")
    choice = described([old], kept, There(folders={"/srv/models/tiny": ShardsFact()}))[0]
    assert (choice.venv, choice.weights) == ("is built from its lock", "1 files to fetch (7 bytes)")
    choice = described([old], kept, There(problem="dark"))[0]
    assert (choice.venv, choice.weights) == ("not asked", "not asked")
    choice = described([launch("b", "2")], kept, There())[0]
    assert (choice.venv, choice.weights) == ("not known", "not known")
    assert choice.to_dict()["model"] == ""
    assert "/v.builds/it'\\''s" in builds_probe(["/v.builds/it's"], NOW.guest).script.replace(
        "'\"'\"'", "'\\''"
    )


# The whole run, on a target that is a few variables.


@dataclasses.dataclass
class World:
    """What serves, by its fingerprint; `bad` does not come up."""

    serves: str
    launch: str
    bad: str = ""
    interrupted: bool = False


class Served(Step):
    """Stop, launch and verify in one."""

    name = "launch"

    def __init__(self, world: World) -> None:
        self.world = world

    def probes(self, want: Any) -> list[Any]:
        return []

    def plan(self, want: Any, facts: Facts, own: DeploymentState) -> Plan:
        wanted = fingerprint(want, own.manifest, want.variant_name)
        if self.world.serves == wanted:
            return Plan.nothing("it serves")
        return Plan.change("another serves", Change("launch", "x", Shell(Where.GUEST, "true")))

    def apply(self, context: Any, facts: Facts, plan: Plan) -> None:
        own, want = context.state, context.want
        wanted = fingerprint(want, own.manifest, want.variant_name)
        self.world.serves = ""
        if self.world.interrupted:
            raise KeyboardInterrupt
        if wanted == self.world.bad:
            raise StepFailed("it died", where=want.id)
        self.world.serves, self.world.launch = wanted, f"l{len(own.launches)}"
        own.launches.append(launch(self.world.launch, wanted, "good"))
        own.known_good = self.world.launch
        context.save()


@dataclasses.dataclass
class Run:
    """`deploy rollback` without its words; a state file and kept recipes in a folder."""

    folder: Path
    world: World
    old: Launch
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        world = self.world

        class Session:
            host_transport = None

            def __init__(self, *words: Any) -> None: ...

            def transports(self, want: Any) -> Any:
                return dict.fromkeys(Where)

            def look(self, want: Any, steps: Any) -> Facts:
                if not world.serves:
                    return facts(fact())
                job = server_job(want, mark=world.serves)
                job = dataclasses.replace(
                    job, identity=dataclasses.replace(job.identity, id=world.launch)
                )
                return facts(fact(job=job, owners=(owner(),), listening=True))

            def want_lock(self, run_id: str) -> None: ...

            def entered(self, step: str) -> None: ...

            def wake(self) -> None: ...

            def close(self, on_problem: Any) -> None: ...

        self.monkeypatch.setattr(up, "HostSession", Session)
        self.monkeypatch.setattr(up, "proven", lambda *words: {"model": "m", "endpoint": "e"})
        self.monkeypatch.setattr(
            rollback, "rollback_steps", lambda one, asked=True: [Served(world)]
        )

    @property
    def kept(self) -> Kept:
        return Kept(self.folder / ".deploy" / "kept")

    def own(self) -> DeploymentState:
        return StateFile(self.folder / ".deploy" / "state", "kpro5").load().deployments["qwen"]

    def save(self, own: DeploymentState) -> None:
        host = HostState(host="kpro5", deployments={"qwen": own})
        StateFile(self.folder / ".deploy" / "state", "kpro5").save(host)

    def back(self) -> DeploymentResult:
        recipe, lock_text = self.kept.load(self.old.recipe)
        want = then(NOW, recipe, lock_text, self.old)
        options = UpOptions(
            base=self.folder / "inventory",
            command="rollback",
            steps=lambda: [Served(self.world)],
            aim=RollBack(NOW, self.old, recipe, self.kept),
            environ={},
        )
        return up.up_host("kpro5", [want], options, Bus(lambda event: None))[0]


@pytest.fixture
def rolling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    kept = Kept(tmp_path / ".deploy" / "kept")
    old = launch(
        "l0",
        fingerprint(OLD, MANIFEST, "no-mtp"),
        variant="no-mtp",
        recipe=kept.add(recipe_of(OLD, MANIFEST), OLD.lock_text),
    )
    mark = fingerprint(NOW, NEWER, "mtp")
    new = launch("l1", mark, "good", recipe=kept.add(recipe_of(NOW, NEWER), NOW.lock_text))
    run = Run(tmp_path, World(mark, "l1"), old, monkeypatch)
    own = history(old, new, good="l1")
    own.manifest = NEWER
    run.save(own)
    return run


def test_a_run_goes_back_and_stays_there(rolling: Run) -> None:
    done = rolling.back()
    assert done.error is None and rolling.world.serves == rolling.old.fingerprint
    own = rolling.own()
    assert own.rollback is not None and own.manifest == MANIFEST
    assert (own.rollback.outcome, own.rollback.left) == ("done", "l1")
    assert StopStep().plan(NOW, serves(rolling.world.serves), own).state is PlanState.BLOCKED
    again = rolling.back()
    assert again.error is None and again.outcome is not None and not again.outcome.changed
    assert len(rolling.own().launches) == 3


def test_a_run_that_fails_puts_back_what_served(rolling: Run) -> None:
    before = rolling.world.serves
    rolling.world.bad = rolling.old.fingerprint
    done = rolling.back()
    assert done.error is not None and done.error.exit_code == 1
    assert "it died; what served before (launch l1) serves again as launch l2" in str(done.error)
    own = rolling.own()
    assert rolling.world.serves == before and own.manifest == NEWER
    assert own.rollback is not None and own.rollback.outcome == "failed"
    assert rolled_back(own, NOW) is None


def test_a_run_that_was_killed_goes_on_or_back(rolling: Run) -> None:
    before = rolling.world.serves
    rolling.world.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        rolling.back()
    assert rolling.world.serves == "" and choose(rolling.own(), "", "h/n").launch is not None
    rolling.world.interrupted, rolling.world.bad = False, rolling.old.fingerprint
    done = rolling.back()
    assert "(launch l1) serves again" in str(done.error) and rolling.world.serves == before
    rolling.world.bad = ""
    assert rolling.back().error is None and rolling.world.serves == rolling.old.fingerprint


def test_up_after_a_killed_rollback_launches_the_playbooks_own_weights(rolling: Run) -> None:
    """The rollback had pinned those of its aim; `up --retry` is a word for the playbook."""
    rolling.world.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        rolling.back()
    rolling.world.interrupted = False
    own = rolling.own()
    assert own.manifest == MANIFEST and own.rollback is not None and not own.rollback.outcome
    options = UpOptions(
        base=rolling.folder / "inventory", steps=lambda: [Served(rolling.world)], environ={}
    )
    done = up.up_host("kpro5", [NOW], options, Bus(lambda event: None))[0]
    assert done.error is None and rolling.world.serves == fingerprint(NOW, NEWER, "mtp")
    assert rolling.own().manifest == NEWER and rolling.own().rollback is None


def test_up_forgets_the_rollback_when_it_has_launched_something_else(rolling: Run) -> None:
    assert rolling.back().error is None
    changed = dataclasses.replace(NOW, lock_text="torch==2.13.0")
    options = UpOptions(
        base=rolling.folder / "inventory", steps=lambda: [Served(rolling.world)], environ={}
    )
    done = up.up_host("kpro5", [changed], options, Bus(lambda event: None))[0]
    assert done.error is None and rolling.own().rollback is None


def test_nothing_is_written_when_only_looking(rolling: Run) -> None:
    before = rolling.own()
    recipe, lock_text = rolling.kept.load(rolling.old.recipe)
    options = UpOptions(
        base=rolling.folder / "inventory",
        dry_run=True,
        steps=lambda: [Served(rolling.world)],
        aim=RollBack(NOW, rolling.old, recipe, rolling.kept),
        environ={},
    )
    want = then(NOW, recipe, lock_text, rolling.old)
    up.up_host("kpro5", [want], options, Bus(lambda event: None))
    assert rolling.own() == before


def test_what_an_older_version_launched_is_kept_when_up_finds_it_serving(rolling: Run) -> None:
    own = rolling.own()
    own.launches[-1].recipe = ""
    rolling.save(own)
    options = UpOptions(
        base=rolling.folder / "inventory", steps=lambda: [Served(rolling.world)], environ={}
    )
    assert up.up_host("kpro5", [NOW], options, Bus(lambda event: None))[0].error is None
    found = rolling.own().launches[-1]
    assert found.id == "l1" and rolling.kept.load(found.recipe)[1] == NOW.lock_text


def test_the_default_is_one_that_can_be_made_again(rolling: Run) -> None:
    """The newest that passed was launched by an older version: its recipe is not kept."""
    own = history(
        launch("a", "1", recipe="kept"), launch("b", "2"), launch("c", "3", "good"), good="c"
    )
    chosen = choose(own, "", "h/n", lambda one: one.recipe == "kept")
    assert chosen.launch is own.launches[0]
    assert chosen.why.endswith("and can be made again; b cannot")
    none = choose(own, "", "h/n", lambda one: False)
    assert none.launch is None and "no other launch that has passed" in none.why
    with pytest.raises(UsageError, match="no launches of h/n begin with z") as caught:
        choose(state(), "z", "h/n")
    assert caught.value.fix == "`deploy history h/n` lists all"
    places = [(NOW, rolling.own())]
    assert unable(rolling.kept, places, "l0") == ""
    assert "no record" in unable(rolling.kept, places, "zz")
    other = NOW.entry.model_copy(update={"container": None})
    moved = [(dataclasses.replace(NOW, entry=other), rolling.own())]
    assert "ran in container 129, and kpro5/qwen is the host itself now" in unable(
        rolling.kept, moved, "l0"
    )
    (rolling.kept.folder / f"{recipe_of(OLD, MANIFEST).lock}.lock").unlink()
    assert "is not kept, or cannot be read" in unable(rolling.kept, places, "l0")


def test_the_whole_playbook_is_kept_but_no_password() -> None:
    index = "https://me:secret@x/simple"
    want = deployment(
        engine={"index_url": index, "find_links": ["/wheels"]},
        serve={"api_key_env": "KEY"},
        gates={"burst": 7},
        stop={"old_server": "adopt"},
        gpus={"persist": "report"},
    )
    recipe = recipe_of(want, MANIFEST)
    assert "secret" not in recipe.text()
    again = playbook_of(recipe, "kpro5/qwen")
    engine = want.playbook.engine.model_copy(update={"index_url": None})
    assert again == want.playbook.model_copy(update={"engine": engine})
    plain = deployment(engine={"index_url": "none"})
    assert playbook_of(recipe_of(plain, MANIFEST), "h/n") == plain.playbook
    # What is rolled back from stays the same wish when the file is as it was again.
    assert wish_key(dataclasses.replace(plain, playbook=again)) != wish_key(plain)
    restored = playbook_of(recipe_of(plain, MANIFEST), "h/n")
    assert wish_key(dataclasses.replace(plain, playbook=restored)) == wish_key(plain)
    with pytest.raises(DeployError, match="older version, which kept no whole playbook"):
        playbook_of(recipe.model_copy(update={"rest": {}}), "h/n")
    odd = recipe.model_copy(update={"rest": {**recipe.rest, "later": 1}})
    with pytest.raises(DeployError, match="cannot read: later"):
        playbook_of(odd, "h/n")


def test_what_runs_is_looked_at_as_it_was_made(rolling: Run) -> None:
    """Another port, name and model than the playbook's, by what was kept or by its command."""
    kept, own = rolling.kept, rolling.own()
    assert as_running(NOW, own, kept) is NOW
    assert as_running(NOW, DeploymentState(), kept) is NOW
    was = deployment(model={"path": "/srv/old"}, serve={"port": 31000})
    key = kept.add(recipe_of(was, MANIFEST), was.lock_text)
    argv = command(was, server_argv(was))
    back = launch("l2", fingerprint(was, MANIFEST, "mtp"), "good", recipe=key, argv=argv)
    own.launches.append(back)
    own.manifest = MANIFEST
    seen = as_running(NOW, own, kept)
    assert (seen.port, seen.playbook.model.path) == (31000, "/srv/old")
    assert seen.playbook.gates.burst == 3, "how it is judged is as now"
    back.recipe = ""
    seen = as_running(NOW, own, kept)
    assert (seen.port, seen.playbook.model.path) == (31000, NOW.playbook.model.path)
    back.verdict = "stopped"
    assert as_running(NOW, own, kept) is NOW
    back.verdict, back.verified = "failed: it did not start", 0.0
    assert as_running(NOW, own, kept) is NOW
    back.verified = 5.0
    assert as_running(NOW, own, kept).port == 31000, "one that fails a gate may run on"
    back.verified = 0.0
    folder = rolling.folder / ".deploy"
    back.verdict, back.recipe = "ready", key
    rolling.save(own)
    assert [one.port for one in running([NOW], folder)] == [31000]
    (folder / "state" / "kpro5.json").write_text("{")
    assert running([NOW], folder) == [NOW]
