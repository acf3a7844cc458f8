"""The lab's `pct` with snapshots, as pve-guest-common has them: what is taken, kept and refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.pctlab import PctLab, load_lab


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PctLab:
    return load_lab(monkeypatch, tmp_path)


def test_snapshots_are_shown_as_a_tree(lab: PctLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    lab.conf().write_text(
        "memory: 512\nparent: s2\n\n[s1]\n#first%3A one\n#more\nsnaptime: 1700000000\n\n"
        "[s2]\nparent: s1\nsnaptime: 1700000500\n\n[other]\nsnaptime: 1600000000\n"
    )
    assert lab.run("listsnapshot", "101").stdout.decode().splitlines() == [
        "`-> other                       2020-09-13 12:26:40     no-description",
        "`-> s1                          2023-11-14 22:13:20     first: one",
        " `-> s2                         2023-11-14 22:21:40     no-description",
        "  `-> current                                           You are here!",
    ]


def test_a_rollback_keeps_what_is_the_container_s(lab: PctLab) -> None:
    lab.conf().write_text(
        "#told\nmemory: 9\nmp1: local:101/new.raw,mp=/n\nrootfs: local:101/d.raw\n"
        "unused3: local:101/u.raw\n\n[pve:pending]\ncores: 2\n\n"
        "[s1]\n#old\nmemory: 5\nrootfs: local:101/d.raw\nsnaptime: 17\n"
    )
    assert lab.run("rollback", "101", "s1").exit == 0
    assert lab.conf().read_text().partition("\n[")[0] == (
        "#told\nmemory: 5\nparent: s1\nrootfs: local:101/d.raw\nunused0: local:101/new.raw\n"
        "unused3: local:101/u.raw\n"
    )
    assert "pve:pending" not in lab.conf().read_text()


@pytest.mark.parametrize(
    ("text", "command", "told"),
    [
        ("template: 1\n", "snapshot 101 s1", "you can't take a snapshot if it's a template"),
        (
            "arch: amd64\n\n[s1]\nsnapstate: prepare\n",
            "rollback 101 s1",
            "unable to rollback to incomplete snapshot (snapstate = prepare)",
        ),
        ("lock: backup\n\n[s1]\nmemory: 1\n", "delsnapshot 101 s1", "CT is locked (backup)"),
        ("arch: amd64\n", "delsnapshot 101 s1", "snapshot 's1' does not exist"),
        ("arch: amd64\n", f"snapshot 101 {'x' * 41}", "value may only be 40 characters long"),
    ],
)
def test_snapshots_that_are_refused(lab: PctLab, text: str, command: str, told: str) -> None:
    lab.conf().write_text(text)
    said = lab.run(*command.split())
    assert said.exit != 0
    assert told in said.stderr.decode()
    assert lab.conf().read_text() == text
