"""`deploy migrate` in any order of commands, kills, cuts and things done by hand between them.

Every end is a typed error that says what to do, clients always have a server that has passed (the
world checks it at each effect), and in the end the same command, or --abort and then it, finishes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import migrateworld as mw
import pytest
from migrateworld import DST, SRC, Killed, World, url
from test_migrate import HOOK, ROUTER

from deployer.errors import Defect

PATH = "/var/lib/deployer/migrations/qwen.json"
COMMANDS: tuple[dict[str, Any], ...] = (
    {},
    {"abort": True},
    {"retire": True},
    {"keep_source": True},
    {"dry_run": True},
)


def by_hand(world: World, dice: random.Random) -> str:
    """Something that somebody does between two runs."""
    host = dice.choice([SRC, DST])
    machine = world.machines[host]
    match dice.randrange(8):
        case 0:
            (world.folder / ".deploy" / "state" / f"{DST}.json").unlink(missing_ok=True)
            return "the state is lost"
        case 1 if PATH in machine.files:
            machine.files[PATH] = dice.choice([b"{", b"empty\n", b"\0\0"])
            return f"the copy on {host} is damaged"
        case 2:
            machine.files.pop(PATH, None)
            return f"the copy on {host} is lost"
        case 3:
            world.edits[DST] = {"serve": {"args": {"context-length": dice.choice([1024, 2048])}}}
            return "the playbook is edited"
        case 4 if not world.machines[SRC].serving:
            source = world.machines[SRC]
            source.serving = source.good = source.container = True
            if dice.random() < 0.5:
                world.workers[url(SRC)] = True
            return "up of the source"
    return "nothing"


def run(world: World, log: list[object], **words: Any) -> int | None:
    """Runs the command; its exit code, None when it was killed."""
    try:
        result = world.migrate(**words)
    except Killed:
        log.append((words, "killed", world.effects[-1]))
        return None
    log.append((words, result.exit_code, str(result.error or result.done)))
    assert not isinstance(result.error, Defect), (log, result.error.evidence)
    assert result.error is None or result.error.fix, log
    return result.exit_code


@pytest.mark.parametrize("seed", range(12))
def test_any_order_can_be_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    dice, log = random.Random(seed), list[object]()
    world = mw.build(monkeypatch, tmp_path, dice.choice([ROUTER, HOOK]))
    for _ in range(dice.randint(3, 7)):
        at = len(world.effects) + dice.randint(0, 14)
        world.stop_at = (at, dice.choice(["before", "after"])) if dice.random() < 0.4 else None
        world.cut_at = (at, dice.choice([SRC, DST])) if dice.random() < 0.3 else None
        if dice.random() < 0.6:
            world.dark.clear()
        log.append(by_hand(world, dice))
        run(world, log, **dice.choice(COMMANDS))
    world.stop_at = world.cut_at = None
    world.dark.clear()
    # A destination that served another wish before is an obstacle that only a person can judge.
    world.edits.clear()
    code = run(world, log)
    for _ in range(3):
        if code != 0:
            run(world, log, abort=True)
            code = run(world, log)
    assert code == 0, log
    destination = world.machines[DST]
    assert destination.serving and destination.good and not world.keys, log
