"""Runs one function a host, hosts in parallel; one host's failure never touches another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from deployer.deployment import Deployment
from deployer.errors import DeployError, Interrupted
from deployer.events import Event, RunFinished

R = TypeVar("R")
MAX_PARALLEL = 16


def by_host(deployments: Sequence[Deployment]) -> dict[str, list[Deployment]]:
    """Grouped, in the order given."""
    groups: dict[str, list[Deployment]] = {}
    for want in deployments:
        groups.setdefault(want.host_name, []).append(want)
    return groups


class Cancel:
    """A subscriber that ends a worker at its next event, once the main thread was interrupted.

    Signals reach the main thread only; every wait of a worker emits progress, so it ends soon and
    releases its locks.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """From now on, workers end."""
        self._asked.set()

    def __call__(self, event: Event) -> None:
        """Raises Interrupted in the worker that emits."""
        # How a run ended is told in any case; it waits for nothing.
        if isinstance(event, RunFinished):
            return
        if self._asked.is_set() and threading.current_thread() is not threading.main_thread():
            raise Interrupted("interrupted", where=event.deployment or event.host)


def run_hosts(
    groups: Mapping[str, Sequence[Deployment]],
    work: Callable[[str, Sequence[Deployment]], R],
    cancel: Cancel | None = None,
) -> dict[str, R]:
    """`work(host, deployments)` for every host. One host runs in the calling thread."""
    if len(groups) == 1:
        [(host, deployments)] = groups.items()
        return {host: work(host, deployments)}
    results: dict[str, R] = {}
    with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(groups))) as pool:
        jobs = {pool.submit(work, host, group): host for host, group in groups.items()}
        try:
            for job in as_completed(jobs):
                results[jobs[job]] = job.result()
        except BaseException:
            if cancel is not None:
                cancel.ask()
            for job in jobs:
                job.cancel()
            raise
    return {host: results[host] for host in groups}


def exit_code(errors: Sequence[DeployError | None]) -> int:
    """The one code of all errors; 1 when they differ; 0 without any."""
    codes = {error.exit_code for error in errors if error is not None}
    if not codes:
        return 0
    return codes.pop() if len(codes) == 1 else 1
