"""Fixtures of the container lab, on pytest-docker: up once a session, reused when it runs.

The lab stays up after the tests, so the next session starts at once; `sh docker/lab.sh down` ends
it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lab import HOSTS, LAB, PREFIX, ROOT, Lab, Machine, run

from tests.labfiles import hosts_of


def docker_answers() -> bool:
    """Is there a Docker that we may use?"""
    return shutil.which("docker") is not None and run(["docker", "info"]).exit == 0


@pytest.fixture(scope="session")
def docker_compose_command() -> str:
    """Compose v2, or Debian's docker-compose."""
    return "docker compose" if run(["docker", "compose", "version"]).exit == 0 else "docker-compose"


@pytest.fixture(scope="session")
def docker_compose_file() -> str:
    """The lab's file."""
    return str(ROOT / "docker" / "compose.yaml")


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    """The project that lab.sh uses too."""
    return "deployer-lab"


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    """All of it is lab.sh's work: two processes of tests may come here at once."""
    if not docker_answers():
        pytest.skip("no Docker here")
    images = [f"{PREFIX}{name}" for name in ("host", "guest", "hub")]
    made = run(["docker", "image", "inspect", *images]).exit == 0
    command = "up" if made else "setup"
    done = subprocess.run(["sh", str(LAB), command], check=False, timeout=900)
    if done.returncode != 0:
        pytest.fail(f"lab.sh {command} ended with {done.returncode}")
    return []


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    """The lab stays."""
    return []


@pytest.fixture(scope="module", autouse=True)
def its_hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    """The lab's hosts of this file, which no other process then drives."""
    with ExitStack() as stack:
        for host in sorted(hosts_of(request.node.nodeid)):
            stack.enter_context(FileLock(LAB.parent / ".build" / f"{host}.lock"))
        yield


@pytest.fixture(scope="session")
def lab(docker_services: object) -> Lab:
    """The running lab."""
    return Lab()


@pytest.fixture
def kpro5(lab: Lab) -> Iterator[Machine]:
    """Host kpro5, pristine."""
    lab.reset("kpro5")
    yield lab.hosts["kpro5"]


@pytest.fixture
def guest5(kpro5: Machine, lab: Lab) -> Machine:
    """The guest of a pristine kpro5."""
    return lab.guests["kpro5"]


@pytest.fixture
def pristine(lab: Lab) -> Lab:
    """Everything as after the first start: both hosts, no fault of the hub."""
    lab.reset()
    assert set(lab.hosts) == set(HOSTS)
    return lab
