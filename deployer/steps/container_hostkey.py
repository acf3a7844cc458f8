"""The SSH host key of a container that this tool created, read on its host and recorded here.

It is not believed because somebody offers it: `pct exec` on the host, whose key is known, reads it
from the container's own file.
"""

from __future__ import annotations

from pathlib import Path

from deployer.model import Where
from deployer.remote import hostkeys
from deployer.remote.hostkeys import parse_public
from deployer.remote.sshconfig import resolve
from deployer.shell import assignments
from deployer.steps.base import StepContext
from deployer.steps.container_create import MARK

# The mark must stand in the current part of the file.
_READ = r"""
sed '/^\[/q' "/etc/pve/lxc/$VMID.conf" | grep -q "^#$MARK" || exit 3
exec pct exec "$VMID" -- sh -c 'cat /etc/ssh/ssh_host_ed25519_key.pub ||
  cat /etc/ssh/ssh_host_ecdsa_key.pub || cat /etc/ssh/ssh_host_rsa_key.pub' </dev/null
"""


def record_host_key(context: StepContext) -> bool:
    """Adds the key to the known_hosts file. False: the container is not ours, or shows no key.

    Raises HostKeyChanged when another key is recorded for its address, and Unreachable.
    """
    want = context.want
    if want.vmid is None or want.container is None or want.container.ssh is None:
        return False
    script = assignments({"VMID": str(want.vmid), "MARK": MARK}) + _READ
    answer = context.on(Where.HOST).run(script, timeout_s=30.0)
    key = parse_public(answer.text) if answer.exit == 0 else None
    if key is None:
        return False
    name = f"{want.host_name}/{want.vmid}"
    endpoint = resolve(name, want.container.ssh, Path())
    hostkeys.append_key(endpoint.known_hosts[0], endpoint.key_name, key)
    context.note(f"host key of {name} as {want.host_name} shows it: {key}; recorded")
    return True
