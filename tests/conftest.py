"""How the tests share processes; `labfiles.py` says what stays together and what begins first.

`tests/run.sh` runs with `--dist loadfile`: a file's tests stay together, since many share what one
of them set up.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.labfiles import hosts_of, rank, unit_of

LAB_FIXTURE = "docker_services"

# How long an example takes depends on the machine and on what else it does.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first. Raises UsageError for a file of the lab that `labfiles` does not know."""
    for item in items:
        if LAB_FIXTURE in getattr(item, "fixturenames", ()) and not hosts_of(item.nodeid):
            file = item.nodeid.partition("::")[0]
            raise pytest.UsageError(f"{file} uses the lab: add it to tests/labfiles.py")
    items.sort(key=lambda item: rank(item.nodeid))


class LabTogether(LoadFileScheduling):
    """One file, or all files of a lab's host, to one process.

    xdist's own groups do not do: they rename tests in a way that pytest 9 does not notice.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LabTogether | None:
    """Ours in place of loadfile's."""
    return LabTogether(config, log) if config.getoption("dist") == "loadfile" else None
