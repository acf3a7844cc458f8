"""Parallel hosts: one's failure leaves the others alone, an interrupt ends all of them."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from deployer.cli.deadline import deadline
from deployer.cli.hosts import Cancel, exit_code, run_hosts
from deployer.deployment import Deployment
from deployer.errors import CommandOverdue, GateFailed, Interrupted, StepFailed, Unreachable
from deployer.events import Note

GROUPS = {name: cast("list[Deployment]", []) for name in ("a", "b", "c")}


def test_results_keep_the_order_of_the_words() -> None:
    assert list(run_hosts(GROUPS, lambda host, group: host * 2)) == ["a", "b", "c"]


def test_an_interrupt_ends_the_workers_at_their_next_event() -> None:
    cancel, ended, waiting = Cancel(), [], threading.Barrier(3)

    def work(host: str, group: object) -> None:
        waiting.wait(10)
        if host == "a":
            raise KeyboardInterrupt
        try:
            limit = time.monotonic() + 10
            while time.monotonic() < limit:
                cancel(Note("h"))
        except Interrupted:
            ended.append(host)

    with pytest.raises(KeyboardInterrupt):
        run_hosts(GROUPS, work, cancel)
    assert sorted(ended) == ["b", "c"]


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([None, None], 0),
        ([None, GateFailed("x")], 5),
        ([Unreachable("x"), Unreachable("y")], 3),
        ([GateFailed("x"), StepFailed("y")], 1),
    ],
)
def test_one_cause_a_code(errors: list[StepFailed | None], code: int) -> None:
    assert exit_code(errors) == code


def test_a_command_over_its_deadline_is_ended() -> None:
    with pytest.raises(CommandOverdue, match="--timeout"), deadline(0.01):
        threading.Event().wait(10)
    threading.Event().wait(0.02)
