"""Deployed hosts besides the lab's two: containers of one image, each with a guest and a server.

One host of the lab is deployed and becomes the image of the others. Each publishes the sshd of the
host and that of the guest on a port of 127.0.0.1, as the lab's own two hosts do, and has an address
of its own in a network of the project, which it shares with a hub.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lab import LAB, Machine, Result, run

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "docker" / ".build"
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
"""Short ones: what the gates find is tested elsewhere."""
STARTING = 4
"""Hosts that boot at once."""

Say = Callable[[str], None]


class BrokenClone(RuntimeError):
    """Docker, or a host, did not do what was asked of it."""


def docker(*words: str, check: bool = True) -> str:
    """Docker's answer. Raises BrokenClone."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise BrokenClone(f"docker {' '.join(words)}\n{done.stderr}")
    return done.stdout.strip()


def environ() -> dict[str, str]:
    """Plain lines, and this checkout."""
    return {**os.environ, "CI": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Clone:
    """Where a host is reached: two ports of 127.0.0.1, and its address among the others."""

    host_port: int
    guest_port: int
    address: str


class Clones:
    """The hosts, and the controller's folder: inventory, playbook, state.

    `book` is the playbook and `entry` the deployment `tiny` of a host; both may be changed before
    `write`.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        project: str,
        *,
        kept: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.folder, self.names, self.project = folder, list(names), project
        self.kept, self.say = kept, say
        self.inventory = folder / "inventory"
        self.user_key = BUILD / "id_ed25519"
        self.at: dict[str, Clone] = {}
        self.inventory.mkdir()
        (folder / "playbooks" / "locks").mkdir(parents=True)
        lab = ROOT / "docker" / "playbooks"
        (folder / "playbooks/locks/lab.txt").write_text((lab / "locks/lab.txt").read_text())
        self.book: dict[str, Any] = yaml.safe_load((lab / "tiny-hybrid.yaml").read_text())
        self.book["gates"] = GATES
        self.book["serve"].update(ready_timeout_s=600, silence_timeout_s=300)
        self.entry: Callable[[str], dict[str, Any]] = lambda name: {"variant": "no-mtp"}

    def deploy(self, *words: str) -> list[str]:
        """A command line of `deploy`."""
        return [sys.executable, "-c", "from deployer.cli.main import main; main()",
                "-i", str(self.inventory), *words]  # fmt: skip

    def run(self, *words: str, timeout_s: float = 300) -> Result:
        """One run of `deploy` to its end."""
        return run(self.deploy(*words), timeout_s=timeout_s, **environ())

    def guest(self, name: str) -> Machine:
        """Its container 129."""
        return Machine(name, 129, f"{self.project}-")

    def fault(self, name: str, fault: str, on: bool = True) -> None:
        """Switches a fault of this host."""
        words = ("/usr/lib/lab/fault", fault, "on" if on else "off")
        docker("exec", f"{self.project}-{name}", *words)

    @contextmanager
    def started(self) -> Iterator[None]:
        """All have booted, with venv and weights, and serve nothing."""
        try:
            self._remove()
            self._images()
            docker("network", "create", self.project)
            self._seed()
            self.say(f"starting {len(self.names)} hosts of one image")
            with ThreadPoolExecutor(STARTING) as pool:
                booted = pool.map(lambda name: self._boot(name, self._image), self.names)
                self.at = dict(zip(self.names, booted, strict=True))
            self.write()
            yield
        finally:
            if not self.kept:
                self._remove()

    def write(self) -> None:
        """Inventory, playbook and known_hosts as they shall be now."""
        hub = self._address("hub")
        self.book["download"]["endpoint"] = f"http://{hub}:8900"
        (self.folder / "playbooks/tiny-hybrid.yaml").write_text(yaml.safe_dump(self.book))
        known = self.folder / "known_hosts"
        kpro5 = yaml.safe_load((ROOT / "docker/inventory/kpro5.yaml").read_text())["hosts"]["kpro5"]
        lines, hosts = [], {}
        for name, clone in self.at.items():
            ssh = {
                "address": "127.0.0.1",
                "identity_file": str(self.user_key),
                "known_hosts": str(known),
                "connect_timeout_s": 60,
            }
            guest = {"ssh": {**ssh, "port": clone.guest_port}, "restart": "allowed"}
            hosts[name] = {
                "kind": kpro5["kind"],
                "gpus": copy.deepcopy(kpro5["gpus"]),
                "ssh": {**ssh, "port": clone.host_port},
                "containers": {129: guest},
                "deployments": {
                    "tiny": {"container": 129, "playbook": "tiny-hybrid", **self.entry(name)}
                },
            }
            for part, port in (("host", clone.host_port), ("guest", clone.guest_port)):
                public = BUILD / "keys/kpro5" / part / "ssh_host_ed25519_key.pub"
                lines.append(f"[127.0.0.1]:{port} {' '.join(public.read_text().split()[:2])}")
        known.write_text("\n".join(lines) + "\n")
        (self.inventory / "clones.yaml").write_text(yaml.safe_dump({"hosts": hosts}))

    @property
    def _image(self) -> str:
        return f"{self.project}-host"

    def _images(self) -> None:
        """Those of the lab, built when they are missing."""
        images = ("deployer-lab-host", "deployer-lab-hub")
        if run(["docker", "image", "inspect", *images]).exit != 0:
            self.say("building the lab's images")
            run(["sh", str(LAB), "setup"], timeout_s=900).ok()

    def _seed(self) -> None:
        """One deployed host, without the server that a lab host finds at its first start."""
        self.say("deploying one host, the image of the others")
        docker(
            "run", "-d", "--no-healthcheck", "--name", f"{self.project}-hub",
            "--network", self.project, "--network-alias", "hub", "deployer-lab-hub",
        )  # fmt: skip
        book, entry = self.book, self.entry
        self.book = {k: v for k, v in copy.deepcopy(book).items() if k != "nodes"}
        self.entry = lambda name: {"variant": "no-mtp"}
        self.at = {"seed": self._boot("seed", "deployer-lab-host")}
        self.fault("seed", "old-server", on=False)
        self.write()
        # Without launch and gates: a server does not live on in an image.
        for step in ("driver", "gpus", "container", "venv", "shards"):
            self.until_done("up", "seed", "--yes", "--only", step)
        self.book, self.entry = book, entry
        docker("commit", f"{self.project}-seed", self._image)
        docker("rm", "-f", "-v", f"{self.project}-seed")

    def until_done(self, *words: str) -> None:
        """In up to three runs: a full machine runs over a deadline now and then.

        Raises BrokenClone with the last run's words.
        """
        for _ in range(3):
            done = self.run(*words, timeout_s=900)
            if done.exit == 0:
                return
        tail = (done.out + done.err)[-6000:]
        raise BrokenClone(f"deploy {' '.join(words)}: exit {done.exit}\n{tail}")

    def _boot(self, name: str, image: str) -> Clone:
        """Starts one host; returns once it has booted."""
        keys = f"{BUILD / 'keys' / 'kpro5'}:/etc/lab/keys:ro"
        own = f"{self.project}-{name}"
        docker(
            "run", "-d", "--name", own, "--hostname", name, "--network", self.project,
            *OPTIONS, "-v", keys, image,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        look = ["docker", "exec", own, "test", "-e", "/run/lab/ready"]
        while subprocess.run(look, check=False).returncode != 0:
            if time.monotonic() > deadline:
                raise BrokenClone(f"{name} has not booted after 300 s")
            time.sleep(0.5)
        host, guest = (docker("port", own, port).split("\n")[0] for port in ("22", "2222"))
        address = self._address(name)
        return Clone(int(host.rpartition(":")[2]), int(guest.rpartition(":")[2]), address)

    def _address(self, name: str) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return docker("inspect", "-f", form, f"{self.project}-{name}")

    def _remove(self) -> None:
        every = docker("ps", "-aq", "--filter", f"name=^{self.project}-", check=False).split()
        if every:
            docker("rm", "-f", "-v", *every, check=False)
        docker("network", "rm", self.project, check=False)
        docker("rmi", "-f", self._image, check=False)


def pairs(clones: Mapping[str, Clone]) -> list[tuple[str, int]]:
    """`host` or `guest`, and the port, of every sshd."""
    return [
        pair
        for clone in clones.values()
        for pair in (("host", clone.host_port), ("guest", clone.guest_port))
    ]
