"""What decides in a migration: journal, obstacles, sources of weights, gap, address."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import serverworld as world
from migrateworld import OLD, conf

from deployer.errors import StepFailed, UsageError
from deployer.inventory import Cutover, HookCutover, Replica, Ssh
from deployer.migrate_gap import Gap, Ledger, Meter
from deployer.migrate_hook import run_hook
from deployer.migrate_journal import (
    PHASES,
    Begin,
    Nothing,
    Resume,
    Seen,
    TakeBack,
    after,
    decide,
    entered,
    newest,
)
from deployer.migrate_key import key_line, known_hosts
from deployer.migrate_mark import Mark, Marked, mark_path, parse_mark, under_way
from deployer.migrate_preflight import (
    Obstacle,
    container_differences,
    destination_obstacles,
    differences,
    lock_obstacle,
    older_wish,
    one_machine,
    pair_obstacles,
    refused,
    serve_differences,
    source_obstacles,
)
from deployer.migrate_retire import restarted, retire_obstacles, retire_users
from deployer.migrate_side import trouble, with_drain
from deployer.migrate_way import cutover_of
from deployer.migrate_weights import (
    LendingPeer,
    Login,
    Rate,
    choose,
    login_of,
    with_source,
)
from deployer.model import Change, Facts, Plan, ProbeOutput, Procedure, Where
from deployer.observe import LockSeen
from deployer.pct_config import parse_conf
from deployer.remote.lock_record import Controller, Held, LockRecord
from deployer.state import DeploymentState, Migration
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_facts import GpuFacts, PciFunction
from deployer.steps.gpus_holders import PERSISTENCED, Holder
from deployer.steps.server_facts import ServerFact
from deployer.steps.serving_fact import ServingFact
from deployer.steps.shards_download import job_files

WANT = world.deployment()
A, B, C = "kpro6/qwen", "kpro5/qwen", "kpro7/qwen"


def record(**words: Any) -> Migration:
    base = {"id": "m1", "source": A, "destination": B, "phase": "weights", "started": 5.0}
    return Migration.model_validate({**base, **words})


def decided(*records: Migration | None, **words: Any) -> Any:
    seen = Seen(words.pop("source_serves", True), words.pop("retired", None))
    return decide(records, A, B, seen, **{"abort": False, "retire": False, **words})


def test_phases_follow_each_other() -> None:
    walked = [PHASES[0]]
    while following := after(walked[-1]):
        walked.append(following)
    assert tuple(walked) == PHASES
    one = entered(record(seq=3), "launch", "me@here", 9.0)
    assert (one.phase, one.seq, one.entered, one.controller) == ("launch", 4, 9.0, "me@here")


def test_the_newest_copy_counts() -> None:
    old, new = record(seq=1), record(seq=2, phase="launch")
    assert newest([old, None, new]) is new
    later = record(id="m2", started=6.0, seq=0)
    assert newest([new, later]) is later
    assert newest([None]) is None
    chosen = decided(old, new, None)
    assert isinstance(chosen, Resume) and chosen.record.phase == "launch"


@pytest.mark.parametrize(
    ("records", "words", "kind"),
    [
        ([], {}, Begin),
        ([record(outcome="aborted", back=True)], {}, Begin),
        ([record()], {}, Resume),
        ([record()], {"abort": True}, TakeBack),
        ([record(back=True)], {"abort": True}, TakeBack),
        ([record(outcome="done")], {"source_serves": False}, Nothing),
        ([record(outcome="done")], {"source_serves": None}, Nothing),
        ([record(outcome="done")], {"source_serves": True}, Begin),
        ([record(outcome="done", keep_source=True)], {"source_serves": True}, Nothing),
        ([record(outcome="done")], {"abort": True}, TakeBack),
        ([record(outcome="done")], {"retire": True, "source_serves": False}, Resume),
        ([record(outcome="done", retire=True)], {"retire": True, "source_serves": False}, Nothing),
        ([record(id="m0", source=B, destination=A, outcome="done", started=1.0)], {}, Begin),
        ([record(outcome="aborted")], {"abort": True}, Nothing),
        # Retired, and somebody has started the container since.
        (
            [record(outcome="done", retire=True)],
            {"retire": True, "source_serves": False, "retired": False},
            Resume,
        ),
        ([record(outcome="done")], {"retire": True, "source_serves": True}, Begin),
        ([record(outcome="done", keep_source=True)], {"retire": True}, Resume),
        # Its clock was a day ahead when it was taken back.
        ([record(id="m0", outcome="aborted", started=9.0), record()], {}, Resume),
        (
            [record(), record(id="m2", source=B, destination=C, outcome="done", started=9.0)],
            {},
            Resume,
        ),
        # What came after it was taken back.
        (
            [record(outcome="done"), record(id="m2", source=B, destination=C, outcome="aborted")],
            {"abort": True},
            TakeBack,
        ),
        # The other one needs only the host that is dark.
        ([record(source=A, destination=C, back=True, released=[A])], {}, Begin),
        (
            [record(back=True, released=[A]), record(id="m2", destination=C, started=9.0)],
            {"abort": True},
            TakeBack,
        ),
    ],
)
def test_what_a_run_does(records: list[Migration], words: dict[str, Any], kind: type) -> None:
    assert isinstance(decided(*records, **words), kind)


@pytest.mark.parametrize(
    ("records", "words", "said"),
    [
        ([], {"abort": True}, "no migration to abort"),
        ([record(source=C, back=True, released=[C])], {}, "under way, in phase weights"),
        ([record(back=True)], {}, "is being taken back"),
        ([record(destination=C)], {}, "kpro6/qwen -> kpro7/qwen \\(m1\\) is under way"),
        ([record(source=C, destination=B)], {"abort": True}, "under way, in phase weights"),
        (
            [
                record(outcome="done"),
                record(id="m2", source=B, destination=A, outcome="done", started=9.0),
            ],
            {"abort": True},
            "kpro5/qwen -> kpro6/qwen \\(m2\\) came after it",
        ),
        (
            [
                record(outcome="done"),
                record(id="m2", source=B, destination=C, outcome="done", started=9.0),
            ],
            {"source_serves": False},
            "kpro5/qwen -> kpro7/qwen \\(m2\\) came after it",
        ),
    ],
)
def test_what_a_run_refuses(records: list[Migration], words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decided(*records, **words)


@pytest.mark.parametrize(("kept", "phase"), [(False, "stop"), (True, "cutover")])
def test_retire_of_a_finished_one_goes_on(kept: bool, phase: str) -> None:
    one = record(outcome="done", phase="retire", keep_source=kept)
    chosen = decided(one, retire=True, source_serves=False)
    assert (chosen.record.phase, chosen.record.outcome, chosen.finished) == (phase, "", True)


def test_the_mark_on_a_host() -> None:
    text = record().model_dump_json()
    assert parse_mark(ProbeOutput(0, text.encode(), b"")) == Marked(record())
    assert parse_mark(ProbeOutput(0, b"", b"")) == Marked()
    newer = parse_mark(ProbeOutput(0, b'{"id": "x"}', b""))
    assert newer.problem == "source: Field required" and not newer.damaged
    later = record().model_copy(update={"phase": "teleport"}).model_dump_json().encode()
    assert parse_mark(ProbeOutput(0, later, b"")).problem == "phase 'teleport' is not known"
    for half in (b'{"id"', b"\0" * 700, b"empty\n", b"[" * 5000):
        assert parse_mark(ProbeOutput(0, half, b"")).damaged, half
    unseen = parse_mark(ProbeOutput(1, b"", b"head: /x: Input/output error\n"))
    assert unseen == Marked(problem="head: /x: Input/output error")
    assert parse_mark(ProbeOutput(0, b"", b"", timed_out=True)).problem
    assert mark_path(WANT) == "/var/lib/deployer/migrations/qwen.json"


@pytest.mark.parametrize(
    ("made", "printed"), [(None, ""), ("", "empty\n"), ('{"id": "m1"}\n', '{"id": "m1"}\n')]
)
def test_the_probe_of_the_mark(tmp_path: Path, made: str | None, printed: str) -> None:
    want = dataclasses.replace(WANT, name="it's $odd")
    [probe] = Mark().probes(want)
    path = tmp_path / "it's $odd.json"
    if made is not None:
        path.write_text(made)
    # The folder is the host's; the rest of the script is as it runs there.
    script = probe.script.replace("/var/lib/deployer/migrations", str(tmp_path))
    assert script != probe.script
    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


def test_status_tells_a_migration_that_has_not_ended() -> None:
    def told(mark: Marked | None, own: Migration | None) -> Any:
        facts = Facts({Marked: mark} if mark is not None else {})
        return under_way(facts, DeploymentState(migration=own))

    assert told(None, None) is None and told(Marked(), record()) is None
    assert told(Marked(record(outcome="done")), record()) is None
    shown = told(Marked(record(phase="settle", controller="ann@desk")), record())
    assert (shown["phase"], shown["by"], shown["back"]) == ("settle", "ann@desk", False)
    assert "`deploy migrate kpro6/qwen kpro5/qwen` goes on, --abort takes it back" in shown["words"]
    # It was dark when the record was written last; another controller's is newer.
    assert "is being taken back" in told(Marked(record()), record(back=True, seq=1))["words"]
    assert told(Marked(record()), record(outcome="done", seq=1)) is None
    assert told(Marked(record(seq=2)), record(back=True, seq=1))["back"] is False
    # A host that could not be asked: by what is known here.
    assert "is being taken back" in told(None, record(back=True))["words"]
    assert "cannot be read: x" in told(Marked(problem="x"), None)["words"]


# ---- obstacles


def serving(problem: str = "", verdict: str = "good") -> Facts:
    job = world.server_job(WANT)
    launch = world.IDENTITY.id
    server = world.fact(job=job, listening=True, owners=(world.owner(),))
    return Facts({ServerFact: server, ServingFact: ServingFact(launch, verdict, 1, {}, problem)})


def test_a_source_that_does_not_serve_as_proven() -> None:
    assert trouble(WANT, serving()) == ""
    assert "short request" in trouble(WANT, serving("a short request failed"))
    assert "has not passed its gates" in trouble(WANT, serving(verdict="failed: x"))
    none = Facts({ServerFact: world.fact(), ServingFact: ServingFact()})
    assert trouble(WANT, none) == "no launch of it runs"
    assert trouble(WANT, Facts({}, {Where.GUEST: "refused"})) == "refused"
    [one] = source_obstacles(WANT, none)
    assert one.where == WANT.id and "deploy up kpro5/qwen" in one.fix
    assert source_obstacles(WANT, serving()) == []


def test_a_source_that_somebody_has_started_since_is_not_stopped_again() -> None:
    [one] = restarted(WANT, serving(verdict="failed: x"))
    assert "somebody has started it since the migration" in one.what and "deploy down" in one.fix
    user = Holder(77, "train.py", container=129)
    gpu = PciFunction(WANT.gpus[0], True, driver="nvidia")
    seen = GpuFacts(functions=(gpu,), holders=((gpu.address, user),))
    idle = Facts({ServerFact: world.fact(), GpuFacts: seen})
    [one] = restarted(WANT, idle)
    assert "since the migration" in one.what and "train.py" in one.what
    assert restarted(WANT, Facts({ServerFact: world.fact()})) == []


def test_who_would_keep_retire_from_the_gpus_is_told_before() -> None:
    def seen(*users: Holder) -> Facts:
        gpu = PciFunction(WANT.gpus[0], True, driver="nvidia")
        rows = tuple((gpu.address, user) for user in users)
        return Facts({GpuFacts: GpuFacts(functions=(gpu,), holders=rows)})

    ours = Holder(42, "python", container=129)
    daemon = Holder(9, PERSISTENCED, unit="nvidia-persistenced.service")
    assert retire_users(WANT, seen(ours)) == [] and retire_users(WANT, Facts({})) == []
    assert retire_users(WANT, seen(Holder(42, "python"))) == [], "it may be the source's own"
    assert len(retire_users(WANT, seen(Holder(42, "python", container=130)))) == 1
    [one] = retire_users(WANT, seen(ours, Holder(7, "dcgm", unit="dcgm.service")))
    assert "for --retire: " in one.what and "dcgm" in one.what and "python" not in one.what
    assert retire_users(WANT, seen(daemon)) == []
    never = world.deployment(gpus={"persistenced": "never"})
    assert len(retire_users(never, seen(daemon))) == 1


def test_a_source_that_serves_something_else_than_its_playbook_says_now() -> None:
    assert older_wish(WANT, serving(), world.MANIFEST) == ""
    assert older_wish(WANT, serving(), None) == ""
    edited = world.deployment(serve={"args": {"context-length": 1024}})
    assert "other arguments, weights or lock" in older_wish(edited, serving(), world.MANIFEST)
    moved = world.MANIFEST.model_copy(update={"commit": "beef"})
    assert "now; what it says now moves" in older_wish(WANT, serving(), moved)


def test_retire_would_take_others_along() -> None:
    entries = {**WANT.host.deployments, "other": WANT.entry}
    host = WANT.host.model_copy(update={"deployments": entries})
    want = dataclasses.replace(WANT, host=host)
    [one] = retire_obstacles(want)
    assert "kpro5/other is too" in one.what
    elsewhere = WANT.entry.model_copy(update={"container": 130})
    host = WANT.host.model_copy(update={"deployments": {"qwen": WANT.entry, "other": elsewhere}})
    want = dataclasses.replace(WANT, host=host)
    [one] = retire_obstacles(want)
    assert f"GPU {WANT.gpus[0]}" in one.what and "which kpro5/other has too" in one.what
    apart = elsewhere.model_copy(update={"gpus": ["0000:99:00.0"]})
    host = WANT.host.model_copy(update={"deployments": {"other": apart}})
    assert retire_obstacles(dataclasses.replace(WANT, host=host)) == []


def test_what_clients_may_notice_is_told() -> None:
    other = world.deployment(serve={"args": {"context-length": 2048}, "api_key_env": "NEW_KEY"})
    told = serve_differences(WANT, other)
    assert any(line.startswith("serve.args: context-length") for line in told)
    assert told[-1].startswith("the API key of no variable there, of $NEW_KEY here")
    assert serve_differences(WANT, WANT) == []


def test_what_up_would_refuse_there_is_an_obstacle() -> None:
    plans = {
        "driver": Plan.blocked("no driver", "install it"),
        "gpus": Plan.change("x", Change("x", "x", Procedure(Where.HOST, "x"))),
        "container": Plan.unknown("gpus"),
        "shards": Plan.blocked("no room", "free 5 GB", exit_code=2),
    }
    facts = Facts({ServerFact: world.fact()})
    found = destination_obstacles(WANT, facts, world.state(), plans, None)
    assert [(one.where, one.what, one.exit_code) for one in found] == [
        ("kpro5/qwen driver", "no driver", 1),
        ("kpro5/qwen shards", "no room", 2),
    ]
    error = refused(found, A, B)
    assert error.exit_code == 1 and len(error.evidence) == 2 and "2 obstacles" in error.what
    assert refused(found[1:], A, B).exit_code == 2
    assert error.evidence[0] == "kpro5/qwen driver: no driver -> install it"


def test_a_guest_that_cannot_be_asked_is_an_obstacle_unless_it_will_be_started() -> None:
    silent = {Where.GUEST: "connection refused"}
    running = ContainerFacts(status="running", conf="", version=(8, 2))
    facts = Facts({ContainerFacts: running}, silent)
    [one] = destination_obstacles(WANT, facts, world.state(), {}, None)
    assert one.exit_code == 3 and "the guest cannot be asked: connection refused" in one.what
    stopped = dataclasses.replace(running, status="stopped")
    gone = ContainerFacts(status_text="Configuration file 'x/130.conf' does not exist")
    for seen in (stopped, gone):
        facts = Facts({ContainerFacts: seen}, silent)
        assert destination_obstacles(WANT, facts, world.state(), {}, None) == []
    blocked = {"container": Plan.blocked("it is locked", "wait")}
    facts = Facts({ContainerFacts: running}, silent)
    [one] = destination_obstacles(WANT, facts, world.state(), blocked, None)
    assert one.what == "it is locked"


def test_another_launch_there_is_an_obstacle_but_not_our_own_of_before() -> None:
    other = Facts({ServerFact: world.fact(job=world.server_job(WANT, mark="other"))})
    [one] = destination_obstacles(WANT, other, world.state(), {}, None)
    assert "another launch of it runs there" in one.what
    assert destination_obstacles(WANT, other, world.state(), {}, record()) == []
    [one] = destination_obstacles(WANT, other, world.state(), {}, record(served_before=True))
    assert "another launch of it runs there" in one.what
    same = Facts({ServerFact: world.fact(job=world.server_job(WANT))})
    assert destination_obstacles(WANT, same, world.state(), {}, None) == []


def test_only_root_may_change_devices() -> None:
    ssh = WANT.host.ssh.model_copy(update={"user": "admin"})
    want = dataclasses.replace(WANT, host=WANT.host.model_copy(update={"ssh": ssh}))
    plan = Plan.change("x", Change("x", "x", Procedure(Where.HOST, "x")))
    facts = Facts({ServerFact: world.fact(), ContainerFacts: conf("")})
    [one] = destination_obstacles(want, facts, world.state(), {"container": plan}, None)
    assert "root@pam" in one.what and "admin" in one.what
    assert destination_obstacles(WANT, facts, world.state(), {"container": plan}, None) == []


def test_a_lock_is_an_obstacle_unless_its_holder_is_proven_dead() -> None:
    me = Controller("desk", "machine", "boot-2", "ns", hardware=frozenset({"card"}))
    held = LockRecord(
        *("root@desk", "kpro5", 5, "boot-1", 7, "machine", "ns", "r1", "venv", 1.0, "card")
    )
    assert lock_obstacle("kpro5", Facts({LockSeen: LockSeen(Held(held))}), me) == []
    other = dataclasses.replace(held, owner="root@far", machine="other")
    [one] = lock_obstacle("kpro5", Facts({LockSeen: LockSeen(Held(other))}), me)
    assert one.exit_code == 4 and "root@far (run r1" in one.what
    assert lock_obstacle("kpro5", Facts({LockSeen: LockSeen()}), me) == []


def test_pairs_that_do_not_go_together() -> None:
    assert pair_obstacles(WANT, WANT) == []
    other = world.deployment(model={"served_name": "other", "revision": "v2"})
    found = pair_obstacles(WANT, other)
    assert [one.exit_code for one in found] == [2, 2]
    assert "different names, tiny and other" in found[0].what


def test_one_machine_under_two_names() -> None:
    def at(address: str, port: int | None = None) -> Any:
        ssh = WANT.host.ssh.model_copy(update={"address": address, "port": port})
        return dataclasses.replace(WANT, host=WANT.host.model_copy(update={"ssh": ssh}))

    [one] = one_machine(at("a"), None, at("a"), None)
    assert one.exit_code == 2 and "are both a" in one.what
    assert one_machine(at("a", 22105), None, at("a", 22106), None) == []
    [one] = one_machine(at("a"), serving(), at("a.example.com"), serving())
    assert "same launch" in one.what and "two names" in one.what
    other = Facts({ServerFact: world.fact()})
    assert one_machine(at("a"), serving(), at("b"), other) == []


def test_what_root_alone_may_set_is_told() -> None:
    old, new = parse_conf(OLD).after_restart(), parse_conf("arch: amd64\n").after_restart()
    told = "\n".join(container_differences(old, new, 130))
    assert "pct set 130 --features nesting=1,keyctl=1" in told
    assert "bind mount mp0: /mnt/models,mp=/srv/models" in told and "mp1" not in told
    assert "lxc.apparmor.profile: unconfined" in told and "nvidia0" not in told
    assert container_differences(old, old, 130) == []
    both = [Facts({ContainerFacts: conf(text)}) for text in (OLD, "arch: amd64\n")]
    other = world.deployment(engine={"version": "0.5.12"})
    lines = differences(WANT, both[0], other, both[1])
    assert "engine 0.5.11 there, 0.5.12 here" in lines and len(lines) > 3


# ---- weights


@pytest.mark.parametrize(
    ("peer", "hub", "chosen"),
    [
        (Rate(5.0), Rate(4.0), "peer"),
        (Rate(4.0), Rate(5.0), "hub"),
        (Rate(0.0, "refused"), Rate(5.0), "hub"),
        (Rate(5.0), Rate(0.0, "403"), "peer"),
        (Rate(0.0, "x"), Rate(0.0, "y"), "relay"),
    ],
)
def test_the_faster_source_comes_first(peer: Rate, hub: Rate, chosen: str) -> None:
    assert choose(peer, hub) == chosen


def test_the_job_knows_the_peer_and_keeps_the_others_as_the_way_out() -> None:
    peer = LendingPeer(address="kpro6", path="/m", identity_file="/k", known_hosts="/h")
    first = with_source(WANT, peer, "peer").playbook.download
    assert first.methods == ["peer", "range", "hf-xet", "mirror"]
    assert with_source(WANT, peer, "hub").playbook.download.methods[-1] == "peer"
    assert with_source(WANT, None, "hub") is WANT
    text = job_files(with_source(WANT, peer, "peer"), world.MANIFEST)["manifest.json"].decode()
    assert '"lends": true' in text and '"known_hosts": "/h"' in text


def test_where_the_destination_logs_in() -> None:
    assert login_of(WANT).vmid == 129  # no ssh of its own: through its host
    ssh = Ssh(address="192.0.2.129", port=2222, peer_address="10.0.0.129")
    container = WANT.host.containers[129].model_copy(update={"ssh": ssh})
    host = WANT.host.model_copy(update={"containers": {129: container}})
    direct = login_of(dataclasses.replace(WANT, host=host))
    assert (direct.vmid, direct.address, direct.port) == (None, "10.0.0.129", 22)
    assert Login(Ssh(address="a", port=5), None).port == 5
    assert Login(Ssh(address="a", peer_port=6), None).port == 6


def test_the_line_that_allows_the_copy() -> None:
    line = key_line("ssh-ed25519 AAAA+/= x", "exec py lend.py", ["192.0.2.5", "fe80::1"], "tag")
    assert line == (
        'restrict,from="192.0.2.5,fe80::1",command="exec py lend.py" ssh-ed25519 AAAA+/= tag'
    )
    for public, command, addresses in (
        ('ssh-ed25519 AA" x', "exec x", ["192.0.2.5"]),
        ("ssh-ed25519 AAAA x", 'exec "x"', ["192.0.2.5"]),
        ("ssh-ed25519 AAAA x", "exec x", ["evil,*"]),
        ("ssh-ed25519 AAAA x", "exec x", []),
    ):
        with pytest.raises(ValueError):
            key_line(public, command, addresses, "tag")


def test_host_keys_come_from_the_host_itself() -> None:
    keys = "ssh-ed25519 AAAA root@kpro6\necdsa-sha2-nistp256 BBBB x\n\nnonsense\n"
    # Whatever ssh calls the host there: with a port, in capitals, by its address.
    assert known_hosts(keys) == "* ssh-ed25519 AAAA\n* ecdsa-sha2-nistp256 BBBB\n"
    assert known_hosts(keys + keys) == known_hosts(keys)
    assert known_hosts("") == ""


# ---- the cut-over


def test_the_gap_is_from_answer_to_answer() -> None:
    ledger = Ledger()
    ledger.add(0.0, 0.1, "")
    ledger.add(0.2, 0.3, "refused")
    ledger.add(0.4, 0.5, "refused")
    ledger.add(0.6, 0.7, "")
    ledger.add(0.8, 0.9, "")
    gap = ledger.gap(1.0)
    assert (gap.asked, gap.failed, round(gap.longest_s, 3), gap.open) == (5, 2, 0.6, False)
    assert str(gap) == "gap: 0.60 s; 2 of 5 requests failed (refused)"
    ledger.add(1.0, 1.1, "reset")
    assert ledger.gap(3.9).open and ledger.gap(3.9).longest_s == pytest.approx(3.0)
    assert "at least 3.00 s" in str(ledger.gap(3.9))
    assert str(Gap()) == "the gap was not measured: nobody was asked"
    assert "no request was answered from here" in str(Gap(3, 3, 1.0, True, "refused"))
    assert str(Gap(7)) == "no gap: all of 7 requests were answered"


def test_the_meter_asks_until_it_is_told_to_stop() -> None:
    answers = iter(["", "refused", "refused", *[""] * 1000])
    with Meter("http://x", lambda url: next(answers)) as meter:
        deadline = time.monotonic() + 5
        while meter.gap().asked < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        gap = meter.settled(1.0)
    assert gap.failed == 2 and not gap.open and gap.longest_s > 0
    asked = meter.gap().asked
    time.sleep(0.12)
    assert meter.gap().asked == asked


def test_a_hook_gets_its_variables_and_its_output_is_told() -> None:
    rules = HookCutover(command=[sys.executable, "-c", "import os; print(os.environ['DEPLOY_TO'])"])
    assert run_hook(rules, {"DEPLOY_TO": B}, dict(os.environ)) == [B]


@pytest.mark.parametrize(
    ("code", "timeout", "said"),
    [
        ("print('bad'); raise SystemExit(3)", 30, "ended with status 3"),
        ("print('slow', flush=True); import time; time.sleep(60)", 0.7, "still ran after 0.7 s"),
    ],
)
def test_a_hook_that_fails_or_hangs(code: str, timeout: float, said: str) -> None:
    rules = HookCutover(command=[sys.executable, "-c", code], timeout_s=timeout)
    with pytest.raises(StepFailed, match=said) as caught:
        run_hook(rules, {}, dict(os.environ))
    assert caught.value.evidence[0] in ("bad", "slow")
    with pytest.raises(StepFailed, match="cannot be run"):
        run_hook(HookCutover(command=["/nowhere/x"]), {}, {})


def test_whose_cutover_counts() -> None:
    def entry(want: Any, **words: Any) -> Any:
        return dataclasses.replace(want, entry=want.entry.model_copy(update=words))

    mine = Cutover(settle_s=5)
    assert cutover_of(WANT, WANT).kind == "none"
    assert cutover_of(entry(WANT, cutover=mine), WANT).settle_s == 5
    other = Cutover.model_validate({"hook": {"command": ["x"]}})
    for pair in ((mine, other), (other, mine)):
        rules = cutover_of(*(entry(WANT, cutover=one) for one in pair))
        assert (rules.kind, rules.settle_s) == ("hook", 5), "times alone are no way"
    replica = Replica.model_validate({"router": {"url": "http://r"}, "drain_s": 7})
    for pair in ((entry(WANT, replica=replica), WANT), (WANT, entry(WANT, replica=replica))):
        rules = cutover_of(*pair)
        assert (rules.kind, rules.drain_s) == ("router", 7)
    rules = cutover_of(entry(WANT, replica=replica), entry(WANT, cutover=mine))
    assert (rules.kind, rules.settle_s, rules.drain_s) == ("router", 5, 7)
    first = Cutover.model_validate({"router": {"url": "http://a"}, "settle_s": 3})
    rules = cutover_of(entry(WANT, cutover=other), entry(WANT, cutover=first))
    assert (rules.kind, rules.settle_s) == ("router", 3)
    assert entry(WANT, url="https://x/").worker_url == "https://x"
    assert (
        entry(WANT, url="https://x/", worker_url="http://10.0.0.1:3/").worker_url
        == "http://10.0.0.1:3"
    )
    assert with_drain(WANT, 30).playbook.stop.drain_s == 30
    assert with_drain(WANT, 0) is WANT


def test_an_obstacle_as_a_line() -> None:
    assert Obstacle("kpro5", "it is dark").line() == "kpro5: it is dark"
