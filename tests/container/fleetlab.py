"""Many targets on this machine: sshd processes, each with a /var/lib/deployer of its own.

A target is one sshd in a mount namespace where a folder of the test lies on /var/lib/deployer.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from sshd import SSHD, WHY_NOT, children, free_port, make_key, wait_for_port

ROOT = Path(__file__).resolve().parents[2]
OWN = "/var/lib/deployer"
MOUNT = 'mount --make-rprivate / && mount --bind "$1" "$2" && shift 2 && exec "$@"'
FULL = (
    'mount --make-rprivate / && mount -t tmpfs -o size=64k,mode=700 none "$2" && '
    '{ head -c 1000000 /dev/zero >"$2/ballast" 2>/dev/null || :; } && shift 2 && exec "$@"'
)


def why_not() -> str:
    """Why there can be no such targets here; '' when there can."""
    if WHY_NOT:
        return WHY_NOT
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare, for a mount namespace a target"
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "no mount namespaces here (unshare -m)"


@dataclass
class Target:
    """One sshd. `own` is what its sessions see as /var/lib/deployer."""

    name: str
    port: int
    own: Path
    argv: list[str]
    process: subprocess.Popen[bytes]

    @property
    def lock_is_free(self) -> bool:
        """Does nobody hold the host lock?"""
        return not (self.own / "lock").exists()


class Fleet:
    """Targets and the inventory that describes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inventory = folder / "inventory"
        self.targets: dict[str, Target] = {}
        self._ports: dict[str, int] = {}
        self._entries: dict[str, dict[str, object]] = {}
        self.user_key = make_key(folder / "keys" / "user")
        self.host_key = make_key(folder / "keys" / "host")
        self.other_key = make_key(folder / "keys" / "other")
        shutil.copytree(ROOT / "docker" / "playbooks", folder / "playbooks")
        self.inventory.mkdir()

    def start(
        self,
        names: list[str],
        *,
        full: frozenset[str] = frozenset(),
        lines: Sequence[str] = (),
        over: Mapping[str, str] | None = None,
    ) -> None:
        """Starts targets; those of `full` have no room left below /var/lib/deployer.

        `lines`: those of sshd_config that go before ours. `over`: what these files of the machine
        hold for the sshd and its sessions.
        """
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        Path(OWN).mkdir(mode=0o700, parents=True, exist_ok=True)
        authorized = self.folder / "authorized_keys"
        shutil.copy(self.user_key.with_name("user.pub"), authorized)
        for name in names:
            port, own = free_port(), self.folder / "own" / name
            own.mkdir(parents=True)
            text = (
                *lines,
                f"Port {port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {self.host_key}",
                f"AuthorizedKeysFile {authorized}",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "UsePAM no",
                "StrictModes no",
                "PidFile none",
                "UseDNS no",
                # Without what this machine's root has in ~/.bashrc.
                f"SetEnv HOME={self.folder}",
            )
            config = self.folder / f"{name}.conf"
            config.write_text("\n".join(text) + "\n")
            argv = [str(SSHD), "-D", "-e", "-f", str(config)]
            script = FULL if name in full else MOUNT
            for number, (path, held) in enumerate((over or {}).items()):
                laid = self.folder / f"{name}.over{number}"
                laid.write_text(held)
                words = f"{shlex.quote(str(laid))} {shlex.quote(path)}"
                script = script.replace(" && shift", f" && mount --bind {words} && shift", 1)
            argv = ["unshare", "-m", "sh", "-c", script, "sh", str(own), OWN, *argv]
            self.targets[name] = Target(name, port, own, argv, self._run(name, argv))
            self._ports[name] = port
        for target in self.targets.values():
            wait_for_port(target.port, target.process)

    def _run(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def cut(self, name: str) -> None:
        """The target is gone, with its sessions, as by a power cut."""
        process = self.targets[name].process
        for pid in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()

    def boot(self, name: str) -> None:
        """It is there again, with its files."""
        target = self.targets[name]
        target.process = self._run(name, target.argv)
        wait_for_port(target.port, target.process)

    def place(self, name: str, port: int, **ssh: object) -> None:
        """From now on this name of the inventory is another port, or reached otherwise."""
        self._ports[name] = port
        self._entries[name] = dict(ssh)

    def forget(self, name: str) -> None:
        """The inventory has it no more."""
        del self._ports[name]
        self._entries.pop(name, None)

    def write(
        self,
        changed_keys: Mapping[str, Path] | None = None,
        gpus: Mapping[str, str] | None = None,
    ) -> None:
        """Writes inventory and known_hosts; `changed_keys`: what is recorded for some names.

        `gpus`: the GPU that some names have.
        """
        known, hosts = [], {}
        for name, port in self._ports.items():
            key = (changed_keys or {}).get(name, self.host_key)
            kind, blob, *_ = key.with_name(f"{key.name}.pub").read_text().split()
            address = self._entries.get(name, {}).get("address", "127.0.0.1")
            known.append(f"[{address}]:{port} {kind} {blob}")
            hosts[name] = {
                "kind": "plain",
                "ssh": {
                    "address": "127.0.0.1",
                    "port": port,
                    "user": "root",
                    "identity_file": str(self.user_key),
                    "known_hosts": str(self.folder / "known_hosts"),
                    "connect_timeout_s": 15,
                    **self._entries.get(name, {}),
                },
                "gpus": [{"address": (gpus or {}).get(name, "0000:21:00.0")}],
                "deployments": {"m": {"playbook": "tiny-hybrid"}},
            }
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")
        (self.inventory / "fleet.yaml").write_text(yaml.safe_dump({"hosts": hosts}))

    def stop(self) -> None:
        """Ends every target and its sessions."""
        for name in self.targets:
            self.cut(name)


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """An empty fleet; its targets end with the block."""
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.stop()
