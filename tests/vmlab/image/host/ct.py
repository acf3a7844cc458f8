"""Containers of the VM lab: real LXC, behind the names that the lab's `pct` uses.

Reading devN values and the rest that knows no kernel is the container lab's own ct.py, which lies
beside this file as namespaces.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
from typing import NoReturn

import namespaces
from ctconf import Conf, die
from namespaces import LXC, device, gone, rootfs, running

__all__ = [
    "attach",
    "device",
    "enter_argv",
    "gone",
    "init_pid",
    "kill",
    "plug",
    "rootfs",
    "running",
    "shut_down",
    "start",
]

RAW_OF_OURS = """\
lxc.include = /usr/share/lxc/config/common.conf
lxc.apparmor.profile = unconfined
lxc.rootfs.path = dir:{root}
lxc.uts.name = {name}
lxc.init.cmd = /usr/bin/python3 /usr/lib/lab/init.py
lxc.mount.auto = proc:mixed sys:mixed
lxc.tty.max = 0
lxc.net.0.type = veth
lxc.net.0.link = vmbr0
lxc.net.0.name = eth0
lxc.net.0.flags = up
lxc.net.0.ipv4.address = {address}
lxc.net.0.ipv4.gateway = {gateway}
"""


def init_pid(vmid: str) -> int | None:
    """Pid of the guest's init as the host sees it."""
    said = subprocess.run(
        ["lxc-info", "-n", vmid, "-p", "-H"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return int(said) if said.isdigit() and int(said) > 0 else None


def own_node(vmid: str, value: str) -> tuple[str, str, str]:
    """Makes the node of a devN value, apart from the host's own, with its mode and owner.

    Returns its path, the path in the guest, and the device rule.
    """
    plain, node, options = device(value)
    path = f"/run/lab/dev/{vmid}{plain}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mknod(path, stat.S_IFMT(node.st_mode), node.st_rdev)
    os.chmod(path, int(options.get("mode", "0660"), 8))
    os.chown(path, int(options.get("uid", 0)), int(options.get("gid", 0)))
    kind = "b" if stat.S_ISBLK(node.st_mode) else "c"
    access = "r" if options.get("deny-write") == "1" else "rw"
    return path, plain, f"{kind} {os.major(node.st_rdev)}:{os.minor(node.st_rdev)} {access}"


def lxc_config(vmid: str, conf: Conf) -> str:
    """The text of /var/lib/lxc/VMID/config, as Proxmox makes it anew at every start."""
    keys = conf.current.keys
    net = dict(part.split("=", 1) for part in keys.get("net0", "").split(",") if "=" in part)
    text = RAW_OF_OURS.format(
        root=rootfs(vmid),
        name=keys.get("hostname", f"CT{vmid}"),
        address=net["ip"],
        gateway=net["gw"],
    )
    for key, value in sorted(keys.items()):
        if re.fullmatch(r"dev\d+", key):
            path, plain, rule = own_node(vmid, value)
            text += f"lxc.cgroup2.devices.allow = {rule}\n"
            text += f"lxc.mount.entry = {path} {plain[1:]} none bind,create=file 0 0\n"
    return text + "".join(f"{key} = {value}\n" for key, value in conf.current.raw)


def start(vmid: str, conf: Conf) -> None:
    """lxc-start; returns once init runs. The caller has checked state and locks."""
    with open(f"{LXC}/{vmid}/config", "w") as file:
        file.write(lxc_config(vmid, conf))
    os.makedirs("/run/pve", exist_ok=True)
    log = f"/run/pve/ct-{vmid}.stderr"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(log)
    done = subprocess.run(
        ["lxc-start", "-n", vmid, "-o", log, "-l", "ERROR"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        with open(log, errors="replace") as file:
            sys.stderr.write(file.read())
        die(f"startup for container '{vmid}' failed")


def plug(root: str, value: str) -> None:
    """Hot-plug of a devN value into the running guest whose root is `root` (/proc/PID/root)."""
    pid = int(root.split("/")[2])
    with open(f"/proc/{pid}/cgroup") as file:
        vmid = re.search(r"/lxc(?:\.payload\.|/)(\d+)", file.read())[1]
    namespaces.plug(root, value)
    _, node, _ = device(value)
    kind = "b" if stat.S_ISBLK(node.st_mode) else "c"
    rule = f"{kind} {os.major(node.st_rdev)}:{os.minor(node.st_rdev)} rw"
    subprocess.run(["lxc-cgroup", "-n", vmid, "devices.allow", rule], check=True)


def kill(vmid: str) -> None:
    """lxc-stop --kill."""
    subprocess.run(["lxc-stop", "-n", vmid, "--kill"], check=False)
    if not gone(vmid, 10):
        die(f"container '{vmid}' did not stop")


def shut_down(vmid: str, seconds: float, force: bool) -> None:
    """Asks init to end; kills it at the deadline only when `force` says so."""
    limit = str(max(1, round(seconds)))
    done = subprocess.run(["lxc-stop", "-n", vmid, "--nokill", "--timeout", limit], check=False)
    if done.returncode == 0 and gone(vmid, 5):
        return
    if not force:
        die("container did not stop")
    kill(vmid)


def enter_argv(vmid: str) -> list[str]:
    """lxc-attach up to the command: its cgroup too, so that device rules hold inside."""
    return ["lxc-attach", "-n", vmid, "--clear-env", "--"]


def attach(vmid: str, words: list[str], env: dict[str, str]) -> NoReturn:
    """Becomes the command inside, with exactly this environment."""
    argv = ["lxc-attach", "-n", vmid, "--keep-env", "--", *words]
    os.execve("/usr/bin/lxc-attach", argv, env)
