"""One QEMU machine of the VM lab: start, stop, cut, and a shell in it."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.vmlab.image import Image

BOOT_LIMIT_S = 120.0
MEMORY_MIB = 1024
APPEND = (
    "console=ttyS0 loglevel=4 panic=-1 intel_iommu=on iommu=pt audit=0 mitigations=off "
    # Emulated, each of these costs time at every fork, every page and every file. apparmor=0 alone
    # would bring up SELinux and TOMOYO.
    "lsm=capability cgroup_disable=memory "
    "init_on_alloc=0 hardened_usercopy=off transparent_hugepage=never nowatchdog "
    # A busy machine may give no tick in time, and the kernel would take the timer for broken.
    "no_timer_check tsc=reliable clocksource=tsc "
    # A library at another address is translated anew at each start of a program: three times the
    # time of a process.
    "norandmaps"
)


@dataclass(frozen=True)
class Answer:
    """What a command in the machine left."""

    exit: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Both streams."""
        return self.out + self.err

    def ok(self) -> str:
        """stdout, when the status is 0."""
        assert self.exit == 0, f"exit {self.exit}\n{self.out}\n{self.err}"
        return self.out


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Machine:
    """The host kpro5, on a copy of the image's disk that lasts as long as this object's folder."""

    def __init__(self, image: Image, folder: Path) -> None:
        self.image = image
        self.folder = folder
        self.port = free_port()
        self.guest_port = free_port()
        self._disk = folder / "disk"
        self._qemu: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when sshd answers. Raises RuntimeError with the console's end."""
        (self.folder / "known_hosts").write_text(
            f"[127.0.0.1]:{self.port} {self.image.known_hosts[0]}\n"
            f"[127.0.0.1]:{self.guest_port} {self.image.known_hosts[1]}\n"
        )
        if not self._disk.exists():
            subprocess.run(
                ["cp", "--sparse=always", self.image.folder / "disk", self._disk], check=True
            )
        with (self.folder / "qemu.log").open("wb") as log:
            self._qemu = subprocess.Popen(
                self._argv(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.await_boot()

    def await_boot(self) -> None:
        """Waits until init has done its work and sshd answers."""
        deadline = time.monotonic() + BOOT_LIMIT_S
        while self.sh("test -e /run/lab/booted", limit_s=10).exit != 0:
            if self._qemu is None or self._qemu.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "qemu.log").read_text(errors="replace")
                raise RuntimeError(f"the VM does not come up: {said}\n{self.console()[-3000:]}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends QEMU, and removes the disk."""
        self.power_off()
        self._disk.unlink(missing_ok=True)

    def cut(self) -> None:
        """Power off without a word to the guest, and on; returns when it has booted again."""
        self.power_off()
        self.start()

    def power_off(self) -> None:
        """Without a word to the guest; the disk stays."""
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
            self._qemu = None
        # The shared connection of `sh` would wait for an answer that never comes.
        argv = self._ssh()
        subprocess.run(
            [*argv[:-1], "-O", "exit", argv[-1]], capture_output=True, timeout=20, check=False
        )

    def console(self) -> str:
        """What the kernel has said on its serial console."""
        path = self.folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def sh(self, script: str, *args: str, limit_s: float = 60) -> Answer:
        """Runs POSIX sh text with "$1".. = args as root; a fresh connection each time."""
        argv = [*self._ssh(), shlex.join(["sh", "-c", script, "sh", *args])]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return Answer(-1, "", f"no answer within {limit_s:g} s")
        return Answer(
            done.returncode,
            done.stdout.decode("utf-8", "replace"),
            done.stderr.decode("utf-8", "replace"),
        )

    def _ssh(self) -> list[str]:
        return [
            "ssh",
            "-F",
            "none",
            "-i",
            str(self.image.key),
            "-p",
            str(self.port),
            *("-o", f"UserKnownHostsFile={self.folder / 'known_hosts'}"),
            *("-o", "BatchMode=yes"),
            *("-o", "IdentitiesOnly=yes"),
            *("-o", "ConnectTimeout=5"),
            *("-o", "ControlMaster=auto"),
            *("-o", f"ControlPath={self.folder / 'control'}"),
            *("-o", "ControlPersist=600"),
            *("-o", "ServerAliveInterval=2"),
            *("-o", "ServerAliveCountMax=3"),
            *("-o", "LogLevel=ERROR"),
            "root@127.0.0.1",
        ]

    def _argv(self) -> list[str]:
        """Two GPUs of two functions each, behind root ports of their own: alone in their groups."""
        forward = (
            f"user,id=net,hostfwd=tcp:127.0.0.1:{self.port}-:22,"
            f"hostfwd=tcp:127.0.0.1:{self.guest_port}-10.0.2.129:2222"
        )
        disk = self._disk
        gpus = []
        for number in (1, 2):
            port = f"gpu{number}"
            place = f"id={port},chassis={number},slot={number},bus=pcie.0,addr={number + 5}"
            gpus += ["-device", f"pcie-root-port,{place}"]
            gpus += ["-device", f"secondary-vga,bus={port},addr=0.0,multifunction=on"]
            gpus += ["-device", f"intel-hda,bus={port},addr=0.1"]
        return [
            "qemu-system-x86_64",
            *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=256"),
            *("-smp", "2", "-m", str(MEMORY_MIB)),
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *("-serial", f"file:{self.folder / 'console.log'}"),
            *("-device", "intel-iommu,intremap=on,device-iotlb=on"),
            *("-kernel", str(self.image.folder / "vmlinuz")),
            *("-initrd", str(self.image.folder / "initrd")),
            *("-append", APPEND),
            *("-drive", f"file={disk},if=none,id=disk,format=raw,cache=unsafe"),
            *("-device", "virtio-blk-pci,drive=disk,bus=pcie.0,addr=3"),
            *("-netdev", forward, "-device", "virtio-net-pci,netdev=net,bus=pcie.0,addr=4"),
            *("-device", "virtio-rng-pci,bus=pcie.0,addr=5"),
            *gpus,
        ]


def eventually(check: Callable[[], bool], what: str, limit_s: float = 15) -> None:
    """Polls until `check` holds; fails with `what` at the deadline."""
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)
