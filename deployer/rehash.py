"""`deploy doctor --rehash`: every file of the model hashed again on its machine, record or not.

Reads only, but for the hash record: a file that turns out wrong leaves it, so that the next `up`
fetches it again. The agent holds the download's own lock meanwhile; no host lock is taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepFailed
from deployer.events import Bus
from deployer.model import Facts
from deployer.session import HostSession
from deployer.state import DeploymentState, Manifest
from deployer.state_file import StateFile
from deployer.steps.base import StepContext
from deployer.steps.shards import pinned
from deployer.steps.shards_agent import Row, failed, run_agent
from deployer.steps.shards_download import MISMATCH
from deployer.up_options import UpOptions

TIMEOUT_S = 86400.0


@dataclass(frozen=True)
class Verdict:
    """One file. `size` in bytes, -1 when there is none; `got` is a hash, or what stands there."""

    path: str
    size: int
    ok: bool
    expected: str
    got: str

    @property
    def missing(self) -> bool:
        """Not a wrong file, but none."""
        return self.size < 0


@dataclass
class Rehashed:
    """How it went for one deployment. `seconds` of hashing."""

    id: str
    files: list[Verdict] = field(default_factory=list)
    error: DeployError | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> list[Verdict]:
        """The files that are not as the list says."""
        return [one for one in self.files if not one.ok]


def rehash_host(
    host_name: str, deployments: Sequence[Deployment], options: UpOptions, bus: Bus
) -> list[Rehashed]:
    """The deployments of one host, one after the other; every error is in the results."""
    done: list[Rehashed] = [Rehashed(want.id) for want in deployments]
    try:
        state = StateFile(options.deploy_dir / "state", host_name).load()
        session = HostSession(host_name, deployments[0].host, options.base)
    except DeployError as error:
        for one in done:
            one.error = error
        return done
    try:
        for want, result in zip(deployments, done, strict=True):
            own = state.deployments.get(want.name, DeploymentState())
            began = time.monotonic()
            try:
                _one(want, session, own, bus, result)
            except DeployError as error:
                result.error = error
            result.seconds = time.monotonic() - began
    finally:
        session.close(lambda text: None)
    return done


def _one(
    want: Deployment, session: HostSession, own: DeploymentState, bus: Bus, result: Rehashed
) -> None:
    manifest = pinned(want, own)
    if manifest is None:
        raise StepFailed(
            "the list of the model's files is not known yet, so there is nothing to compare with",
            where=want.id,
            fix=f"`deploy up {want.id} --only shards` fetches it",
        )
    context = StepContext(
        want, "", bus, session.transports(want), Facts, own, lambda: None, "rehash"
    )
    said = run_agent(
        context.on(want.guest),
        want,
        manifest,
        ["rehash", "--stream"],
        timeout_s=TIMEOUT_S,
        on_row=lambda row: _tell(context, row),
    )
    result.files = [_verdict(row) for row in said.rows]
    if said.exit not in (0, MISMATCH) or len(result.files) != len(manifest.files):
        raise failed(want, "the files were not all hashed", said)
    _in_order(result, manifest)


def _tell(context: StepContext, row: Row) -> None:
    """Progress from the agent's figures; a wrong file at once."""
    figures = row.get("progress")
    if isinstance(figures, dict):
        done, total = float(figures.get("moved", 0)), float(figures.get("total", 0))
        files = f"{figures.get('files_done', 0)} of {figures.get('files', 0)} files"
        context.progress("hash", min(done, total), total, "bytes", files)
    elif row.get("ok") is False:
        state = "wrong" if int(row.get("size", -1)) >= 0 else "missing"
        context.note(f"{row.get('path')}: {state}", "warning")


def _verdict(row: Row) -> Verdict:
    return Verdict(
        str(row["path"]),
        int(row["size"]),
        bool(row["ok"]),
        str(row["expected"]),
        str(row["got"]),
    )


def _in_order(result: Rehashed, manifest: Manifest) -> None:
    order = {file.path: number for number, file in enumerate(manifest.files)}
    result.files.sort(key=lambda one: order.get(one.path, len(order)))
