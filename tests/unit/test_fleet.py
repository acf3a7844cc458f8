"""Parallel hosts: one's failure or hang leaves the others alone, an interrupt ends all of them."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from deployer import fleet
from deployer.cancel import Cancel
from deployer.cli.deadline import deadline
from deployer.deployment import Deployment
from deployer.errors import (
    CommandOverdue,
    DeployError,
    GateFailed,
    Interrupted,
    NotStarted,
    StepFailed,
    Unreachable,
)
from deployer.events import Note, RunFinished
from deployer.fleet import Slots, exit_code, run_hosts

GROUPS = {name: cast("list[Deployment]", []) for name in ("a", "b", "c")}


def lost(host: str, error: DeployError) -> str:
    return f"{type(error).__name__} {error.what}"


def test_results_keep_the_order_of_the_words() -> None:
    assert list(run_hosts(GROUPS, lambda host, group: host * 2, lost).items()) == [
        ("a", "aa"),
        ("b", "bb"),
        ("c", "cc"),
    ]


def test_a_host_that_hangs_delays_nobody() -> None:
    done, released = [], threading.Event()

    def work(host: str, group: object) -> str:
        if host == "a":
            assert released.wait(10)
        done.append(host)
        if len(done) == 2:
            released.set()
        return host

    run_hosts(GROUPS, work, lost)
    assert done[2] == "a"


def test_what_comes_after_others_waits_for_these_alone() -> None:
    """`c` is a server of several nodes on the host `b`; `a` hangs."""
    begun, ended = [], threading.Event()

    def work(host: str, group: object) -> str:
        begun.append(host)
        if host == "a":
            assert ended.wait(10)
        elif host == "b":
            time.sleep(0.05)
            begun.append("b ended")
        else:
            ended.set()
        return host

    done = run_hosts(GROUPS, work, lost, slots=Slots(2), after={"c": ["b"]})
    assert begun == ["a", "b", "b ended", "c"]
    assert list(done) == ["a", "b", "c"]


def test_what_waits_for_others_ends_with_an_interrupt() -> None:
    cancel, begun = Cancel(), threading.Event()

    def work(host: str, group: object) -> str:
        if host == "a":
            begun.set()
            while not cancel.asked:
                time.sleep(0.01)
            raise Interrupted("interrupted")
        return host

    def ask() -> None:
        assert begun.wait(10)
        cancel.ask(Interrupted("interrupted"))

    threading.Thread(target=ask).start()
    groups = {name: GROUPS[name] for name in ("a", "c")}
    with pytest.raises(Interrupted):
        run_hosts(groups, work, lost, cancel=cancel, after={"c": ["a"]})


def test_who_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TELL_S", 0.05)
    said: list[list[str]] = []
    told = threading.Event()

    def waits_for(hosts: list[str]) -> None:
        said.append(hosts)
        told.set()

    def work(host: str, group: object) -> str:
        if host == "b":
            assert told.wait(10)
        return host

    run_hosts(GROUPS, work, lost, waits_for=waits_for)
    assert said[-1] == ["b"]


def test_who_holds_the_only_slot_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TELL_S", 0.05)
    monkeypatch.setattr(fleet, "TURN_S", 0.01)
    told = threading.Event()
    said: list[list[str]] = []

    def waits_for(hosts: list[str]) -> None:
        said.append(hosts)
        told.set()

    def work(host: str, group: object) -> str:
        assert told.wait(10)
        return host

    done = run_hosts(GROUPS, work, lost, waits_for=waits_for, slots=Slots(1))
    assert said[0] == ["a"] and list(done) == list(GROUPS)


def test_after_an_unforeseen_error_no_further_host_is_begun() -> None:
    begun: list[str] = []

    def work(host: str, group: object) -> str:
        begun.append(host)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_hosts(GROUPS, work, lost, slots=Slots(1))
    assert begun == ["a"]


def test_no_more_than_asked_for_at_once() -> None:
    now, most, lock = [0], [0], threading.Lock()

    def work(host: str, group: object) -> str:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return host

    run_hosts({str(n): [] for n in range(12)}, work, lost, slots=Slots(3))
    assert most[0] == 3


def test_a_slot_that_is_lent_lets_the_next_one_work() -> None:
    slots, second = Slots(1), threading.Event()

    def work(host: str, group: object) -> str:
        if host == "a":
            with slots.lent():
                assert second.wait(10)
        else:
            second.set()
        return host

    assert list(run_hosts({"a": [], "b": []}, work, lost, slots=slots)) == ["a", "b"]


def test_a_refused_host_is_not_begun() -> None:
    begun: list[str] = []

    def refusal(host: str) -> DeployError | None:
        return NotStarted("too many") if host == "b" else None

    results = run_hosts(GROUPS, lambda h, g: begun.append(h) or h, lost, refusal=refusal)  # type: ignore[func-returns-value]
    assert sorted(begun) == ["a", "c"]
    assert results["b"] == "NotStarted too many"


def test_an_interrupt_ends_the_workers_at_their_next_event_and_keeps_what_is_done() -> None:
    cancel, waiting = Cancel(), threading.Barrier(3)

    def work(host: str, group: object) -> str:
        waiting.wait(10)
        if host == "a":
            raise KeyboardInterrupt
        try:
            limit = time.monotonic() + 10
            while time.monotonic() < limit:
                cancel(Note("h"))
        except Interrupted as error:
            cancel(RunFinished("h"))
            return f"ended: {error.what}"
        return "never ended"

    results = run_hosts(GROUPS, work, lost, cancel=cancel)
    assert results == {
        "a": "Interrupted interrupted",
        "b": "ended: interrupted",
        "c": "ended: interrupted",
    }


def test_an_interrupt_wakes_what_waits_and_leaves_behind_what_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "CLEAN_UP_S", 0.2)
    cancel, woken, never, waiting = (
        Cancel(),
        threading.Event(),
        threading.Event(),
        threading.Barrier(3),
    )

    def work(host: str, group: object) -> str:
        waiting.wait(10)
        if host == "a":
            raise CommandOverdue("over its --timeout")
        if host == "c":
            never.wait(20)
            return "too late"
        with cancel.waking(woken.set):
            assert woken.wait(10)
        return lost(host, cancel.error(host))

    began = time.monotonic()
    results = run_hosts(GROUPS, work, lost, cancel=cancel)
    assert time.monotonic() - began < 5
    assert results == dict.fromkeys("abc", "CommandOverdue over its --timeout")
    never.set()


def test_an_unforeseen_error_of_a_worker_is_raised() -> None:
    def work(host: str, group: object) -> str:
        if host == "b":
            raise BrokenPipeError
        return host

    with pytest.raises(BrokenPipeError):
        run_hosts(GROUPS, work, lost)


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([None, None], 0),
        ([None, GateFailed("x")], 5),
        ([Unreachable("x"), Unreachable("y")], 3),
        ([GateFailed("x"), StepFailed("y")], 1),
        ([GateFailed("x"), NotStarted("y")], 5),
        ([NotStarted("y"), None], 1),
        ([GateFailed("x"), Interrupted("y"), Unreachable("z")], 130),
    ],
)
def test_one_cause_a_code(errors: list[DeployError | None], code: int) -> None:
    assert exit_code(errors) == code


def test_a_command_over_its_deadline_is_ended() -> None:
    with pytest.raises(CommandOverdue, match="--timeout"), deadline(0.01):
        threading.Event().wait(10)
    threading.Event().wait(0.02)
