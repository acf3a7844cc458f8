"""The benches' own tools: what they measure, and what they write down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import measure
import results

HOG = "x = bytearray(80 << 20)\nprint(flush=True)\ninput()"
CHILDREN = f"""
import pathlib, subprocess, sys, time
both = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
some = [subprocess.Popen([sys.executable, '-c', {HOG!r}], **both) for _ in range(2)]
for one in some:
    one.stdout.readline()
until = time.monotonic() + 20
while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < until:
    time.sleep(0.02)
for one in some:
    one.communicate(b'\\n')
sys.exit(max(one.returncode for one in some))
"""
WORK = "import time\nwhile time.process_time() < 0.3: pass"


def test_memory_is_that_of_all_processes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    looks: list[tuple[int, int]] = []
    memory = measure.memory

    def look(pid: int) -> tuple[int, int]:
        looks.append(memory(pid))
        if min(looks[-1]) > 160 << 20:
            seen.touch()
        return looks[-1]

    monkeypatch.setattr(measure, "memory", look)
    got = measure.cost([sys.executable, "-c", CHILDREN, str(seen)])
    assert seen.exists()
    assert (got.rss, got.pss) == tuple(max(sizes) for sizes in zip(*looks, strict=True))
    assert got.wall > 0


def test_cpu_time_of_children_counts() -> None:
    shell = '"$0" -c "$1" & "$0" -c "$1"; wait'
    got = measure.cost(["sh", "-c", shell, sys.executable, WORK], sample=False)
    assert 0.6 <= got.cpu < 2.0


def test_a_contender_that_fails_ends_the_bench() -> None:
    with pytest.raises(SystemExit, match=r"(?s)exit 3.*why"):
        measure.cost(["sh", "-c", "echo why; exit 3"])


def test_one_after_the_other() -> None:
    got = measure.Cost(1.0, 2.0, 30, 4).then(measure.Cost(0.5, 0.25, 20, 5))
    assert got == measure.Cost(1.5, 2.25, 30, 5)


def test_a_bench_replaces_only_its_own_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PATH", tmp_path / "R.md")
    results.keep("One", "One (old)", ["a", "", "### part", "b"])
    results.keep("Two", "Two", ["c"])
    results.keep("One", "One (new)", ["d"])
    assert results.PATH.read_text() == "# Results\n\n## Two\n\nc\n\n## One (new)\n\nd\n"
