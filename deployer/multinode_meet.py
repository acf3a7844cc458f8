"""Whether the nodes of one server can meet: rank 0's address, tried from the others' targets.

SGLang's ranks wait ten minutes for each other before they say anything, and the old server has
ended by then. So rank 0's target listens for some seconds where the store of the launch will, and
the others knock: a firewall, a name that is not known there, the address of another network card
and a port that is taken come to light while the old server still serves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deployer.errors import StepBlocked
from deployer.events import Note
from deployer.multinode_follower import job_of
from deployer.multinode_node import NodeRun
from deployer.multinode_threads import together
from deployer.multinode_told import Failed
from deployer.remote.transport import Answer
from deployer.rollback_choice import part_of
from deployer.shell import quote
from deployer.steps.server_agent import PYTHON
from deployer.steps.server_facts import ServerFact

LISTEN_S = 20.0
KNOCK_S = 15.0
"""Shorter: a node that is told to knock a little later is heard all the same."""
PATIENCE_S = 5.0
"""How long an answer may take once the connection stands: a full machine is slow to give one."""

LISTEN = """\
import socket, sys, time
port, seconds, count, word = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ends, said = time.monotonic() + seconds, ""
for family in (socket.AF_INET6, socket.AF_INET):
    try:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", port))
        server.listen(16)
        break
    except OSError as error:
        said = str(error)
else:
    print("taken", said)
    sys.exit(0)
while count and time.monotonic() < ends:
    server.settimeout(max(0.1, ends - time.monotonic()))
    try:
        guest, _ = server.accept()
        guest.settimeout(2)
        guest.sendall(word.encode())
        # A rank that an earlier run left waiting comes in, too, and says nothing like it.
        count -= guest.recv(64) == word.encode()
        guest.close()
    except OSError:
        continue
print("listened")
"""
KNOCK = """\
import socket, sys, time
host, port, seconds, word = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
patience = float(sys.argv[5])
ends, last = time.monotonic() + seconds, "timed out"
while time.monotonic() < ends:
    try:
        with socket.create_connection((host, port), timeout=3) as guest:
            guest.settimeout(patience)
            heard = b""
            try:
                while len(heard) < len(word):
                    more = guest.recv(64)
                    if not more:
                        break
                    heard += more
                if heard == word.encode():
                    guest.sendall(heard)
            except OSError:
                pass
        print("met" if heard == word.encode() else "open")
        sys.exit(0)
    except socket.gaierror as error:
        print("lost", error)
        sys.exit(0)
    except OSError as error:
        last = error
        time.sleep(0.3)
print("lost", last)
"""


@dataclass(frozen=True)
class Heard:
    """What a target said: met|open|lost|listened|taken, with the reason; '' when it could not."""

    word: str
    reason: str = ""


def heard(answer: Answer) -> Heard:
    """Of one exec; what is not understood says nothing."""
    for line in answer.text.splitlines():
        word, _, reason = line.partition(" ")
        if word in ("met", "open", "lost", "listened", "taken"):
            return Heard(word, reason)
    return Heard("", (answer.error_text.strip() or f"exit code {answer.exit}")[:200])


def meet(nodes: Sequence[NodeRun]) -> None:
    """Raises Failed with StepBlocked when they cannot, or when a node cannot be asked."""
    leader, others = nodes[0], nodes[1:]
    node = leader.want.node
    if node is None:
        return
    address, _, port = node.init.rpartition(":")
    # The store of a launch that runs says nothing to a stranger.
    patience = 0.5 if _ours(leader, port) else PATIENCE_S
    word, said = secrets.token_hex(8), dict[str, Heard]()

    def listen() -> None:
        words = [port, str(LISTEN_S), str(len(others)), word]
        said[leader.host] = heard(_run(leader, LISTEN, words, LISTEN_S))

    def knock(one: NodeRun) -> Callable[[], None]:
        def work() -> None:
            words = [address.strip("[]"), port, str(KNOCK_S), word, str(patience)]
            said[one.host] = heard(_run(one, KNOCK, words, KNOCK_S))

        return work

    works = {leader.host: listen, **{one.host: knock(one) for one in others}}
    if errors := together(works, leader.options.cancel):
        raise Failed(errors)
    if problems := verdict(nodes, said):
        raise Failed(problems)
    for one in nodes:
        if not said[one.host].word:
            told = f"whether the nodes can meet at {node.init} was not tried: "
            told += said[one.host].reason
            one.bus.emit(Note(one.host, one.want.id, "launch", "warning", told))


def verdict(nodes: Sequence[NodeRun], said: Mapping[str, Heard]) -> dict[str, StepBlocked]:
    """Host -> why it cannot meet the others. Pure."""
    leader, others = nodes[0], nodes[1:]
    init = leader.want.node.init if leader.want.node is not None else ""
    mine = said[leader.host]
    if mine.word == "taken" and not _ours(leader, init.rpartition(":")[2]):
        return {
            leader.host: StepBlocked(
                f"the port at which its nodes meet, {init.rpartition(':')[2]}, is taken on rank 0 "
                f"({mine.reason})",
                where=f"{leader.want.id} launch",
                fix="`ss -tlnp` there tells by whom: stop it, or choose another serve.dist_port",
            )
        }
    problems = {}
    for one in others:
        theirs = said[one.host]
        what = ""
        if theirs.word == "lost":
            what = f"rank 0 is not reached at {init}: {theirs.reason}"
        elif theirs.word == "open" and mine.word != "taken":
            what = f"at {init} answers something else than rank 0 on {leader.host}"
        if what:
            problems[one.host] = StepBlocked(
                f"{what}; nothing was stopped",
                where=f"{one.want.id} launch",
                fix="open this and all ports above 1024 between the nodes, or set `node_address` "
                f"of {leader.want.id} to the address at which {one.host} reaches it",
            )
    return problems


def _ours(leader: NodeRun, port: str) -> bool:
    """Is it the launch that runs which has the port? One without a record may be."""
    server = leader.facts.get(ServerFact)
    if server is not None and server.leftovers:
        # What a dead launch of ours left may hold it: the step `stop` ends that.
        return True
    job = job_of(leader.facts)
    launch = part_of(leader.own, job.identity.id) if job is not None else None
    if launch is None:
        return job is not None
    flags = dict(zip(launch.argv, launch.argv[1:], strict=False))
    return flags.get("--dist-init-addr", "").rpartition(":")[2] == port


def _run(node: NodeRun, code: str, words: Sequence[str], seconds: float) -> Answer:
    return node.transports[node.want.guest].run(
        f'{PYTHON}shift\nexec "$python" -I -c {quote(code)} "$@"\n',
        args=[node.want.playbook.engine.venv, *words],
        timeout_s=seconds + 20,
    )
