"""Runs one function a host, hosts in parallel; one host's failure never touches another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from deployer.deployment import Deployment
from deployer.errors import DeployError

R = TypeVar("R")
MAX_PARALLEL = 16


def by_host(deployments: Sequence[Deployment]) -> dict[str, list[Deployment]]:
    """Grouped, in the order given."""
    groups: dict[str, list[Deployment]] = {}
    for want in deployments:
        groups.setdefault(want.host_name, []).append(want)
    return groups


def run_hosts(
    groups: Mapping[str, Sequence[Deployment]],
    work: Callable[[str, Sequence[Deployment]], R],
) -> dict[str, R]:
    """`work(host, deployments)` for every host. One host runs in the calling thread."""
    if len(groups) == 1:
        [(host, deployments)] = groups.items()
        return {host: work(host, deployments)}
    results: dict[str, R] = {}
    with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(groups))) as pool:
        jobs = {pool.submit(work, host, group): host for host, group in groups.items()}
        for job in as_completed(jobs):
            results[jobs[job]] = job.result()
    return {host: results[host] for host in groups}


def exit_code(errors: Sequence[DeployError | None]) -> int:
    """The one code of all errors; 1 when they differ; 0 without any."""
    codes = {error.exit_code for error in errors if error is not None}
    if not codes:
        return 0
    return codes.pop() if len(codes) == 1 else 1
