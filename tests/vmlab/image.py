"""Builds the VM lab's disk, once for each state of its inputs: `python tests/vmlab/image.py`.

The file system comes from a Docker image (`image/Dockerfile`), whose layers are Docker's cache; the
disk made of it is kept in ~/.cache/deployer-vmlab/ID, ID coming from the image's, so that changed
inputs make another. About 70 s when nothing is cached, 2 s when all is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LAB = ROOT / "docker" / "lab.sh"
LAB_CONTEXT = ROOT / "docker" / ".build" / "context"
NAME = "deployer-vmlab"
GUEST_IMAGE = "deployer-lab-guest"
DISK_SIZE = "8G"
BUILD_LIMIT_S = 600
OLD_S = 86_400.0
DISK_SCRIPT = f"""
mount --bind / /mnt
cp /boot/vmlinuz /boot/initrd /out/
sha256sum /var/lib/vz/template/cache/*.run >/out/packages
rm -f /out/disk.part
truncate -s {DISK_SIZE} /out/disk.part
mke2fs -q -t ext4 -J size=16 -E lazy_itable_init=1,lazy_journal_init=1 -d /mnt /out/disk.part
chown {os.getuid()}:{os.getgid()} /out/*
mv /out/disk.part /out/disk
"""


class Missing(Exception):
    """The lab cannot be had on this machine; the text says why."""


@dataclass(frozen=True)
class Image:
    """What a machine is started from."""

    folder: Path
    key: Path
    """Private key of the one user, root, of host and guest."""
    known_hosts: tuple[str, str]
    """Public host keys of host and guest, without a name in front."""

    @property
    def packages(self) -> dict[str, str]:
        """Driver packages on the host: path -> sha256."""
        lines = (self.folder / "packages").read_text().splitlines()
        return {path: digest for digest, path in (line.split() for line in lines)}


def cache() -> Path:
    """Where keys and disks lie."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deployer-vmlab"


def docker(*words: str, limit_s: float = 60) -> str:
    """stdout of a docker command; raises CalledProcessError with its stderr."""
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"docker {words[0]} ended with {done.returncode}:\n{said}")
    return done.stdout.strip()


def missing() -> str:
    """Why the lab cannot run here, '' when it can."""
    if shutil.which("qemu-system-x86_64") is None:
        return "no qemu-system-x86_64 (tests/run.sh installs it as root)"
    if shutil.which("docker") is None:
        return "no docker, which builds the VM's disk"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "Docker does not answer, which builds the VM's disk"
    return ""


def make_keys(folder: Path) -> None:
    """One key pair of the user, one of each machine; kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("user", "host", "guest"):
        if not (folder / name).exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name],
                check=True,
            )


def make_context(folder: Path, keys: Path) -> None:
    """The build's inputs in one folder: ours, the driver stand-ins, what reaches registries."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / "image", folder)
    docker_folder = ROOT / "docker"
    shutil.copytree(docker_folder / "driver", folder / "driver")
    for name in ("lab", "sbin"):
        shutil.copytree(
            docker_folder / "host" / name,
            folder / "stand-ins" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copyfile(docker_folder / "host" / "vfio.conf", folder / "stand-ins" / "vfio.conf")
    (folder / "stand-ins" / "guest").mkdir()
    for source in (docker_folder / "guest").glob("*.py"):
        shutil.copyfile(source, folder / "stand-ins" / "guest" / source.name)
    (folder / "keys").mkdir()
    for name in ("user.pub", "host", "host.pub", "guest", "guest.pub"):
        shutil.copyfile(keys / name, folder / "keys" / name)
    for name in ("ca.crt", "apt.conf"):
        shutil.copyfile(LAB_CONTEXT / name, folder / name)


def ready_guest_image() -> None:
    """The image of the container lab's guest; made by lab.sh where there is none."""
    found = subprocess.run(
        ["docker", "image", "inspect", GUEST_IMAGE], capture_output=True, check=False
    )
    if found.returncode == 0 and (LAB_CONTEXT / "apt.conf").exists():
        return
    done = subprocess.run(["sh", str(LAB), "setup"], timeout=BUILD_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"lab.sh setup ended with {done.returncode}")


def build() -> Image:
    """The image for the inputs as they are now. Raises Missing or RuntimeError."""
    if reason := missing():
        raise Missing(reason)
    base = cache()
    base.mkdir(parents=True, exist_ok=True)
    with FileLock(base / "lock"):
        ready_guest_image()
        keys = base / "keys"
        make_keys(keys)
        context = base / "context"
        make_context(context, keys)
        built = docker("build", "-q", "-t", NAME, str(context), limit_s=BUILD_LIMIT_S)
        folder = base / hashlib.sha256(f"{built} {DISK_SCRIPT}".encode()).hexdigest()[:16]
        if not (folder / "disk").exists():
            # A younger one may be in use: the VM of another checkout boots from it again.
            for old in base.glob("*/disk"):
                if time.time() - old.stat().st_mtime > OLD_S:
                    shutil.rmtree(old.parent)
            folder.mkdir(exist_ok=True)
            # For the bind mount, which shows the image's own files, without Docker's /proc.
            rights = ("--cap-add", "SYS_ADMIN", "--security-opt", "apparmor=unconfined")
            volume = ("-v", f"{folder}:/out")
            docker(
                *("run", "--rm", *rights, *volume, NAME, "sh", "-ec", DISK_SCRIPT),
                limit_s=BUILD_LIMIT_S,
            )
        public = [" ".join((keys / f"{part}.pub").read_text().split()[:2]) for part in PARTS]
        return Image(folder, keys / "user", (public[0], public[1]))


PARTS = ("host", "guest")

if __name__ == "__main__":
    print(build().folder)
