"""`status` and `history` tell who went back, from which launch to which, and whether asked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deployer import observe
from deployer.cli.main import group
from deployer.cli.status import lines
from deployer.state import Back, DeploymentState, HostState, Launch, RolledBack
from deployer.state_file import StateFile
from deployer.steps.rolled_back import back_words, record_words
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import LaunchNote
from tests.unit.hoststeps import deployment, facts
from tests.unit.test_observe import OURS, job

SAMPLES = Path(__file__).parents[2]
ASKED = Back(to="a", left="b", asked=True, by="ann@desk")
ITSELF = Back(to="a", left="c", by="ann@desk")


def record(outcome: str, **more: str) -> RolledBack:
    given = {"to": "a", "mark": "1", "left": "b", "wish": "w", "by": "ann@desk", **more}
    return RolledBack(**given, commits=[], when=5.0, outcome=outcome)


@pytest.mark.parametrize(
    ("back", "words"),
    [
        (ASKED, "rolled back to launch a, from launch b, asked for by ann@desk"),
        (
            ASKED.model_copy(update={"left": ""}),
            "rolled back to launch a, where nothing served, asked for by ann@desk",
        ),
        (ITSELF, "launch a again, automatically after launch c had failed (run of ann@desk)"),
        (Back(to="a"), "launch a again, automatically (run of an older version)"),
    ],
)
def test_why_a_launch_repeats_another(back: Back, words: str) -> None:
    assert back_words(back) == words


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            record("done"),
            "done: to launch a, from launch b, asked for by ann@desk at 1970-01-01 00:00:05 UTC",
        ),
        (record("failed"), "UTC; launch b was brought back"),
        (record("failed", left=""), "where nothing served, asked for by ann@desk at 1970-01-01"),
        (record("", by=""), "not finished: to launch a, from launch b, asked for by an older"),
        (record(""), "`deploy rollback h/n` goes on"),
    ],
)
def test_what_became_of_a_rollback(one: RolledBack, words: str) -> None:
    assert words in record_words(one, "h/n")


def test_the_note_on_the_target_carries_it_and_a_strange_one_says_nothing() -> None:
    note = LaunchNote("mtp", ("x",), ("oom",), back=ASKED)
    assert LaunchNote.parse(note.line()) == note
    assert "back" not in json.loads(LaunchNote("mtp").line())
    odd = json.dumps({**json.loads(note.line()), "back": {"later": 1}})
    assert LaunchNote.parse(odd) == dataclasses.replace(note, back=None)


def test_status_shows_it_of_the_launch_that_runs() -> None:
    went_back = dataclasses.replace(job(), launch=LaunchNote("mtp", back=ASKED))
    own = DeploymentState(rollback=record("done"))
    seen = facts(ServerFact(job=went_back, listening=True, owners=(OURS,)))
    one = observe.deployment_document(deployment(), seen, own)
    assert one["back"]["automatic"] is False
    assert (one["back"]["from"], one["back"]["to"], one["back"]["by"]) == ("b", "a", "ann@desk")
    assert (one["rollback"]["outcome"], one["rollback"]["when"]) == ("done", 5.0)
    document = {
        **{"host": "kpro5", "reachable": True, "error": None, "lock": None, "gpus": []},
        **{"driver": {"version": "1", "flavour": "", "problem": ""}},
        "deployments": [{**one, "endpoint": "e"}],
    }
    text = "\n".join(lines(document))
    assert "               rolled back to launch a, from launch b, asked for by ann@desk" in text
    assert "    rollback   done: to launch a, from launch b" in text
    plain = observe.deployment_document(deployment(), facts(), DeploymentState())
    assert plain["back"] is None and plain["rollback"] is None


def test_history_shows_every_one(tmp_path: Path) -> None:
    own = DeploymentState(rollback=record("failed"))
    own.launches = [
        Launch(id="a", variant="mtp", started=1.0, verdict="stopped"),
        Launch(id="b", variant="mtp", started=2.0, verdict="stopped"),
        Launch(id="c", variant="mtp", started=3.0, verdict="failed: x", back=ASKED),
        Launch(id="d", variant="mtp", started=4.0, verdict="ready", back=ITSELF),
    ]
    (tmp_path / "playbooks").symlink_to(SAMPLES / "playbooks")
    (tmp_path / "inventory").mkdir()
    for file in (SAMPLES / "inventory").glob("*.yaml"):
        (tmp_path / "inventory" / file.name).write_bytes(file.read_bytes())
    StateFile(tmp_path / ".deploy" / "state", "kpro5").save(
        HostState(host="kpro5", deployments={"qwen": own})
    )

    def deploy(*words: str) -> str:
        argv = ["-i", str(tmp_path / "inventory"), "history", "kpro5", *words]
        done = CliRunner().invoke(group, argv, standalone_mode=False)
        assert done.exception is None, done.exception
        return done.stdout

    text = deploy()
    assert "    rolled back to launch a, from launch b, asked for by ann@desk\n" in text
    assert "    launch a again, automatically after launch c had failed" in text
    assert text.endswith("UTC; launch b was brought back\n")
    told = json.loads(deploy("--json"))["kpro5/qwen"]
    assert [one["back"] and one["back"]["automatic"] for one in told["launches"]] == [
        *(None, None, False, True)
    ]
    assert told["rollback"]["outcome"] == "failed" and told["rollback"]["by"] == "ann@desk"
    (tmp_path / ".deploy" / "state" / "kpro6.json").write_text("{")
    argv = ["-i", str(tmp_path / "inventory"), "history", "--all"]
    done = CliRunner().invoke(group, argv, standalone_mode=False)
    assert done.return_value == 2 and "rolled back to launch a" in done.stdout
    assert "kpro6.json" in done.stderr and "\n  -> " in done.stderr
    done = CliRunner().invoke(group, [*argv, "--json"], standalone_mode=False)
    told = json.loads(done.stdout)
    assert done.return_value == 2 and len(told["kpro5/qwen"]["launches"]) == 4
    assert told["kpro6/qwen"]["error"]["kind"] == "StateUnreadable"
