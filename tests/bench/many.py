"""Fifty hosts: `up --all` with nothing to do and `status --all` beside xargs ssh, pyinfra, ansible.

    .venv/bin/python tests/bench/many.py [--hosts 50] [--rounds 3] [--minutes 10] [--bare] [--write]

Needs root and Docker (`sh docker/lab.sh setup`). The targets are containers of one image of the
lab, each a deployed host with a guest, two sshds on ports of loopback, and a server of its own; so
`up` is all of `up`, and the bench ends when it finds anything to do. With --bare they are sshd
processes, each in a mount namespace with a /var/lib/deployer of its own; nothing is deployed there,
and what is measured is `plan`.

All contenders run the same probe texts over new connections, so many targets at once (--at-once);
pyinfra and ansible-core come from a venv of their own (requirements.txt). `plan`, `up` and `status`
also parse, compare and decide. Wall time belongs to the targets as well, which run on the same
machine; CPU and memory are the contender's alone, with its children. No round is begun that would
not end within --minutes of the start.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT / "tests" / "container"))

from clones import Clones, environ, pairs  # noqa: E402
from converge import PEERS, peers  # noqa: E402
from fleetlab import fleet  # noqa: E402
from measure import Cost, cost  # noqa: E402
from results import keep  # noqa: E402

from deployer.catalog import Catalog  # noqa: E402
from deployer.model import Where  # noqa: E402
from deployer.remote.batch import batch_script  # noqa: E402
from deployer.steps.order import all_steps  # noqa: E402

BASELINE = "xargs -P ssh sh -s"
TOPIC = "Many hosts"
BEGAN = time.monotonic()
DEPLOYING = 8
"""Hosts at once while the targets are made: more run over deadlines on two cores."""


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


@dataclass
class World:
    """What the contenders are given. `pairs`: which part of the probes goes to which port."""

    folder: Path
    inventory: Path
    user_key: Path
    pairs: list[tuple[Where, str, int]]

    def deploy(self, *words: str) -> list[str]:
        """The command line of one of ours."""
        return [sys.executable, "-c", "from deployer.cli.main import main; main()",
                "-i", str(self.inventory), *words]  # fmt: skip


@contextmanager
def sshds(folder: Path, count: int) -> Iterator[World]:
    """So many sshd processes on loopback, nothing deployed."""
    with fleet(folder / "fleet") as made:
        made.start([f"h{number:02}" for number in range(1, count + 1)])
        made.write()
        (folder / "known_hosts").write_text((made.folder / "known_hosts").read_text())
        places = [(Where.HOST, "127.0.0.1", one.port) for one in made.targets.values()]
        yield World(folder, made.inventory, made.user_key, places)


@contextmanager
def containers(folder: Path, count: int, kept: bool) -> Iterator[World]:
    """So many deployed hosts, each serving: `up` has nothing more to do."""
    names = [f"h{number:02}" for number in range(1, count + 1)]
    clones = Clones(folder, names, "deployer-many", kept=kept, say=say)
    with clones.started():
        say(f"{count} hosts start their servers, {DEPLOYING} at once")
        many = ("--all", "--yes", "--no-canary", "--parallel", str(DEPLOYING))
        clones.until_done("up", *many)
        places = [(Where(part), "127.0.0.1", port) for part, port in pairs(clones.at)]
        yield World(folder, clones.inventory, clones.user_key, places)


def texts(world: World) -> dict[Where, str]:
    """What `up` asks a host and a guest, as two scripts."""
    want, *_ = Catalog.load(world.inventory).select([], True)
    probes = [probe for step in all_steps() for probe in step.probes(want)]
    return {
        where: batch_script([p for p in probes if p.where is where], "0123456789abcdef")
        for where in Where
    }


def contenders(world: World, up: Sequence[str], at_once: int) -> dict[str, Callable[[], Cost]]:
    """Each name and one run of it."""
    folder, scripts = world.folder, texts(world)
    for where, text in scripts.items():
        (folder / f"{where.value}.sh").write_text(text)
    options = f"-F none -T -i {world.user_key} -o BatchMode=yes -o UserKnownHostsFile="
    options += f"{folder / 'known_hosts'} -o StrictHostKeyChecking=yes"
    (folder / "ssh.list").write_text(
        "".join(f"{port} {address} {where.value}.sh\n" for where, address, port in world.pairs)
    )
    one = f'ssh {options} -p "$0" "root@$1" sh -s <"$2" >/dev/null'
    quick = one.replace("ssh ", "ssh -o KexAlgorithms=curve25519-sha256 ", 1)
    hosts = max(1, at_once // max(1, len({where for where, _, _ in world.pairs})))

    def xargs(each: str) -> Callable[[], Cost]:
        argv = ["sh", "-c", f'xargs -P {at_once} -L 1 sh -c "$1" <ssh.list', "sh", each]
        return lambda: cost(argv, cwd=folder)

    def ours(*words: str) -> Callable[[], Cost]:
        argv = world.deploy(*words, "--parallel", str(hosts))
        return lambda: cost(argv, env=environ())

    return {
        f"deploy {' '.join(up)}": ours(*up),
        "deploy status --all": ours("status", "--all"),
        BASELINE: xargs(one),
        f"{BASELINE}, curve25519": xargs(quick),
        "pyinfra, the text as one operation": pyinfra(world, at_once),
        "ansible-core, script module": ansible(world, at_once),
    }


def pyinfra(world: World, at_once: int) -> Callable[[], Cost]:
    """All targets in one run; the text is the operation's one command."""
    folder = world.folder
    hosts = [
        (
            f"{address}-{port}",
            {
                "ssh_hostname": address,
                "ssh_port": port,
                "ssh_user": "root",
                "ssh_key": str(world.user_key),
                "ssh_known_hosts_file": str(folder / "known_hosts"),
                "ssh_strict_host_key_checking": "yes",
                "part": where.value,
            },
        )
        for where, address, port in world.pairs
    ]
    (folder / "hosts.py").write_text(f"hosts = {hosts!r}\n")
    (folder / "ops.py").write_text(
        "from pathlib import Path\nfrom pyinfra import host\n"
        "from pyinfra.operations import server\n"
        "server.shell(commands=[Path(host.data.part + '.sh').read_text()])\n"
    )
    argv = [str(PEERS / "bin/pyinfra"), "-y", f"--parallel={at_once}"]
    argv += ["hosts.py", "ops.py"]
    return lambda: cost(argv, cwd=folder)


def ansible(world: World, at_once: int) -> Callable[[], Cost]:
    """All targets in one run; `script` copies the text and runs it."""
    folder = world.folder
    lines = [
        f"{address}-{port} ansible_host={address} ansible_port={port} "
        f"ansible_user=root ansible_ssh_private_key_file={world.user_key} "
        f"ansible_ssh_common_args='-o UserKnownHostsFile={folder / 'known_hosts'}' "
        f"ansible_python_interpreter=/usr/bin/python3 part={where.value}\n"
        for where, address, port in world.pairs
    ]
    (folder / "hosts.ini").write_text("".join(lines))
    (folder / "tasks.yml").write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.script: {cmd: '{{ part }}.sh', executable: /bin/sh}\n"
    )
    env = {
        **environ(),
        "ANSIBLE_PIPELINING": "1",
        # A new connection each round, as for the others.
        "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=no -o ControlPath=none",
    }
    argv = [str(PEERS / "bin/ansible-playbook"), "-f", str(at_once), "-i", "hosts.ini", "tasks.yml"]
    return lambda: cost(argv, cwd=folder, env=env)


def table(measured: dict[str, list[Cost]]) -> list[str]:
    """Medians (minima), ratios to plain ssh."""

    def middle(label: str, what: Callable[[Cost], float]) -> float:
        return statistics.median(what(one) for one in measured[label])

    lines = [
        "| contender | wall s, median (min) | ratio | CPU s | ratio | peak memory, MiB (PSS) |",
        "|---|---|---|---|---|---|",
    ]
    wall0, cpu0 = middle(BASELINE, lambda c: c.wall), middle(BASELINE, lambda c: c.cpu)
    for label, costs in measured.items():
        wall, cpu = middle(label, lambda c: c.wall), middle(label, lambda c: c.cpu)
        least = min(one.wall for one in costs)
        memory = middle(label, lambda c: c.pss) / 2**20
        lines.append(
            f"| {label} | {wall:.2f} ({least:.2f}) | {wall / wall0:.2f} | {cpu:.2f} "
            f"| {cpu / cpu0:.2f} | {memory:.0f} |"
        )
    return lines


def nothing_done(hosts: int) -> Callable[[str], str]:
    """What is wrong with the words of an `up` that is to change nothing."""

    def problem(said: str) -> str:
        idle = said.count("changed: nothing")
        return "" if idle == hosts else f"{hosts - idle} of {hosts} deployments were changed"

    return problem


def measure(
    runs: dict[str, Callable[[], Cost]],
    checks: dict[str, Callable[[str], str]],
    rounds: int,
    ends: float,
) -> dict[str, list[Cost]]:
    """Rounds of all contenders in turn, as many as end in time, at least one."""
    measured: dict[str, list[Cost]] = {label: [] for label in runs}
    for number in range(rounds):
        began = time.monotonic()
        for label, run in runs.items():
            one = run()
            if problem := checks.get(label, lambda said: "")(one.said):
                sys.exit(f"{label}: {problem}\n{one.said[-4000:]}")
            measured[label].append(one)
            say(f"round {number + 1}: {label}: {one}")
        if 2 * time.monotonic() - began > ends:
            break
    return measured


def versions() -> str:
    """Of the peers."""
    argv = [str(PEERS / "bin/python"), "-m", "pip", "freeze"]
    frozen = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr
    peers = re.findall(r"(?:pyinfra|ansible-core)==\S+", frozen)
    return ", ".join([*peers, ssh.split(",")[0].strip()])


def main() -> None:
    """Prepares, measures in interleaved rounds, prints, and with --write keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument("--minutes", type=float, default=10, help="of the whole bench")
    parser.add_argument("--write", action="store_true", help="keep the result in RESULTS.md")
    parser.add_argument("--at-once", type=int, default=20, help="targets; for all contenders")
    parser.add_argument("--bare", action="store_true", help="sshds with nothing deployed: `plan`")
    parser.add_argument("--keep", action="store_true", help="leave the targets running")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    peers()
    for folder in (ROOT / "deployer", sysconfig.get_path("purelib")):
        compileall.compile_dir(folder, quiet=2, workers=0)
    checks: dict[str, Callable[[str], str]] = {}
    with tempfile.TemporaryDirectory(prefix="many-") as name:
        folder = Path(name)
        if chosen.bare:
            up, places = ["plan", "--all"], sshds(folder, chosen.hosts)
        else:
            up = ["up", "--all", "--yes"]
            places = containers(folder, chosen.hosts, chosen.keep)
            checks[f"deploy {' '.join(up)}"] = nothing_done(chosen.hosts)
        with places as world:
            say("measuring")
            ends = BEGAN + chosen.minutes * 60
            runs = contenders(world, up, chosen.at_once)
            measured = measure(runs, checks, chosen.rounds, ends)
            say("clearing away")
    lines = table(measured)
    rounds = len(measured[BASELINE])
    say(f"{rounds} rounds")
    what = "sshds, nothing deployed" if chosen.bare else "containers of one image, each serving"
    about = [
        f"{chosen.hosts} hosts ({what}; {len(world.pairs)} sshds on loopback) on the machine that "
        f"runs the contender, {chosen.at_once} at once: a wall time is mostly theirs. Ratios to "
        "plain ssh are the result.",
        f"{os.cpu_count()} cores; load of others before the start: {load:.1f}; {versions()}.",
        "",
    ]
    print("\n".join([*about, *lines]))
    if chosen.write:
        more = " --bare" if chosen.bare else ""
        command = f"`.venv/bin/python tests/bench/many.py --hosts {chosen.hosts}{more} --write`"
        keep(TOPIC, f"{TOPIC} ({time.strftime('%Y-%m-%d')}, {command}, {rounds} rounds)",
             [*about, *lines])  # fmt: skip


if __name__ == "__main__":
    main()
