"""Every class of failure and kind of bad answer, made by the look-alike and told by the tool."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_lookalike import ROOT, SERVER, Running, base, environment

from deployer.remote.jobs import Jobs
from deployer.sglang.failure_rules import RULES
from deployer.sglang.failures import classify, fatal_while_alive
from deployer.sglang.log import LaunchLog
from deployer.sglang.quality import judge
from tests.local_transport import LocalTransport, shell_path

sys.path.insert(0, str(ROOT / "engine"))
from sglang.lookalike import deaths, outputs

__all__ = ["base"]

OUTPUTS = Path(__file__).resolve().parents[1] / "fixtures" / "outputs"
NO_RULE = {"died-silent", "killed", "unknown", "exception"}
"""Classes that are told from what a log lacks."""
LIVES_ON = {"port-in-use", "address-not-here"}
DEADLINE_S = 30.0
SIDE_BY_SIDE = 6


# ---- failures
def test_there_is_a_fault_for_every_class() -> None:
    assert {rule.cls for rule in RULES} | NO_RULE == set(deaths.DEATHS)


class Failed:
    """One start under a fault: its log, exit code and phase."""

    def __init__(self, base: Path, folder: Path, cls: str, version: str) -> None:
        faults, log = folder / f"{cls}-{version}.faults", folder / f"{cls}-{version}.log"
        faults.write_text(f"{deaths.PREFIX}{cls}\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*SERVER, str(base / "model"), "--port", str(port)],
                env=environment(base, version, LAB_FAULTS=str(faults)),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + DEADLINE_S
        try:
            while process.poll() is None and not fatal_while_alive(log.read_text(errors="replace")):
                if cls == "address-not-here" and "[Errno 99]" in log.read_text(errors="replace"):
                    break
                if time.monotonic() > deadline:
                    break  # told by the tests, each of its class
                time.sleep(0.05)
            self.exit = process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        self.text = log.read_text(errors="replace")
        reader = LaunchLog()
        reader.feed(log.read_bytes())
        self.phase = reader.phase


@pytest.fixture(scope="module")
def failed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Failed]:
    """Every class once, some side by side."""
    folder = tmp_path_factory.mktemp("deaths")
    wanted = []
    for i, (cls, death) in enumerate(deaths.DEATHS.items()):
        # 0.5.9 does not watch its children: there a dead one ends nothing.
        old = death.place != deaths.SERVING and cls != "bad-arguments"
        versions = ("0.5.11", "0.5.23", "0.5.9" if old else "0.5.11")
        wanted.append((cls, versions[i % 3]))
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = list(pool.map(lambda one: Failed(base, folder, *one), wanted))
    return {cls: one for (cls, _), one in zip(wanted, found, strict=True)}


@pytest.mark.parametrize("cls", deaths.DEATHS)
def test_a_failure_is_told_by_its_class(failed: dict[str, Failed], cls: str) -> None:
    one, death = failed[cls], deaths.DEATHS[cls]
    found = classify(one.text, one.exit, one.phase)
    if cls in {"killed", "child-killed"} and death.place != deaths.SERVING:
        # A worker that is killed while it loads: the parent says so and ends with 1.
        assert found.cls in {"child-killed", "killed", "exception"}
        assert "died during initialization" in one.text or "scheduler is dead" in one.text
    else:
        assert found.cls == cls, (found, one.text[-1500:])
    if death.text:
        assert found.cause_line.strip()
    assert "ready" not in found.cls


@pytest.mark.parametrize("cls", deaths.DEATHS)
def test_the_exit_code_is_the_real_one(failed: dict[str, Failed], cls: str) -> None:
    one, death = failed[cls], deaths.DEATHS[cls]
    if cls in LIVES_ON:
        assert one.exit is None, "a lost port ends no server"
    elif death.place in {deaths.IMPORT, deaths.ARGPARSE, deaths.ARGS}:
        assert one.exit == death.code
    elif death.way == deaths.RAISES:
        assert one.exit == -signal.SIGKILL
        assert "sigquit" in one.text.lower()


@pytest.mark.parametrize(
    ("cls", "phase"),
    [("not-enough-memory", "weights"), ("graph-capture-out-of-memory", "graphs"),
     ("nccl", "distributed"), ("weights-corrupt", "weights"), ("compiler-missing", "warmup"),
     ("bad-numbers", "ready"), ("context-too-long", "starting")],
)  # fmt: skip
def test_it_gets_as_far_as_the_real_one(failed: dict[str, Failed], cls: str, phase: str) -> None:
    assert failed[cls].phase == phase, failed[cls].text[-1500:]


def test_0_5_9_serves_on_without_its_scheduler(base: Path) -> None:
    server = Running(base, faults=f"{deaths.PREFIX}child-killed\n", version="0.5.9")
    try:
        server.ready()
        deadline = time.monotonic() + DEADLINE_S
        while server.ask("/health")[0] == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.process.poll() is None
        assert server.ask("/v1/models")[0] == 200
        assert "Health check failed. Server couldn't get a response" in server.text()
    finally:
        server.kill()
        (base / "faults").write_text("")


# ---- a stop
def test_a_stop_ends_what_got_away(base: Path, tmp_path: Path) -> None:
    """The job mechanism finds what has left the session, the parent and the name behind."""
    (tmp_path / "faults").write_text("server-strays\n")
    env = environment(base, LAB_FAULTS=str(tmp_path / "faults"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    wanted = {k: v for k, v in env.items() if os.environ.get(k) != v}
    lines = [f"export {k}={shlex.quote(v)}" for k, v in wanted.items()]
    argv = [*SERVER, str(base / "model"), "--port", str(port)]
    script = "\n".join([*lines, f"exec {shlex.join(argv)}"])
    jobs = Jobs(LocalTransport(shell_path("dash", tmp_path)), str(tmp_path / "jobs"))
    job = jobs.start("server-x", "one", script)
    log = b""
    deadline = time.monotonic() + DEADLINE_S
    try:
        while b"fired up" not in log:
            status = jobs.poll(job)
            log = status.log
            assert status.alive and time.monotonic() < deadline, log[-2000:]
            time.sleep(0.1)
        assert len(strays()) == 1, "it is there"
    finally:
        proof = jobs.stop(job, grace_s=1, kill_s=10)
    assert proof.stopped
    assert strays() == []


def strays() -> list[int]:
    """Processes of the stray's name that hold our stand-in for a GPU."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == "kworker/u8:3":
                held = [str(fd.readlink()) for fd in (folder / "fd").iterdir()]
                found += [int(folder.name)] if any("nvidia" in one for one in held) else []
        except OSError:
            continue
    return found


# ---- answers
@pytest.fixture(scope="module")
def talker(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running server; `say(faults, text)` is what it answers then."""
    folder = tmp_path_factory.mktemp("says")
    old = os.environ.get("LAB_SAYS")
    os.environ["LAB_SAYS"] = str(folder / "says")
    server = Running(base, faults="")
    try:
        server.ready()

        def say(fault: str, text: str = "", limit: int = 600) -> dict[str, Any]:
            (folder / "says").write_bytes(text.encode())
            (base / "faults").write_text(f"{fault}\n")
            try:
                return server.chat("Tell me.", max_tokens=limit)
            finally:
                (base / "faults").write_text("")

        yield say
    finally:
        server.kill()
        if old is None:
            del os.environ["LAB_SAYS"]
        else:
            os.environ["LAB_SAYS"] = old


@pytest.mark.parametrize("kind", [*outputs.kinds(), *(k + "-late" for k in outputs.kinds())])
def test_a_bad_kind_is_refused(talker: Any, kind: str) -> None:
    answer = talker(f"{outputs.SAYS}-{kind}")
    verdict = judge("Tell me.", answer["message"]["content"], None, answer["finish_reason"])
    assert not verdict.good
    assert verdict.why


@pytest.mark.parametrize("path", sorted((OUTPUTS / "bad").glob("*.txt")), ids=lambda p: p.stem)
def test_every_bad_text_of_the_corpus_can_be_said(talker: Any, path: Path) -> None:
    text = path.read_bytes().decode("utf-8")
    answer = talker(outputs.SAYS, text, limit=20_000)
    assert answer["message"]["content"] == text
    assert not judge("Tell me.", answer["message"]["content"], None, answer["finish_reason"]).good


def test_a_good_text_passes_the_same_way(talker: Any) -> None:
    for path in sorted((OUTPUTS / "good").glob("*.txt"))[:12]:
        text = path.read_bytes().decode("utf-8")
        answer = talker(outputs.SAYS, text, limit=20_000)
        assert json.dumps(answer["message"]["content"]) == json.dumps(text)
        verdict = judge("Tell me.", answer["message"]["content"], None, answer["finish_reason"])
        assert verdict.good, (path, verdict)
