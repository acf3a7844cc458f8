"""Our download beside `hf download`, aria2c and curl, against the lab's hub on loopback.

    .venv/bin/python tests/bench/download.py [--rounds 5] [--shards 6] [--mb 256] [--write]

Every contender fetches the same repository into an empty folder; every result is hashed after the
clock has stopped. The named baseline is `hf download` as it comes (8 workers) in HTTP mode.
Interleaved rounds, medians; a ratio is the median of the ratios within each round. CPU seconds and
memory are those of the contender with all its children, never of the hub. Ours is what the target
runs: `python3 -I -S fetch.pyz` in a job folder, sha256 included. aria2c and curl: `apt-get install
aria2 curl`; a missing one is named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))
from measure import Cost, cost  # noqa: E402
from results import keep  # noqa: E402

from deployer.agents.bundle import fetch_agent  # noqa: E402

REPO = "acme/tiny-hybrid"
BASELINE = "hf download"
GIB_15 = 1.5 * (1 << 30)
HF = Path(sys.executable).with_name("hf")
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@dataclass(frozen=True)
class Hub:
    """A hub in a process of its own, and what it has."""

    url: str
    info: dict[str, Any]

    @property
    def files(self) -> list[dict[str, Any]]:
        return [
            {
                "path": row["rfilename"],
                "size": row["size"],
                "sha256": row.get("lfs", {}).get("sha256", ""),
                "blob_id": row["blobId"],
            }
            for row in self.info["siblings"]
        ]

    @property
    def size(self) -> int:
        return sum(int(file["size"]) for file in self.files)

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url + path, data, timeout=30) as answer:
            return json.load(answer)

    def link(self, path: str) -> str:
        return f"{self.url}/{REPO}/resolve/{self.info['sha']}/{path}"


@contextlib.contextmanager
def running_hub(folder: Path, shards: int, mb: float) -> Iterator[Hub]:
    """Starts the lab's hub on free ports; making the content takes a second a GiB."""
    argv = [sys.executable, str(ROOT / "docker" / "hub" / "hub.py"), "--port", "0"]
    argv += ["--data", str(folder), "--shards", str(shards), "--mb", str(mb)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                sys.exit("the hub did not start")
            url = line.split()[0]
            path = f"{url}/api/models/{REPO}/revision/main?blobs=true"
            with urllib.request.urlopen(path, timeout=30) as answer:
                hub = Hub(url, json.load(answer))
            for one in folder.rglob("*.safetensors"):
                with one.open("rb") as stream:  # the page cache serves every contender alike
                    while stream.read(1 << 22):
                        pass
            yield hub
        finally:
            process.terminate()


class Bench:
    """The contenders: each fetches the whole repository into `out` and says what it cost."""

    def __init__(self, hub: Hub, folder: Path, connections: int) -> None:
        self.hub, self.folder, self.connections = hub, folder, connections
        self.out = folder / "out"
        self.missing = [
            f"{tool} is missing: apt-get install {package}"
            for tool, package in (("aria2c", "aria2"), ("curl", "curl"))
            if not shutil.which(tool)
        ]

    def contenders(self) -> dict[str, Callable[[], Cost]]:
        """Names and one run of each; those of missing tools are left out."""
        runs: dict[str, Callable[[], Cost]] = {
            "ours, sha256 included": self.ours,
            BASELINE: self.hf,
            "hf download + hf cache verify": lambda: self.hf().then(self.verify()),
            "hf download, Xet": lambda: self.hf(xet=True),
        }
        if shutil.which("aria2c"):
            runs["aria2c -j6 -x4"] = self.aria2
            runs["aria2c -j6 -x4, sha-256"] = lambda: self.aria2(checked=True)
        if shutil.which("curl"):
            runs["curl --parallel 6"] = self.curl
        return runs

    def ours(self) -> Cost:
        job = self.folder / "job"
        job.mkdir(exist_ok=True)
        (job / "fetch.pyz").write_bytes(fetch_agent())
        manifest = {
            "repo": REPO,
            "commit": self.hub.info["sha"],
            "path": str(self.out),
            "files": self.hub.files,
            "endpoint": self.hub.url,
            "methods": ["range"],
            "connections": self.connections,
        }
        (job / "manifest.json").write_text(json.dumps(manifest))
        return cost([PYTHON, "-I", "-S", "fetch.pyz"], cwd=job)

    def environment(self, xet: bool = False) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
        }

    def hf(self, xet: bool = False) -> Cost:
        self.hub.ask("/_set", {"xet": xet})
        argv = [str(HF), "download", REPO, "--local-dir", str(self.out)]
        try:
            return cost(argv, env=self.environment(xet))
        finally:
            self.hub.ask("/_set", {"xet": False})

    def verify(self) -> Cost:
        argv = [str(HF), "cache", "verify", REPO, "--local-dir", str(self.out)]
        return cost(argv, env=self.environment())

    def aria2(self, checked: bool = False) -> Cost:
        lines = []
        for file in self.hub.files:
            lines += [self.hub.link(file["path"]), f"  out={file['path']}"]
            if checked and file["sha256"]:
                lines.append(f"  checksum=sha-256={file['sha256']}")
        (self.folder / "urls").write_text("\n".join(lines) + "\n")
        options = ["-q", "-j6", "-x4", "-s4", "--file-allocation=none", "--no-conf"]
        where = ["-d", str(self.out), "-i", str(self.folder / "urls")]
        return cost(["aria2c", *options, *where])

    def curl(self) -> Cost:
        lines = ["location", "fail", "silent", "show-error", "parallel", "parallel-max = 6"]
        for file in self.hub.files:
            lines += [f'url = "{self.hub.link(file["path"])}"']
            lines += [f'output = "{self.out / file["path"]}"']
        (self.folder / "curlrc").write_text("\n".join(lines) + "\n")
        return cost(["curl", "-q", "--config", str(self.folder / "curlrc")])

    def empty(self) -> None:
        """An empty folder, and a hub that has sent nothing."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        self.hub.ask("/_reset", {})

    def check(self, label: str) -> float:
        """Hashes the result; the hub's bytes as a multiple of the repository's."""

        def right(file: dict[str, Any]) -> bool:
            path = self.out / file["path"]
            if not path.exists() or path.stat().st_size != file["size"]:
                return False
            if not file["sha256"]:
                return True
            with path.open("rb") as stream:
                return bool(hashlib.file_digest(stream, "sha256").hexdigest() == file["sha256"])

        with ThreadPoolExecutor(2) as pool:
            if not all(pool.map(right, self.hub.files)):
                sys.exit(f"{label}: the files are not the repository's")
        return int(self.hub.ask("/_stats?log=0")["sent_total"]) / self.hub.size


@dataclass
class Row:
    """One contender's rounds."""

    costs: list[Cost] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(float(getattr(one, figure)) for one in self.costs)

    def ratio(self, other: Row, figure: str) -> float:
        """The median over the rounds of this one's figure to the other's in the same round."""
        pairs = zip(self.costs, other.costs, strict=True)
        return statistics.median(float(getattr(a, figure) / getattr(b, figure)) for a, b in pairs)


def compare(bench: Bench, rounds: int) -> list[str]:
    """Interleaved rounds of every contender; the table's lines."""
    runs = bench.contenders()
    rows = {label: Row() for label in runs}
    for n in range(rounds):
        # Another order each round: none runs always after the same neighbour.
        labels = list(runs)[n % len(runs) :] + list(runs)[: n % len(runs)]
        for label in labels:
            bench.empty()
            rows[label].costs.append(runs[label]())
            rows[label].sent.append(bench.check(label))
    base = rows[BASELINE]
    scale = GIB_15 / bench.hub.size
    lines = [
        "| contender | throughput, ratio to hf | s, median (min) | MB/s | CPU s / 1.5 GiB | CPU, "
        "ratio to hf | peak RSS, MiB | sent / size |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, row in rows.items():
        wall, cpu = row.median("wall"), row.median("cpu")
        shown = [
            f"{base.ratio(row, 'wall'):.2f}",
            f"{wall:.2f} ({min(one.wall for one in row.costs):.2f})",
            f"{bench.hub.size / wall / 1e6:.0f}",
            f"{cpu * scale:.2f}",
            f"{row.ratio(base, 'cpu'):.2f}",
            f"{max(one.rss for one in row.costs) / (1 << 20):.0f}",
            f"{max(row.sent):.3f}",
        ]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    ours = max(one.pss for one in rows["ours, sha256 included"].costs) / (1 << 20)
    lines += ["", "RSS: all processes of the contender added up at their common peak; pages that"]
    lines += [f"they share count for each (counted once, ours are {ours:.0f} MiB)."]
    return [*lines, *bench.missing, ""]


def complete(bench: Bench, rounds: int) -> list[str]:
    """A re-run where everything is there; no byte may be sent."""
    shards = sum(file["path"].endswith(".safetensors") for file in bench.hub.files)
    lines = ["| contender | s, median (min) | CPU s | ratio to hf |", "|---|---|---|---|"]
    costs: dict[str, list[Cost]] = {}
    for label, run in (("ours", bench.ours), (BASELINE, bench.hf)):
        bench.empty()
        run()
        bench.hub.ask("/_reset", {})
        costs[label] = [run() for _ in range(rounds * 2)]
        sent = bench.check(label)
        if sent:
            sys.exit(f"{label}: a complete folder cost {sent} of the repository's bytes")
    base = statistics.median(one.wall for one in costs[BASELINE])
    for label, some in costs.items():
        wall = statistics.median(one.wall for one in some)
        cpu = statistics.median(one.cpu for one in some)
        best = min(one.wall for one in some)
        lines.append(f"| {label} | {wall:.3f} ({best:.3f}) | {cpu:.3f} | {wall / base:.2f} |")
    size = bench.hub.size / (1 << 30)
    return [f"### A re-run on a complete model, {shards} shards, {size:.1f} GiB", "", *lines, ""]


def machine(folder: Path) -> str:
    """Where the figures come from."""
    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine(),
    )  # fmt: skip
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], check=True, capture_output=True, text=True
    ).stdout.strip()
    versions = [f"hf {_version([str(HF), 'version'])}", f"python3 {_version([PYTHON, '-V'])}"]
    versions += [
        f"{tool} {_version([tool, '--version'])}" for tool in ("aria2c", "curl")
        if shutil.which(tool)
    ]  # fmt: skip
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    if (nice := session_nice()) != 0:
        load += f" (of others; the bench's session at nice {nice})"
    return (
        f"{os.cpu_count()} cores ({model}), shared with the hub; load {load} before the start; "
        f"files on {kind}; {', '.join(versions)}."
    )


def session_nice() -> int:
    """The priority of this session's processes as a group, or their own where there are no groups.

    On a machine that others use: `setsid sh -c 'echo -12 >/proc/self/autogroup; exec ...'`.
    """
    group = Path("/proc/self/autogroup")
    if group.exists() and (text := group.read_text()).strip():
        return int(text.split()[-1]) or os.nice(0)
    return os.nice(0)


def _version(argv: list[str]) -> str:
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return next((word for word in said.split() if word[0].isdigit()), said.strip())


def roomy(size: float) -> Path:
    """Memory where there is plenty of it, so that no disk is measured; else the usual folder."""
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).free > 4 * size:
        return shm
    return Path(tempfile.gettempdir())


def main() -> None:
    """Measures, prints, and with --write keeps the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--mb", type=float, default=256, help="MiB a shard")
    parser.add_argument("--connections", type=int, default=4, help="of ours; the default is ours")
    parser.add_argument("--folder", type=Path, help="where the files go (default: /dev/shm)")
    parser.add_argument("--write", action="store_true", help="keep the result in RESULTS.md")
    options = parser.parse_args()
    size = options.shards * options.mb * (1 << 20)
    folder = options.folder or roomy(size)
    lines = [machine(folder), ""]
    print(lines[0], flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as name:
        work = Path(name)
        with running_hub(work / "hub", options.shards, options.mb) as hub:
            title = f"### {options.shards} shards, {hub.size / (1 << 30):.2f} GiB"
            lines += [title, "", *compare(Bench(hub, work, options.connections), options.rounds)]
        shutil.rmtree(work / "hub")
        with running_hub(work / "hub15", 15, options.shards * options.mb / 15) as hub:
            lines += complete(Bench(hub, work, options.connections), options.rounds)
    print("\n".join(lines[2:]), flush=True)
    if options.write:
        topic, command = "A download", "`.venv/bin/python tests/bench/download.py --write`"
        title = f"{topic} ({time.strftime('%Y-%m-%d')}, {command}, {options.rounds} rounds)"
        text = "Loopback; ratios are the result, the rest belongs to the machine:"
        keep(topic, title, [text, *lines])


if __name__ == "__main__":
    main()
