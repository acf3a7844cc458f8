"""A copy of the lab's inventory and playbooks that a test may change; its state is its own."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lab import INVENTORY, PREFIX, Lab, Machine, Result, eventually, run

BUILD = INVENTORY.parent / ".build"
PLAYBOOK = "tiny-hybrid.yaml"
COMPLETIONS = "http://127.0.0.1:30105/v1/chat/completions"
HUB = "http://127.0.0.1:8900"


class Project:
    """inventory/, playbooks/ and .deploy/ in a folder; `deploy` runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(INVENTORY.parent / "playbooks", folder / "playbooks")
        self.playbook_text = (folder / "playbooks" / PLAYBOOK).read_text(encoding="utf-8")
        inventory = yaml.safe_load((INVENTORY / "kpro5.yaml").read_text(encoding="utf-8"))
        self.hosts: dict[str, Any] = inventory["hosts"]
        for ssh in self.ssh():
            ssh["identity_file"] = str(BUILD / "id_ed25519")
            ssh["known_hosts"] = str(BUILD / "known_hosts")
        (folder / "inventory").mkdir()
        self.write()

    def ssh(self) -> list[dict[str, Any]]:
        """The `ssh` of the host and of its guest, to be changed; then `write`."""
        host = self.hosts["kpro5"]
        return [host["ssh"], host["containers"][129]["ssh"]]

    def write(self) -> None:
        """Writes the inventory."""
        text = yaml.safe_dump({"hosts": self.hosts}, sort_keys=False)
        (self.folder / "inventory" / "kpro5.yaml").write_text(text, encoding="utf-8")

    def playbook(self, **changes: Mapping[str, Any]) -> None:
        """The lab's playbook with some keys of some sections changed; without changes: as it is."""
        document = yaml.safe_load(self.playbook_text)
        for section, values in changes.items():
            document[section].update(values)
        text = yaml.safe_dump(document, sort_keys=False)
        (self.folder / "playbooks" / PLAYBOOK).write_text(text, encoding="utf-8")

    def deploy(self, *words: str, timeout_s: float = 240) -> Result:
        """`deploy -i <this> WORDS`."""
        program = str(Path(sys.executable).parent / "deploy")
        return run([program, "-i", str(self.folder / "inventory"), *words], timeout_s=timeout_s)

    def state(self) -> dict[str, Any]:
        """The recorded deployment."""
        text = (self.folder / ".deploy" / "state" / "kpro5.json").read_text(encoding="utf-8")
        deployment: dict[str, Any] = json.loads(text)["deployments"]["tiny"]
        return deployment


HOST_LISTING = r"""
for path in /var/lib/deployer /etc/pve /etc/modprobe.d /etc/modules-load.d /etc/systemd/system \
  /usr/local /usr/lib/modules /lib/modules /etc/initramfs-tools
do [ ! -e "$path" ] || find "$path" -xdev \( -type f -o -type l \) -printf '%p %m %s %i %T@ %l\n'
done | sort -u
for path in /sys/bus/pci/devices/*
do echo "$path $(readlink "$path/driver") $(cat "$path/driver_override" 2>/dev/null)"
done
"""
GUEST_LISTING = r"""
for path in /var/lib/deployer /opt /srv /usr/local /usr/lib/x86_64-linux-gnu /root
do [ ! -e "$path" ] || find "$path" -xdev \( -type f -o -type l \) -printf '%p %m %s %i %T@ %l\n'
done | sort
"""
PROCESSES = "ps -eo ppid=,pid=,lstart=,args="
SESSION = (
    *("sshd", "pct exec", "ps -eo", "sh -c ps", " sleep "),
    *("runc init", "runc:[", "test -e /run/lab/ready"),
)
"""What comes and goes with every look, ours, theirs or Docker's; and a supervisor's beat."""
GROWING = (".log", "/log", "/heartbeat")
"""Files that the server itself writes to."""


@dataclass(frozen=True)
class Listing:
    """Files (with mode, size, inode, time), driver links and processes of a host and its guest."""

    files: frozenset[str]
    processes: frozenset[str]

    @classmethod
    def of(cls, host: Machine, guest: Machine) -> Listing:
        """As they are now."""
        rows = host.sh(HOST_LISTING).ok().out.splitlines()
        rows += [f"guest {row}" for row in guest.sh(GUEST_LISTING).ok().out.splitlines()]
        kept = [row for row in rows if not row.split()[0 if row[0] == "/" else 1].endswith(GROWING)]
        processes = [row.strip() for row in host.sh(PROCESSES).ok().out.splitlines()]
        lasting = [row for row in processes if not any(word in row for word in SESSION)]
        return cls(frozenset(kept), frozenset(lasting))

    def difference(self, later: Listing) -> list[str]:
        """What went and what came, one a line."""
        return [
            *(f"- {row}" for row in sorted(self.files - later.files)),
            *(f"+ {row}" for row in sorted(later.files - self.files)),
            *(f"- process {row}" for row in sorted(self.processes - later.processes)),
            *(f"+ process {row}" for row in sorted(later.processes - self.processes)),
        ]


class SshdLog:
    """A second life of an sshd, with a log that names connections and channels."""

    PATH = "/run/sshd-counted.log"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.sh(
            'kill "$(cat /run/sshd.pid)" && while kill -0 "$(cat /run/sshd.pid)" 2>/dev/null; '
            "do sleep 0.05; done; rm -f /run/sshd.pid; "
            f"/usr/sbin/sshd -E {self.PATH} -o LogLevel=VERBOSE",
            timeout_s=20,
        ).ok()
        port = 22 if machine.vmid is None else 2222
        eventually(
            lambda: machine.sh(f"grep -q 'listening on.*port {port}' {self.PATH}").exit == 0,
            "sshd listens",
        )

    def clear(self) -> None:
        """Forgets what was."""
        self.machine.sh(f": >{self.PATH}").ok()

    def counted(self) -> tuple[int, int]:
        """Connections, and sessions opened on them."""
        text = self.machine.read(self.PATH)
        return text.count("Connection from "), text.count("Starting session: ")


def complete(prompt: str = "Say hello.", timeout_s: float = 20) -> str:
    """One chat completion from outside, through the published port."""
    body = {
        "model": "tiny-hybrid",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 64,
    }
    request = urllib.request.Request(
        COMPLETIONS, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        message = json.load(answer)["choices"][0]["message"]
    return str(message["content"] or message.get("reasoning_content") or "")


def hub(path: str) -> Any:
    """One GET of the hub's control page."""
    with urllib.request.urlopen(HUB + path, timeout=10) as answer:
        return json.load(answer)


def address_of(host: str) -> str:
    """The lab address of a host's container."""
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return run(["docker", "inspect", "-f", form, PREFIX + host]).ok().out.strip()


def pristine(lab: Lab) -> tuple[Machine, Machine]:
    """kpro5 as after the first start."""
    lab.reset("kpro5")
    return lab.hosts["kpro5"], lab.guests["kpro5"]
