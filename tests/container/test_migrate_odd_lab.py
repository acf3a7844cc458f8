"""`deploy migrate` when things change in between: a side that stays dark, an edited playbook.

The tests run in order, on one `up` of kpro6, with clients at a real router.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml
from lab import HOSTS, Lab, eventually
from migrateharm import Cut, assert_idle, watched, why_no_cuts
from migratelab import DST, MARK, SRC, URLS, Project, Router, drivers, is_served, moving

pytestmark = [pytest.mark.container, pytest.mark.long]
KEYS = "cat /root/.ssh/authorized_keys; ls /var/lib/deployer/lending"


@pytest.fixture(scope="module")
def box(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Router]]:
    """See moving."""
    if why := why_no_cuts():
        pytest.skip(why)
    with moving(lab, tmp_path_factory.mktemp("migrate")) as made:
        yield made


def context_length(project: Project, length: int) -> None:
    """Edits the playbook of both."""
    path = project.folder / "playbooks" / "tiny-hybrid.yaml"
    playbook = yaml.safe_load(path.read_text(encoding="utf-8"))
    playbook["serve"]["args"]["context-length"] = length
    path.write_text(yaml.safe_dump(playbook, sort_keys=False), encoding="utf-8")


def server(lab: Lab, host: str) -> str:
    """Pid and command line of the server there."""
    return lab.guests[host].sh("pgrep -a -f [s]glang.launch_server.*tiny-hybrid").out


def test_taken_back_while_the_destination_is_dark(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    before = server(lab, SRC)
    cut = Cut(DST, "dark")
    with watched(project, router):
        project.kill_at("job_started", "shards", SRC, DST)
        assert "deployer-migrate" in lab.hosts[SRC].sh(KEYS).out + lab.guests[SRC].sh(KEYS).out
        shown = project.deploy("status", SRC).ok()
        assert "kpro6/tiny -> kpro5/tiny is in phase weights since" in shown.out
        cut.cut()
        try:
            back = project.deploy("migrate", SRC, DST, "--abort", "--yes")
        finally:
            cut.mend()
        assert back.exit == 3, back.err
        for word in ("kpro6/tiny serves as before; left on kpro5/tiny: ", "may move elsewhere"):
            assert word in back.err
        # What the key on the dark host would open is closed.
        assert "deployer-migrate" not in lab.hosts[SRC].sh(KEYS).out + lab.guests[SRC].sh(KEYS).out
        assert project.deploy("migrate", SRC, DST, "--yes").exit == 2
        assert "is being taken back" in project.deploy("status", DST).ok().out
        project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        again = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
    assert "is taken back: nothing is left to do" in again.out
    assert server(lab, SRC) == before and not is_served(lab, DST)
    assert_idle(lab)
    for host in HOSTS:
        assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0


def test_an_edited_playbook_and_a_source_that_is_gone(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    cut = Cut(SRC, "dark")
    with watched(project, router):
        project.kill_at("step_started", "migrate:settle", SRC, DST)
        context_length(project, 2048)
        moved, left = server(lab, DST), server(lab, SRC)
        cut.cut()
        try:
            dark = project.deploy("migrate", SRC, DST, "--yes")
            kept = project.deploy("migrate", SRC, DST, "--keep-source", "--yes")
        finally:
            cut.mend()
        assert dark.exit == 3 and "--keep-source ends the migration without it" in dark.err
        assert kept.exit == 0 and "kpro6/tiny is left as it is" in kept.out, kept.err
        assert server(lab, DST) == moved and server(lab, SRC) == left
        again = project.deploy("migrate", SRC, DST, "--yes").ok()
        assert "was finished at" in again.out
        project.deploy("migrate", SRC, DST, "--retire", "--yes").ok()
    assert router.workers() == {URLS[DST]: "ready"}
    assert server(lab, DST) == moved, "an edited playbook is for the next `up`"
    assert lab.hosts[SRC].sh("pct status 129").out == "status: stopped\n"
    assert drivers(lab, SRC) == {"vfio-pci"}
    for host in HOSTS:
        assert json.loads(lab.hosts[host].read(MARK))["outcome"] == "done"


def test_the_source_comes_back_as_it_was_and_is_not_stopped_by_surprise(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    with watched(project, router):
        back = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "only kpro6 is left", 30)
    assert "its playbook says something else now" in back.err
    assert "--context-length 4096" in server(lab, SRC)
    context_length(project, 4096)
    with watched(project, router):
        project.deploy("migrate", SRC, DST, "--yes").ok()
        project.deploy("up", SRC, "--yes").ok()
        refused = project.deploy("migrate", SRC, DST, "--retire", "--yes")
        assert refused.exit == 1 and "stop it: `deploy down kpro6/tiny`" in refused.err
        assert is_served(lab, SRC)
        project.deploy("down", SRC, "--yes").ok()
        project.deploy("migrate", SRC, DST, "--retire", "--yes").ok()
    assert drivers(lab, SRC) == {"vfio-pci"} and is_served(lab, DST)
    assert_idle(lab)
