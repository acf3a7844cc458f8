"""Reasons to touch nothing of a container, each with the way out."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.model import Plan
from deployer.pct_config import printable
from deployer.steps.container_facts import ContainerFacts

_LOCK_ENDS = {
    "backup": "vzdump",
    "create": "vzcreate",
    "destroyed": "vzdestroy",
    "disk": "a disk move or resize",
    "fstrim": "vzfstrim",
    "migrate": "vzmigrate",
    "mounted": "pct mount",
    "rollback": "vzrollback",
    "snapshot": "vzsnapshot",
    "snapshot-delete": "vzdelsnapshot",
}
_HA_BUSY = {
    "fence": "waits for the fencing of the node of",
    "freeze": "holds, for the restart of a node,",
    "migrate": "migrates",
    "recovery": "looks for a node for",
    "relocate": "moves to another node",
    "request_stop": "stops",
}


def refuse(want: Deployment, vmid: int, seen: ContainerFacts) -> Plan | None:
    """None when the container is there and free."""
    return refuse_on(want.host_name, vmid, seen)


def refuse_on(host: str, vmid: int, seen: ContainerFacts) -> Plan | None:
    """The same of a host that no inventory names."""
    if "please run as root" in seen.status_text:
        return Plan.blocked(f"`pct` on {host} needs root", "set `user: root` in the host's `ssh`")
    if not seen.exists:
        return _not_there(host, vmid, seen)
    if lock := printable(seen.config().lock):
        return _locked(host, vmid, seen, lock)
    if not seen.status:
        return Plan.blocked(
            f"pct cannot tell the status of container {vmid}: {seen.status_text}",
            f"run `pct status {vmid}` on {host}",
        )
    if task := _HA_BUSY.get(seen.ha_state):
        return Plan.blocked(
            f"the HA manager {task} container {vmid} ({seen.ha_state})",
            f"run again when `ha-manager status` on {host} calls it started or stopped",
        )
    if seen.frozen:
        return Plan.blocked(
            f"container {vmid} is frozen: no process of it moves, and commands in it would hang",
            f"if no backup or snapshot of it is at work: lxc-unfreeze -n {vmid}, on {host}",
        )
    if seen.config().current.flag("template"):
        return Plan.blocked(
            f"container {vmid} is a template and cannot run", "name a container that is none"
        )
    return None


def _not_there(host: str, vmid: int, seen: ContainerFacts) -> Plan:
    if seen.status:
        return Plan.blocked(
            f"/etc/pve/lxc/{vmid}.conf on {host} cannot be read",
            f"run as root there, and look at `systemctl status pve-cluster`: "
            f"pct says {seen.status_text}",
        )
    if "not found" in seen.status_text:
        return Plan.blocked(
            f"{host} has no `pct`: it is no Proxmox host",
            "write `kind: plain` in the inventory, or correct the address",
        )
    if "Connection refused" in seen.status_text or "ipcc_send_rec" in seen.status_text:
        return Plan.blocked(
            f"/etc/pve on {host} is not mounted: {seen.status_text.splitlines()[0]}",
            f"on {host}: systemctl status pve-cluster",
        )
    if seen.elsewhere:
        return Plan.blocked(
            f"{host} has no container {vmid}: there is {', '.join(seen.elsewhere)}",
            "correct the vmid or the host in the inventory",
        )
    return Plan.blocked(
        f"container {vmid} does not exist on {host}",
        f"add `create:` to it in the inventory, create it (`pct create {vmid} ...`), or correct "
        "the vmid",
    )


def _locked(host: str, vmid: int, seen: ContainerFacts, lock: str) -> Plan:
    if seen.tasks:
        return Plan.blocked(
            f"container {vmid} is locked ({lock}): task {', '.join(seen.tasks)} works on it",
            "run again when that task has ended",
        )
    task = _LOCK_ENDS.get(lock, "another tool")
    if lock == "create":
        return Plan.blocked(
            f"container {vmid} is locked (create): a creation was cut off, and it was not ours",
            f"look at it on {host} (`pct config {vmid}`); to be rid of it: "
            f"pct unlock {vmid} && pct destroy {vmid}",
        )
    return Plan.blocked(
        f"container {vmid} is locked ({lock}), and no task works on it: {task} was cut off",
        f"if you know that it is over: pct unlock {vmid}",
    )
