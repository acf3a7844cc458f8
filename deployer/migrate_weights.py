"""Weights for the destination: from the source by ssh, or from the Hub, whichever is faster now.

For the copy a key pair is made on the destination, where the private half stays. Its public half is
authorized on the source with `restrict`, `from=` the destination's addresses, and one command: the
lending agent, which gives out the files of the model's list and nothing else. The source's host
keys come through our own connection, so no key is trusted on first use. All of it is taken away
after the copy, and when the migration is taken back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepFailed, Unreachable
from deployer.inventory import Ssh
from deployer.migrate_key import AUTHORIZE, HOST_KEYS, key_line, known_hosts
from deployer.migrate_side import Side
from deployer.playbook import Method, Peer
from deployer.remote.files import write_atomic
from deployer.remote.transport import Answer, Transport
from deployer.shell import words
from deployer.state import Manifest
from deployer.steps.shards_agent import run_agent
from deployer.steps.shards_facts import find_python
from deployer.steps.shards_figures import size_text

FOLDER = "/var/lib/deployer/lending"
PROBE_S = 3.0
"""How long each source is measured."""
PROBE_SHARE = 20
"""At most one in so many bytes of the model is spent on measuring a source."""
LEAST_PROBE = 64 << 20
"""So many may be spent in any case: fewer are over before the connections are at speed."""
LENDING_S = 7 * 86400.0
"""The right to copy ends by itself after this, should nobody ever take it away."""

# $1 folder, $2 comment of the key.
MAKE_KEY = r"""umask 077
mkdir -p "$1" && cd "$1" || exit 1
command -v ssh >/dev/null && command -v ssh-keygen >/dev/null || {
  echo "there is no ssh client" >&2; exit 69; }
[ -s key ] && [ -s key.pub ] || {
  made=
  for kind in ed25519 ecdsa rsa; do  # some policies forbid the first
    rm -f key key.pub
    ssh-keygen -q -t "$kind" -N '' -C "$2" -f key </dev/null && made=1 && break
  done
  [ -n "$made" ] || exit 1
}
echo "=key"
cat key.pub
"""
ADDRESSES = r"""{ ip -o addr show scope global 2>/dev/null || :; } |
  awk '{ sub("/.*", "", $4); print $4 }'
hostname -I 2>/dev/null | tr ' ' '\n'
exit 0
"""
REMOVE = 'rm -rf "$1/$2"; rmdir "$1" 2>/dev/null; exit 0\n'


REFUSED = " (AllowUsers or the like there, or it sees the destination under another address: NAT)"


class LendingPeer(Peer):
    """A peer that lends: see agents/fetch/manifest.Peer."""

    known_hosts: str
    lends: bool = True


@dataclass(frozen=True)
class Rate:
    """What a source gave. `problem` says why it gave nothing."""

    bytes_per_s: float
    problem: str = ""

    def __str__(self) -> str:
        return self.problem or f"{size_text(self.bytes_per_s)}/s"


def choose(peer: Rate, hub: Rate) -> str:
    """`peer` or `hub`: the faster one; `relay`, through this machine, when both gave nothing."""
    if peer.bytes_per_s <= 0 and hub.bytes_per_s <= 0:
        return "relay"
    return "peer" if peer.bytes_per_s >= hub.bytes_per_s else "hub"


def with_source(want: Deployment, peer: Peer | None, first: str) -> Deployment:
    """The destination with the chosen source first; the other stays as the way out."""
    rules = want.playbook.download
    others: list[Method] = [method for method in rules.methods if method != "peer"]
    if peer is None:
        return want
    methods: list[Method] = ["peer", *others] if first == "peer" else [*others, "peer"]
    download = rules.model_copy(update={"methods": methods, "peer": peer})
    playbook = want.playbook.model_copy(update={"download": download})
    return dataclasses.replace(want, playbook=playbook)


@dataclass(frozen=True)
class Login:
    """Where the destination logs in on the source, and how the files are reached from there."""

    ssh: Ssh
    vmid: int | None
    """Through `pct exec` into this container; None: the files are on that machine."""

    @property
    def address(self) -> str:
        """As other hosts reach it."""
        return self.ssh.peer_address or self.ssh.address

    @property
    def port(self) -> int:
        """As other hosts reach it."""
        if self.ssh.peer_port is not None:
            return self.ssh.peer_port
        return 22 if self.ssh.peer_address else self.ssh.port or 22


def login_of(want: Deployment) -> Login:
    """The container itself where it has an SSH of its own, else its host."""
    container = want.container
    if container is not None and container.ssh is not None:
        return Login(container.ssh, None)
    return Login(want.host.ssh, want.vmid)


class Lending:
    """The right to copy, from its making to its end. `ident`: the migration's id."""

    def __init__(self, source: Side, destination: Side, ident: str) -> None:
        self.source, self.destination, self.ident = source, destination, ident
        self.tag = f"deployer-migrate-{ident}"
        self.folder = f"{FOLDER}/{ident}"

    @property
    def door(self) -> Transport:
        """The machine of the source that the destination logs in to."""
        side = self.source
        return side.guest if login_of(side.want).vmid is None else side.host

    def open(self, manifest: Manifest) -> Peer:
        """Makes the key and allows it; again when it is there. Raises DeployError with why not."""
        source, there = self.source.want, login_of(self.source.want)
        public = self._text(
            self.destination.guest.run(MAKE_KEY, args=(self.folder, self.tag), timeout_s=30), "=key"
        )
        addresses = self._addresses()
        python = self._python()
        files = [file.model_dump() for file in manifest.files]
        shelf = {
            "path": source.playbook.model.path,
            "repo": manifest.repo,
            "commit": manifest.commit,
            "files": files,
            "until": time.time() + LENDING_S,
        }
        agent = resources.files("deployer.agents.fetch").joinpath("lend.py").read_bytes()
        write_atomic(self.source.guest, f"{self.folder}/lend.py", agent)
        write_atomic(self.source.guest, f"{self.folder}/manifest.json", json.dumps(shelf).encode())
        command = words([python, "-I", "-S", f"{self.folder}/lend.py", self.folder])
        if there.vmid is not None:
            command = f"pct exec {there.vmid} -- {command}"
        try:
            line = key_line(public, f"exec {command}", addresses, self.tag)
        except ValueError as error:
            raise StepFailed(str(error), where=self.source.want.id) from error
        self._authorize(line, addresses[0])
        known = known_hosts(self.door.run(HOST_KEYS).text)
        if not known:
            raise StepFailed("its sshd's public host keys were not found", where=self.door.name)
        write_atomic(self.destination.guest, f"{self.folder}/known_hosts", known.encode(), 0o600)
        return self.peer()

    def peer(self) -> Peer:
        """How the agent on the destination reaches it."""
        there = login_of(self.source.want)
        return LendingPeer(
            address=there.address,
            port=there.port,
            user=there.ssh.user,
            path=self.source.want.playbook.model.path,
            identity_file=f"{self.folder}/key",
            known_hosts=f"{self.folder}/known_hosts",
        )

    def close(self, *, borrower: bool = True) -> None:
        """Takes key, agent and authorization away. Raises Unreachable, StepFailed.

        Without `borrower` the destination, which is stopped, keeps a key that opens nothing.
        """
        callers: list[str] = []
        if borrower:
            # A `Match Address` of the source's sshd may name another file for this caller.
            with contextlib.suppress(Unreachable):
                callers = self._addresses()
        self._authorize("", *callers[:1])
        guests = (self.source.guest, self.destination.guest)
        for transport in guests if borrower else guests[:1]:
            transport.run(REMOVE, args=(FOLDER, self.ident), timeout_s=30)

    def drop(self) -> None:
        """Takes the private half away; what the source still allows opens nothing then."""
        self.destination.guest.run(REMOVE, args=(FOLDER, self.ident), timeout_s=30)

    def _authorize(self, line: str, caller: str = "127.0.0.1") -> None:
        args = (self.tag, caller)
        answer = self.door.run(AUTHORIZE, args=args, stdin=line.encode(), timeout_s=30)
        if answer.exit != 0:
            told = (answer.error_text.strip() or f"exit {answer.exit}").splitlines()[-1]
            raise StepFailed(f"authorized_keys cannot be written: {told}", where=self.door.name)

    def _addresses(self) -> list[str]:
        side = self.destination
        found: list[str] = []
        for transport in dict.fromkeys((side.guest, side.host)):
            found += transport.run(ADDRESSES).text.split()
        return list(dict.fromkeys(found))

    def _python(self) -> str:
        script = (
            find_python(self.source.want.playbook.engine.venv) + 'printf "=python\\n%s\\n" "$py"\n'
        )
        python = self._text(self.source.guest.run(script), "=python")
        if not python:
            raise StepFailed("there is no python3 (3.9 or newer)", where=self.source.guest.name)
        return python

    @staticmethod
    def _text(answer: Answer, mark: str) -> str:
        found, _, rest = answer.text.partition(f"{mark}\n")
        if answer.exit != 0 or (not rest and not answer.text.endswith(f"{mark}\n")):
            told = (answer.error_text.strip() or found or f"exit {answer.exit}").splitlines()[-1]
            raise StepFailed(f"the copy from the source cannot be set up: {told}")
        return rest.strip()


def measure(destination: Side, want: Deployment, manifest: Manifest, source: str) -> Rate:
    """How fast bytes come from `peer` or `hub`, by a few seconds of them."""
    most = max(LEAST_PROBE, sum(file.size for file in manifest.files) // PROBE_SHARE)
    rows: list[Mapping[str, Any]] = []
    try:
        said = run_agent(
            destination.guest,
            want,
            manifest,
            ["measure", source, str(PROBE_S), str(most)],
            timeout_s=PROBE_S + 60.0,
        )
        rows = list(said.rows)
    except DeployError as error:
        return Rate(0.0, error.what)
    row = next((row for row in rows if "bytes_per_s" in row), None)
    if row is None:
        return Rate(0.0, said.error or f"exit {said.exit}")
    rate = float(row["bytes_per_s"])
    problem = "" if rate > 0 else str(row.get("error") or "no byte came")
    if source == "peer" and "Permission denied" in problem:
        problem += REFUSED
    return Rate(rate, problem)
