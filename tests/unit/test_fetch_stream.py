"""The rules of one connection: the slow one is dropped, the limit is shared."""

from __future__ import annotations

import pytest

from deployer.agents.fetch.common import BLOCK, Again
from deployer.agents.fetch.manifest import Limits
from deployer.agents.fetch.stream import Pace
from deployer.agents.fetch.throttle import SMALLEST, STEP_S, Throttle


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


LIMITS = Limits(slow_bytes_per_s=1000, slow_window_s=10)


def test_a_slow_connection_is_dropped_after_the_window_only() -> None:
    clock = Clock()
    pace = Pace(LIMITS, clock)
    for _ in range(9):
        clock.now += 1
        pace.see(1, 0.0)
    clock.now += 1
    with pytest.raises(Again, match=r"only 1 bytes/s over 10 s"):
        pace.see(1, 0.0)


def test_each_window_is_judged_by_itself() -> None:
    clock = Clock()
    pace = Pace(LIMITS, clock)
    clock.now += 10
    pace.see(10_000_000, 0.0)
    clock.now += 9
    pace.see(1, 0.0)
    clock.now += 1
    with pytest.raises(Again):
        pace.see(1, 0.0)


def test_a_drip_after_a_fast_beginning_is_seen_as_soon_as_one_from_the_start() -> None:
    clock = Clock()
    pace = Pace(LIMITS, clock)
    for _ in range(25):
        clock.now += 0.2
        pace.see(1_000_000, 0.0)
    dripping = clock.now
    with pytest.raises(Again):
        while clock.now < dripping + 60:
            clock.now += 1
            pace.see(1, 0.0)
    assert clock.now - dripping <= 1.2 * LIMITS.slow_window_s


def test_our_own_limit_makes_no_connection_slow() -> None:
    clock = Clock()
    pace = Pace(LIMITS, clock)
    for _ in range(100):
        clock.now += 1
        pace.see(100, 0.95)


def test_the_limit_is_one_for_all_connections() -> None:
    clock = Clock()
    throttle = Throttle(1_000_000, 4, clock)
    began, got = clock.now, 0
    while got < 5_000_000:
        waits = [throttle.take(throttle.most) for _ in range(4)]
        got += 4 * throttle.most
        clock.now += max(waits)
    assert clock.now - began == pytest.approx(got / 1_000_000, abs=2 * STEP_S)


def test_time_that_was_not_used_is_not_saved_up() -> None:
    clock = Clock()
    throttle = Throttle(1_000_000, 1, clock)
    clock.now += 3600
    assert throttle.take(1_000_000) == pytest.approx(1.0 - STEP_S)


def test_blocks_are_small_under_a_low_limit_and_whole_without_one() -> None:
    assert Throttle(1000, 8).most == SMALLEST
    assert Throttle(1_000_000, 4).most == 25_000
    assert Throttle(1e12, 4).most == BLOCK
    free = Throttle(0, 4)
    assert free.most == BLOCK and free.take(1 << 40) == 0.0
