"""The GPU memory of a deployment as it is now, for `deploy fit PLAYBOOK HOST`. Read-only."""

from __future__ import annotations

from dataclasses import dataclass

from deployer.catalog import Catalog
from deployer.cli.options import Options
from deployer.cli.status import look_at
from deployer.deployment import Deployment
from deployer.errors import StepFailed, UsageError
from deployer.names import listed
from deployer.observe import smi_problem
from deployer.sglang.weights import Tensors
from deployer.steps.driver_facts import HostSmi
from deployer.steps.server_facts import ServerFact
from deployer.steps.weights_facts import WeightsFact


@dataclass(frozen=True)
class Seen:
    """The fullest GPU of a deployment, by nvidia-smi of its host."""

    deployment: str
    name: str
    total_mib: int
    used_mib: int
    compute_cap: str = ""
    """`8.6`; '' when nvidia-smi does not tell."""
    libc: str = ""
    """glibc of the guest; '' when it cannot be asked."""
    tensors: Tensors | None = None
    """The weights that lie on the target; None when they are not there yet."""


def fullest_gpu(options: Options, word: str, playbook: str) -> Seen:
    """Asks the host of HOST or HOST/NAME.

    Raises UsageError when no deployment there uses the playbook or several do, the host's error
    when it cannot be asked, StepFailed when nvidia-smi does not tell of all GPUs.
    """
    meant = Catalog.load(options.inventory).select([word], whole=False)
    chosen = [want for want in meant if want.playbook_name == playbook]
    if len(chosen) != 1:
        raise UsageError(
            f"{len(chosen)} deployments of `{word}` use playbook {playbook}",
            fix=f"name one of: {listed([want.id for want in chosen or meant])}",
        )
    return fullest_of(options, chosen[0])


def fullest_of(options: Options, want: Deployment) -> Seen:
    """Asks the host of one deployment. Raises as `fullest_gpu` does."""
    look = look_at(options, [want])[0]
    smi = look.seen[0][1].get(HostSmi) if look.seen else None
    if smi is None and look.error is not None:
        raise look.error
    facts = look.seen[0][1] if look.seen else None
    server = facts.get(ServerFact) if facts is not None else None
    weights = facts.get(WeightsFact) if facts is not None else None
    rows = {row.address.lower(): row for row in smi.gpus} if smi is not None else {}
    found = []
    for address in want.gpus:
        row = rows.get(address.lower())
        if row is None or row.memory_total_mib is None or row.memory_used_mib is None:
            raise StepFailed(
                f"nvidia-smi does not tell the memory of GPU {address}: "
                f"{smi_problem(smi) or 'it does not list the GPU'}",
                where=want.host_name,
                fix=f"`deploy doctor {want.host_name}` says why; or give --gpu-mib",
            )
        found.append(
            Seen(
                want.id,
                row.name,
                row.memory_total_mib,
                row.memory_used_mib,
                row.compute_cap,
                server.libc if server is not None else "",
                weights.tensors if weights is not None else None,
            )
        )
    return min(found, key=lambda one: one.total_mib - one.used_mib)
