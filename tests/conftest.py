"""How the tests share two processes: what uses the container lab goes one after another.

`tests/run.sh` runs with `-n 2 --dist loadfile`. A file's tests stay together, since many share
what one of them set up; the files that use the lab are one group, and it starts first, as the
longest.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

LAB_FIXTURE = "docker_services"
LAB_FILES = frozenset(
    f"tests/container/test_{name}.py"
    for name in ("hostile_values", "kill", "lab", "locks", "story", "up_faults", "up_path")
)
ORDER = ("container", "scripts", "corpus", "unit")

# How long an example takes depends on the machine and on what else it does.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The lab's files first. Raises UsageError for one that is not in the list."""
    for item in items:
        if LAB_FIXTURE in getattr(item, "fixturenames", ()) and _file(item) not in LAB_FILES:
            raise pytest.UsageError(f"{_file(item)} uses the lab: add it to LAB_FILES")

    def rank(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.parent.name
        return _file(item) not in LAB_FILES, ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=rank)


class LabTogether(LoadFileScheduling):
    """One file, or all files of the lab, to one process.

    xdist's own groups do not do: they rename tests in a way that pytest 9 does not notice.
    """

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return "lab" if scope in LAB_FILES else scope


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LabTogether | None:
    """Ours in place of loadfile's."""
    return LabTogether(config, log) if config.getoption("dist") == "loadfile" else None
