"""The deployment as the launch that runs was made: what `status` shows and `verify` judges.

After a rollback, a failed `up` or an edit of the playbook the server that runs may have another
port, name, build or model than the playbook says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deployer.deployment import Deployment
from deployer.errors import DeployError, StateUnreadable
from deployer.kept import Kept
from deployer.rollback import made_of, then
from deployer.state import DeploymentState
from deployer.state_file import StateFile
from deployer.steps.launch_restore import as_launched
from deployer.steps.server_wanted import Rung

RUNS = frozenset({"starting", "ready", "good"})
"""Verdicts of a launch that nobody has ended, as far as is recorded."""


def running(wants: Sequence[Deployment], deploy_dir: Path) -> list[Deployment]:
    """Each as what runs of it was made, by the state files of `deploy_dir`."""
    kept, found = Kept(deploy_dir / "kept"), []
    for want in wants:
        try:
            state = StateFile(deploy_dir / "state", want.host_name).load()
        except StateUnreadable:
            # Who runs on it or shows it tells that.
            found.append(want)
            continue
        own = state.deployments.get(want.name, DeploymentState())
        found.append(as_running(want, own, kept))
    return found


def as_running(now: Deployment, own: DeploymentState, kept: Kept) -> Deployment:
    """`now` when the newest launch is of it, or none runs by the records.

    Without what that launch was made from: its port, name, build and environment.
    """
    launch = own.launches[-1] if own.launches else None
    if launch is None or not launch.argv:
        return now
    # One that has failed its gates may run on; one that has failed to start has been ended.
    judged = launch.verified > 0 and launch.verdict != "stopped"
    if launch.verdict not in RUNS and not judged:
        return now
    try:
        rung = Rung(launch.variant, tuple(launch.changes.items()))
        if rung.fingerprint(now, own.manifest) == launch.fingerprint:
            return now
    except ValueError:
        # The playbook as it is now makes no command line: what runs is of another one.
        pass
    try:
        return then(now, *made_of(kept, launch, now.id), launch)
    except DeployError:
        return as_launched(now, launch)
