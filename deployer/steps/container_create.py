"""Creating a container that the inventory describes: what must be there, and the job that does it.

pct takes the id with a file that says `lock: create`, unpacks the template, and takes the lock off.
A creation that was cut off leaves that lock: a note of ours, written before, tells whose it was.
"""

from __future__ import annotations

from deployer import pct_config
from deployer.deployment import Deployment
from deployer.inventory import Create
from deployer.model import Change, Plan, RunJob, Where
from deployer.shell import assignments, words
from deployer.steps.container_facts import STATE_FOLDER, ContainerFacts

CREATE_TIMEOUT_S = 1800.0
CREATE_STALL_S = 900.0
MARK = "Created by deployer"

# A task of pct outlives whoever asked for it: one that still runs is waited for, not repeated.
_CREATE = r"""
export LC_ALL=C
conf=/etc/pve/lxc/$VMID.conf
locked() { sed '/^\[/q' "$conf" 2>/dev/null | grep -q '^lock: create'; }
creating() {
  for file in /proc/[0-9]*/cmdline; do
    tr '\0' ' ' <"$file" 2>/dev/null | grep -q "^task UPID:.*:vzcreate:$VMID:" && return 0
  done
  return 1
}
while [ -e "$conf" ] && locked && creating; do
  echo "a creation of container $VMID still runs"
  sleep 2
done
if [ -e "$conf" ] && locked; then
  if [ ! -e "$STATE/creating" ]; then
    echo "container $VMID is locked by a creation that is not ours" >&2
    exit 1
  fi
  if grep -q -v -e '^lock: create' -e '^$' "$conf" && ! grep -q "^#$MARK" "$conf"; then
    echo "container $VMID is locked by a creation that is not ours: see $conf" >&2
    exit 1
  fi
  echo "removing what a cut-off creation of container $VMID left"
  pct unlock "$VMID" && pct destroy "$VMID" || exit 1
fi
if [ ! -e "$conf" ]; then
  mkdir -p "$STATE" && : >"$STATE/creating" || exit 1
  if ! "$@"; then
    # pct takes its own leftovers away; what it could not is found by the next run.
    [ -e "$conf" ] || rm -f "$STATE/creating"
    exit 1
  fi
fi
if [ ! -e "$conf" ] || locked; then
  echo "pct create ended, but container $VMID is not whole" >&2
  exit 1
fi
rm -f "$STATE/creating"
"""


def argv(vmid: int, create: Create, *, keys: bool) -> list[str]:
    """The `pct create` command. `keys`: the file `keys` in the job's folder has SSH keys."""
    net = f"name=eth0,bridge={create.net.bridge},ip={create.net.ip}"
    if create.net.gateway:
        net += f",gw={create.net.gateway}"
    if create.net.vlan:
        net += f",tag={create.net.vlan}"
    made = ["pct", "create", str(vmid), create.template]
    made += ["--hostname", create.hostname, "--rootfs", f"{create.storage}:{create.disk_gib}"]
    if create.cores is not None:
        made += ["--cores", str(create.cores)]
    made += ["--memory", str(create.memory_mib), "--swap", str(create.swap_mib), "--net0", net]
    made += ["--unprivileged", "1" if create.unprivileged else "0"]
    if create.features:
        made += ["--features", ",".join(create.features)]
    made += ["--onboot", "1" if create.onboot else "0", "--description", MARK]
    return [*made, "--ssh-public-keys", "keys"] if keys else made


def change(want: Deployment, vmid: int, create: Create, reason: str) -> Change:
    """The creation, as a job: it outlives a cut connection, and the next run joins it."""
    keys = want.guest_keys or ""
    values = {"VMID": str(vmid), "STATE": f"{STATE_FOLDER}/{vmid}", "MARK": MARK}
    script = (
        f"set -- {words(argv(vmid, create, keys=bool(keys)))}\n" + assignments(values) + _CREATE
    )
    files = {"keys": keys.encode("utf-8")} if keys else {}
    job = RunJob(
        Where.HOST,
        f"create-{vmid}",
        script,
        files,
        timeout_s=CREATE_TIMEOUT_S,
        stall_s=CREATE_STALL_S,
    )
    title = f"create container {vmid} from {create.template}"
    return Change(title, reason, job, f"pct destroy {vmid}")


def refuse(want: Deployment, vmid: int, create: Create, seen: ContainerFacts) -> Plan | None:
    """Why it cannot be created; None when nothing speaks against it."""
    host = want.host_name
    if seen.elsewhere:
        return Plan.blocked(
            f"container {vmid} cannot be created on {host}: there is {', '.join(seen.elsewhere)}",
            "an id belongs to one guest of the cluster: choose another in the inventory",
        )
    if not seen.quorate:
        return no_quorum(host)
    if want.guest_keys is None:
        return Plan.blocked(
            f"container {vmid} cannot be created: {create.ssh_public_key_file} is not on this "
            "machine",
            "make a key (`ssh-keygen -t ed25519`), or correct create.ssh_public_key_file",
        )
    there = seen.create
    if there is None:
        return None
    if there.storages and create.storage not in there.storages:
        return Plan.blocked(
            f"{host} has no active storage {create.storage}",
            f"active there: {', '.join(there.storages)}; see `pvesm status`",
        )
    if there.bridges and create.net.bridge not in there.bridges:
        return Plan.blocked(
            f"{host} has no bridge {create.net.bridge}",
            f"bridges there: {', '.join(there.bridges)}",
        )
    if not there.template:
        storage, _, name = create.template.partition(":vztmpl/")
        said = f" ({there.template_text})" if there.template_text else ""
        return Plan.blocked(
            f"{host} has no template {create.template}{said}",
            f"fetch it there: pveam download {storage} {name}",
        )
    return None


def no_quorum(host: str) -> Plan:
    """Nothing below /etc/pve can be changed."""
    return Plan.blocked(
        f"the cluster of {host} has no quorum: /etc/pve is read-only, and no guest starts",
        "bring the other nodes back (`pvecm status`); with only one node left for good: "
        "`pvecm expected 1`",
    )


def cut_off(seen: ContainerFacts) -> bool:
    """Whether a creation of ours was cut off, or still runs."""
    config = seen.config()
    if config.lock != "create" or not seen.begun:
        return False
    return set(config.current.keys) <= {"lock"} or MARK in config.current.description


def is_ours(config: pct_config.PctConfig) -> bool:
    """Whether this tool created the container: then its host key may be read from the host."""
    return MARK in config.current.description
