"""Storages, templates, bridges and root file systems of the lab: what `pct` asks about them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import ctconf
from ctconf import Section, die

LXC = "/var/lib/lxc"
VZ = "/var/lib/vz"
STORAGES = ("local", "local-zfs")
BRIDGES = ("vmbr0", "vmbr1")


def check_volume(volume: str) -> None:
    """A volume of a storage, or an absolute path."""
    if volume.startswith("/"):
        return
    storage, colon, _ = volume.partition(":")
    if not colon or "/" in storage:
        die(f"unable to parse volume ID '{volume}'")
    if storage not in STORAGES:
        die(f"storage '{storage}' does not exist")


def check_script(volume: str) -> None:
    """A hook script must be an executable file of a storage with snippets."""
    path = f"{VZ}/snippets/{volume.partition('snippets/')[2]}"
    if not os.path.exists(path):
        die(f"script '{volume}' does not exist")
    if not os.access(path, os.X_OK) or not os.stat(path).st_mode & 0o100:
        die(f"script '{volume}' is not executable")


def network(value: str, vmid: str = "0") -> str:
    """A netN value as pct writes it: the name, then the sub-keys in order, `type` last."""
    parts = dict(part.split("=", 1) for part in value.split(","))
    parts["type"] = "veth"
    parts.setdefault("hwaddr", f"BC:24:11:00:{int(vmid) // 256 % 256:02X}:{int(vmid) % 256:02X}")
    name = parts.pop("name")
    return ",".join([f"name={name}", *(f"{key}={parts[key]}" for key in sorted(parts))])


def check_bridge(value: str) -> None:
    """The bridge of a netN value must exist."""
    found = re.search(r"(?:^|,)bridge=([^,]+)", value)
    if found and found[1] not in BRIDGES and not os.path.isdir(f"/sys/class/net/{found[1]}"):
        die(f"bridge '{found[1]}' does not exist", 2)


def snapshots(section: Section) -> bool:
    """Whether every volume can be snapshotted: no bind mount, no device, no plain folder."""
    if section.keys.get("rootfs", "").startswith("/"):
        return False
    mounts = [value for key, value in section.keys.items() if re.fullmatch(r"mp\d+", key)]
    return not any(value.startswith("/") for value in mounts)


def template(volume: str) -> str:
    """The path of a template; ends as pct does when it is not there."""
    storage, _, rest = volume.partition(":")
    if storage not in STORAGES:
        die(f"storage '{storage}' does not exist", 2)
    path = f"{VZ}/template/cache/{rest.removeprefix('vztmpl/')}"
    if not os.path.isfile(path):
        die(f"volume '{volume}' does not exist", 2)
    return path


def reserve(vmid: str) -> None:
    """Takes the id with an empty file under `lock: create`; ends when another guest has it."""
    node = os.uname().nodename
    base = os.path.dirname(ctconf.CONF)
    places = [("CT", node, ctconf.path(vmid)), ("VM", node, f"{base}/qemu-server/{vmid}.conf")]
    if os.path.isdir(f"{base}/nodes"):
        for other in sorted(os.listdir(f"{base}/nodes")):
            places.append(("CT", other, f"{base}/nodes/{other}/lxc/{vmid}.conf"))
            places.append(("VM", other, f"{base}/nodes/{other}/qemu-server/{vmid}.conf"))
    for kind, owner, path in places:
        if os.path.exists(path):
            die(f"unable to create CT {vmid} - {kind} {vmid} already exists on node '{owner}'")
    with open(ctconf.path(vmid), "x") as file:
        file.write("lock: create\n")


def allocated(vmid: str, value: str) -> str:
    """`STORAGE:SIZE` as the volume that comes of it."""
    storage, _, size = value.partition(":")
    check_volume(value)
    if storage == "local":
        return f"local:{vmid}/vm-{vmid}-disk-0.raw,size={size}G"
    return f"{storage}:subvol-{vmid}-disk-0,size={size}G"


def new_volume(vmid: str, storage: str, taken: set[str]) -> str:
    """The name of a volume that is made now."""
    form = "{0}:{1}/vm-{1}-disk-{2}.raw" if storage == "local" else "{0}:subvol-{1}-disk-{2}"
    names = (form.format(storage, vmid, number) for number in range(256))
    return next(name for name in names if name not in taken)


def unpack(vmid: str, archive: str, section: Section, keys: str | None) -> None:
    """The template's files, the host name and the SSH keys of root."""
    root = f"{LXC}/{vmid}/rootfs"
    os.makedirs(root)
    subprocess.run(["tar", "-xf", archive, "-C", root], check=True, capture_output=True)
    os.makedirs(f"{root}/etc", exist_ok=True)
    with open(f"{root}/etc/hostname", "w") as file:
        file.write(section.keys["hostname"] + "\n")
    if keys:
        os.makedirs(f"{root}/root/.ssh", mode=0o700, exist_ok=True)
        shutil.copyfile(keys, f"{root}/root/.ssh/authorized_keys")
        os.chmod(f"{root}/root/.ssh/authorized_keys", 0o600)
    etc = f"{root}/etc/ssh"
    if os.path.isdir(etc) and not os.path.exists(f"{etc}/ssh_host_ed25519_key"):
        # pct makes new host keys for each container.
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{etc}/ssh_host_ed25519_key"],
            check=True,
        )


def remove(vmid: str) -> None:
    """The configuration and the files of a container."""
    shutil.rmtree(f"{LXC}/{vmid}", ignore_errors=True)
    os.unlink(ctconf.path(vmid))
