"""A no-op `up` beside plain ssh, a ControlMaster, pyinfra and ansible, in one run.

    .venv/bin/python tests/bench/converge.py [--rounds 5] [--write]

Needs the lab deployed (`sh docker/lab.sh`) and root (for the namespace with a 50 ms round trip).
Whole-process wall time; medians (minima); ratios against `ssh host sh -s` fed the same probe text.
`up` asks host and guest; the ssh baseline feeds the host's text to the host and the guest's text to
the guest, one after the other; the row `host only` is the first half of it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

from delay import delayed_namespace  # noqa: E402
from results import keep  # noqa: E402

from deployer.catalog import Catalog  # noqa: E402
from deployer.model import Where  # noqa: E402
from deployer.remote.batch import batch_script  # noqa: E402
from deployer.steps.order import all_steps  # noqa: E402

BUILD = ROOT / "docker" / ".build"
PEERS = BUILD / "bench-venv"
BASELINE = "ssh sh -s, same probe text"


@dataclass(frozen=True)
class Place:
    """How the lab is reached: addresses and ports of host and guest, and an argv prefix."""

    name: str
    host: tuple[str, int]
    guest: tuple[str, int]
    prefix: tuple[str, ...] = ()


def peers() -> None:
    """Makes the venv of pyinfra and ansible-core."""
    if not (PEERS / "bin" / "pyinfra").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        wanted = Path(__file__).parent / "requirements.txt"
        subprocess.run([str(PEERS / "bin" / "pip"), "install", "-q", "-r", str(wanted)], check=True)


def ssh(place: Place, target: tuple[str, int], *extra: str) -> list[str]:
    """A plain ssh command line to a target of the lab."""
    known = place_known_hosts(place)
    return [
        "ssh", "-F", "none", "-T", "-i", str(BUILD / "id_ed25519"), "-o", "BatchMode=yes",
        "-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={known}",
        "-p", str(target[1]), *extra, f"root@{target[0]}",
    ]  # fmt: skip


def place_known_hosts(place: Place) -> Path:
    """The lab's known_hosts, with this place's addresses."""
    lines = (BUILD / "known_hosts").read_text().splitlines()
    ours = {"22105": place.host, "22125": place.guest}
    out = []
    for line in lines:
        match = re.match(r"\[127\.0\.0\.1\]:(\d+) (.*)", line)
        if match and match[1] in ours:
            address, port = ours[match[1]]
            out.append(f"{address if port == 22 else f'[{address}]:{port}'} {match[2]}")
    path = Path(tempfile.gettempdir()) / f"bench-known-{place.host[1]}-{place.guest[1]}"
    path.write_text("\n".join(out) + "\n")
    return path


def workspace(place: Place, folder: Path) -> Path:
    """A copy of the lab's inventory and state with this place's addresses; the inventory folder."""
    shutil.copytree(ROOT / "docker" / "playbooks", folder / "playbooks")
    shutil.copytree(ROOT / "docker" / ".deploy" / "state", folder / ".deploy" / "state")
    (folder / "inventory").mkdir()
    text = (ROOT / "docker" / "inventory" / "kpro5.yaml").read_text()
    for port, (address, own) in (("22105", place.host), ("22125", place.guest)):
        text = re.sub(
            rf"address: 127\.0\.0\.1(\s+)port: {port}", f"address: {address}\\1port: {own}", text
        )
    text = text.replace("../.build/id_ed25519", str(BUILD / "id_ed25519"))
    text = text.replace("../.build/known_hosts", str(place_known_hosts(place)))
    (folder / "inventory" / "kpro5.yaml").write_text(text)
    return folder / "inventory"


def timed(argv: Sequence[str], **options: object) -> float:
    """Wall seconds of one process; a failure ends the bench."""
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    seconds = time.monotonic() - began
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)}\n{done.stdout.decode()}\n{done.stderr.decode()}")
    return seconds


def contenders(place: Place, folder: Path) -> dict[str, Callable[[], float]]:
    """Each name and one run of it."""
    inventory = workspace(place, folder)
    [want] = Catalog.load(inventory).select(["kpro5"])
    probes = [probe for step in all_steps() for probe in step.probes(want)]
    texts = {
        where: batch_script([p for p in probes if p.where is where], "0123456789abcdef").encode()
        for where in Where
    }
    prefix = list(place.prefix)
    deploy = [*prefix, str(ROOT / ".venv/bin/deploy"), "-i", str(inventory), "up", "kpro5"]
    env = {**os.environ, "CI": "1"}

    def bare(*wheres: Where) -> float:
        return sum(
            timed(
                [*prefix, *ssh(place, place.host if w is Where.HOST else place.guest), "sh", "-s"],
                input=texts[w],
            )
            for w in wheres
        )

    def master() -> float:
        sock = str(folder / "cm")
        began = time.monotonic()
        base = ssh(place, place.host, "-S", sock)
        timed([*prefix, *ssh(place, place.host, "-S", sock, "-M", "-N", "-f")])
        for _ in range(30):
            timed([*prefix, *base, "test", "-d", "/etc"])
        subprocess.run([*prefix, *base, "-O", "exit"], capture_output=True, check=True)
        return time.monotonic() - began

    pyinfra_files = write_pyinfra(place, folder)
    ansible_files = write_ansible(place, folder)
    return {
        BASELINE: lambda: bare(Where.HOST, Where.GUEST),
        "  host only": lambda: bare(Where.HOST),
        "deploy up, no-op": lambda: timed(deploy, env=env),
        "ssh ControlMaster, 30 runs": master,
        "pyinfra, 30 no-op operations": lambda: timed(
            [*prefix, str(PEERS / "bin/pyinfra"), "-y", *pyinfra_files], cwd=folder
        ),
        "ansible-core, 30 tasks, pipelining": lambda: timed(
            [*prefix, str(PEERS / "bin/ansible-playbook"), *ansible_files],
            env={**os.environ, "ANSIBLE_PIPELINING": "1", "LC_ALL": "C.UTF-8"},
            cwd=folder,
        ),
    }


def write_pyinfra(place: Place, folder: Path) -> list[str]:
    """Inventory and 30 no-op operations on files, lines, users and groups that exist."""
    data = {
        "ssh_user": "root",
        "ssh_port": place.host[1],
        "ssh_key": str(BUILD / "id_ed25519"),
        "ssh_known_hosts_file": str(place_known_hosts(place)),
        "ssh_strict_host_key_checking": "yes",
    }
    (folder / "hosts.py").write_text(f"hosts = [({place.host[0]!r}, {data!r})]\n")
    files = ("passwd", "group", "hosts", "shadow", "profile", "shells", "issue", "login.defs")
    names = ("root", "daemon", "bin", "sys", "mail", "news", "man")
    ops = [f"files.file(path='/etc/{name}')" for name in files]
    ops += [f"files.line(path='/etc/{name}', line='.*')" for name in files]
    ops += [f"server.user(user='{name}')" for name in names]
    ops += [f"server.group(group='{name}')" for name in names]
    (folder / "ops.py").write_text(
        "from pyinfra.operations import files, server\n" + "\n".join(ops) + "\n"
    )
    return ["hosts.py", "ops.py"]


def write_ansible(place: Place, folder: Path) -> list[str]:
    """Inventory and 30 no-op file tasks."""
    options = f"-o UserKnownHostsFile={place_known_hosts(place)}"
    (folder / "hosts.ini").write_text(
        f"kpro5 ansible_host={place.host[0]} ansible_port={place.host[1]} ansible_user=root "
        f"ansible_ssh_private_key_file={BUILD / 'id_ed25519'} "
        f"ansible_ssh_common_args='{options}' ansible_python_interpreter=/usr/bin/python3\n"
    )
    tasks = "".join(
        f"    - ansible.builtin.file: {{path: /etc/ssh, state: directory}}\n      name: t{n}\n"
        for n in range(30)
    )
    (folder / "tasks.yml").write_text(f"- hosts: all\n  gather_facts: false\n  tasks:\n{tasks}")
    return ["-i", "hosts.ini", "tasks.yml"]


def measure(place: Place, rounds: int) -> list[str]:
    """Interleaved rounds; the table's lines."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        runs = contenders(place, Path(name))
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(rounds):
            for label, run in runs.items():
                times[label].append(run())
    base = statistics.median(times[BASELINE])
    lines = [
        f"### {place.name}",
        "",
        "| contender | s, median (min) | ratio to ssh |",
        "|---|---|---|",
    ]
    for label, seconds in times.items():
        median = statistics.median(seconds)
        lines.append(f"| {label} | {median:.3f} ({min(seconds):.3f}) | {median / base:.2f} |")
    print("\n".join(lines), flush=True)
    return [*lines, ""]


def start_up(rounds: int) -> list[str]:
    """`deploy --help` against `python -c pass`."""
    python = str(ROOT / ".venv/bin/python")
    bare = statistics.median(timed([python, "-c", "pass"]) for _ in range(rounds * 3))
    shown = statistics.median(
        timed([str(ROOT / ".venv/bin/deploy"), "--help"]) for _ in range(rounds * 3)
    )
    return [
        f"`deploy --help`: {shown * 1000:.0f} ms, {shown / bare:.1f}x of `python -c pass`"
        f" ({bare * 1000:.0f} ms)",
        "",
    ]


def container_address() -> str:
    """The lab host's address on its Docker network."""
    name = subprocess.run(
        ["docker", "ps", "--filter", "publish=22105", "--format", "{{.Names}}"],
        check=True, capture_output=True, text=True,
    ).stdout.split()[0]  # fmt: skip
    shown = ["docker", "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"]
    return subprocess.run([*shown, name], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Measures, prints, and with --write keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the result in RESULTS.md")
    options = parser.parse_args()
    peers()
    # As pip leaves an installed package, the peers among them; uv and a checkout leave it to the
    # first run, which PYTHONDONTWRITEBYTECODE forbids.
    for folder in (ROOT / "deployer", sysconfig.get_path("purelib")):
        compileall.compile_dir(folder, quiet=2, workers=0)
    lines = start_up(options.rounds)
    local = Place("loopback", ("127.0.0.1", 22105), ("127.0.0.1", 22125))
    lines += measure(local, options.rounds)
    address = container_address()
    with delayed_namespace(0.05) as prefix:
        far = Place("50 ms round trip", (address, 22), (address, 2222), tuple(prefix))
        lines += measure(far, options.rounds)
    print(lines[0])
    if options.write:
        command = "`.venv/bin/python tests/bench/converge.py --write`"
        topic = "A no-op `up`"
        title = f"{topic} ({time.strftime('%Y-%m-%d')}, {command}, {options.rounds} rounds)"
        machine = f"seconds belong to the machine ({os.cpu_count()} cores)."
        keep(topic, title, [f"Ratios are the result; {machine}", "", *lines])


if __name__ == "__main__":
    main()
