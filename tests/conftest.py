"""How the tests share two processes: what uses the container lab goes one after another.

`tests/run.sh` runs with `-n 2 --dist loadgroup`. A file's tests stay together, since many share
what one of them set up; all files that use the lab are one group, and it starts first, as the
longest.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

LAB = "docker_services"
ORDER = ("container", "scripts", "corpus", "unit")

# How long an example takes depends on the machine and on what else it does.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def _uses_lab(item: pytest.Item) -> bool:
    """By its fixtures; a module that asks for them by name at run time says USES_LAB."""
    named = LAB in getattr(item, "fixturenames", ())
    return named or bool(getattr(getattr(item, "module", None), "USES_LAB", False))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for xdist; the lab's files first."""
    lab = {item.path for item in items if _uses_lab(item)}

    def rank(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.parent.name
        return item.path not in lab, ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=rank)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("lab" if item.path in lab else str(item.path)))
