"""What only `init` asks: who the machine is, and what a running container says of itself. Pure.

Everything else of a survey comes from the probes of the steps. Read-only: names of GPUs come from
files (lspci would wake a sleeping device), and nothing is asked of a driver that is not loaded.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from deployer.model import Probe, ProbeOutput, Where
from deployer.remote.framing import PATH
from deployer.remote.hostkeys import HostKey, parse_public
from deployer.shell import assignments, words
from deployer.steps import container_facts, driver_probes, driver_scripts
from deployer.steps.container_facts import GuestNodes
from deployer.steps.driver_facts import GuestDriver
from deployer.steps.driver_scripts import rooted

GUEST_TIMEOUT_S = 20.0

MACHINE = r"""
echo "name $(uname -n)"
echo "uid $(id -u)"
echo "user $(id -un 2>/dev/null)"
sed -n 's/^PRETTY_NAME=//p' "$ROOT/etc/os-release" 2>/dev/null | tr -d "\"'" | sed 's/^/os /;q'
command -v pct >/dev/null && echo "tool pct"
dpkg-query -W -f 'pve ${Version}\n' pve-manager 2>/dev/null
[ -d "$ROOT/etc/pve/lxc" ] && echo "folder lxc"
for file in "$ROOT"/etc/pve/lxc/*.conf; do
  [ -e "$file" ] || continue
  file=${file##*/}
  echo "ct ${file%.conf}"
done
devices=" "
for device in "$ROOT"/sys/bus/pci/devices/*; do
  { read -r vendor <"$device/vendor" && read -r id <"$device/device"; } 2>/dev/null || continue
  [ "$vendor" = 0x10de ] || continue
  devices="$devices${id#0x} "
  if [ -e "$device/physfn" ] || [ -L "$device/physfn" ]; then echo "virtual ${device##*/}"; fi
done
for file in "$ROOT"/proc/driver/nvidia/gpus/*/information; do
  [ -r "$file" ] || continue
  address=${file%/information}
  sed -n "s/^Model:[[:space:]]*/model ${address##*/} /p" "$file"
done
for file in /usr/share/misc/pci.ids /usr/share/hwdata/pci.ids /var/lib/pciutils/pci.ids; do
  [ -r "$ROOT$file" ] || continue
  awk -v wanted="$devices" '
    /^[0-9a-f]/ { if (ours) exit; ours = $1 == "10de" }
    ours && /^\t[0-9a-f]/ && index(wanted, " " $1 " ") { sub(/^\t/, ""); print "known " $0 }
  ' "$ROOT$file"
  break
done
exit 0
"""

# Of the container's own interfaces, and where its sshd listens; the keys are compared with what
# its address offers.
GUEST = r"""
if command -v ip >/dev/null; then
  ip -o addr show scope global 2>/dev/null | awk '{ print "address", $2, $4 }'
else
  for one in $(hostname -I 2>/dev/null); do echo "address - $one"; done
fi
sed -n 's/^[[:space:]]*[Pp]ort[[:space:]=]\{1,\}\([0-9]\{1,5\}\)[[:space:]]*$/port \1/p' \
  "$ROOT"/etc/ssh/sshd_config.d/*.conf "$ROOT/etc/ssh/sshd_config" 2>/dev/null
for file in "$ROOT"/etc/ssh/ssh_host_*_key.pub; do
  [ -r "$file" ] && sed 's/^/hostkey /' "$file"
done
echo "whole"
exit 0
"""


@dataclass(frozen=True)
class Machine:
    """Who the machine is. `containers`: vmids, () on a machine without Proxmox."""

    name: str = ""
    uid: int | None = None
    user: str = ""
    os: str = ""
    pct: bool = False
    pve: str = ""
    """Version of pve-manager; '' when it is not installed."""
    mounted: bool = False
    """/etc/pve shows its content, which only root and the web server may read."""
    containers: tuple[int, ...] = ()
    models: tuple[tuple[str, str], ...] = ()
    """PCI address and product name, of the loaded driver."""
    known: tuple[tuple[str, str], ...] = ()
    """PCI device id and name, of pci.ids."""
    virtual: tuple[str, ...] = ()
    """Virtual functions."""
    timed_out: bool = False

    @property
    def is_proxmox(self) -> bool:
        """It has Proxmox VE, even where its cluster file system is not mounted."""
        return self.pct or bool(self.pve)

    def gpu_name(self, address: str, device: str) -> str:
        """`RTX A6000`; '' when no file there names it. `device`: 2230."""
        model = dict(self.models).get(address, "")
        if not model:
            known = dict(self.known).get(device, "")
            product = re.search(r"\[(.+)\]\s*$", known)
            model = product.group(1) if product else known
        return model.removeprefix("NVIDIA ").strip()


@dataclass(frozen=True)
class GuestLook:
    """A running container from within. `problem`: why it could not be asked, '' when it was."""

    addresses: tuple[tuple[str, str], ...] = ()
    """Interface (`-` where it is not told) and address without prefix length."""
    port: int = 22
    """Where its sshd is told to listen."""
    keys: tuple[HostKey, ...] = ()
    driver: GuestDriver = field(default_factory=GuestDriver)
    nodes: GuestNodes = field(default_factory=GuestNodes)
    problem: str = ""


def _rows(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        found.setdefault(key, []).append(rest.strip())
    return found


def parse_machine(output: ProbeOutput) -> Machine:
    """The answer of MACHINE."""
    rows = _rows(output.text)

    def one(key: str) -> str:
        return next(iter(rows.get(key, ())), "")

    def pairs(key: str) -> tuple[tuple[str, str], ...]:
        split = (line.partition(" ") for line in rows.get(key, ()))
        return tuple((first, rest.strip()) for first, _, rest in split if rest.strip())

    vmids = (int(word) for word in rows.get("ct", ()) if re.fullmatch("[1-9][0-9]{2,8}", word))
    return Machine(
        name=one("name"),
        uid=int(one("uid")) if one("uid").isdigit() else None,
        user=one("user"),
        os=one("os"),
        pct="pct" in rows.get("tool", ()),
        pve=one("pve"),
        mounted="lxc" in rows.get("folder", ()),
        containers=tuple(sorted(vmids)),
        models=pairs("model"),
        known=pairs("known"),
        virtual=tuple(rows.get("virtual", ())),
        timed_out=output.timed_out,
    )


def machine_probe(root: str = "") -> Probe:
    """Of the host."""
    return Probe("survey.machine", Where.HOST, rooted(MACHINE, root), parse_machine)


def parse_guest(output: ProbeOutput, root: str = "") -> GuestLook:
    """The answer of `guest_script`; what is no address is left out."""
    rows = _rows(output.text)
    if output.timed_out:
        return GuestLook(problem=f"`pct exec` gave no answer within {GUEST_TIMEOUT_S:g} s")
    if "whole" not in rows:
        told = [line for line in output.error_text.splitlines() if line.strip()]
        return GuestLook(
            problem=f"`pct exec` failed: {told[-1].strip() if told else f'exit {output.exit}'}"
        )
    ports = [int(word) for word in rows.get("port", ()) if word.isdigit()]
    keys = (parse_public(line) for line in rows.get("hostkey", ()))
    return GuestLook(
        tuple(_addresses(rows.get("address", ()))),
        next((port for port in ports if 0 < port < 65536), 22),
        tuple(key for key in keys if key is not None),
        driver_probes.parse_guest(output),
        container_facts.parse_nodes(output, root),
    )


def _addresses(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, _, text = line.partition(" ")
        address = usable(text)
        if address:
            yield name.partition("@")[0], address


def usable(text: str) -> str:
    """The address of `192.0.2.129/24`, when others can reach a machine by it; else ''."""
    try:
        address = ipaddress.ip_interface(text.strip()).ip
    except ValueError:
        return ""
    none = address.is_loopback or address.is_link_local or address.is_unspecified
    return "" if none or address.is_multicast else str(address)


def guest_script(root: str = "") -> str:
    """What runs inside a container: addresses and keys, driver libraries, device nodes."""
    parts = (GUEST, driver_scripts.GUEST, container_facts.GUEST_SCRIPT)
    head = assignments({"PATH": PATH, "LC_ALL": "C"}) + "export PATH LC_ALL\n"
    return head + "".join(f"(\n{rooted(part, root)})\n" for part in parts)


def guest_probe(vmid: int) -> Probe:
    """Of the host: asks running container `vmid` through `pct exec`."""
    command = words(("pct", "exec", str(vmid), "--", "/bin/sh", "-c", guest_script()))
    # lxc-attach would wait on a stdin that nobody closes.
    script = f"exec {command} </dev/null"
    return Probe(f"survey.{vmid}", Where.HOST, script, partial(parse_guest), GUEST_TIMEOUT_S)
