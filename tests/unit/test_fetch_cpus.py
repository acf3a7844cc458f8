"""How many streams a copy between hosts begins with, and when it takes one more."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.agents.fetch import cpus
from deployer.agents.fetch.borrow import Lender
from deployer.agents.fetch.cpus import Cpus
from deployer.agents.fetch.hubhttp import Hub
from deployer.agents.fetch.manifest import Job


def test_idle_is_the_share_since_the_look_before(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 7 7\ncpu0 1 2 3\n")
    seen = Cpus(str(stat))
    stat.write_text("cpu  160 0 50 830 60 0 0 0 7 7\n")
    assert seen.idle() == pytest.approx(0.4)
    assert seen.idle() == 0.0  # no time has passed
    stat.write_text("no such line\n")
    assert Cpus(str(stat)).idle() == 1.0
    assert Cpus(str(tmp_path / "none")).idle() == 1.0


@pytest.mark.parametrize(("there", "asked", "begun"), [(2, 4, 2), (1, 4, 2), (16, 4, 4), (2, 1, 1)])
def test_no_more_ciphers_at_once_than_cpus(
    monkeypatch: pytest.MonkeyPatch, there: int, asked: int, begun: int
) -> None:
    monkeypatch.setattr(cpus, "count", lambda: there)
    row = {"path": "/m", "repo": "a/b", "commit": "c" * 40, "files": [], "connections": asked}
    peer = {"address": "192.0.2.9", "user": "root", "path": "/m", "lends": True}
    job = Job.parse({**row, "peer": peer})
    assert Lender(job).at_once(asked) == begun
    assert Hub(job, "", job.endpoint).at_once(asked) == asked
