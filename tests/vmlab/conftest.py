"""The VM lab's fixtures: one machine for all tests, as after its boot for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmlab import image
from tests.vmlab.machine import Machine
from tests.vmlab.world import World

PRISTINE = (
    "mkdir -p /run/lab/pristine/etc && cp -a --parents /etc/pve /etc/modprobe.d"
    " /etc/modules-load.d /etc/modules /run/lab/pristine"
)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The VM, booted; it ends with the session. Skips, with the reason, where it cannot be had."""
    try:
        built = image.build()
    except image.Missing as reason:
        pytest.skip(str(reason))
    one = Machine(built, tmp_path_factory.mktemp("vm"))
    try:
        one.start()
        one.sh(PRISTINE).ok()
        yield one
    finally:
        one.stop()


@pytest.fixture
def world(machine: Machine, tmp_path: Path) -> Iterator[World]:
    """A project of its own on a host as after its boot."""
    made = World(machine, tmp_path)
    yield made
    made.reset()
