"""The last known-good launch, as it is started again after a newer one has failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from deployer.deployment import Deployment
from deployer.remote.lock_record import owner_here
from deployer.state import Back, DeploymentState, Launch
from deployer.steps.server_wanted import LaunchNote


def last_good(state: DeploymentState, failed: Collection[str]) -> Launch | None:
    """The launch to fall back to: it was stopped, and is none of those that have just failed.

    `failed` are their fingerprints.
    """
    good = next((one for one in state.launches if one.id == state.known_good), None)
    if good is None or not good.argv or good.verdict != "stopped" or good.fingerprint in failed:
        return None
    return good


def note_of(good: Launch, back: Back) -> LaunchNote:
    """What the job's folder is told of it: as at its first launch, and why it is launched again."""
    return LaunchNote(
        good.variant,
        tuple(good.instead_of),
        tuple(good.instead_of.values()),
        changes=tuple(good.changes.items()),
        back=back,
    )


def by_itself(state: DeploymentState, good: Launch) -> Back:
    """Why `good` is launched again when nobody has asked for it: the newest launch has failed."""
    left = state.launches[-1].id if state.launches else ""
    return Back(to=good.id, left=left if left != good.id else "", by=owner_here())


def restored_words(want: Deployment, then: Deployment, good: Launch, launch: Launch) -> str:
    """That it serves again, and where, when that is not where the wanted one would be."""
    where = ""
    if then.port != want.port:
        where += f" at port {then.port}"
    if then.playbook.model.served_name != want.playbook.model.served_name:
        where += f" as model {then.playbook.model.served_name}"
    return (
        f"the last known-good arguments (launch {good.id}) run again as launch {launch.id}{where}; "
        "its gates were not run again"
    )


def other_weights(want: Deployment, state: DeploymentState, good: Launch) -> str:
    """That its folder holds another commit by now than it had passed with, and the way back."""
    flags = dict(zip(good.argv, good.argv[1:], strict=False))
    then = next((one.model for one in state.validated if one.launch == good.id), "")
    now = f"{state.manifest.repo}@{state.manifest.commit}" if state.manifest is not None else ""
    if not then or not now or then == now or flags.get("--model-path") != want.playbook.model.path:
        return ""
    return (
        f"; it had passed with the weights {then}, and {want.playbook.model.path} has {now} by "
        f"now: `deploy rollback {want.id} {good.id}` brings those back"
    )


def as_launched(want: Deployment, launch: Launch) -> Deployment:
    """The deployment as `launch` knew it: its build, environment, port and served name. Pure.

    The rest is as it is wanted now; the arguments are in the launch's own command.
    """
    flags = dict(zip(launch.argv, launch.argv[1:], strict=False))
    playbook, port = want.playbook, flags.get("--port", "")
    env = playbook.serve.env if launch.env is None else launch.env
    engine = {"venv": launch.venv or playbook.engine.venv}
    model = {"served_name": flags.get("--served-model-name", playbook.model.served_name)}
    then = playbook.model_copy(
        update={
            "serve": playbook.serve.model_copy(update={"env": env}),
            "engine": playbook.engine.model_copy(update=engine),
            "model": playbook.model.model_copy(update=model),
        }
    )
    number = int(port) if port.isdigit() else want.port
    entry = want.entry.model_copy(update={"port": number})
    return dataclasses.replace(want, playbook=then, entry=entry)


def command_of(launch: Launch) -> list[str]:
    """Its command, by the build that it ran in: engine.venv may point to another one now."""
    if not launch.venv or not launch.argv[0].endswith("/bin/python"):
        return launch.argv
    return [f"{launch.venv}/bin/python", *launch.argv[1:]]
