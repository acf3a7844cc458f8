"""Every fault of the table, against the whole `shards` step at default settings.

All rows run at once, each with a hub and folders of its own: a stall takes tens of seconds to be
seen. The tests read their row's outcome; a table is printed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fault_bench import Bench, FolderWatch, Overdue, SilenceWatch, sha256, truth, wait_until
from fault_rows import BPS, MIB, ROWS, SHARD, SHARD_MB, SHARDS, Row, cdn
from fault_rows import hub as hub_fault
from hub import Hub

from deployer.errors import DeployError
from deployer.hub import HubError
from deployer.steps.shards_facts import ShardsFact

pytestmark = pytest.mark.container
DEADLINE_S = 175.0
"""Of one run. A row that is not over by then is cut and fails."""

SEEN_S = 45.0
FAST_AT_ONCE = 4
NAME = f"model-{SHARD}-{SHARDS:05d}.safetensors"


@dataclass
class Outcome:
    """What was seen of one row."""

    row: Row
    error: BaseException | None = None
    """How the first run ended."""
    seconds: float = 0.0
    silences: list[float] = field(default_factory=list)
    ratio: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Files that had their name with other bytes."""
    lacking: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    leaks: int = 0
    notes: list[str] = field(default_factory=list)
    log: str = ""
    remarks: list[str] = field(default_factory=list)
    """What a row's own drive found wrong."""

    def text(self) -> str:
        """One line of the table."""
        how = "verified"
        if self.error is not None:
            how = f"{type(self.error).__name__}, then verified" if self.row.rerun else "error"
        seen = f"{max(self.silences):.0f} s" if self.silences else "-"
        return (
            f"{self.row.name:12} {self.row.what:44} {how:28} "
            f"seen {seen:>5}  sent {self.ratio:.3f}  {self.seconds:5.1f} s"
        )


class Run:
    """One row while it runs."""

    def __init__(self, row: Row, hub: Hub, folder: Path) -> None:
        self.row, self.hub, self.folder = row, hub, folder
        self.right = truth(hub)
        self.size = sum(blob.size for blob in hub.repo.blobs.values() if blob.lfs)
        self.outcome = Outcome(row)
        self.bench = self.controller()

    def controller(self, **more: Any) -> Bench:
        """A controller of this row's deployment, with a state of its own."""
        where = {"folder": self.folder, "download": dict(self.row.download), **more}
        return Bench(self.hub.url, self.hub.repo.name, **where)

    def remark(self, bad: bool, text: str) -> None:
        if bad:
            self.outcome.remarks.append(text)

    def go(self, bench: Bench, run_id: str, deadline_s: float = DEADLINE_S) -> BaseException | None:
        """One run of one controller; the error it ended with. Cut at the deadline."""
        try:
            bench.run_within(deadline_s, run_id)
        except (DeployError, AssertionError, Overdue) as error:
            return error
        return None

    def finish(self) -> None:
        """What the hub sent and what lies in the folder, when everything is over."""
        out, stats = self.outcome, self.hub.stats()
        out.ratio = self.sent() / self.size
        out.leaks = stats["auth_leaks"]
        model = self.bench.model
        out.lacking = [
            name
            for name, right in self.right.items()
            if not (model / name).is_file() or sha256(model / name) != right
        ]
        out.leftovers = self.bench.leftovers(set(self.right))
        out.notes, out.log = self.bench.notes(), self.bench.agent_log()
        out.ends = self.bench.agent_ends()

    def sent(self) -> int:
        """Bytes of shards that the hub has sent, to whomever."""
        sent = self.hub.stats(log=False)["sent"]
        return sum(count for name, count in sent.items() if name.endswith(".safetensors"))

    def parts(self) -> dict[str, int]:
        """Bytes of every partial and finished shard on disk."""
        found = [*self.bench.model.glob("*.part"), *self.bench.model.glob("*.safetensors")]
        return {path.name.removesuffix(".part"): path.stat().st_size for path in found}

    def wait_sent(self, share: float) -> None:
        what = f"{share:.0%} of the repository sent"
        wait_until(lambda: self.sent() >= share * self.size, 60, what)


def plain(run: Run) -> None:
    """One run under the fault; after a named error the faults are lifted and a second ends it."""
    row, out = run.row, run.outcome
    silence = SilenceWatch(run.hub)
    began = time.monotonic()
    out.error = run.go(run.bench, "r1")
    out.seconds = time.monotonic() - began
    silences = silence.close()
    if row.notice:
        out.silences = silences
    if out.error is not None and row.error and row.rerun:
        run.hub.faults([])
        again = run.go(run.bench, "r2", 60)
        run.remark(again is not None, f"the second run ended with {again!r}")


def by_xet(run: Run) -> None:
    """huggingface_hub with hf_xet out of this venv is tried first, and replaced when it hangs."""
    run.bench.venv = sys.prefix
    plain(run)
    tried = any(entry["where"] == "cas" for entry in run.hub.stats()["log"])
    asked = any("xet-read-token" in entry["path"] for entry in run.hub.stats()["log"])
    run.remark(not tried and not asked, "Xet was never tried")
    notes = " ".join(run.bench.notes())
    run.remark("hf-xet" not in notes or "range" not in notes, f"no note told it: {notes}")


def corrupt(run: Run) -> None:
    """Wrong for ever: the shard has no name at any moment, and is kept as NAME.bad."""
    watch = FolderWatch(run.bench.model, run.right)
    out = run.outcome
    began = time.monotonic()
    out.error = run.go(run.bench, "r1")
    out.seconds = time.monotonic() - began
    watch.close()
    bad = run.bench.model / f"{NAME}.bad"
    run.remark(NAME in watch.named, f"{NAME} had its final name")
    run.remark((run.bench.model / NAME).exists(), f"{NAME} is there")
    run.remark(not bad.is_file(), f"no {bad.name}")
    run.remark(NAME not in str(out.error), f"the error does not name the shard: {out.error}")
    run.hub.faults([])
    again = run.go(run.bench, "r2", 60)
    run.remark(again is not None, f"the second run ended with {again!r}")
    bad.unlink(missing_ok=True)  # kept for inspection: what lies there is the user's to remove


def held_back(run: Run) -> None:
    """Retry-After holds back the whole pool, not only the file that was refused."""
    plain(run)
    log = [e for e in run.hub.stats()["log"] if e["where"] == "cdn"]
    refused = [e["t"] for e in log if e["status"] == 429]
    early = [e for e in log for t in refused if t + 0.4 < e["t"] < t + 1.8]
    run.remark(len(refused) != 2, f"{len(refused)} answers of 429")
    run.remark(bool(early), f"{len(early)} requests came before Retry-After was over")


def expired(run: Run) -> None:
    """The url of the first try is dead at the second: it must be asked for again."""
    plain(run)
    log = run.hub.stats()["log"]
    asked = [e for e in log if e["where"] == "hub" and e["file"] == NAME]
    run.remark(len(asked) < 2, "the url was asked for once only")


def other_version(run: Run) -> None:
    """A first run breaks off; then the hub has another etag: named at once, all bytes kept."""
    refused = hub_fault("status", SHARD, code=401, skip=1)
    run.hub.faults([cdn("truncate", times=1), refused])
    first = run.go(run.bench, "r1", 60)
    run.remark("401" not in str(first), f"the first run ended with {first!r}")
    before, sent = run.parts(), run.sent()
    run.hub.faults([])
    run.hub.shared.set["etag_salt"] = "another"
    began = time.monotonic()
    error = run.go(run.bench, "r2", 60)
    run.outcome.seconds = time.monotonic() - began
    after = run.parts()
    text = f"{error!r}"
    run.remark("another version" not in text, f"the second run ended with {text}")
    run.remark("code 10" not in run.bench.agent_ends(), f"exits: {run.bench.agent_ends()}")
    run.remark(run.outcome.seconds > 10, f"named after {run.outcome.seconds:.0f} s")
    lost = [name for name, size in before.items() if after.get(name, 0) < size]
    run.remark(bool(lost) or not before, f"bytes of {lost} were lost")
    run.remark(run.sent() - sent > 4 * MIB, "it went on with the bytes of another version")
    run.hub.shared.set["etag_salt"] = ""
    run.remark(run.go(run.bench, "r3", 60) is not None, "the third run did not end verified")


def with_tmpfs(run: Run, size: int) -> Path:
    """A small file system of its own below the row's folder. Root only."""
    place = run.folder / "small"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(place)], check=True
    )
    run.bench = run.controller(model=place / "model")
    return place


def no_room(run: Run) -> None:
    """Refused before anything runs, with numbers."""
    with_tmpfs(run, run.size // 2)
    began = time.monotonic()
    error = run.go(run.bench, "r1", 60)
    run.outcome.seconds = time.monotonic() - began
    text = f"{error} {getattr(error, 'fix', '')}"
    run.remark(type(error).__name__ != "StepBlocked", f"ended with {error!r}")
    numbers = re.findall(r"[\d.]+ MB", text)
    run.remark(len(numbers) < 3 or str(run.bench.model) not in text, f"no figures in: {text}")
    run.remark(bool(run.bench.job_folders()) or run.sent() > 0, "something ran")
    subprocess.run(
        ["mount", "-o", f"remount,size={run.size * 2}", str(run.bench.model.parent)], check=True
    )
    run.remark(run.go(run.bench, "r2", 60) is not None, "with room it did not end verified")


def filled(run: Run) -> None:
    """Somebody else fills the disk: 13, bytes kept, and resumed once there is room."""
    place = with_tmpfs(run, int(run.size * 1.1))
    errors: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: errors.append(run.go(run.bench, "r1", 60)))
    thread.start()
    run.wait_sent(0.3)
    before = run.parts()
    began = time.monotonic()
    with (place / "ballast").open("wb") as ballast:
        left = os.statvfs(place)
        os.posix_fallocate(ballast.fileno(), 0, left.f_bavail * left.f_frsize - 20 * MIB)
    thread.join(90)
    run.outcome.seconds = time.monotonic() - began
    error = errors[0] if errors else None
    text = f"{error} {getattr(error, 'fix', '')}"
    run.remark("code 13" not in run.bench.agent_ends(), f"ended with {text}")
    run.remark("space" not in text or str(place) not in text, f"unclear: {text}")
    lost = [name for name, size in before.items() if run.parts().get(name, 0) < size]
    run.remark(bool(lost) or not before, f"bytes of {lost} were lost: {before} {run.parts()}")
    full = run.go(run.bench, "r2", 60)
    run.remark(type(full).__name__ != "StepBlocked", f"with no room the next run said {full!r}")
    (place / "ballast").unlink()
    run.remark(run.go(run.bench, "r3", 60) is not None, "with room it did not end verified")


def in_background(run: Run, bench: Bench, run_id: str) -> tuple[threading.Thread, list[Any]]:
    errors: list[Any] = []
    thread = threading.Thread(target=lambda: errors.append(run.go(bench, run_id, 90)))
    thread.start()
    return thread, errors


def killed(run: Run) -> None:
    """The controller lives on, sees it, and starts again by itself."""
    began = time.monotonic()
    thread, errors = in_background(run, run.bench, "r1")
    run.wait_sent(0.6)
    run.remark(len(run.bench.kill_tree()) < 2, "no process tree to kill")
    thread.join(120)
    run.outcome.seconds = time.monotonic() - began
    run.remark(errors != [None], f"ended with {errors}")
    run.remark(len(run.bench.job_folders()) != 2, f"jobs: {len(run.bench.job_folders())}")
    run.remark(not any("resuming" in note for note in run.bench.notes()), "no note told it")


def other_controller(run: Run, run_id: str) -> subprocess.Popen[str]:
    """A controller as a process of its own."""
    spec = {
        "url": run.hub.url,
        "repo": run.hub.repo.name,
        "folder": str(run.folder),
        "model": str(run.bench.model),
        "run_id": run_id,
    }
    path = run.folder / f"{run_id}.json"
    path.write_text(json.dumps(spec))
    program = Path(__file__).with_name("fault_bench.py")
    return subprocess.Popen(
        [sys.executable, str(program), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def killed_both(run: Run) -> None:
    """kill -9 of controller and agent; a new controller that knows nothing goes on."""
    began = time.monotonic()
    first = other_controller(run, "r1")
    run.wait_sent(0.6)
    first.kill()
    wait_until(lambda: not run.bench.kill_tree(), 10, "the job's processes are gone")
    first.communicate()
    run.remark(run.go(run.bench, "r2", 90) is not None, "the second run did not end verified")
    run.outcome.seconds = time.monotonic() - began


def interrupted(run: Run) -> None:
    """Ctrl-C ends the controller at once; the job goes on and the next run joins it."""
    first = other_controller(run, "r1")
    run.wait_sent(0.4)
    began = time.monotonic()
    os.kill(first.pid, signal.SIGINT)
    said, _ = first.communicate(timeout=30)
    run.outcome.seconds = time.monotonic() - began
    run.remark(first.returncode != 130, f"the controller ended with {first.returncode}: {said}")
    run.remark(run.outcome.seconds > 5, f"it took {run.outcome.seconds:.0f} s to stop")
    error = run.go(run.bench, "r2", 90)
    run.remark(error is not None, f"the second run ended with {error!r}")
    joined = [event.attached for event in run.bench.starts()]
    run.remark(joined not in ([True], []), "a second job was started")
    run.remark(len(run.bench.job_folders()) != 1, f"jobs: {len(run.bench.job_folders())}")


def interrupted_agent(run: Run) -> None:
    """SIGINT to every process of the job: bytes kept, nothing fetched twice, ends verified."""
    thread, errors = in_background(run, run.bench, "r1")
    run.wait_sent(0.4)
    run.bench.kill_tree(b"fetch.pyz", signal.SIGINT)
    thread.join(120)
    run.remark(errors != [None], f"ended with {errors}")


def twice(run: Run) -> None:
    """Two controllers of one deployment: one job, both end verified."""
    other = run.controller()
    began = time.monotonic()
    both = [in_background(run, bench, name) for bench, name in ((run.bench, "r1"), (other, "r2"))]
    for thread, _ in both:
        thread.join(120)
    run.outcome.seconds = time.monotonic() - began
    run.remark([errors for _, errors in both] != [[None], [None]], f"ended with {both}")
    run.remark(len(run.bench.job_folders()) != 1, f"jobs: {len(run.bench.job_folders())}")


def stranger(run: Run) -> None:
    """A download of the same folder under another name is refused with pid and command line."""
    thread, errors = in_background(run, run.bench, "r1")
    run.wait_sent(0.2)
    holder = run.bench.facts().need(ShardsFact).running
    other = run.controller(name="other", jobs_root=str(run.folder / "jobs2"))
    began = time.monotonic()
    error = run.go(other, "r2", 60)
    run.outcome.seconds = time.monotonic() - began
    text = str(error)
    run.remark(other.agent_ends() != ["code 15"], f"the second ended with {other.agent_ends()}")
    run.remark(not holder or str(holder) not in text, f"no pid {holder} in: {text}")
    run.remark("fetch.pyz" not in text, f"no command line in: {text}")
    thread.join(120)
    run.remark(errors != [None], f"the first ended with {errors}")


def gated(run: Run) -> None:
    """Named before anything runs; a refusal in the middle keeps the bytes."""
    began = time.monotonic()
    error = run.go(run.bench, "r1", 60)
    run.outcome.seconds = time.monotonic() - began
    said = f"{type(error).__name__} {error} {getattr(error, 'fix', '')}"
    run.remark(not said.startswith("AccessGated") or "HF_TOKEN" not in said, f"said {said}")
    run.remark(bool(run.bench.job_folders()) or run.sent() > 0, "something ran")
    run.bench.token = "hf_wrong"
    wrong = run.go(run.bench, "r2", 60)
    run.remark(not isinstance(wrong, HubError), f"a wrong token ended with {wrong!r}")
    run.bench.token = "hf_right"
    run.hub.faults([cdn("truncate", times=1), hub_fault("status", SHARD, code=403, skip=1)])
    denied = run.go(run.bench, "r3", 60)
    run.remark("code 11" not in run.bench.agent_ends(), f"refused in the middle: {denied!r}")
    run.hub.faults([])
    run.remark(run.go(run.bench, "r4", 60) is not None, "with the token it did not end verified")
    told = run.bench.agent_log() + repr(run.bench.events)
    run.remark("hf_right" in told or "hf_wrong" in told, "the token is in a log or an event")


DRIVES = {
    name: globals()[name]
    for name in (
        *(
            "plain",
            "by_xet",
            "corrupt",
            "held_back",
            "expired",
            "other_version",
            "no_room",
            "filled",
        ),
        *("killed", "killed_both", "interrupted", "interrupted_agent", "twice", "stranger"),
        *("filled", "gated"),
    )
}


def why_not(row: Row) -> str:
    """Why a row cannot run here; '' when it can."""
    if row.drive == "by_xet" and not find_spec("hf_xet"):
        return "no hf_xet in this venv"
    return "mounts a tmpfs: needs root" if row.name.startswith("j") and os.getuid() else ""


def drive(run: Run) -> Outcome:
    """Runs one row to its end and clears its folder."""
    watch = None
    try:
        if not run.row.name.startswith("j"):  # there the folder lies on a mount to come
            watch = FolderWatch(run.bench.model, run.right)
        try:
            DRIVES[run.row.drive](run)
        except Overdue as error:
            run.outcome.remarks.append(str(error) or "overdue")
        run.finish()
    finally:
        run.bench.kill_tree()
        if watch is not None:
            watch.close()
            run.outcome.wrong = watch.wrong
        run.hub.__exit__()
        if (run.folder / "small").is_mount():
            subprocess.run(["umount", "-l", str(run.folder / "small")], check=True)
        shutil.rmtree(run.folder / "model", ignore_errors=True)
    return run.outcome


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """Every selected row, running. The slow ones all at once, the others a few at a time."""
    wanted = {
        item.callspec.params["row"].name
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    }
    rows = [row for row in ROWS if row.name in wanted and not why_not(row)]
    base = tmp_path_factory.mktemp("faults")
    # All hubs serve one folder; a hub writes its small files when it is made, so: first all hubs.
    runs = []
    for row in sorted(rows, key=lambda row: not row.slow):
        hub = Hub(base / "hub", shards=SHARDS, mb=SHARD_MB, **{"bps": BPS, **row.hub})
        hub.faults([dict(fault) for fault in row.faults])
        hub.__enter__()
        runs.append(Run(row, hub, base / row.name))
    slow = ThreadPoolExecutor(max(1, len([row for row in rows if row.slow])))
    fast = ThreadPoolExecutor(FAST_AT_ONCE)
    found = {run.row.name: (slow if run.row.slow else fast).submit(drive, run) for run in runs}
    yield found
    for pool in (slow, fast):
        pool.shutdown(cancel_futures=True)
    ended = [found[row.name] for row in rows if not found[row.name].cancelled()]
    lines = [future.result().text() for future in ended if future.exception() is None]
    report = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        report.write_line("")
        for line in lines:
            report.write_line(line)
    shutil.rmtree(base / "hub", ignore_errors=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_fault_ends_verified_or_named(outcomes: dict[str, Future[Outcome]], row: Row) -> None:
    if reason := why_not(row):
        pytest.skip(reason)
    out = outcomes[row.name].result(timeout=400)
    shown = f"{out.text()}\n" + "\n".join([*out.notes[-8:], *out.log.splitlines()[-25:]])
    assert not out.remarks, (out.remarks, shown)
    assert not out.wrong, (out.wrong, shown)
    if row.error:
        error = out.error
        assert type(error).__name__ == row.error, (repr(error), shown)
        assert isinstance(error, DeployError) and error.exit_code == row.exit, (error, shown)
        assert "\n" not in str(error) and error.fix and "\n" not in error.fix, (error, error.fix)
        assert re.search(row.says, str(error)), (str(error), shown)
        assert not row.code or f"code {row.code}" in out.ends, (out.ends, shown)
    else:
        assert out.error is None, (repr(out.error), shown)
    if row.notice:
        assert out.silences, shown
        assert max(out.silences) <= SEEN_S, (out.silences, shown)
    assert not out.lacking, (out.lacking, shown)
    assert not out.leftovers, (out.leftovers, shown)
    assert out.ratio <= row.most, (out.ratio, shown)
    assert out.ratio >= 1.0, (out.ratio, shown)
    assert out.leaks == 0, shown
