"""What the container step would run on the host, as data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deployer import gpu, pct_config, proxmox
from deployer.model import Change, Shell, Where
from deployer.shell import assignments, words
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_facts import GpuFacts

START_DEADLINE_S = 120
SHUTDOWN_S = 60

# pct may answer before the task is done (HA), and `running` does not mean that it can be entered.
_WAIT = r"""
wait_for() {
  stop=$(($(date +%s) + DEADLINE))
  until "$@"; do
    if [ "$(date +%s)" -ge "$stop" ]; then
      echo "container $VMID: $* was not reached in $DEADLINE s: $(pct status "$VMID" 2>&1)" >&2
      return 1
    fi
    sleep 1
  done
}
stopped() { [ "$(pct status "$VMID" 2>/dev/null)" = "status: stopped" ]; }
running() { [ "$(pct status "$VMID" 2>/dev/null)" = "status: running" ]; }
answering() { pct exec "$VMID" -- true </dev/null >/dev/null 2>&1; }
start() {
  running || pct start "$VMID" || return 1
  wait_for running && wait_for answering
}
"""

_RESTART = r"""
if running; then
  pct shutdown "$VMID" --timeout "$SHUTDOWN" --forceStop 1 || stopped || exit 1
  wait_for stopped || exit 1
fi
"""

# The lock and the check are those of pct: an edit of another is never overwritten.
_EDIT = r"""
mkdir -p "$LOCKS"
exec 9>"$LOCKS/pve-config-$VMID.lock"
if ! flock -w 10 9; then
  echo "the configuration of container $VMID is locked by another task" >&2
  exit 1
fi
if [ "$(sha1sum <"$CONF" | cut -d ' ' -f 1)" != "$BEFORE" ]; then
  echo "$CONF was changed by another meanwhile; nothing was written" >&2
  exit 1
fi
cat >"$CONF.deployer.tmp" && mv -f "$CONF.deployer.tmp" "$CONF"
"""


def set_devices(
    vmid: int, facts: ContainerFacts, host: GpuFacts, paths: Sequence[str]
) -> list[Change]:
    """Adds `paths` to the container's configuration; by devN, or raw lines on an old Proxmox."""
    names = ", ".join(paths)
    reason = f"{names} not in the configuration of container {vmid}"
    if facts.version and facts.version < proxmox.DEVICES_SINCE:
        return [_edit_conf(vmid, facts, [host.node(path) for path in paths], reason)]
    indexes = pct_config.free_indexes(facts.config(), len(paths))
    argv = ["pct", "set", str(vmid)]
    for index, path in zip(indexes, paths, strict=True):
        argv += [f"--dev{index}", f"{path},mode=0666"]
    undo = words(["pct", "set", str(vmid), "--delete", ",".join(f"dev{n}" for n in indexes)])
    title = f"add {names} to container {vmid}"
    return [Change(title, reason, Shell(Where.HOST, words(argv)), undo)]


def _edit_conf(vmid: int, facts: ContainerFacts, nodes: Sequence[gpu.Node], reason: str) -> Change:
    before = facts.conf or ""
    devices = [pct_config.RawDevice(node.path, node.major, node.minor) for node in nodes]
    after = pct_config.with_devices(before, devices)
    values = {
        "VMID": str(vmid),
        "CONF": f"/etc/pve/lxc/{vmid}.conf",
        "LOCKS": pct_config.LOCK_FOLDER,
        "BEFORE": hashlib.sha1(before.encode("utf-8"), usedforsecurity=False).hexdigest(),
    }
    added = "".join(f"# + {line}\n" for device in devices for line in device.lines())
    action = Shell(Where.HOST, assignments(values) + added + _EDIT, stdin=after.encode("utf-8"))
    return Change(
        f"add {', '.join(node.path for node in nodes)} to container {vmid} by raw lines",
        f"{reason}; this Proxmox has no devN",
        action,
        f"take these lines out of /etc/pve/lxc/{vmid}.conf",
    )


def start(vmid: int, reason: str) -> Change:
    """Starts the container and waits until commands run in it."""
    script = _values(vmid) + _WAIT + "start\n"
    action = Shell(Where.HOST, script, timeout_s=2 * START_DEADLINE_S + 120.0)
    return Change(f"start container {vmid}", reason, action, f"pct shutdown {vmid}")


def restart(vmid: int, reason: str) -> Change:
    """Shuts the container down (by force after a minute), starts it and waits likewise."""
    script = _values(vmid) + _WAIT + _RESTART + "start\n"
    timeout = 3 * START_DEADLINE_S + SHUTDOWN_S + 120.0
    return Change(f"restart container {vmid}", reason, Shell(Where.HOST, script, timeout))


def _values(vmid: int) -> str:
    return assignments(
        {"VMID": str(vmid), "DEADLINE": str(START_DEADLINE_S), "SHUTDOWN": str(SHUTDOWN_S)}
    )
