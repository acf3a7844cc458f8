"""`deploy migrate` between kpro6 and kpro5 with clients at a real router for the whole time.

The tests run in order, on one `up` of kpro6: gates that fail, two kills and the way back, a kill
and the same command to the end with --retire, the way back from there. Then each phase: the
controller killed, the network to the source cut, the network to the destination cut; each followed
once by the same command and once by `--abort`. A row goes from the host that serves to the other.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from lab import HOSTS, Lab, eventually
from migrateharm import Cut, assert_idle, moment, serving, watched, why_no_cuts
from migratelab import (
    DST,
    LONG_TOKENS,
    MARK,
    OLD,
    SRC,
    URLS,
    Client,
    Move,
    Project,
    Router,
    assert_none_failed,
    assert_nothing_is_left,
    drivers,
    is_served,
    moving,
    old_answers,
    served,
)

from deployer.pct_net import net_options

pytestmark = [pytest.mark.container, pytest.mark.long]


@pytest.fixture(scope="module")
def box(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Router]]:
    """See moving."""
    with moving(lab, tmp_path_factory.mktemp("migrate")) as made:
        yield made


def test_dry_run_touches_nothing(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    seen = project.deploy("migrate", SRC, DST, "--dry-run", "--retire").ok()
    words = ("--abort starts it again", "stop container 129", "to vfio-pci")
    for word in (f"POST /workers {URLS[DST]}", *words):
        assert word in seen.out
    assert " blocked: " not in seen.out
    assert lab.hosts[DST].sh('ls "$1"', MARK).exit != 0
    assert router.workers() == {URLS[SRC]: "ready"}


def test_failed_gates_end_with_5_and_the_source_was_never_touched(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    before = lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").out
    lab.fault("server-degenerate", host=DST)
    try:
        with Client(router) as client:
            failed = project.start("migrate", SRC, DST)
            assert failed.end() == 5, failed.said
    finally:
        lab.fault("server-degenerate", on=False, host=DST)
    assert_none_failed(client)
    assert "was not touched and serves" in "".join(one["text"] for one in failed.named("note"))
    assert lab.guests[SRC].sh("pgrep -f [s]glang.launch_server").out == before
    assert router.workers() == {URLS[SRC]: "ready"}
    chosen = [event["text"] for event in failed.named("note") if "comes first" in event["text"]]
    assert chosen and "from kpro6/tiny: " in chosen[0] and "; from the Hub: " in chosen[0]
    assert_nothing_is_left(lab)
    assert "sglang.launch_server --model-path /srv/old/tiny-old" in " ".join(
        event["text"]
        for event in failed.named("note")
        if "--abort starts it again" in event["text"]
    )
    assert any("did not start, serves again" in event["text"] for event in failed.named("note"))
    eventually(lambda: old_answers(lab), "the old server answers again", 10)
    project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
    assert is_served(lab, SRC) and not is_served(lab, DST) and old_answers(lab)


def test_killed_twice_with_a_hook_and_taken_back(lab: Lab, box: tuple[Project, Router]) -> None:
    project, router = box
    command = [sys.executable, str(project.folder / "hook.py"), router.url]
    project.cut_over(hook={"command": command, "probe_url": router.url})
    with Client(router) as client:
        project.kill_at("job_started", "launch", SRC, DST)
        assert router.workers() == {URLS[SRC]: "ready"}
        moved = project.kill_at("step_started", "migrate:settle", SRC, DST)
        said = [event["text"] for event in moved.named("note") if event["step"] == "cutover"]
        assert said[0] == "hook: forward kpro6/tiny to kpro5/tiny"
        assert said[1].startswith("no gap: all of "), said
        eventually(lambda: router.workers() == {URLS[DST]: "ready"}, "moved", 30)
        back = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "back", 30)
    assert_none_failed(client)
    assert "kpro6/tiny serves as before" in back.out
    assert not is_served(lab, DST)
    eventually(lambda: old_answers(lab), "the old server answers again", 10)
    for host in HOSTS:
        assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0


def test_no_request_fails_while_the_model_moves(lab: Lab, box: tuple[Project, Router]) -> None:
    """Killed at the cut-over; the same command ends it and retires the source."""
    project, router = box
    project.cut_over(router={"url": router.url})
    cut = 0.0
    with Client(router) as client:
        for event in (killed := project.start("migrate", SRC, DST, "--retire")):
            if (event["event"], event.get("step")) == ("step_done", "verify"):
                # Gated now; not before.
                assert URLS[DST] not in router.workers()
            if (event["event"], event.get("step")) == ("step_started", "migrate:cutover"):
                killed.signal(signal.SIGKILL)
        assert killed.end() == -signal.SIGKILL, killed.said
        move = project.start("migrate", SRC, DST, "--retire")
        for event in move:
            if (event["event"], event.get("step")) == ("step_done", "migrate:cutover"):
                cut = time.monotonic()
        assert move.end() == 0, move.said
    assert_none_failed(client)
    across = [one for one in client.answers if one[0] < cut < one[1] and one[2] == LONG_TOKENS]
    assert across, "a long request was under way at the cut-over, and ended well"
    assert router.workers() == {URLS[DST]: "ready"}
    assert "kpro5/tiny serves tiny-hybrid" in move.named("run_finished")[-1]["summary"]
    assert served(lab, DST) > 20
    assert_nothing_is_left(lab)
    for host in HOSTS:
        assert json.loads(lab.hosts[host].read(MARK))["outcome"] == "done"
    assert lab.hosts[SRC].sh("pct status 129").out == "status: stopped\n"
    assert drivers(lab, SRC) == {"vfio-pci"}


def test_abort_after_the_end_brings_the_retired_source_back(
    lab: Lab, box: tuple[Project, Router]
) -> None:
    project, router = box
    with Client(router) as client:
        back = project.deploy("migrate", SRC, DST, "--abort", "--yes").ok()
        eventually(lambda: router.workers() == {URLS[SRC]: "ready"}, "only kpro6 is left", 30)
    assert_none_failed(client)
    assert "kpro6/tiny serves as before" in back.out
    assert drivers(lab, SRC) == {"nvidia"}
    assert is_served(lab, SRC) and not is_served(lab, DST)
    for host in HOSTS:
        assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0


@pytest.fixture
def pair(lab: Lab, box: tuple[Project, Router]) -> Iterator[tuple[str, str]]:
    """Who serves, and who does not: everything is as it should be before a row."""
    project, router = box
    project.cut_over(router={"url": router.url})
    try:
        source = serving(router)
    except ValueError:
        pytest.fail(f"an earlier row has left {router.workers()}")
    destination = next(host for host in HOSTS if host != source)
    # How a stranger's is adopted and put back is seen in the story above.
    lab.fault("old-server", on=False, host=DST)
    lab.guests[DST].sh('pkill -f "$1"', OLD)
    assert is_served(lab, source) and not is_served(lab, destination)
    yield source, destination


def net1(lab: Lab, host: str) -> str:
    """The container's second network card, by pct."""
    return lab.hosts[host].sh("pct config 129 | sed -n 's/^net1: //p'").out.strip()


def test_an_address_moves_by_pct_and_back(
    lab: Lab, box: tuple[Project, Router], pair: tuple[str, str]
) -> None:
    """The source is kept, so that the router's clients have it all the time."""
    project, router = box
    source, destination = pair
    card = "name=eth1,bridge=vmbr1,hwaddr=BC:24:11:00:50:01,ip=192.0.2.50/24,tag=7"
    lab.hosts[source].sh('pct set 129 --net1 "$1"', card).ok()
    project.cut_over(address={"ip": "192.0.2.77/24"})
    wrong = project.deploy("migrate", source, destination, "--dry-run")
    assert wrong.exit == 1
    assert f"container 129 on {source} does not have 192.0.2.77/24 on net1; that is" in wrong.err
    project.cut_over(address={"ip": "192.0.2.50/24"})
    with watched(project, router):
        project.deploy("migrate", source, destination, "--keep-source", "--yes").ok()
        assert dict(net_options(net1(lab, destination))) == {
            **dict(net_options(card)),
            "type": "veth",
        }
        assert net1(lab, source) == ""
        project.deploy("migrate", source, destination, "--abort", "--yes").ok()
    assert "hwaddr=BC:24:11:00:50:01,ip=192.0.2.50/24" in net1(lab, source)
    assert net1(lab, destination) == ""
    assert is_served(lab, source) and not is_served(lab, destination)
    lab.hosts[source].sh("pct set 129 --delete net1").ok()


PHASES = ("prepare", "weights", "launch", "cutover", "settle", "stop", "retire")
HARM = ("killed", "source cut", "destination cut")
UNDONE = {
    "prepare": "pct status 129 | grep -q stopped || pct shutdown 129 --forceStop 1",
    "weights": "rm -rf /var/lib/lxc/129/rootfs/srv/models/tiny-hybrid",
}
"""What makes the destination lack what the phase brings."""


def harmed(project: Project, move: Move, harm: str, phase: str, cut: Cut) -> None:
    """Runs to the middle of the phase, does the harm there, and sees how the run ends."""
    seen = move.until(moment(phase))
    assert seen is not None, move.said or move.events[-1]
    if harm == "killed":
        move.signal(signal.SIGKILL)
        assert move.end() == -signal.SIGKILL
        return
    cut.cut()
    code = move.end()
    # A host that is not needed any more does not keep the run from its end.
    assert code in (0, 3), (code, move.said)
    assert code == 0 or "-> " in move.said, move.said


@pytest.mark.parametrize("follow", ["same command", "abort"])
@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("phase", PHASES)
def test_harmed_in_a_phase(
    lab: Lab,
    box: tuple[Project, Router],
    pair: tuple[str, str],
    phase: str,
    harm: str,
    follow: str,
) -> None:
    project, router = box
    source, destination = pair
    retire = ["--retire"] if phase == "retire" else []
    how = "dark" if follow == "abort" else "refused"
    cut = Cut(source if harm == "source cut" else destination, how)
    if harm != "killed" and (why := why_no_cuts()):
        pytest.skip(why)
    lab.hosts[destination].sh(UNDONE.get(phase, "")).ok()
    with watched(project, router):
        try:
            move = project.start("migrate", source, destination, *retire)
            harmed(project, move, harm, phase, cut)
        finally:
            cut.mend()
        if follow == "abort":
            ended = project.deploy("migrate", source, destination, "--abort", "--yes").ok()
        else:
            ended = project.deploy("migrate", source, destination, *retire, "--yes").ok()
    assert_idle(lab)
    if follow == "abort":
        assert f"{source}/tiny serves as before" in ended.out
        assert router.workers() == {URLS[source]: "ready"}
        assert is_served(lab, source) and not is_served(lab, destination)
        assert drivers(lab, source) == {"nvidia"}
        for host in HOSTS:
            assert lab.hosts[host].sh('ls "$1"', MARK).exit != 0
        return
    assert router.workers() == {URLS[destination]: "ready"}
    assert is_served(lab, destination) and not is_served(lab, source)
    for host in HOSTS:
        assert json.loads(lab.hosts[host].read(MARK))["outcome"] == "done"
    if retire:
        assert lab.hosts[source].sh("pct status 129").out == "status: stopped\n"
        assert drivers(lab, source) == {"vfio-pci"}
