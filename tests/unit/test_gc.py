"""What may go, and why the rest stays."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
from serverworld import MANIFEST, FakeJobs, FakeTransport, context, deployment, facts, state

from deployer.cli.gc import table
from deployer.collecting import Collect
from deployer.errors import StateUnreadable, StepFailed
from deployer.gc import Known, decide, freeable, used_by
from deployer.gc_found import Found, GcFact, HostUsed, Row, Through
from deployer.gc_here import KEPT_RUNS, free_here, look_here
from deployer.gc_look import host_probe, look_probe, parse_host, parse_look
from deployer.gc_scripts import MARK, REMOVE, TRASH, removal
from deployer.kept import Kept
from deployer.model import PlanState, ProbeOutput, Where
from deployer.recipe import recipe_of
from deployer.remote.transport import Answer
from deployer.state import DeploymentState, HostState, Launch, RolledBack
from deployer.state_file import StateFile

WANT = deployment()
BUILDS = "/opt/venvs/qwen.builds"
PLENTY = {BUILDS: 10**12, "/srv/models/tiny": 10**12, "/srv/models/old": 10**12}


def launch(name: str, **more: Any) -> Launch:
    return Launch(id=name, variant="mtp", started=1.0, **more)


def known(own: DeploymentState | None = None, **more: Any) -> Known:
    return Known(WANT, own or state(), **more)


def builds(*names: str, **more: Any) -> tuple[Found, ...]:
    """The first is the newest."""
    return tuple(
        Found("venv", f"{BUILDS}/{name}", 100, 1000 - number, **more)
        for number, name in enumerate(names)
    )


def why(rows: list[Row]) -> dict[str, tuple[bool, str]]:
    return {row.found.id: (row.goes, row.why) for row in rows}


def test_builds_are_kept_by_use_then_by_number() -> None:
    own = state()
    own.launches = [launch("g", venv=f"{BUILDS}/c")]
    own.known_good = "g"
    fact = GcFact(
        found=builds("a", "b", "c", "d", "e", "f"),
        links={"/opt/venvs/qwen": f"{BUILDS}/a"},
        used=(f"{BUILDS}/e/lib/x.so", f"{BUILDS}/ff/lib/x.so"),
        free=PLENTY,
    )
    told = why(decide(known(own, others={f"{BUILDS}/f": "kpro5/other"}), fact))
    assert told == {
        "a": (False, "/opt/venvs/qwen points to it"),
        "b": (True, "older than the newest 2 (keep.venvs)"),
        "c": (False, "launch g ran in it: the known-good launch"),
        "d": (True, "older than the newest 2 (keep.venvs)"),
        "e": (False, "a process uses it"),
        "f": (False, "kpro5/other uses it"),
    }
    alone = GcFact(found=builds("a", "b", "c"), links={"/x": f"{BUILDS}/c"}, free=PLENTY)
    told = why(decide(known(), alone))
    assert [told[name][0] for name in "abc"] == [False, True, False]
    assert told["a"][1] == "one of the newest 2 (keep.venvs)"


def test_below_the_floor_a_number_keeps_nothing() -> None:
    low = {BUILDS: 5_000_000_000}
    fact = GcFact(found=builds("a", "b"), links={"/x": f"{BUILDS}/a"}, free=low)
    told = why(decide(known(), fact))
    assert not told["a"][0]
    assert told["b"] == (True, "5.0 GB are free, less than keep.floor_bytes (20.0 GB)")
    none = Known(deployment(keep={"floor_bytes": 0}), state())
    assert not why(decide(none, fact))["b"][0]


def test_below_the_floor_only_so_much_goes_as_it_takes() -> None:
    """The cache first, the oldest build, the oldest weights; another disk does not help."""
    gb, cache = 10**9, "/opt/deployer/cache/uv"
    found = (
        *(dataclasses.replace(one, size=4 * gb) for one in builds("a", "b", "c", "d")),
        Found("cache", cache, 3 * gb),
        *(Found("weights", f"/srv/models/{name}", 50 * gb) for name in ("now", "old")),
    )
    own = state()
    own.launches = [launch("l", argv=["py", "--model-path", "/srv/models/old"], verdict="failed")]
    want = deployment(model={"path": "/srv/models/now"}, keep={"venvs": 3})

    def goes(free: float, disks: dict[str, str]) -> set[str]:
        places = (BUILDS, cache, "/srv/models/now", "/srv/models/old")
        fact = GcFact(
            found=found,
            links={"/x": f"{BUILDS}/a"},
            free=dict.fromkeys(places, int(free * gb)),
            disks=disks,
        )
        return {row.found.id for row in decide(Known(want, own), fact) if row.goes}

    one = dict.fromkeys((BUILDS, cache, "/srv/models/now", "/srv/models/old"), "1")
    assert goes(30, one) == {"d"}
    assert goes(16.5, one) == {"d"}, "what goes for its age is enough"
    assert goes(14, one) == {"d", "uv"}
    assert goes(9.5, one) == {"d", "uv", "c"}
    assert goes(5, one) == {"d", "uv", "c", "b"}
    assert goes(4, one) == {"d", "uv", "c", "b", "old"}
    assert goes(16.5, {**one, "/srv/models/old": "2"}) == {"d", "old"}
    assert goes(16.5, {}) == {"d", "uv", "old"}, "each for itself where nothing is known"


def test_what_is_not_provably_ours_stays() -> None:
    strange = (*builds("a", "b"), *builds("x", "y", "z", ours=False))
    told = why(decide(known(), GcFact(found=strange, free=PLENTY)))
    assert all(not told[name][0] and "not known to be ours" in told[name][1] for name in "xyz")
    assert not told["a"][0] and not told["b"][0]
    job = Found("job", "/jobs/venv-qwen/1", 1, job="venv-qwen", alive=True)
    at_work = GcFact(found=(*builds("a", "b", "c"), job), free=PLENTY, building=("venv-qwen",))
    told = why(decide(known(), at_work))
    assert told["c"] == (False, "a build is at work (venv-qwen)")
    assert told["1"] == (False, "its job runs")


def models(*paths: str, **more: Any) -> tuple[Found, ...]:
    return tuple(Found("weights", path, 1000, **more) for path in paths)


def test_weights() -> None:
    own = state()
    own.launches = [
        launch(name, argv=["py", "--model-path", f"/srv/models/{name}"])
        for name in ("good", "old", "older", "shared", "named", "odd", "bare", "used")
    ]
    own.known_good = "good"
    fact = GcFact(
        found=(
            *models("/srv/models/tiny", "/srv/models/good", "/srv/models/old"),
            *models("/srv/models/older", "/srv/models/shared", "/srv/models/named"),
            *models("/srv/models/odd", foreign=3),
            *models("/srv/models/bare", ours=False),
            *models("/srv/models/used"),
        ),
        used=("/srv/models/used/model.safetensors",),
        named={"/srv/models/named": ("server-other",), "/srv/models/old": ("server-qwen",)},
    )
    told = why(decide(known(own, others={"/srv/models/shared": "kpro5/other"}), fact))
    assert told["tiny"] == (False, "the playbook's model")
    assert told["good"] == (False, "launch good had these weights: the known-good launch")
    assert told["old"][0] and told["older"][0]
    assert told["shared"] == (False, "kpro5/other uses it")
    assert told["named"] == (False, "server-other, of another deployment, names it")
    assert told["odd"][1].endswith("3 files in it are not in the hash record")
    assert told["bare"][1].endswith("it has no hash record")
    assert told["used"] == (False, "a process uses it")
    assert known(own).models()[:2] == ["/srv/models/tiny", "/srv/models/used"]


def test_a_model_folder_that_holds_anothers_stays() -> None:
    own = state()
    own.launches = [launch("l", argv=["py", "--model-path", "/srv/models"])]
    whole = known(own, others={"/data/models/other": "kpro5/other"})
    found = (*models("/srv/models", "/data/models", "/x/y"),)
    told = why(decide(whole, GcFact(found=found, real={"/data/models/other": "/x/y/z"})))
    assert told["models"] == (False, "kpro5/other uses it") == told["y"]
    rows = {row.found.path: row.why for row in decide(whole, GcFact(found=found))}
    assert rows["/srv/models"] == "the playbook's model", "it lies in it"


def test_by_another_name_it_is_the_same_folder() -> None:
    """/srv/models is a symlink; an old launch had the real path."""
    own = state()
    own.launches = [
        launch("a", argv=["py", "--model-path", "/data/models/tiny"], venv="/data/v.builds/a"),
        launch("b", argv=["py", "--model-path", "/data/models/x"]),
    ]
    own.known_good = "a"
    found = (
        *models("/data/models/tiny", "/data/models/x", "/data/models/y"),
        Found("venv", f"{BUILDS}/a", 1, real="/data/v.builds/a"),
        Found("venv", f"{BUILDS}/b", 1, real="/data/v.builds/b"),
        Found("venv", f"{BUILDS}/c", 1, real="/data/v.builds/c"),
        Found("venv", f"{BUILDS}/d", 1, real="/data/v.builds/d"),
    )
    fact = GcFact(
        found=found,
        links={"/opt/venvs/qwen": "/data/v.builds/b"},
        used=("/data/v.builds/c/lib/x.so",),
        real={"/srv/models/tiny": "/data/models/tiny"},
    )
    told = why(decide(known(own), fact))
    assert told["tiny"] == (False, "the playbook's model")
    assert told["a"][1] == "launch a ran in it: the known-good launch"
    assert told["b"][1] == "/opt/venvs/qwen points to it"
    assert told["c"] == (False, "a process uses it") and told["d"][0]


def test_what_rollback_goes_back_to_stays() -> None:
    own = state()
    own.launches = [
        launch("old", venv=f"{BUILDS}/e", fingerprint="1", verdict="stopped", verified=1.0),
        launch("new", venv=f"{BUILDS}/a", fingerprint="2", verdict="good"),
    ]
    own.known_good = "new"
    told = why(decide(known(own), GcFact(found=builds("a", "b", "c", "d", "e"))))
    assert told["e"] == (False, "launch old ran in it: `deploy rollback` goes back to it")
    assert [name for name in "abcde" if told[name][0]] == ["b", "c", "d"]


def test_what_was_started_through_the_link_may_run_from_any_build() -> None:
    own = state()
    own.launches = [launch("l1", venv=f"{BUILDS}/b")]
    link = BUILDS.removesuffix(".builds")
    fact = GcFact(found=builds("a", "b", "c", "d"), links={link: f"{BUILDS}/a"})
    alone = dataclasses.replace(fact, through=(Through(link, 7, "server-qwen/l1"),))
    told = why(decide(known(own), alone))
    assert told["b"] == (False, "launch l1 runs in it") and told["c"][0] and told["d"][0]
    for job in ("", "server-qwen/other", "server-other/x"):
        strange = dataclasses.replace(fact, through=(Through(link, 7, job),))
        told = why(decide(known(own), strange))
        assert not any(goes for goes, _ in told.values())
        assert told["c"][1].startswith(f"pid 7 was started through {link}, and shows no build")
    other = dataclasses.replace(fact, through=(Through("/opt/other", 7),))
    assert why(decide(known(own), other))["d"][0]


def test_the_cache_goes_only_for_want_of_room() -> None:
    cache = Found("cache", "/opt/deployer/cache/uv", 10**10)
    low = GcFact(found=(cache,), free={"/opt/deployer/cache/uv": 10**9})
    assert why(decide(known(), low))["uv"][0]
    for fact in (
        dataclasses.replace(low, free={"/opt/deployer/cache/uv": 10**12}),
        dataclasses.replace(low, building=("venv-other",)),
        dataclasses.replace(low, used=("/opt/deployer/cache/uv/x",)),
        dataclasses.replace(low, found=(dataclasses.replace(cache, ours=False),)),
        dataclasses.replace(low, found=(dataclasses.replace(cache, mounted=True),)),
        dataclasses.replace(low, found=(dataclasses.replace(cache, user="1000"),)),
    ):
        [row] = decide(known(), fact)
        assert not row.goes, row


def test_what_has_another_name_is_not_counted_as_freed() -> None:
    rows = [Row(Found("weights", "/m", 1000, shared=900), True, "old")]
    assert freeable(rows) == 100
    [head, line] = table("h/n", rows)
    assert "1.0 kB in 1 folders, 100 B may go" in head and "900 B of it have other names" in line


def test_the_host_sees_who_uses_a_folder_in_another_container() -> None:
    fact = GcFact(found=builds("a", "b", "c"), links={"/x": f"{BUILDS}/a"}, free=PLENTY)
    step = Collect(lambda want, own: known(own), {})
    names = [(probe.name, probe.where) for probe in step.probes(WANT)]
    assert names == [("gc", WANT.guest), ("gc.host", Where.HOST)]
    assert step.plan(WANT, facts(fact, HostUsed()), state()).state is PlanState.CHANGES
    held = facts(fact, HostUsed(used=(f"{BUILDS}/c/bin/python",)))
    # Two are kept: now it is the third that stays.
    assert [change.title.split()[2] for change in step.plan(WANT, held, state()).changes] == [
        f"{BUILDS}/b"
    ]
    silent = facts(fact, parse_host(ProbeOutput(0, b"used\t/a\n", b"")))
    assert step.plan(WANT, silent, state()).state is PlanState.BLOCKED
    assert "'/a b'" in host_probe(["/a b"]).script


def test_launches_and_jobs() -> None:
    own = state()
    own.known_good = "l1"
    own.launches = [launch("l1"), launch("l2")]
    own.rollback = RolledBack(to="l2", mark="", left="", wish="", commits=[], when=1.0)

    def job(name: str, kind: Any, of: str, changed: int, **more: Any) -> Found:
        return Found(kind, f"/jobs/{of}/{name}", 1, changed, job=of, **more)

    found = (
        *(job(f"l{number}", "launch", "server-qwen", number) for number in range(1, 10)),
        job("now", "launch", "server-qwen", 99, current=True),
        job("mine", "launch", "server-qwen", 0, ours=False),
        *(job(f"v{number}", "job", "venv-qwen", number) for number in range(5)),
        *(job(f"s{number}", "job", "shards-qwen", number) for number in range(2)),
    )
    told = why(decide(known(own), GcFact(found=found)))
    assert told["now"] == (False, "the newest launch")
    assert told["l1"][1] == "the known-good launch"
    assert told["l2"][1] == "the rollback under way needs it"
    assert [name for name in sorted(told) if told[name][0]] == [
        "l3",
        "l4",
        "l5",
        "l6",
        "l7",
        "v0",
        "v1",
    ]
    assert "not known" in told["mine"][1]
    own.rollback.outcome = "done"
    assert why(decide(known(own), GcFact(found=found)))["l2"][0]


def test_what_an_interrupted_one_left_goes() -> None:
    rows = decide(known(), GcFact(found=(Found("trash", f"{BUILDS}/{TRASH}/a.1", 7),)))
    assert rows[0].goes and freeable(rows) == 7
    left = Found("trash", f"{BUILDS}/{TRASH}/a.1", 7, user="1000")
    assert decide(known(), GcFact(found=(left,))) == [
        Row(left, False, "files of user 1000 are in it")
    ]
    assert "may go" in table("h/n", rows)[0] and "goes" in table("h/n", rows)[1]
    assert table("h/n", []) == ["h/n: nothing was found"]


def test_others_use() -> None:
    own = state()
    own.launches, own.known_good = [launch("g", venv="/v/a"), launch("b", venv="/v/b")], "g"
    assert used_by([WANT], {WANT.id: own}) == {"/srv/models/tiny": WANT.id, "/v/a": WANT.id}
    assert used_by([WANT], {}) == {"/srv/models/tiny": WANT.id}


def test_a_look_that_did_not_come_to_its_end_frees_nothing() -> None:
    for output in (
        ProbeOutput(0, b"found\tvenv\t/a\t1\t1\tyes\t0\t\tno\tno\n", b"boom"),
        ProbeOutput(124, b"", b"", timed_out=True),
    ):
        fact = parse_look(output)
        assert fact.problem and not fact.found
        step = Collect(lambda want, own: known(own), {})
        assert step.plan(WANT, facts(fact), state()).state is PlanState.BLOCKED
    step = Collect(lambda want, own: known(own), {})
    assert step.plan(WANT, facts(), state()).state is PlanState.UNKNOWN
    assert TRASH in REMOVE and MARK in REMOVE


def test_what_is_held_by_now_is_left_and_what_fails_is_told() -> None:
    shown: dict[str, list[Row]] = {}
    fact = GcFact(found=builds("a", "b", "c", "d"), links={"/x": f"{BUILDS}/a"}, free=PLENTY)
    step = Collect(lambda want, own: known(own), shown)
    plan = step.plan(WANT, facts(fact), state())
    assert plan.state is PlanState.CHANGES and plan.reason == "2 folders, 200 bytes"
    assert len(shown[WANT.id]) == 4
    said = {"/c": Answer(0, b"held a process uses it\n", b""), "/d": Answer(0, b"removed\n", b"")}

    def answer(script: str) -> Answer:
        first = script.split("\n", 1)[0]
        return next(one for end, one in said.items() if f"{end} " in f"{first} ")

    made, events = context(WANT, state(), FakeJobs(), guest=FakeTransport(answer))
    step.apply(made, facts(fact), plan)
    told = [getattr(event, "text", "") for event in events]
    assert any(text.startswith("left venv") and "a process uses it" in text for text in told)
    assert any(text.startswith("removed: venv") for text in told)
    assert step.became == {
        (WANT.id, f"{BUILDS}/c"): "a process uses it",
        (WANT.id, f"{BUILDS}/d"): "freed",
    }
    lines = table(WANT.id, shown[WANT.id], {path: said for (_, path), said in step.became.items()})
    assert lines[0] == f"{WANT.id}: 400 B in 4 folders, 100 B freed"
    assert f"  left  venv          100 B  {BUILDS}/c: a process uses it" in lines
    assert any(line.startswith("  freed venv ") and "/d: older than" in line for line in lines)
    assert "the run ended before" in table(WANT.id, shown[WANT.id], {})[-1]
    assert step.plan(WANT, facts(fact), state()).state is PlanState.NOTHING
    said["/d"] = Answer(1, b"", b"mv: cannot move\n")
    with pytest.raises(StepFailed, match="1 of 2 folders were not removed"):
        step.apply(made, facts(fact), plan)


def test_on_this_machine(tmp_path: Path) -> None:
    deploy = tmp_path / ".deploy"
    kept = Kept(deploy / "kept")
    used = kept.add(recipe_of(WANT, MANIFEST), WANT.lock_text)
    other = deployment(serve={"port": 1})
    needless = kept.add(recipe_of(other, MANIFEST), WANT.lock_text)
    own = state()
    own.launches = [launch("a", recipe=used)]
    StateFile(deploy / "state", "kpro5").save(HostState(host="kpro5", deployments={"qwen": own}))
    (deploy / "runs").mkdir()
    for number in range(KEPT_RUNS + 2):
        (deploy / "runs" / f"20261130-{number:06}-ab12-kpro-5.jsonl").write_text("{}\n")
    assert [one.path.name for one in look_here(deploy)] == [
        "20261130-000000-ab12-kpro-5.jsonl",
        "20261130-000001-ab12-kpro-5.jsonl",
    ]
    for path in kept.folder.iterdir():
        os.utime(path, (1, 1))
    found = look_here(deploy)
    assert found[-1].path.name == f"{needless}.json" and len(found) == 3
    free_here(found)
    assert look_here(deploy) == [] and kept.has(used)
    backups = ("kpro5.json.prev", "kpro5.json.schema1", "kpro5.json.new", "kpro5.json.prev.new")
    for name in backups:
        (deploy / "state" / name).write_text("x")
    now = time.time()
    assert [(one.path.name, one.goes) for one in look_here(deploy)] == [
        ("kpro5.json.prev", False),
        ("kpro5.json.schema1", False),
    ]
    later = look_here(deploy, now + 40 * 86400)
    assert {one.path.name for one in later if one.goes} == set(backups) - {"kpro5.json.prev"}
    free_here(later)
    assert [one.path.name for one in look_here(deploy)] == ["kpro5.json.prev"]
    (deploy / "state" / "kpro6.json").write_text("not json")
    with pytest.raises(StateUnreadable):
        look_here(deploy)


def test_a_file_that_goes_while_this_machine_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that writes its state renames it; another `gc` removes records."""
    runs, states = tmp_path / "runs", tmp_path / "state"
    runs.mkdir()
    states.mkdir()
    for number in range(KEPT_RUNS + 1):
        (runs / f"20260101T{number:06d}Z-kpro5.jsonl").write_text("x")
    (states / "kpro5.json.new").write_text("{")
    plain = Path.stat

    def stat(self: Path, **more: Any) -> os.stat_result:
        if self.parent in (runs, states):
            self.unlink(missing_ok=True)
        return plain(self, **more)

    monkeypatch.setattr(Path, "stat", stat)
    assert look_here(tmp_path) == []
    assert not (states / "kpro5.json.new").exists(), "it was looked at"


def test_scripts_quote(tmp_path: Path) -> None:
    script = removal(Found("venv", "/a b'c", 1), ["/l k"])
    assert script.startswith("set -- venv '/a b'\"'\"'c' '/l k'\n")
    probe = look_probe(["/b'"], [], [], [], WANT.guest)
    assert "builds='/b'\"'\"''" in probe.script
