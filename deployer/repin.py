"""`--repin`: what the model's revision is at the Hub now."""

from __future__ import annotations

from deployer import hub
from deployer.deployment import Deployment
from deployer.events import Bus, Note
from deployer.state import DeploymentState
from deployer.up_options import UpOptions


def repin(want: Deployment, own: DeploymentState, options: UpOptions, bus: Bus) -> None:
    """The newest file list of the revision in place of the pinned one; not saved here.

    Raises HubError, and then the pin is as it was.
    """
    token = options.environ.get(want.playbook.download.token_env) or None
    before, after = own.manifest, hub.fetch_manifest(want.playbook, token)
    what = f"{after.repo} {after.asked}"
    if before is None or (before.repo, before.asked) != (after.repo, after.asked):
        text = f"{what} is {after.commit[:12]}"
    elif before.commit == after.commit:
        text = f"{what} is {after.commit[:12]}, as pinned"
    else:
        known = {file.path: file for file in before.files}
        new = sum(known.get(file.path) != file for file in after.files)
        text = f"{what} moved from {before.commit[:12]} to {after.commit[:12]}: {new} files differ"
    own.manifest = after
    bus.emit(Note(want.host_name, want.id, "shards", "info", text))
