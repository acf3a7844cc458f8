"""Many deployed hosts for a bench: containers of one image, each with a guest and a server.

One host of the lab is deployed and becomes the image of the others. Each publishes the sshd of the
host and that of the guest on a port of 127.0.0.1, as the lab's own two hosts do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import yaml

from deployer.model import Where

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "docker" / ".build"
NETWORK = "deployer-many"
IMAGE = "deployer-many-host"
OPTIONS = [
    *("--cap-add=SYS_ADMIN", "--cap-add=SYS_PTRACE", "--cap-add=MKNOD"),
    *("--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined"),
    # Fifty times every two seconds, that would be most of the machine's work.
    "--no-healthcheck",
    *("--tmpfs=/run:mode=755,exec", "--tmpfs=/run/lock:mode=1777"),
    *("-p", "127.0.0.1::22", "-p", "127.0.0.1::2222"),
]
GATES = {
    "request_timeout_s": 120,
    "min_tokens": 40,
    "max_tokens": 120,
    "long_prompt_tokens": 0,
    "context_edge": False,
    "burst": 1,
    "parallel": 1,
    "alive_after_s": 0,
    "thinking": "default",
}
"""Not what is measured: the servers only have to be there and judged."""
STARTING, DEPLOYING = 4, 8
"""Hosts at once. Two cores are busy with these, and none runs over a deadline."""

Say = Callable[[str], None]


def docker(*words: str, check: bool = True) -> str:
    """Docker's answer; a failure ends the bench."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"docker {' '.join(words)}\n{done.stderr}")
    return done.stdout.strip()


def environ() -> dict[str, str]:
    """Plain lines, and this checkout."""
    return {**os.environ, "CI": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}


class World:
    """The controller's folder: inventory, playbook, state, and what the peers are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inventory = folder / "inventory"
        self.pairs: list[tuple[Where, str, int]] = []
        """What part of the probes goes to which address and port."""
        self.user_key = BUILD / "id_ed25519"

    def deploy(self, *words: str) -> list[str]:
        """The command line of one of ours."""
        return [sys.executable, "-c", "from deployer.cli.main import main; main()",
                "-i", str(self.inventory), *words]  # fmt: skip

    def run(self, *words: str) -> None:
        """To its end, in up to three runs: a full machine runs over a deadline now and then."""
        said = b""
        for _ in range(3):
            done = subprocess.run(
                self.deploy(*words), env=environ(), check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if done.returncode == 0:
                return
            said = done.stdout
        tail = said.decode("utf-8", "replace")[-6000:]
        sys.exit(f"deploy {' '.join(words)}: exit {done.returncode}\n{tail}")


class Lab(World):
    """A world of containers."""

    def __init__(self, folder: Path, count: int, kept: bool, say: Say) -> None:
        super().__init__(folder)
        self.names = [f"h{number:02}" for number in range(1, count + 1)]
        self.kept, self.say = kept, say
        self.inventory.mkdir()
        (folder / "playbooks" / "locks").mkdir(parents=True)
        lab = ROOT / "docker" / "playbooks"
        (folder / "playbooks/locks/lab.txt").write_text((lab / "locks/lab.txt").read_text())
        self.book = yaml.safe_load((lab / "tiny-hybrid.yaml").read_text())

    @contextmanager
    def serving(self) -> Iterator[None]:
        """All of them deployed; `up` has nothing more to do."""
        try:
            docker("network", "create", NETWORK)
            self._seed()
            self.say(f"starting {len(self.names)} hosts of one image")
            with ThreadPoolExecutor(STARTING) as pool:
                ports = dict(zip(self.names, pool.map(self._boot, self.names), strict=True))
            self._write(ports)
            self.say(f"deploying them, {DEPLOYING} at once")
            self.run("up", "--all", "--yes", "--no-canary", "--parallel", str(DEPLOYING))
            yield
        finally:
            if not self.kept:
                self._remove()

    def _seed(self) -> None:
        """One deployed host, without the server that a lab host finds at its first start."""
        self.say("deploying one host, the image of the others")
        docker(
            "run", "-d", "--no-healthcheck", "--name", f"{NETWORK}-hub", "--network", NETWORK,
            "--network-alias", "hub", "deployer-lab-hub",
        )  # fmt: skip
        ports = {"seed": self._boot("seed", "deployer-lab-host")}
        docker("exec", f"{NETWORK}-seed", "/usr/lib/lab/fault", "old-server", "off")
        self._write(ports)
        self.run("up", "seed", "--yes")
        self.run("down", "seed", "--yes")
        docker("commit", f"{NETWORK}-seed", IMAGE)
        docker("rm", "-f", "-v", f"{NETWORK}-seed")

    @staticmethod
    def _boot(name: str, image: str = IMAGE) -> tuple[int, int]:
        """Starts one host; the ports of its sshd and its guest's, once it has booted."""
        keys = f"{BUILD / 'keys' / 'kpro5'}:/etc/lab/keys:ro"
        own = f"{NETWORK}-{name}"
        docker(
            "run", "-d", "--name", own, "--hostname", name, "--network", NETWORK,
            *OPTIONS, "-v", keys, image,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        look = ["docker", "exec", own, "test", "-e", "/run/lab/ready"]
        while subprocess.run(look, check=False).returncode != 0:
            if time.monotonic() > deadline:
                sys.exit(f"{name} has not booted after 300 s")
            time.sleep(0.5)
        host, guest = (docker("port", own, port).split("\n")[0] for port in ("22", "2222"))
        return int(host.rpartition(":")[2]), int(guest.rpartition(":")[2])

    def _write(self, ports: dict[str, tuple[int, int]]) -> None:
        """Inventory, playbook and known_hosts for these hosts."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        hub = docker("inspect", "-f", form, f"{NETWORK}-hub")
        self.book["download"]["endpoint"] = f"http://{hub}:8900"
        self.book["gates"] = GATES
        self.book["serve"].update(ready_timeout_s=600, silence_timeout_s=300)
        (self.folder / "playbooks/tiny-hybrid.yaml").write_text(yaml.safe_dump(self.book))
        known = self.folder / "known_hosts"
        entry = yaml.safe_load((ROOT / "docker/inventory/kpro5.yaml").read_text())["hosts"]["kpro5"]
        lines, hosts, self.pairs = [], {}, []
        for name, (host, guest) in ports.items():
            ssh = {
                "address": "127.0.0.1",
                "identity_file": str(self.user_key),
                "known_hosts": str(known),
                "connect_timeout_s": 60,
            }
            hosts[name] = {
                **{k: v for k, v in entry.items() if k not in ("ssh", "containers", "deployments")},
                "ssh": {**ssh, "port": host},
                "containers": {129: {"ssh": {**ssh, "port": guest}, "restart": "allowed"}},
                "deployments": {
                    "tiny": {"container": 129, "playbook": "tiny-hybrid", "variant": "no-mtp"}
                },
            }
            for part, port in (("host", host), ("guest", guest)):
                public = BUILD / "keys/kpro5" / part / "ssh_host_ed25519_key.pub"
                lines.append(f"[127.0.0.1]:{port} {' '.join(public.read_text().split()[:2])}")
                self.pairs.append((Where(part), "127.0.0.1", port))
        known.write_text("\n".join(lines) + "\n")
        (self.inventory / "many.yaml").write_text(yaml.safe_dump({"hosts": hosts}))

    @staticmethod
    def _remove() -> None:
        every = docker("ps", "-aq", "--filter", f"name=^{NETWORK}-", check=False).split()
        if every:
            docker("rm", "-f", "-v", *every, check=False)
        docker("network", "rm", NETWORK, check=False)
        docker("rmi", "-f", IMAGE, check=False)
