"""Two or more hosts out of one machine: each has processes, folders and a name of its own, one GPU.

A host is an sshd in namespaces of its own (mount, pid, uts). Its /dev has the node of one GPU and
no way to make others, and the driver's list in /proc names that one, as in a container. Its
/var/lib/deployer, /opt/deployer, /srv/models, /run and /dev/shm are its own and empty. It shares
the network, the packages and the kernels' caches.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from project import door
from sshd import Sshd

HERE = Path(__file__).resolve().parent
TOOLS = ("unshare", "setpriv")
ENTER = r"""
set -eu
root=$1 name=$2 minor=$3 address=$4
shift 4
mount --make-rprivate /
mount -t proc proc /proc
echo "$name" >/proc/sys/kernel/hostname
if [ -d "/proc/driver/nvidia/gpus/$address" ]; then
  mkdir -p "$root/gpus/$address"
  mount --bind "/proc/driver/nvidia/gpus/$address" "$root/gpus/$address"
  mount --rbind "$root/gpus" /proc/driver/nvidia/gpus
fi
mkdir -p "$root/dev"
mount -t tmpfs -o mode=755 dev "$root/dev"
for node in null zero full random urandom tty; do
  [ ! -e "/dev/$node" ] || cp -a "/dev/$node" "$root/dev/"
done
for node in /dev/nvidia*; do
  case ${node#/dev/nvidia} in
    "$minor") ;;
    [0-9]* | '*') continue ;;
  esac
  cp -a "$node" "$root/dev/"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount --bind /dev/pts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for pair in 0:stdin 1:stdout 2:stderr; do
  ln -s "/proc/self/fd/${pair%:*}" "$root/dev/${pair#*:}"
done
mount --rbind "$root/dev" /dev
for folder in /var/lib/deployer /opt/deployer /srv/models /run; do
  mkdir -p "$folder"
  mount -t tmpfs -o mode=755 own "$folder"
done
mkdir -p /run/sshd /run/lock
if [ -e /etc/machine-id ]; then
  od -An -tx1 -N16 /dev/urandom | tr -d ' ' >"$root/machine-id"
  mount --bind "$root/machine-id" /etc/machine-id
fi
exec setpriv --bounding-set=-mknod --inh-caps=-mknod -- "$@"
"""


@dataclass
class Host:
    """One of them; `index` is that of its GPU on the machine."""

    name: str
    index: int
    gpu: machine.Gpu
    sshd: Sshd

    def sh(self, script: str, *words: str, limit_s: float = 60.0) -> str:
        """Runs sh text there over SSH; its output. Raises CalledProcessError, TimeoutExpired."""
        argv = ["ssh", "-F", "none", "-p", str(self.sshd.port), "-i", str(self.sshd.user_key)]
        argv += ["-o", f"UserKnownHostsFile={self.sshd.known_hosts}", "-o", "BatchMode=yes"]
        argv += [f"{self.sshd.user}@127.0.0.1", "sh", "-s", "--", *words]
        done = subprocess.run(
            argv, input=script, capture_output=True, text=True, check=True, timeout=limit_s
        )
        return done.stdout

    def launch(self, name: str) -> dict[str, Any]:
        """Of the newest launch of deployment `name`: id, log, processes (pid -> title)."""
        code = "import hosts, json, sys; print(json.dumps(hosts.look(sys.argv[1])))"
        path = f"PYTHONPATH={HERE}:{':'.join(one for one in sys.path if one)}"
        text = self.sh('env "$1" "$2" -c "$3" "$4"', quoted(path), quoted(sys.executable),
                       quoted(code), quoted(name))  # fmt: skip
        return dict(json.loads(text))

    def used_mib(self) -> int:
        """GPU memory in use on its card."""
        return machine.used_mib(self.index)


def quoted(word: str) -> str:
    """For the shell that the SSH server hands the words to."""
    return "'" + word.replace("'", "'\\''") + "'"


def look(name: str) -> dict[str, Any]:
    """Runs on the host."""
    from project import JOBS

    current = JOBS / f"server-{name}" / "current"
    if not current.exists():
        return {"id": "", "log": "", "processes": {}}
    text = (current / "session").read_text().strip() if (current / "session").exists() else ""
    return {
        "id": current.resolve().name,
        "log": (current / "log").read_text(errors="replace"),
        "processes": machine.session_members(int(text) if text.isdigit() else 0),
    }


def listens(port: int) -> bool:
    """Does anything accept connections on this port of loopback?"""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def why_not(count: int) -> str:
    """Why this machine cannot be `count` hosts with a GPU each; '' when it can."""
    found = len(machine.gpus())
    if found < count:
        return f"it wants {count} GPUs, nvidia-smi lists {found}"
    if lacks := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"this machine lacks {', '.join(lacks)}"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--uts", "--fork", "mount", "-t", "proc", "proc", "/proc"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


@contextlib.contextmanager
def hosts(folder: Path, names: tuple[str, ...]) -> Iterator[list[Host]]:
    """As many hosts as names, the n-th with the n-th GPU. Raises RuntimeError, OSError."""
    with contextlib.ExitStack() as stack:
        found = []
        for index, (name, gpu) in enumerate(zip(names, machine.gpus(), strict=False)):
            root = folder / name
            root.mkdir(parents=True)
            try:
                minor = machine.minor(gpu.address)
            except OSError:
                # No driver of its own here, as in a rehearsal.
                minor = index
            within = ("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "sh", "-c",
                      ENTER, "sh", str(root), name, str(minor), gpu.address)  # fmt: skip
            found.append(Host(name, index, gpu, stack.enter_context(door(root / "sshd", within))))
        yield found
