"""Who may act, and when: canary, elections, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployer import rollout
from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.errors import (
    CommandOverdue,
    ConnectionLost,
    DeployError,
    GateFailed,
    Interrupted,
    LockHeld,
    NotStarted,
    StepBlocked,
    StepFailed,
    Unreachable,
)
from deployer.fleet import Slots
from deployer.rollout import Rollout


def want(id_: str, playbook: str = "qwen", canary: bool = True, router: str = "") -> Deployment:
    host = id_.partition("/")[0]
    known = SimpleNamespace(
        id=id_,
        host_name=host,
        playbook_name=playbook,
        variant_name="base",
        entry=SimpleNamespace(
            replica=SimpleNamespace(router=SimpleNamespace(url=router)) if router else None
        ),
        playbook=SimpleNamespace(rollout=SimpleNamespace(canary=canary)),
    )
    return cast(Deployment, known)


class Asking:
    """`admit` in a thread of its own; `said` is what it was told to wait for."""

    def __init__(
        self,
        policy: Rollout,
        who: Deployment,
        idle: bool = False,
        lacking: Callable[[], list[str]] = list,
    ) -> None:
        self.idle = idle
        self.lacking = lacking
        self.said: list[str] = []
        self.told = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._ask, args=(policy, who), daemon=True)
        self.thread.start()

    def _ask(self, policy: Rollout, who: Deployment) -> None:
        try:
            policy.admit(who, self._waits, idle=self.idle, lacking=self.lacking)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def _waits(self, text: str) -> None:
        self.said.append(text)
        self.told.set()

    @property
    def waits(self) -> str:
        assert self.told.wait(5)
        assert self.thread.is_alive()
        return self.said[-1]

    def ended(self) -> BaseException | None:
        self.thread.join(5)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "SAY_EVERY_S", 0.02)


A, B, C = want("a/m"), want("b/m"), want("c/m")


def until(seen: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(500):
        if seen():
            return
        done.wait(0.01)
    raise AssertionError("not within 5 s")


def test_the_others_wait_for_the_canary_and_act_when_it_has_passed() -> None:
    policy = Rollout([A, B, C])
    policy.admit(A, pytest.fail)
    others = [Asking(policy, B), Asking(policy, C)]
    assert [one.waits for one in others] == ["waits for the canary a/m"] * 2
    policy.ended("a/m", None, acted=True, passed=True)
    assert [one.ended() for one in others] == [None, None]


@pytest.mark.parametrize(
    "why",
    [
        GateFailed("repeats itself"),
        StepFailed("no"),
        ConnectionLost("gone in the middle"),
        LockHeld("taken away"),
        CommandOverdue("late"),
        None,
    ],
    ids=lambda error: type(error).__name__,
)
def test_nobody_starts_after_a_canary_that_failed(why: DeployError | None) -> None:
    """However it ended, once it has begun to change something."""
    policy = Rollout([A, B, C])
    policy.admit(A, pytest.fail)
    other = Asking(policy, B)
    assert other.waits
    policy.ended("a/m", why, acted=True)
    error = other.ended()
    assert isinstance(error, NotStarted)
    assert error.what == "not started: the canary a/m failed"
    with pytest.raises(NotStarted):
        policy.admit(C, pytest.fail)


@pytest.mark.parametrize("error", [Unreachable("dark"), None])
def test_who_changed_nothing_is_no_canary(error: Unreachable | None) -> None:
    policy = Rollout([A, B, C])
    policy.admit(A, pytest.fail)
    other = Asking(policy, B)
    assert other.waits == "waits for the canary a/m"
    policy.ended("a/m", error, acted=False, passed=False)  # cannot be reached, or declined
    assert other.ended() is None
    third = Asking(policy, C)
    assert third.waits == "waits for the canary b/m"
    policy.ended("b/m", None, acted=True, passed=True)
    assert third.ended() is None


def test_one_that_is_already_as_wanted_has_passed() -> None:
    policy = Rollout([A, B, C])
    policy.ended("c/m", None, passed=True)
    policy.admit(A, pytest.fail)
    policy.admit(B, pytest.fail)


def test_the_first_in_order_is_the_canary_not_the_fastest() -> None:
    policy = Rollout([A, B, C])
    second = Asking(policy, B)
    assert second.waits == "before the first canary"
    policy.admit(A, pytest.fail)
    until(lambda: second.said[-1] == "waits for the canary a/m")


def test_one_that_hangs_before_it_delays_the_election_for_seconds_only() -> None:
    now = [100.0]
    policy = Rollout([A, B, C], clock=lambda: now[0])
    second = Asking(policy, B)
    assert second.waits == "before the first canary"
    now[0] += rollout.ELECTION_S
    assert second.ended() is None


def test_one_that_ends_before_it_delays_nothing() -> None:
    policy = Rollout([A, B])
    policy.ended("a/m", Unreachable("dark"))
    policy.admit(B, pytest.fail)


@pytest.mark.parametrize(
    ("wants", "canary"),
    [
        ([A, B], False),
        ([want("a/m", canary=False), want("b/m", canary=False)], None),
        ([want("a/m"), want("a/n")], None),
        ([want("a/m", "one"), want("b/m", "two")], None),
    ],
)
def test_no_canary(wants: list[Deployment], canary: bool | None) -> None:
    """Not asked for; not by the playbook; one host alone; nobody else with this playbook."""
    policy = Rollout(wants, canary=canary)
    for one in wants:
        policy.admit(one, pytest.fail)


def test_the_option_wins_over_the_playbook() -> None:
    wants = [want("a/m", canary=False), want("b/m", canary=False)]
    policy = Rollout(wants, canary=True)
    policy.admit(wants[0], pytest.fail)
    assert Asking(policy, wants[1]).waits


def test_after_so_many_failed_hosts_no_more_are_begun() -> None:
    policy = Rollout([A, B, C, want("a/n")], canary=False, max_failures=2)
    policy.ended("a/m", GateFailed("x"), acted=True)
    policy.ended("a/n", GateFailed("x"), acted=True)
    assert policy.refusal("b") is None, "one host has failed so far"
    policy.ended("b/m", Unreachable("x"))
    refused = policy.refusal("c")
    assert refused is not None
    assert refused.what == "not started: a, b failed, and --max-failures is 2"
    with pytest.raises(NotStarted):
        policy.admit(C, pytest.fail)


def test_what_others_ended_is_no_failure() -> None:
    policy = Rollout([A, B], canary=False, max_failures=1)
    policy.ended("a/m", NotStarted("x"))
    policy.ended("a/m", GateFailed("the first word counts"))
    policy.ended("b/m", Interrupted("x"))
    assert policy.refusal("b") is None


def test_an_interrupt_ends_the_wait() -> None:
    cancel = Cancel()
    policy = Rollout([A, B], cancel=cancel)
    policy.admit(A, pytest.fail)
    other = Asking(policy, B)
    assert other.waits
    cancel.ask()
    assert isinstance(other.ended(), Interrupted)


def test_who_waits_has_no_slot() -> None:
    slots: Any = Slots(1)
    policy = Rollout([A, B], slots=slots)
    slots.take()
    second = Asking(policy, B)
    assert second.waits
    taken = threading.Thread(target=slots.take, daemon=True)
    taken.start()
    taken.join(5)
    assert not taken.is_alive(), "the slot of the one that waits is free"
    policy.ended("a/m", None, passed=True)
    slots.give_back()
    assert second.ended() is None


R = [want(f"{host}/m", router="http://r") for host in "abc"]


def test_replicas_act_one_at_a_time() -> None:
    policy = Rollout(R, canary=False)
    asking = [Asking(policy, one) for one in R]
    assert asking[0].ended() is None
    until(lambda: asking[1].said[-1:] == ["waits for the replica a/m"])
    policy.ended("a/m", None, acted=True, passed=True)
    assert asking[1].ended() is None
    until(lambda: asking[2].said[-1:] == ["waits for the replica b/m"])
    policy.ended("b/m", None, acted=True, passed=True)
    assert asking[2].ended() is None


def test_a_replica_that_does_not_serve_goes_first() -> None:
    policy = Rollout(R)
    first = Asking(policy, R[0])
    assert first.waits == "before the first replica"
    policy.ended("b/m", None, passed=True)
    down = Asking(policy, R[2], idle=True)
    assert down.ended() is None
    until(lambda: first.said[-1] == "waits for the replica c/m")
    policy.ended("c/m", None, acted=True, passed=True)
    assert first.ended() is None


def test_no_second_replica_goes_missing() -> None:
    policy = Rollout(R, canary=False)
    asking = [Asking(policy, one) for one in R]
    assert asking[0].ended() is None
    policy.ended("a/m", GateFailed("bad"), acted=True)
    for one in asking[1:]:
        error = one.ended()
        assert isinstance(error, NotStarted)
        assert error.what == "not started: the replica a/m failed"


def test_replicas_that_a_router_forgot_do_not_wait_for_one_another() -> None:
    """Each had requests when it was admitted; then the router was started again, with no worker."""
    policy = Rollout(R, canary=False)
    names = [one.id for one in R]
    asking = []
    for one in R:
        others = [name for name in names if name != one.id]
        asking.append(Asking(policy, one, lacking=lambda others=others: others))  # type: ignore[misc]
    until(lambda: any(not one.thread.is_alive() for one in asking))
    [first] = [one for one in asking if not one.thread.is_alive()]
    assert first.error is None


def test_a_failure_of_an_earlier_run_stops_the_others_too() -> None:
    policy = Rollout(R)
    asking = [Asking(policy, one) for one in R[1:]]
    policy.ended("a/m", None, passed=True)
    assert asking[0].ended() is None
    blocked = StepBlocked("launch x has failed its gates", where="b/m verify")
    blocked.exit_code = GateFailed.exit_code
    policy.ended("b/m", blocked)
    error = asking[1].ended()
    assert isinstance(error, NotStarted) and "the replica b/m failed" in error.what


def test_what_shall_not_serve_afterwards_waits_for_nobody() -> None:
    policy = Rollout(R, canary=False, serves=False)
    assert [Asking(policy, one).ended() for one in R] == [None, None, None]


@pytest.mark.parametrize("comes", ["ready", "over", "serving"])
def test_one_that_serves_waits_for_one_without_requests_however_long(comes: str) -> None:
    """`a` was left half-way by a killed run, and its host takes its time to be looked at."""
    now, away = [0.0], ["a/m"]
    policy = Rollout(R, clock=lambda: now[0])
    second = Asking(policy, R[1], lacking=lambda: away)
    assert second.waits == "waits for a/m: without requests"
    now[0] = 1000.0
    until(lambda: len(second.said) > 3)
    assert second.thread.is_alive()
    if comes == "ready":
        assert Asking(policy, R[0], idle=True).ended() is None
        until(lambda: second.said[-1] == "waits for the replica a/m")
        policy.ended("a/m", None, acted=True, passed=True)
    elif comes == "over":
        policy.ended("a/m", Unreachable("dark"))
    else:
        away.clear()
    assert second.ended() is None


def test_a_router_that_is_dark_ends_the_wait() -> None:
    def dark() -> list[str]:
        raise Unreachable("the router does not answer")

    assert isinstance(Asking(Rollout(R), R[0], lacking=dark).ended(), Unreachable)


def test_a_replica_that_hangs_at_the_look_holds_the_others_for_seconds_only() -> None:
    now = [0.0]
    policy = Rollout(R, clock=lambda: now[0])
    second = Asking(policy, R[1])
    assert second.waits == "before the first replica"
    now[0] = rollout.ELECTION_S
    assert second.ended() is None
