"""Fifty hosts: `up --all` with nothing to do and `status --all` beside xargs ssh, pyinfra, ansible.

    .venv/bin/python tests/bench/many.py [--hosts 50] [--rounds 3] [--lab] [--write] [--keep]

Needs root. Without --lab the targets are sshd processes on loopback, each in a mount namespace with
a /var/lib/deployer of its own; nothing is deployed there, so what is measured is `plan`: the look
and the decisions of all steps, as of an `up` with nothing to do. With --lab they are containers of
one image (Docker, `sh docker/lab.sh setup`), each a deployed host with a guest and two sshds of its
own, and it is `up --only shards`; --servers starts a server on each too, and it is all of `up`.
Fifty of these want more than two cores.

All contenders run the same probe texts over new connections, so many targets at once (--at-once).
`plan`, `up` and `status` also parse, compare and decide. Wall time belongs to the targets as well,
which run on the same machine; CPU and memory are the contender's alone, with its children.
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
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT / "tests" / "container"))

from converge import BUILD, PEERS, peers  # noqa: E402
from fleetlab import fleet  # noqa: E402
from measure import Cost, cost  # noqa: E402
from results import keep  # noqa: E402

from deployer.catalog import Catalog  # noqa: E402
from deployer.model import Where  # noqa: E402
from deployer.remote.batch import batch_script  # noqa: E402
from deployer.steps.order import all_steps  # noqa: E402

NETWORK = "deployer-many"
IMAGE = "deployer-many-host"
BASELINE = "xargs -P ssh sh -s"
OPTIONS = [
    *("--cap-add=SYS_ADMIN", "--cap-add=SYS_PTRACE", "--cap-add=MKNOD"),
    *("--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined"),
    # Fifty times every two seconds, that would be most of the machine's work.
    "--no-healthcheck",
    *("--tmpfs=/run:mode=755,exec", "--tmpfs=/run/lock:mode=1777"),
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


def docker(*words: str, check: bool = True) -> str:
    """Docker's answer; a failure ends the bench."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"docker {' '.join(words)}\n{done.stderr}")
    return done.stdout.strip()


def start(name: str, image: str, *more: str) -> str:
    """One container; its address."""
    keys = f"{BUILD / 'keys' / 'kpro5'}:/etc/lab/keys:ro"
    docker(
        "run", "-d", "--name", f"{NETWORK}-{name}", "--hostname", name, "--network", NETWORK,
        *OPTIONS, "-v", keys, *more, image,
    )  # fmt: skip
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return docker("inspect", "-f", form, f"{NETWORK}-{name}")


def ready(name: str) -> None:
    """Returns when the host has booted."""
    deadline = time.monotonic() + 300
    look = ["docker", "exec", f"{NETWORK}-{name}", "test", "-e", "/run/lab/ready"]
    while subprocess.run(look, check=False).returncode != 0:
        if time.monotonic() > deadline:
            sys.exit(f"{name} has not booted after 300 s")
        time.sleep(0.5)


class World:
    """The controller's folder: inventory, playbook, state, and what the peers are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inventory = folder / "inventory"
        self.inventory.mkdir()
        (folder / "playbooks" / "locks").mkdir(parents=True)
        lab = ROOT / "docker" / "playbooks"
        (folder / "playbooks/locks/lab.txt").write_text((lab / "locks/lab.txt").read_text())
        self.book = yaml.safe_load((lab / "tiny-hybrid.yaml").read_text())
        self.pairs: list[tuple[Where, str, int]] = []
        """What part of the probes goes to which address and port."""
        self.user_key = BUILD / "id_ed25519"

    def write(self, addresses: dict[str, str], hub: str) -> None:
        """Everything, for these hosts."""
        for address in addresses.values():
            self.pairs += [(Where.HOST, address, 22), (Where.GUEST, address, 2222)]
        self.book["download"]["endpoint"] = f"http://{hub}:8900"
        self.book["gates"] = GATES
        self.book["serve"]["ready_timeout_s"] = 600
        self.book["serve"]["silence_timeout_s"] = 300
        (self.folder / "playbooks/tiny-hybrid.yaml").write_text(yaml.safe_dump(self.book))
        key, known = str(BUILD / "id_ed25519"), self.folder / "known_hosts"
        lines = []
        entry = yaml.safe_load((ROOT / "docker/inventory/kpro5.yaml").read_text())["hosts"]["kpro5"]
        hosts = {}
        for name, address in addresses.items():
            ssh = {"address": address, "identity_file": key, "known_hosts": str(known)}
            ssh["connect_timeout_s"] = 60
            hosts[name] = {
                **{k: v for k, v in entry.items() if k not in ("ssh", "containers", "deployments")},
                "ssh": {**ssh, "port": 22},
                "containers": {129: {"ssh": {**ssh, "port": 2222}, "restart": "allowed"}},
                "deployments": {
                    "tiny": {"container": 129, "playbook": "tiny-hybrid", "variant": "no-mtp"}
                },
            }
            for part, place in (("host", address), ("guest", f"[{address}]:2222")):
                public = BUILD / "keys/kpro5" / part / "ssh_host_ed25519_key.pub"
                lines.append(f"{place} {' '.join(public.read_text().split()[:2])}")
        known.write_text("\n".join(lines) + "\n")
        (self.inventory / "many.yaml").write_text(yaml.safe_dump({"hosts": hosts}))

    def deploy(self, *words: str) -> list[str]:
        """The command line of one of ours."""
        return [sys.executable, "-c", "from deployer.cli.main import main; main()",
                "-i", str(self.inventory), *words]  # fmt: skip

    def run(self, *words: str) -> None:
        """To its end, in up to three runs: a full machine runs over a deadline now and then."""
        for _ in range(3):
            done = subprocess.run(self.deploy(*words), env=environ(), check=False)
            if done.returncode == 0:
                return
        sys.exit(f"deploy {' '.join(words)}: exit {done.returncode}")


def environ() -> dict[str, str]:
    """Plain lines, and this checkout."""
    return {**os.environ, "CI": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}


@contextmanager
def targets(world: World, count: int, *, kept: bool, up: Sequence[str]) -> Iterator[None]:
    """So many deployed hosts; `up` is what makes them so that it has nothing more to do."""
    names = [f"h{number:02}" for number in range(1, count + 1)]
    try:
        docker("network", "create", NETWORK)
        docker(
            "run", "-d", "--no-healthcheck", "--name", f"{NETWORK}-hub", "--network", NETWORK,
            "--network-alias", "hub", "deployer-lab-hub",
        )  # fmt: skip
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        hub = docker("inspect", "-f", form, f"{NETWORK}-hub")
        print("deploying one host, the image of the others", flush=True)
        world.write({"seed": start("seed", "deployer-lab-host")}, hub)
        ready("seed")
        world.run("up", "seed", "--yes")
        world.run("down", "seed", "--yes")
        docker("commit", f"{NETWORK}-seed", IMAGE)
        docker("rm", "-f", "-v", f"{NETWORK}-seed")
        print(f"starting {count} of it", flush=True)
        addresses = {}
        for name in names:
            addresses[name] = start(name, IMAGE)
            ready(name)
        world.write(addresses, hub)
        # Two cores start few servers at once.
        world.run(*up, "--no-canary", "--parallel", "4")
        yield
    finally:
        if not kept:
            every = docker("ps", "-aq", "--filter", f"name={NETWORK}-").split()
            if every:
                docker("rm", "-f", "-v", *every, check=False)
            docker("network", "rm", NETWORK, check=False)
            docker("rmi", "-f", IMAGE, check=False)


@contextmanager
def sshds(world: World, count: int) -> Iterator[None]:
    """So many sshd processes on loopback, nothing deployed."""
    with fleet(world.folder / "fleet") as made:
        made.start([f"h{number:02}" for number in range(1, count + 1)])
        made.write()
        world.inventory, world.user_key = made.inventory, made.user_key
        (world.folder / "known_hosts").write_text((made.folder / "known_hosts").read_text())
        world.pairs = [(Where.HOST, "127.0.0.1", one.port) for one in made.targets.values()]
        yield


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


def main() -> None:
    """Prepares, measures in interleaved rounds, prints, and with --write keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the result in RESULTS.md")
    parser.add_argument("--at-once", type=int, default=20, help="targets; for all contenders")
    parser.add_argument("--lab", action="store_true", help="deployed containers, not bare sshds")
    parser.add_argument("--servers", action="store_true", help="a running server on each host")
    parser.add_argument("--keep", action="store_true", help="leave the targets running")
    chosen = parser.parse_args()
    peers()
    for folder in (ROOT / "deployer", sysconfig.get_path("purelib")):
        compileall.compile_dir(folder, quiet=2, workers=0)
    with tempfile.TemporaryDirectory(prefix="many-") as name:
        world = World(Path(name))
        up = ["plan", "--all"]
        places = sshds(world, chosen.hosts)
        if chosen.lab or chosen.servers:
            up = ["up", "--all", "--yes", *([] if chosen.servers else ["--only", "shards"])]
            places = targets(world, chosen.hosts, kept=chosen.keep, up=up)
        with places:
            runs = contenders(world, up, chosen.at_once)
            measured: dict[str, list[Cost]] = {label: [] for label in runs}
            load = os.getloadavg()[0]
            for number in range(chosen.rounds):
                for label, run in runs.items():
                    measured[label].append(run())
                    print(f"round {number + 1}: {label}: {measured[label][-1]}", flush=True)
            lines = table(measured)
            versions = re.findall(
                r"(?:pyinfra|ansible-core)==\S+",
                subprocess.run(
                    [str(PEERS / "bin/python"), "-m", "pip", "freeze"],
                    capture_output=True, text=True, check=True,
                ).stdout,
            )  # fmt: skip
    print("\n".join(lines))
    if chosen.write:
        more = " --servers" if chosen.servers else " --lab" if chosen.lab else ""
        command = f"`.venv/bin/python tests/bench/many.py --hosts {chosen.hosts}{more} --write`"
        topic = "Many hosts"
        title = f"{topic} ({time.strftime('%Y-%m-%d')}, {command}, {chosen.rounds} rounds)"
        about = [
            f"{chosen.hosts} hosts ({len(world.pairs)} sshds) on the machine that runs the "
            f"contender, {chosen.at_once} at once: a wall time is mostly theirs. Ratios to plain "
            "ssh are the result.",
            f"{os.cpu_count()} cores; load of others before the start: {load:.1f}; "
            f"{', '.join(versions)}.",
            "",
        ]
        keep(topic, title, [*about, *lines])


if __name__ == "__main__":
    main()
