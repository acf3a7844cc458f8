"""`--repin`: the newest commit of a branch, asked for and never taken by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import pytest
from click.testing import CliRunner

from deployer import hub, up
from deployer.cli.up import command
from deployer.deployment import Deployment
from deployer.engine import Outcome
from deployer.errors import DeployError, NotStarted, UsageError
from deployer.events import Bus, Event, Note
from deployer.model import Change, Facts, Plan, Probe, Procedure, Where
from deployer.rollout import Rollout
from deployer.state import DeploymentState, HostState, Manifest, ManifestFile
from deployer.state_file import StateFile
from deployer.steps.base import Step, StepContext
from deployer.up_options import UpOptions
from tests.unit.downloadworld import want
from tests.unit.test_up import Session

WANT = want()
OLD, NEW = "a" * 40, "b" * 40


def manifest(commit: str, *digits: str) -> Manifest:
    files = [
        ManifestFile(path=f"{n}.safetensors", size=1, sha256=digit * 64)
        for n, digit in enumerate(digits)
    ]
    return Manifest(repo="acme/tiny", asked="main", commit=commit, files=files)


class Shards(Step):
    """Has something to do until the new commit was fetched."""

    name = "shards"
    fetched: ClassVar[list[str]] = []

    def probes(self, want: Deployment) -> list[Probe]:
        return []

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        assert state.manifest is not None
        commit = state.manifest.commit
        if commit in (OLD, *self.fetched):
            return Plan.nothing("all verified")
        return Plan.change("new", Change(commit, "new", Procedure(Where.HOST, "work")))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        self.fetched.append(plan.changes[0].title)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Event]]:
    monkeypatch.setattr(up, "HostSession", Session)
    monkeypatch.setattr(Session, "locks", [])
    monkeypatch.setattr(Shards, "fetched", [])
    asked: list[str | None] = []

    def newest(playbook: object, token: str | None) -> Manifest:
        asked.append(token)
        return manifest(NEW, "1", "3", "4")

    monkeypatch.setattr(hub, "fetch_manifest", newest)
    state = HostState(host=WANT.host_name)
    state.deployments[WANT.name] = DeploymentState(manifest=manifest(OLD, "1", "2"))
    file(tmp_path).save(state)
    options = UpOptions(
        base=tmp_path / "inventory",
        steps=lambda: [Shards()],
        serves=False,
        environ={"HF_TOKEN": "hf_x"},
    )

    def go(
        repin: bool = True,
        dry_run: bool = False,
        confirm: Callable[[Deployment, Outcome], bool] | None = None,
    ) -> list[Event]:
        events: list[Event] = []
        how = replace(options, repin=repin, dry_run=dry_run, confirm=confirm)
        [result] = up.up_host(WANT.host_name, [WANT], how, Bus(events.append))
        if result.error is not None:
            raise result.error
        assert asked == (["hf_x"] if repin else [])
        return events

    return go


def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path / ".deploy" / "state", WANT.host_name)


def pinned(tmp_path: Path) -> str:
    found = file(tmp_path).load().deployments[WANT.name].manifest
    return found.commit if found else ""


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def test_a_branch_stays_at_its_commit(run: Callable[..., list[Event]], tmp_path: Path) -> None:
    assert notes(run(repin=False)) == []
    assert pinned(tmp_path) == OLD and Shards.fetched == []


def test_the_newest_commit_is_taken_when_asked_for(
    run: Callable[..., list[Event]], tmp_path: Path
) -> None:
    assert notes(run()) == [
        "acme/tiny main moved from aaaaaaaaaaaa to bbbbbbbbbbbb: 2 files differ"
    ]
    assert pinned(tmp_path) == NEW and Shards.fetched == [NEW]


def test_a_plan_shows_it_and_keeps_the_pin(run: Callable[..., list[Event]], tmp_path: Path) -> None:
    events = run(dry_run=True)
    planned = [json.dumps(event.to_dict()) for event in events]
    assert any('"step_planned"' in text and NEW in text for text in planned)
    assert pinned(tmp_path) == OLD and Shards.fetched == []


def test_who_declines_keeps_the_pin(run: Callable[..., list[Event]], tmp_path: Path) -> None:
    run(confirm=lambda want, outcome: False)
    assert pinned(tmp_path) == OLD and Shards.fetched == []


def test_one_that_may_not_act_keeps_its_pin_when_the_next_one_is_saved(
    run: Callable[..., list[Event]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = replace(WANT, name="other")
    known = file(tmp_path).load()
    known.deployments["other"] = DeploymentState(manifest=manifest(OLD, "1", "2"))
    file(tmp_path).save(known)

    class Line:
        """A canary failed: the first one may not act."""

        def admit(self, want: Deployment, waits: object, **more: object) -> None:
            if want.name == WANT.name:
                raise NotStarted("not started: the canary failed", where=want.id, fix="see it")

        def ended(self, *seen: object, **more: object) -> None:
            pass

    options = UpOptions(
        base=tmp_path / "inventory",
        steps=lambda: [Shards()],
        serves=False,
        environ={"HF_TOKEN": "hf_x"},
        repin=True,
        rollout=cast(Rollout, Line()),
    )
    first, _ = up.up_host(WANT.host_name, [WANT, second], options, Bus(lambda event: None))
    assert isinstance(first.error, NotStarted)
    after = file(tmp_path).load().deployments
    commits = {name: one.manifest.commit for name, one in after.items() if one.manifest}
    assert commits == {WANT.name: OLD, "other": NEW}


def test_a_hub_that_is_away_changes_nothing(
    run: Callable[..., list[Event]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(playbook: object, token: str | None) -> Manifest:
        raise hub.EndpointUnreachable("away", fix="later")

    monkeypatch.setattr(hub, "fetch_manifest", away)
    with pytest.raises(DeployError, match="away"):
        run()
    assert pinned(tmp_path) == OLD and Shards.fetched == []


@pytest.mark.parametrize("words", [["--only", "launch"], ["--from", "stop"]])
def test_it_needs_the_shards_step(words: list[str]) -> None:
    done = CliRunner().invoke(command, ["x", "--repin", *words])
    assert isinstance(done.exception, UsageError) and "--repin is of no use" in str(done.exception)
