"""Two runs at once, locks of dead runs, and `unlock`, on kpro6."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from lab import Lab, Machine
from second import HOST, LOCK, Copy, is_free

pytestmark = pytest.mark.container

ROUNDS = 5
WHO = re.compile(r"another run is at work: \S+@\S+ \(run [\w-]+, pid \d+\) since 2\d{3}-\d\d-\d\d ")


@pytest.fixture(scope="module")
def host(lab: Lab) -> Machine:
    """kpro6, pristine: there is something to do."""
    lab.reset(HOST)
    return lab.hosts[HOST]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, Copy]:
    """Two controllers, as far as local locks go."""
    folder: Path = tmp_path_factory.mktemp("locks")
    return Copy(folder / "one"), Copy(folder / "two")


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_of_two_runs_at_once_one_proceeds(
    host: Machine, copies: tuple[Copy, Copy], round_: int
) -> None:
    runs = [copy.up() for copy in copies]
    # Each is read up to what it does under the lock; the one that has no lock ends by itself.
    entered = [run.until(lambda event: event["event"] == "step_started") for run in runs]
    assert sum(event is not None for event in entered) == 1, [run.said for run in runs]
    winner, loser = (runs[0], runs[1]) if entered[0] else (runs[1], runs[0])
    assert loser.end() == 4, loser.said
    [finished] = loser.named("run_finished")
    assert WHO.search(finished["summary"]), finished
    assert f"pid {winner.process.pid})" in finished["summary"]
    assert "deploy unlock kpro6" in finished["fix"]
    assert finished["summary"] in loser.said.replace("\n", " ")
    winner.signal(signal.SIGTERM)
    assert winner.end() == 130, winner.said
    assert is_free(host)


def test_the_refusal_names_the_step(host: Machine, copies: tuple[Copy, Copy]) -> None:
    one, two = copies
    first = one.up()
    assert first.until(lambda event: event["event"] == "step_started"), first.said
    # The record on the host names the step before the step says anything else.
    assert first.until(lambda event: True), first.said
    second = two.up()
    assert second.end() == 4, second.said
    [finished] = second.named("run_finished")
    first.signal(signal.SIGTERM)
    assert first.end() == 130
    steps = [event["step"] for event in first.named("step_started")]
    said = re.search(r", in step (\w+) \(for \d+ s\)$", finished["summary"])
    assert said and said[1] in steps, (finished, steps)


def test_same_folder_the_local_lock_decides(host: Machine, copies: tuple[Copy, Copy]) -> None:
    one, _ = copies
    first = one.up()
    assert first.until(lambda event: event["event"] == "run_started")
    second = one.up()
    assert second.end() == 4, second.said
    [finished] = second.named("run_finished")
    assert f"kpro6 is in use by pid {first.process.pid} (up kpro6/tiny)" in finished["summary"]
    assert ", since 2" in finished["summary"]
    first.signal(signal.SIGTERM)
    assert first.end() == 130
    assert is_free(host)


def test_lock_of_a_killed_run_is_taken_over_and_said(
    host: Machine, copies: tuple[Copy, Copy]
) -> None:
    one, two = copies
    dead = one.up()
    assert dead.until(lambda event: event["event"] == "step_started")
    dead.signal(signal.SIGKILL)
    assert dead.end() == -signal.SIGKILL
    assert not is_free(host)
    heir = two.up()
    assert heir.until(lambda event: event["event"] == "step_started"), heir.said
    heir.signal(signal.SIGINT)
    assert heir.end() == 130
    [note] = [event["text"] for event in heir.named("note") if "lock" in event["text"]]
    assert note.startswith("took over the lock of a dead run: ")
    assert f"pid {dead.process.pid})" in note
    assert f"pid {dead.process.pid} on " in note and note.endswith(" is gone")
    assert note in heir.said.replace("\n", " ")
    assert is_free(host)


def test_lock_of_another_controller_is_never_taken(
    host: Machine, copies: tuple[Copy, Copy]
) -> None:
    one, _ = copies
    host.sh('mkdir -p "${1%/*}" && printf "run-elsewhere\\nbm8gcmVjb3Jk\\n" >"$1"', LOCK).ok()
    refused = one.up()
    assert refused.end() == 4
    assert "run-elsewhere" in refused.said
    assert host.read(LOCK).startswith("run-elsewhere\n")
    asked = one.deploy("unlock", HOST)
    assert asked.exit == 2, asked.err
    assert "use --yes" in asked.err
    done = one.deploy("unlock", HOST, "--yes").ok()
    assert "kpro6: held by run run-elsewhere" in done.err
    assert "kpro6: unlocked" in done.err
    assert is_free(host)
    assert "the lock is free" in one.deploy("unlock", HOST, "--yes").ok().err


def test_a_run_whose_lock_was_taken_away_stops(
    lab: Lab, host: Machine, copies: tuple[Copy, Copy]
) -> None:
    lab.reset(HOST)  # short steps come first
    one, _ = copies
    robbed = one.up()
    # The step has its lock written by then; the next one asks again.
    assert robbed.until(lambda event: event["event"] == "change_started"), robbed.said
    host.sh('printf "thief\\nx\\n" >"$1.t" && mv "$1.t" "$1"', LOCK).ok()
    assert robbed.end() == 4, robbed.said
    assert "taken away (now: thief)" in robbed.said
    assert host.read(LOCK).startswith("thief\n"), "the lock of another is left alone"
    one.deploy("unlock", HOST, "--yes").ok()
