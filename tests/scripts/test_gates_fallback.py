"""launch and verify of `up` against the look-alike: real jobs, real agent, a broken speculation."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]
from serverworld import context, deployment, facts, state  # noqa: E402
from test_lookalike import base, environment  # noqa: E402, F401

from deployer.errors import GateFailed, StepFailed  # noqa: E402
from deployer.events import Event, GateChecked  # noqa: E402
from deployer.model import Facts, PlanState, ProbeOutput  # noqa: E402
from deployer.remote.jobs import ROOT, Jobs  # noqa: E402
from deployer.remote.transport import Answer  # noqa: E402
from deployer.state import DeploymentState, Launch  # noqa: E402
from deployer.steps import adopted  # noqa: E402
from deployer.steps.base import StepContext  # noqa: E402
from deployer.steps.launch import LaunchStep  # noqa: E402
from deployer.steps.server_facts import ServerFact, parse_server  # noqa: E402
from deployer.steps.server_script import server_script_text  # noqa: E402
from deployer.steps.serving_fact import ServingFact, light_script, parse_serving  # noqa: E402
from deployer.steps.stop import StopStep  # noqa: E402
from deployer.steps.verify import VerifyStep  # noqa: E402
from tests.local_transport import LocalTransport, shell_path  # noqa: E402


class Moved(LocalTransport):
    """This machine, with the tool's own folder somewhere else."""

    root = ""

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        moved = [word.replace(ROOT, self.root) for word in args]
        text = script.replace(ROOT, self.root)
        return super().run(text, args=moved, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout)


class World:
    """One deployment on this machine, served by the look-alike."""

    def __init__(self, base: Path, folder: Path, **rules: Any) -> None:  # noqa: F811
        self.base, self.folder = base, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        venv = folder / "venv" / "bin"
        venv.mkdir(parents=True)
        words = environment(base)
        lines = [
            f"export {name}='{words[name]}'"
            for name in ("PYTHONPATH", "SGLANG_LOOKALIKE_DEV", "SGLANG_LOOKALIKE_SPEED")
        ]
        lines += [f"export LAB_FAULTS='{base}/faults'", f"export PATH='{base}/bin':$PATH"]
        (venv / "python").write_text(
            "#!/bin/sh\n"
            f'case $* in *launch_server*) ;; *) exec "{sys.executable}" "$@" ;; esac\n'
            + "\n".join(lines)
            + f'\nexec "{sys.executable}" -S "$@"\n'
        )
        (venv / "python").chmod(0o755)
        self.want = deployment(
            model={"path": str(base / "model")},
            engine={"venv": str(folder / "venv")},
            serve={
                "port": port,
                "args": {"tp-size": 2, "context-length": 4096, "reasoning-parser": "qwen3"},
                "ready_timeout_s": 60,
            },
            stop={"grace_s": 1},
            gates={"request_timeout_s": 20, "alive_after_s": 0, "parallel": 2, "burst": 4, **rules},
        )
        self.guest = Moved(shell_path("dash", folder))
        self.guest.root = str(folder / "jobs")
        own = state()
        made, self.events = context(self.want, own, None, guest=self.guest, host=self.guest)  # type: ignore[arg-type]
        self.context: StepContext = made
        made.jobs = lambda where: Jobs(self.guest, self.guest.root)  # type: ignore[method-assign]
        made.reprobe = self.look

    def fault(self, name: str) -> None:
        (self.base / "faults").write_text(f"{name}\n", encoding="utf-8")

    def look(self) -> Facts:
        """What the probes of stop and verify see."""
        found: list[object] = []
        for script, parse in (
            (server_script_text(self.want), parse_server),
            (light_script(self.want), lambda output: parse_serving(output, "tiny")),
        ):
            answer = self.guest.run(script, timeout_s=30)
            found.append(parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr)))
        return facts(*found)

    def launch(self) -> None:
        step, seen = LaunchStep(), self.look()
        step.apply(self.context, seen, step.plan(self.want, seen, self.context.state))

    def verify(self) -> GateFailed | None:
        step, seen = VerifyStep(), self.look()
        try:
            step.apply(self.context, seen, step.plan(self.want, seen, self.context.state))
        except GateFailed as error:
            return error
        return None

    def checked(self) -> list[tuple[str, bool]]:
        chosen: list[Event] = self.events
        return [(one.gate, one.passed) for one in chosen if isinstance(one, GateChecked)]

    def down(self) -> None:
        step, seen = StopStep(), self.look()
        step.apply(self.context, seen, step.down_plan(self.want, seen))


@pytest.fixture
def world(base: Path, tmp_path: Path) -> Iterator[Callable[..., World]]:  # noqa: F811
    made: list[World] = []

    def make(**rules: Any) -> World:
        made.append(World(base, tmp_path, **rules))
        return made[-1]

    yield make
    for one in made:
        one.fault("")
        fact = one.look().get(ServerFact)
        if fact is not None and fact.job is not None and (fact.job.alive or fact.job.members):
            one.down()


def test_a_good_launch_and_its_quick_proof(world: Callable[..., World]) -> None:
    one = world()
    one.fault("")
    one.launch()
    assert one.verify() is None, one.checked()
    assert all(passed for _, passed in one.checked())
    seen = one.look()
    plan = VerifyStep().plan(one.want, seen, one.context.state)
    assert not plan.changes, plan.reason
    assert "passed its gates" in plan.reason


def test_speculation_is_found_to_be_the_broken_side(world: Callable[..., World]) -> None:
    one = world()
    one.fault("server-degenerate-mtp")
    one.launch()
    error = one.verify()
    assert error is not None
    assert "speculation is the broken side" in error.what, error.what
    assert "serves now" in error.what
    launches = one.context.state.launches
    assert [(launch.variant, launch.verdict[:6]) for launch in launches] == [
        ("mtp", "failed"),
        ("no-mtp", "good"),
    ]
    seen = one.look()
    server, serving = seen.need(ServerFact), seen.need(ServingFact)
    assert server.job is not None
    assert (server.job.identity.id, server.job.launch.variant) == (launches[1].id, "no-mtp")
    assert (serving.verdict, serving.problem) == ("good", "")
    # The next `up` finds nothing to do.
    assert not VerifyStep().plan(one.want, seen, one.context.state).changes
    assert not LaunchStep().plan(one.want, seen, one.context.state).changes
    assert not StopStep().plan(one.want, seen, one.context.state).changes


def test_the_known_good_arguments_run_again(world: Callable[..., World]) -> None:
    one = world(ab_on_failure=False)
    one.fault("")
    one.launch()
    good = one.context.state.launches[-1]
    one.down()
    argv = [*good.argv, "--log-level", "info"]
    old = Launch(
        id="old", variant="mtp", started=1.0, fingerprint="f", argv=argv, verdict="stopped"
    )
    one.context.state.launches[:] = [old]
    one.context.state.known_good = "old"
    one.fault("server-degenerate")
    one.launch()
    one.fault("server-degenerate")
    error = one.verify()
    assert error is not None
    assert "the last known-good arguments (launch old) run again" in error.what
    seen = one.look().need(ServerFact)
    assert seen.job is not None
    assert seen.job.alive
    assert "--log-level" in Path(f"/proc/{seen.job.identity.pid}/cmdline").read_text()


def killed_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The controller ends without a word at the wait for launch number `count` from now."""
    follow, seen = LaunchStep.follow, []

    def once(*words: Any) -> None:
        seen.append(words)
        if len(seen) == count:
            raise KeyboardInterrupt
        follow(*words)

    monkeypatch.setattr(LaunchStep, "follow", once)


def up(one: World) -> GateFailed | None:
    """stop, launch and verify as the engine runs them, by a controller that knows its file only."""
    made = one.context
    made.state = DeploymentState.model_validate_json(made.state.model_dump_json())
    for step in (StopStep(), LaunchStep()):
        seen = one.look()
        plan = step.plan(one.want, seen, made.state)
        if plan.changes:
            step.apply(made, seen, plan)
    return one.verify()


def test_killed_in_the_comparison_it_goes_on_with_that_launch(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world()
    one.fault("server-degenerate-mtp")
    one.launch()
    killed_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        one.verify()
    left = one.context.state.launches[-1]
    assert (left.variant, left.verdict) == ("no-mtp", "starting")
    assert up(one) is None
    launches = one.context.state.launches
    assert [(launch.variant, launch.verdict[:6]) for launch in launches] == [
        ("mtp", "failed"),
        ("no-mtp", "good"),
    ]
    assert launches[1].id == left.id
    assert one.context.state.known_good == left.id
    job = one.look().need(ServerFact).job
    assert job is not None
    assert "degraded: no-mtp runs in place of mtp" in job.launch.degraded


def test_killed_in_the_restore_the_known_good_is_left_to_come_up(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world(ab_on_failure=False)
    one.fault("")
    one.launch()
    good = one.context.state.launches[-1]
    one.down()
    old = good.model_copy(
        update={
            "id": "old",
            "fingerprint": "f",
            "argv": [*good.argv, "--log-level", "info"],
            "verdict": "stopped",
        }
    )
    one.context.state.launches[:] = [old]
    one.context.state.known_good = "old"
    one.fault("server-degenerate")
    one.launch()
    killed_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        one.verify()
    assert one.context.state.launches[-1].fingerprint == "f"
    again = one.context.state.launches[-1].id
    plan = StopStep().plan(one.want, one.look(), one.context.state)
    assert (plan.state, plan.exit_code) == (PlanState.BLOCKED, 5)
    assert f"known-good launch {again} (variant mtp) runs and was left alone" in plan.reason
    job = one.look().need(ServerFact).job
    assert job is not None and job.alive and job.identity.id == again


def by_hand(one: World) -> subprocess.Popen[bytes]:
    """A server that somebody started on our port, as it says that it listens."""
    playbook = one.want.playbook.model_copy(
        update={"stop": one.want.playbook.stop.model_copy(update={"old_server": "adopt"})}
    )
    one.want = one.context.want = dataclasses.replace(one.want, playbook=playbook)
    words = [sys.executable, "-S", "-m", "sglang.launch_server"]
    words += ["--model-path", playbook.model.path, "--port", str(one.want.port), "--tp-size", "2"]
    words += ["--served-model-name", "it's old", "--host", "127.0.0.1"]
    with (one.folder / "by-hand.log").open("ab") as log:
        # No fault is one of its own.
        sound = {**environment(one.base), "LAB_FAULTS": str(one.folder / "no-faults")}
        process = subprocess.Popen(words, env=sound, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 60
    while not one.look().need(ServerFact).listening:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("how", ["gates", "killed"])
def test_a_server_of_somebody_else_comes_back(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It was ended for ours, which does not come up, or is no good; nothing else had served."""
    one = world(ab_on_failure=False)
    monkeypatch.setattr(adopted, "FOLDER", str(one.folder / "adopted"))
    one.fault("")
    process = by_hand(one)
    one.fault("server-degenerate" if how == "gates" else "server-dies-silent")
    failed: list[str] = []
    try:
        if how == "killed":
            killed_at(monkeypatch, 1)
            with pytest.raises(KeyboardInterrupt):
                up(one)
            one.down()
        try:
            failed += [str(error) for error in [up(one)] if error is not None]
        except StepFailed as error:
            failed.append(str(error))
        one.fault("")
        said = f"what had port {one.want.port} before, which this tool did not start, serves again"
        assert failed and said in failed[0] and "--served-model-name 'it'\"'\"'s old'" in failed[0]
        seen = one.look().need(ServerFact)
        [owner] = seen.strangers
        assert owner.pid != process.pid and process.wait(timeout=10) is not None
        words = Path(f"/proc/{owner.pid}/cmdline").read_bytes().split(b"\0")
        assert b"it's old" in words and not Path(adopted.FOLDER).exists()
        # The same wish does not end it once more.
        again = StopStep().plan(one.want, one.look(), one.context.state)
        assert again.state is PlanState.BLOCKED and "was left alone" in again.reason
    finally:
        for left in {process.pid, *(each.pid for each in one.look().need(ServerFact).strangers)}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(left, signal.SIGKILL)
        process.wait()
