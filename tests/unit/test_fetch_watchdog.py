"""When a worker of a download counts as hung: tables of samples in, verdicts out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agents.fetch.manifest import Limits
from deployer.agents.fetch.watchdog import MAX_FLUSH_S, MAX_GAP_S, Sample, Verdict, Watchdog

LIMITS = Limits()
FAST = 50_000_000


def watch(samples: Iterable[Sample], limits: Limits = LIMITS) -> tuple[float, Verdict] | None:
    """(when, verdict) of the first verdict, None when there is none."""
    dog = Watchdog(limits)
    for sample in samples:
        if verdict := dog.see(sample):
            return sample.at, verdict
    return None


def steady(seconds: int, rate: int, start: Sample | None = None) -> list[Sample]:
    """A worker that brings `rate` bytes each second, from after `start` on."""
    now = start or Sample(0.0, 0, 0, 0)
    return [
        dataclasses.replace(
            now,
            at=now.at + step,
            wire=now.wire + step * rate,
            moved=now.moved + step * rate,
            disk=now.disk + step * rate,
        )
        for step in range(1, seconds + 1)
    ]


def still(seconds: int, start: Sample, **changes: object) -> list[Sample]:
    """Nothing moves for so long."""
    return [
        dataclasses.replace(start, at=start.at + step, **changes)  # type: ignore[arg-type]
        for step in range(1, seconds + 1)
    ]


def test_a_worker_that_works_is_left_alone() -> None:
    assert watch(steady(1000, FAST)) is None


def test_a_stall_is_seen_within_45_seconds_of_the_last_byte() -> None:
    before = steady(60, FAST)
    seen = watch([*before, *still(100, before[-1])])
    assert seen == (60 + 45, Verdict("stalled", 45.0))
    assert seen[1].text("33 of 52 bytes") == "stalled at 33 of 52 bytes for 45 s"


@pytest.mark.parametrize("figure", ["wire", "moved", "disk"])
def test_any_figure_that_moves_is_a_sign_of_life(figure: str) -> None:
    samples = [Sample(float(s), 0, 0, 0) for s in range(1000)]
    samples = [dataclasses.replace(s, **{figure: int(s.at) * FAST}) for s in samples]
    assert watch(samples) is None


def test_bytes_on_the_disk_may_fall_and_grow_again() -> None:
    """A file that is fetched anew after a mismatch: the gauge begins again below its best."""
    before = steady(100, FAST)
    lower = dataclasses.replace(before[-1], disk=0)
    again = [
        dataclasses.replace(s, wire=lower.wire, moved=lower.moved)
        for s in steady(99, 200_000, lower)
    ]
    assert watch([*before, lower, *again]) is None


def test_a_drip_is_too_slow_and_no_stall() -> None:
    before = steady(300, FAST)
    at, verdict = watch([*before, *steady(1000, 1, before[-1])]) or pytest.fail("never seen")
    assert verdict.kind == "slow"
    assert at <= 300 + LIMITS.floor_window_s + 1
    assert verdict.rate < LIMITS.floor_bytes_per_s
    assert "bytes/s over 120 s" in verdict.text("a place")


def test_a_stall_every_minute_that_brings_little_is_too_slow() -> None:
    """Table row a3: each try brings 1 MB and then hangs."""
    samples = [Sample(float(s), s // 40 * 1_000_000, s // 40 * 1_000_000, 0) for s in range(1000)]
    seen = watch(samples)
    assert seen is not None and seen[1].kind == "slow"


def test_no_floor_when_it_is_zero() -> None:
    assert watch(steady(1000, 1), dataclasses.replace(LIMITS, floor_bytes_per_s=0.0)) is None


def test_a_limit_of_the_bandwidth_lowers_the_floor() -> None:
    slow = dataclasses.replace(LIMITS, bwlimit_bytes_per_s=50_000.0)
    assert watch(steady(1000, 48_000), slow) is None
    assert watch(steady(1000, 20_000), slow) is not None


def test_a_pause_that_the_hub_asked_for_is_no_stall() -> None:
    before = steady(10, FAST)
    paused = still(250, before[-1], pausing=True)
    after = steady(10, FAST, dataclasses.replace(paused[-1], pausing=False))
    assert watch([*before, *paused, *after]) is None


def test_pauses_without_a_byte_between_them_have_an_end() -> None:
    before = steady(10, FAST)
    seen = watch([*before, *still(1000, before[-1], pausing=True)])
    assert seen is not None
    assert seen[0] == 10 + LIMITS.max_pause_s + LIMITS.stall_s


def test_time_before_and_after_a_pause_adds_up() -> None:
    before = steady(10, FAST)
    first = still(30, before[-1])
    pause = still(100, first[-1], pausing=True)
    second = still(30, dataclasses.replace(pause[-1], pausing=False))
    seen = watch([*before, *first, *pause, *second])
    assert seen is not None and seen[0] == 10 + 30 + 100 + 15


@pytest.mark.parametrize("phase", ["starting", "metadata", "probing"])
def test_a_phase_without_bytes_has_a_deadline(phase: str) -> None:
    samples = still(100, Sample(0.0, 0, 0, 0, phase=phase))
    at, verdict = watch(samples) or pytest.fail("never seen")
    assert (at, verdict.kind) == (61.0, "overdue")
    assert repr(phase) in verdict.text("0 of 9 bytes")


def test_each_phase_has_its_own_deadline() -> None:
    samples = [
        *still(50, Sample(0.0, 0, 0, 0, phase="starting")),
        *still(50, Sample(50.0, 0, 0, 0, phase="metadata")),
    ]
    assert watch(samples) is None


def test_hashing_is_work() -> None:
    samples = [Sample(float(s), 0, s * FAST, 0, phase="hashing") for s in range(600)]
    assert watch(samples) is None


def test_a_disk_that_is_written_is_waited_for_but_not_for_ever() -> None:
    before = steady(10, FAST)
    seen = watch([*before, *still(2000, before[-1], flushing=True)])
    assert seen is not None
    assert seen[0] == 10 + MAX_FLUSH_S + LIMITS.stall_s


def test_a_machine_that_was_frozen_has_not_stalled() -> None:
    before = steady(10, FAST)
    thawed = dataclasses.replace(before[-1], at=7200.0)
    assert watch([*before, thawed, *steady(100, FAST, thawed)]) is None
    assert LIMITS.stall_s > MAX_GAP_S


def test_a_clock_that_stands_or_goes_back_is_no_time() -> None:
    assert watch([Sample(100.0 - s, 0, 0, 0) for s in range(1000)]) is None


STEPS = st.lists(
    st.tuples(
        st.floats(0, 4),
        st.integers(0, 10**7),
        st.sampled_from(["downloading", "hashing", "metadata", "settling"]),
        st.booleans(),
    ),
    max_size=200,
)


def walk(steps: Iterable[tuple[float, int, str, bool]]) -> list[Sample]:
    at, wire, samples = 0.0, 0, [Sample(0.0, 0, 0, 0)]
    for seconds, gain, phase, pausing in steps:
        at, wire = at + seconds, wire + gain
        samples.append(Sample(at, wire, wire, wire, phase, pausing))
    return samples


@given(STEPS)
def test_never_stalled_before_so_much_time_without_a_byte(
    steps: list[tuple[float, int, str, bool]],
) -> None:
    samples = walk(steps)
    seen = watch(samples, dataclasses.replace(LIMITS, floor_bytes_per_s=0.0))
    if seen is None:
        return
    at, verdict = seen
    gains = [b.at for a, b in itertools.pairwise(samples) if b.wire > a.wire and b.at <= at]
    limit = LIMITS.phase_s if verdict.kind == "overdue" else LIMITS.stall_s
    if verdict.kind == "stalled":
        assert at - max(gains, default=0.0) >= limit - 1e-6
    assert verdict.seconds >= limit


@given(STEPS)
def test_silence_always_ends_it(steps: list[tuple[float, int, str, bool]]) -> None:
    """Whatever came before: without a byte there is a verdict in bounded time."""
    samples = walk(steps)
    last = samples[-1]
    bound = int(LIMITS.max_pause_s + LIMITS.stall_s + LIMITS.phase_s) + 5
    for phase in ("downloading", "metadata"):
        tail = still(bound, last, phase=phase)
        assert watch([*samples, *tail]) is not None
