"""How the tests share two processes: what uses the container lab goes one after another.

`tests/run.sh` runs with `-n 2 --dist loadgroup`. A file's tests stay together, since many share
what one of them set up; all files that use the lab are one group, and it starts first, as the
longest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

LAB = "docker_services"
ORDER = ("container", "scripts", "corpus", "unit")

# How long an example takes depends on the machine and on what else it does.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def _rank(item: pytest.Item) -> tuple[int, int]:
    folder = Path(item.path).parent.name
    known = ORDER.index(folder) if folder in ORDER else len(ORDER)
    return (0 if LAB in getattr(item, "fixturenames", ()) else 1, known)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for xdist; the lab's tests first."""
    items.sort(key=_rank)
    for item in items:
        lab = LAB in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("lab" if lab else Path(item.path).stem))
