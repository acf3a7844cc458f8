"""A copy of a model between hosts: ours against `rsync -a` and scp, through one sshd, in one run.

    .venv/bin/python tests/bench/hostcopy.py [--write] [--rounds N] [--shards N] [--mb N]

Both ends are this machine, so every contender pays for both: the ratio is the result. The sshd is
OpenSSH with its own defaults. Ours checks the sha256 of every file; the others check nothing.
`sh tests/run.sh unit` makes the .venv; rsync and OpenSSH's server and client must be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "container"))
sys.path.insert(0, str(Path(__file__).parent))

from measure import Cost, cost  # noqa: E402
from results import keep  # noqa: E402
from sshd import SSHD, WHY_NOT, Sshd, make_key, start_sshd  # noqa: E402

from deployer.agents.bundle import fetch_agent  # noqa: E402

PYTHON = str(Path(sys.executable).resolve())
BASELINE = "rsync -a"
OURS = "ours, aes128-gcm, sha256 included"
WANTED = 1.2
"""The least ratio of ours to the baseline."""


class Bench:
    """A folder of shards, an sshd, and a key that may run the lending agent only."""

    def __init__(self, folder: Path, shards: int, mb: int, connections: int) -> None:
        self.folder, self.connections = folder, connections
        self.source, self.out = folder / "source", folder / "out"
        self.source.mkdir()
        block = os.urandom(1 << 20)
        self.files: list[dict[str, Any]] = []
        for number in range(shards):
            path = self.source / f"shard-{number + 1:02}.bin"
            digest = hashlib.sha256()
            with path.open("wb") as stream:
                for at in range(mb):
                    piece = at.to_bytes(8, "little") + number.to_bytes(8, "little") + block[16:]
                    digest.update(piece)
                    stream.write(piece)
            row = {"path": path.name, "size": mb << 20, "sha256": digest.hexdigest()}
            self.files.append(row)
        self.size = shards * (mb << 20)
        self.server: Sshd = start_sshd(folder / "sshd", options=("Subsystem sftp internal-sftp",))
        self.key = make_key(folder / "lend_key")
        self.manifest = {
            "repo": "acme/tiny",
            "commit": "0" * 40,
            "path": str(self.source),
            "files": self.files,
            "methods": ["peer"],
            "connections": connections,
            "until": time.time() + 86400,
        }
        lending = folder / "lending"
        lending.mkdir()
        shutil.copy(ROOT / "deployer" / "agents" / "fetch" / "lend.py", lending)
        (lending / "manifest.json").write_text(json.dumps(self.manifest))
        line = f'restrict,command="exec {PYTHON} -I -S {lending}/lend.py {lending}" '
        with (folder / "sshd" / "authorized_keys").open("a") as keys:
            keys.write(line + self.key.with_suffix(".pub").read_text())

    def ssh(self, key: Path) -> str:
        known = f"-o UserKnownHostsFile={self.server.known_hosts} -o BatchMode=yes"
        return f"-F none -i {key} -o IdentitiesOnly=yes {known}"

    def contenders(self) -> dict[str, Callable[[], Cost]]:
        """Names and one run of each."""
        return {
            OURS: lambda: self.ours(self.connections),
            "the same, one stream": lambda: self.ours(1),
            BASELINE: self.rsync,
            "rsync -a -W, aes128-gcm": lambda: self.rsync("-c aes128-gcm@openssh.com", "-W"),
            "scp": self.scp,
        }

    def ours(self, connections: int) -> Cost:
        job = self.folder / "job"
        job.mkdir(exist_ok=True)
        (job / "fetch.pyz").write_bytes(fetch_agent())
        peer = {
            "address": "127.0.0.1",
            "user": self.server.user,
            "port": self.server.port,
            "path": str(self.source),
            "identity_file": str(self.key),
            "known_hosts": str(self.server.known_hosts),
            "lends": True,
        }
        manifest = {
            **self.manifest,
            "path": str(self.out),
            "peer": peer,
            "connections": connections,
        }
        (job / "manifest.json").write_text(json.dumps(manifest))
        return cost([PYTHON, "-I", "-S", "fetch.pyz"], cwd=job, sample=False)

    def rsync(self, cipher: str = "", *more: str) -> Cost:
        shell = f"ssh {self.ssh(self.server.user_key)} {cipher} -p {self.server.port}"
        place = f"{self.server.user}@127.0.0.1:{self.source}/"
        return cost(["rsync", "-a", *more, "-e", shell, place, f"{self.out}/"], sample=False)

    def scp(self) -> Cost:
        words = ["scp", "-q", "-r", "-P", str(self.server.port)]
        words += self.ssh(self.server.user_key).split()
        place = f"{self.server.user}@127.0.0.1:{self.source}/."
        return cost([*words, place, str(self.out)], sample=False)

    def empty(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()

    def check(self, label: str) -> None:
        """Every file there, with its hash; else the bench ends."""
        for row in self.files:
            path = self.out / row["path"]
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != row["sha256"]:
                    sys.exit(f"{label}: {path.name} is not what was sent")


def compare(bench: Bench, rounds: int) -> list[str]:
    """The table; contenders take turns, so that a busy minute hits all of them."""
    rows: dict[str, list[Cost]] = {name: [] for name in bench.contenders()}
    for number in range(rounds):
        order = list(bench.contenders().items())
        for name, run in order[number % len(order) :] + order[: number % len(order)]:
            bench.empty()
            rows[name].append(run())
            bench.check(name)
    lines = [
        f"| contender | ratio to {BASELINE} | s, median (min) | MB/s | receiver's CPU s |",
        "|---|---|---|---|---|",
    ]
    for name, costs in rows.items():
        wall = statistics.median(one.wall for one in costs)
        cpu = statistics.median(one.cpu for one in costs)
        least = min(one.wall for one in costs)
        lines.append(
            f"| {name} | {ratio(rows[BASELINE], costs):.2f} | {wall:.2f} ({least:.2f}) | "
            f"{bench.size / wall / 1e6:.0f} | {cpu:.2f} |"
        )
    won = ratio(rows[BASELINE], rows[OURS])
    kept = "as wanted" if won >= WANTED else "NOT as wanted"
    return [
        *lines,
        "",
        f"Ours is {won:.2f} times as fast as `{BASELINE}`; at least {WANTED}: {kept}.",
    ]


def ratio(base: list[Cost], other: list[Cost]) -> float:
    """Median of the rounds' own ratios: what slows the machine down for a round slows both."""
    return statistics.median(one.wall / two.wall for one, two in zip(base, other, strict=True))


def place_for(size: int) -> str | None:
    """A folder in memory when it has room for both copies, else None, the usual one on disk."""
    memory = Path("/dev/shm")
    need = size * 5 // 2
    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    if memory.is_dir() and shutil.disk_usage(memory).free >= need and free >= need:
        return str(memory)
    if shutil.disk_usage(tempfile.gettempdir()).free < need:
        sys.exit(f"{tempfile.gettempdir()} lacks room for {need >> 20} MiB: use --mb or --shards")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in RESULTS.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=15)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--connections", type=int, default=4)
    words = parser.parse_args()
    nice = f", the bench and its sshd at nice {os.nice(0)}" if os.nice(0) else ""
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    lacking = [name for name in ("rsync", "scp", "ssh") if shutil.which(name) is None]
    if lacking or SSHD is None:
        sys.exit(f"not installed: {', '.join(lacking)}" if lacking else WHY_NOT)
    where = place_for(words.shards * words.mb << 20)
    with tempfile.TemporaryDirectory(prefix="bench-copy-", dir=where) as folder:
        Path(folder).chmod(0o755)
        bench = Bench(Path(folder), words.shards, words.mb, words.connections)
        try:
            lines = compare(bench, words.rounds)
        finally:
            bench.server.stop()
    size = f"{words.shards} shards of {words.mb} MiB, files on {'tmpfs' if where else 'disk'}"
    about = (
        f"{size}; {os.cpu_count()} cores ({platform.machine()}), both ends here; load {load}{nice}."
    )
    text = [about, "", *lines]
    print("\n".join(text))
    if words.write:
        command = ".venv/bin/python tests/bench/hostcopy.py --write"
        day = time.strftime("%Y-%m-%d", time.gmtime())
        keep("A copy between hosts", f"A copy between hosts ({day}, `{command}`)", text)


if __name__ == "__main__":
    main()
