"""Pid 1 of a lab host: mounts over /proc and /sys, the simulator, sshd, guests with onboot."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import ct
from ctconf import load

VERSION = "580.126.09"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
PRISTINE_FAULTS = ("old-server",)


def mount(*words: str) -> None:
    """mount, or the end."""
    subprocess.run(["mount", *words], check=True)


def lay_mounts() -> None:
    """What the kernel of a real host would say, bound over the real places."""
    os.makedirs("/run/lab/proc/driver")
    os.makedirs("/run/lab/ct")
    shutil.copy("/proc/devices", "/run/lab/proc/devices")
    open("/run/lab/proc/modules", "w").close()
    # The simulator rewrites these files in place, so the bind mounts stay good.
    for name in ("driver", "devices", "modules"):
        if os.path.exists(f"/proc/{name}"):
            mount("--bind", f"/run/lab/proc/{name}", f"/proc/{name}")
    mount("-t", "tmpfs", "-o", "mode=755,size=16m", "tmpfs", "/sys/bus")
    mount("-t", "tmpfs", "-o", "mode=755,size=16m", "tmpfs", "/sys/module")
    os.makedirs("/sys/bus/pci")
    if os.path.isdir("/sys/kernel/iommu_groups"):
        mount("-t", "tmpfs", "-o", "mode=755,size=4m", "tmpfs", "/sys/kernel/iommu_groups")


def install_driver() -> None:
    """The host's driver package: module on disk, nvidia-smi, libraries."""
    modules = f"/lib/modules/{os.uname().release}"
    folder = f"{modules}/updates/dkms"
    os.makedirs(folder, exist_ok=True)
    os.makedirs(f"{modules}/build", exist_ok=True)
    open(f"{modules}/build/Makefile", "w").close()
    for name in ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"):
        with open(f"{folder}/{name}.ko", "w") as file:
            file.write(VERSION + "\n")
    for name in ("libcuda", "libnvidia-ml"):
        open(f"{LIBRARIES}/{name}.so.{VERSION}", "w").close()
        link = f"{LIBRARIES}/{name}.so.1"
        if not os.path.islink(link):
            os.symlink(f"{name}.so.{VERSION}", link)


def install_keys() -> None:
    """Host keys and the one key that may log in, of the host and of the guest."""
    guest = ct.rootfs("129")
    for root, part in (("", "host"), (guest, "guest")):
        for name, mode in (("ssh_host_ed25519_key", 0o600), ("ssh_host_ed25519_key.pub", 0o644)):
            target = f"{root}/etc/ssh/{name}"
            if not os.path.exists(target):
                shutil.copyfile(f"/etc/lab/keys/{part}/{name}", target)
                os.chmod(target, mode)
        os.makedirs(f"{root}/root/.ssh", mode=0o700, exist_ok=True)
        shutil.copyfile("/etc/lab/keys/authorized_keys", f"{root}/root/.ssh/authorized_keys")
        os.chmod(f"{root}/root/.ssh/authorized_keys", 0o600)


def run_units() -> None:
    """What systemd does at boot with enabled units that come before the guests: ExecStart lines."""
    folder = "/etc/systemd/system/multi-user.target.wants"
    if not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        if not os.path.exists(f"{folder}/{name}"):
            continue
        with open(f"{folder}/{name}") as file:
            lines = file.read().splitlines()
        if not any(line.startswith("Before=") and "pve-guests" in line for line in lines):
            continue
        for line in (line for line in lines if line.startswith("ExecStart=")):
            argv = shlex.split(line.partition("=")[2].lstrip("-"))
            done = subprocess.run(argv, check=False, timeout=120)
            print(f"lab: {name}: {argv[0]} ended with {done.returncode}", file=sys.stderr)


def start_guests() -> None:
    """What pve-guests.service does."""
    for name in sorted(os.listdir("/etc/pve/lxc")):
        vmid = name.removesuffix(".conf")
        if vmid.isdigit() and load(vmid).current.keys.get("onboot") == "1":
            subprocess.run(["/usr/sbin/pct", "start", vmid], check=False)


def end(_number: int, _frame: object) -> None:
    """Docker kills what is left with this process."""
    os._exit(0)


def main() -> int:
    """Boots, then reaps."""
    signal.signal(signal.SIGTERM, end)
    fresh = not os.path.exists("/etc/lab/booted")
    # A restarted container keeps its files; what a reboot clears goes here.
    shutil.rmtree("/run/lab", ignore_errors=True)
    shutil.rmtree("/run/qemu-server", ignore_errors=True)
    lay_mounts()
    if fresh:
        install_driver()
        for path in ("/etc/lab/faults", f"{ct.rootfs('129')}/etc/lab/faults"):
            with open(path, "w") as file:
                file.write("".join(name + "\n" for name in PRISTINE_FAULTS))
        open("/etc/lab/booted", "w").close()
    install_keys()
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    subprocess.Popen(["/usr/bin/python3", "/usr/lib/lab/simulator.py"], start_new_session=True)
    deadline = time.monotonic() + 10
    while not os.path.exists("/run/lab/simulator.sock"):
        if time.monotonic() > deadline:
            print("lab: the simulator does not start", file=sys.stderr)
            return 1
        time.sleep(0.02)
    subprocess.Popen(["/usr/sbin/sshd", "-D", "-e"], start_new_session=True)
    run_units()
    start_guests()
    open("/run/lab/ready", "w").close()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
