"""What the container step looks at: pct's view on the host, device nodes inside the guest.

`ContainerFacts` (host) and `GuestNodes` (guest) are public facts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from deployer import gpu, pct_config, proxmox
from deployer.inventory import Create
from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import assignments
from deployer.steps.driver_scripts import rooted

PCT_TIMEOUT_S = 30.0
MARK = "=== "
STATE_FOLDER = "/var/lib/deployer/lxc"
"""Copies of configurations before an edit, and the note that a creation is under way."""

HOST_SCRIPT = r"""
conf=$ROOT/etc/pve/lxc/$VMID.conf
echo "=== version"
dpkg-query -W -f '${Version}\n' pve-container 2>/dev/null
echo "=== status"
pct status "$VMID" 2>&1
echo "=== quorum"
[ -r "$ROOT/etc/pve/.members" ] && while read -r line; do
  case $line in *'"quorate":'*) line=${line##*'"quorate":'}; line=${line#"${line%%[! ]*}"}
    case $line in [01]*) echo "${line%"${line#?}"}" ;; esac ;;
  esac
done <"$ROOT/etc/pve/.members"
echo "=== ha"
managed= inside=
[ -r "$ROOT/etc/pve/ha/resources.cfg" ] && while IFS= read -r line || [ -n "$line" ]; do
  case $line in
    "ct: $VMID") managed=yes inside=yes; echo managed ;;
    [[:space:]]*[![:space:]]*) # An indented line belongs to the section before it.
      line=${line#"${line%%[![:space:]]*}"}
      case $inside$line in
        yesstate[[:space:]]*) line=${line#state}; echo "state ${line#"${line%%[![:space:]]*}"}" ;;
      esac ;;
    ?*) inside= ;;
  esac
done <"$ROOT/etc/pve/ha/resources.cfg"
[ -z "$managed" ] || timeout 10 ha-manager status 2>&1 | grep "^service ct:$VMID "
echo "=== elsewhere"
for file in "$ROOT"/etc/pve/nodes/*/lxc/"$VMID.conf" \
  "$ROOT"/etc/pve/nodes/*/qemu-server/"$VMID.conf" "$ROOT/etc/pve/qemu-server/$VMID.conf"; do
  [ -e "$file" ] && echo "${file#"$ROOT/etc/pve/"}"
done
echo "=== name"
{ read -r name <"$ROOT/proc/sys/kernel/hostname"; } 2>/dev/null || name=$(uname -n)
echo "$name"
# The lines that matter here, by the shell: pct reads this file, a process for each word is slow.
locked= devices="/dev/nvidia0
/dev/nvidiactl
"
[ -r "$conf" ] && while read -r key line || [ -n "$key" ]; do
  case $key in
    lock:*) locked=yes ;;
    # Of all sections: a pending entry, too, keeps the container from starting.
    dev[0-9]*:*)
      line="${key#*:}$line,"
      while [ -n "$line" ]; do
        path=${line%%,*} line=${line#*,}
        path=${path#path=}
        case $path in /dev/*) devices="$devices${path%[[:cntrl:]]}
" ;; esac
      done ;;
  esac
done <"$conf"
echo "=== task"
# A worker's name is its UPID; only a locked container has one that matters.
if [ -n "$locked" ]; then
  for file in "$ROOT"/proc/[0-9]*/cmdline; do
    tr '\0' ' ' <"$file" 2>/dev/null | sed -n "s/^task UPID:\(.*:$VMID:[^ ]*\).*/\1/p"
  done
fi
echo "=== begun"
[ -e "$ROOT$STATE/$VMID/creating" ] && echo creating
echo "=== frozen"
{ read -r frozen <"$ROOT/sys/fs/cgroup/lxc/$VMID/cgroup.freeze"; } 2>/dev/null && echo "$frozen"
echo "=== majors"
kind=
[ -r "$ROOT/proc/devices" ] && while read -r major rest; do
  case $major in
    Character* | Block*) kind=$major ;;
    [0-9]*) case $kind in Character*) echo "$major" ;; esac ;;
  esac
done <"$ROOT/proc/devices"
echo "=== devices"
set --
while IFS= read -r path; do
  [ -z "$path" ] || set -- "$@" "$ROOT$path"
done <<EOF
$devices
EOF
stat -L -c '%n|%F|%t:%T|%a' "$@" 2>/dev/null | sort -u |
  while IFS= read -r line; do echo "${line#"$ROOT"}"; done
if [ -n "$TEMPLATE" ] && [ ! -e "$conf" ]; then
  echo "=== create"
  path=$(timeout 15 pvesm path "$TEMPLATE" 2>&1) && [ -f "$path" ] && echo "template" ||
    echo "no template: $path"
  timeout 15 pvesm status 2>/dev/null | sed -n 's/^\([^ ]*\)  *[^ ]*  *active .*/storage \1/p'
  for link in "$ROOT"/sys/class/net/*; do
    [ -d "$link/bridge" ] && echo "bridge ${link##*/}"
  done
fi
echo "=== conf"
cat "$conf" 2>/dev/null && echo "=== whole"
exit 0
"""

GUEST_SCRIPT = r"""
set --
for node in "$ROOT"/dev/nvidia*; do [ ! -e "$node" ] || set -- "$@" "$node"; done
[ $# -eq 0 ] || stat -c '%n|%F|%t:%T' "$@"
exit 0
"""


@dataclass(frozen=True)
class CreateFacts:
    """What a creation needs of the host."""

    template: bool = False
    template_text: str = ""
    storages: tuple[str, ...] = ()
    """Active ones."""
    bridges: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContainerFacts:
    """pct's view. `status` is running|stopped|'' (then `status_text` says why)."""

    status: str = ""
    status_text: str = ""
    conf: str | None = None
    """The whole conf file (pct_config.decode); None when there is none or it could not be read."""
    version: tuple[int, ...] = ()
    """pve-container; () when unknown."""
    timed_out: bool = False
    quorate: bool = True
    """False: /etc/pve is read-only."""
    ha: str = ""
    """What the HA manager was asked for (`started`, ...); '' when it does not own the container."""
    ha_status: str = ""
    """What `ha-manager status` says of it."""
    frozen: bool = False
    """Its processes stand still (a backup, a snapshot, lxc-freeze); pct calls that running."""
    elsewhere: tuple[str, ...] = ()
    """`VM 129 on kpro5`, `container 129 on kpro6`: who else has this id."""
    tasks: tuple[str, ...] = ()
    """Kinds of the tasks that work on it now (`vzdump`, ...); looked for under a lock only."""
    begun: bool = False
    """A creation by this tool has begun and has not ended."""
    majors: frozenset[int] = frozenset()
    """Character majors of the host."""
    devices: tuple[tuple[gpu.Node, int], ...] = ()
    """Host nodes that the configuration names, with their modes."""
    create: CreateFacts | None = None

    @property
    def exists(self) -> bool:
        """There is a container of this id on this node."""
        return self.conf is not None

    @property
    def ha_state(self) -> str:
        """What the HA manager has made of it (`started`, `migrate`, `error`, ...); '' unknown."""
        found = re.search(r"\([^,()]*, *([\w-]+)\)", self.ha_status)
        return found.group(1) if found else ""

    def config(self) -> pct_config.PctConfig:
        """The conf, parsed."""
        return pct_config.parse_conf(self.conf or "")

    def host_mode(self, path: str) -> int | None:
        """The mode of a node on the host; None when it is not there or was not looked at."""
        return next((mode for node, mode in self.devices if node.path == path), None)

    def on_host(self, path: str) -> bool:
        """Whether the host has a device at `path`."""
        return any(node.path == path and node.kind != "file" for node, _ in self.devices)


@dataclass(frozen=True)
class GuestNodes:
    """NVIDIA nodes below the guest's /dev, by path."""

    nodes: tuple[gpu.Node, ...] = ()
    timed_out: bool = False

    def node(self, path: str) -> gpu.Node:
        """What lies at `path` in the guest."""
        return next((node for node in self.nodes if node.path == path), gpu.Node(path, "missing"))


def parse_container(output: ProbeOutput, vmid: int = 0) -> ContainerFacts:
    """The answer of HOST_SCRIPT."""
    text = pct_config.decode(output.stdout)
    head, _, conf = text.partition(f"{MARK}conf\n")
    whole = conf.removesuffix("\n").endswith(f"{MARK}whole")
    body = conf.removesuffix("\n").removesuffix(f"{MARK}whole")
    part = _parts(head)
    status = part.get("status", [])
    word = next((line.split(":", 1)[1].strip() for line in status if _is_status(line)), "")
    ha = part.get("ha", [])
    asked = next((line.removeprefix("state ") for line in ha if line.startswith("state ")), "")
    asked = asked.strip() or "started"
    name = "".join(part.get("name", [])).split(".")[0]
    return ContainerFacts(
        status=word,
        status_text="\n".join(status).strip(),
        conf=body if whole else None,
        version=proxmox.package_version("\n".join(part.get("version", []))),
        timed_out=output.timed_out,
        quorate="0" not in part.get("quorum", []),
        ha=asked if "managed" in ha and asked != "ignored" else "",
        ha_status=next((line for line in ha if line.startswith("service ")), ""),
        frozen="1" in part.get("frozen", []),
        elsewhere=_elsewhere(part.get("elsewhere", []), name, vmid, whole),
        tasks=tuple(
            fields[4] for line in part.get("task", []) if len(fields := line.split(":")) > 5
        ),
        begun="creating" in part.get("begun", []),
        majors=frozenset(int(line) for line in part.get("majors", []) if line.isdigit()),
        devices=_devices(part.get("devices", [])),
        create=_create(part["create"]) if "create" in part else None,
    )


def _parts(text: str) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith(MARK):
            lines = parts.setdefault(line.removeprefix(MARK), [])
        elif line:
            lines.append(line)
    return parts


def _elsewhere(paths: list[str], name: str, vmid: int, here: bool) -> tuple[str, ...]:
    found = []
    for path in paths:
        fields = path.split("/")
        node = fields[1] if fields[0] == "nodes" else name
        kind = "VM" if fields[-2] == "qemu-server" else "container"
        if kind == "VM" or node != name or not here:
            found.append(f"{kind} {vmid} on {node}")
    return tuple(dict.fromkeys(found))


def _devices(lines: list[str]) -> tuple[tuple[gpu.Node, int], ...]:
    found = []
    for line in lines:
        stat, _, mode = line.rpartition("|")
        for node in gpu.parse_nodes([stat]).values():
            if re.fullmatch("[0-7]+", mode):
                found.append((node, int(mode, 8)))
    return tuple(found)


def _create(lines: list[str]) -> CreateFacts:
    def of(word: str) -> tuple[str, ...]:
        return tuple(line.split(" ", 1)[1] for line in lines if line.startswith(f"{word} "))

    told = "; ".join(text.removeprefix("template: ") for text in of("no"))
    return CreateFacts("template" in lines, told, of("storage"), of("bridge"))


def _is_status(line: str) -> bool:
    return line.startswith("status: ")


def parse_nodes(output: ProbeOutput, root: str = "") -> GuestNodes:
    """The answer of GUEST_SCRIPT."""
    lines = [line.removeprefix(root) for line in output.text.splitlines()]
    return GuestNodes(tuple(gpu.parse_nodes(lines).values()), output.timed_out)


def probes(vmid: int, root: str = "", create: Create | None = None) -> list[Probe]:
    """Of the host and the guest; `create`: what the inventory wants when there is none."""
    values = {
        "VMID": str(vmid),
        "STATE": STATE_FOLDER,
        "TEMPLATE": create.template if create is not None else "",
    }
    host = assignments(values) + rooted(HOST_SCRIPT, root)
    parse_host = partial(parse_container, vmid=vmid)
    return [
        Probe("container.pct", Where.HOST, host, parse_host, PCT_TIMEOUT_S),
        Probe(
            "container.nodes",
            Where.GUEST,
            rooted(GUEST_SCRIPT, root),
            partial(parse_nodes, root=root),
        ),
    ]
