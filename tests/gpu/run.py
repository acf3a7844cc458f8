"""Real SGLang under the real `deploy`, on a machine with one NVIDIA GPU, or two.

    python3 tests/gpu/run.py --work DIR [--out DIR] [--only SCENE,SCENE] [--models DIR]

Wants: Linux, root, a GPU (the scene `nodes` wants two), an nvidia-smi that works, sshd and
ssh-keygen, uv, and a Python that can import sglang, torch and what `deploy` needs. Nothing is
fetched. It starts an sshd of its own on loopback with throw-away keys, makes two tiny hybrid models
with an MTP head (one with random weights, one that knows the gates' questions by heart), serves
their files by the lab's hub, writes an inventory and playbooks, and runs `deploy` as a user would.
SGLang, driver, GPU, SSH, download, gates and stop are the real ones. For `nodes` it makes two hosts
out of the machine (hosts.py).

It writes below /var/lib/deployer, /opt/deployer and /srv/models, as `deploy` does. Exit code 0: all
scenes went as expected, or were left out with a reason; 1: at least one did not; 2: this machine
will not do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import environment
import machine
import nodes
import project as project_module
import report
import scenes

LIMITS = [
    "The models are tiny (16 M parameters): figures of speed say nothing of a real model.",
    "The learned model was trained for this run to know the gates' prompts by heart: that a gate "
    "passes proves the chain (download, weights, kernels, draft head, parser, gate), not a model.",
    "The hosts are plain ones, reached by SSH on loopback: no Proxmox, no container, one GPU each.",
    "The two nodes are one machine: each has processes, folders and a name of its own and sees one "
    "GPU; they speak over TCP on loopback, so the GPUs' own links are not used.",
    "The engine's packages were on the machine; the venv step built its environment from wheels "
    "that point to them.",
    "Planned draft states are what the engine sets aside for all asked requests when it sizes its "
    "pools; it allocates them for those that really run.",
]
SERVE = {
    "tp-size": 1,
    "context-length": 4096,
    "mem-fraction-static": 0.1,
    "mamba-full-memory-ratio": 0.5,
    "max-running-requests": 256,
    "cuda-graph-max-bs": 8,
    "reasoning-parser": "qwen3",
    **project_module.PLAIN_ENGINE,
}
"""So small a share of the card that a second process can take the memory away; with it, 64
requests do not all find state slots, which the plan must say."""


def wanting() -> list[str]:
    """What this machine lacks, in words."""
    lacks = [f"the Python package {name}" for name in environment.missing()]
    search = f"/usr/sbin:/usr/local/sbin:{os.environ.get('PATH', '')}"
    lacks += [tool for tool in ("nvidia-smi", "uv", "sshd", "ssh-keygen")
              if shutil.which(tool, path=search) is None]  # fmt: skip
    if os.getuid() != 0:
        lacks.append("root")
    return lacks


def make_models(folder: Path, told: dict[str, Any]) -> dict[str, Path]:
    """Both checkpoints below `folder`; those that are there are kept. Raises CalledProcessError."""
    found = {}
    for kind in project_module.KINDS:
        path = folder / f"acme--tiny-{kind}"
        figures = folder / f"{kind}.json"
        if not (path / "config.json").exists():
            maker = Path(__file__).with_name("model.py")
            earlier = folder / f"start--tiny-{kind}"
            start = ["--start", str(earlier)] if earlier.exists() else []
            done = subprocess.run(
                [sys.executable, str(maker), str(path), kind, *start],
                stdout=subprocess.PIPE, text=True, check=True, timeout=600,
            )  # fmt: skip
            figures.write_text(done.stdout.strip().splitlines()[-1])
        if figures.exists():
            told[kind] = json.loads(figures.read_text())
            print(f"model {kind}: {told[kind]}", flush=True)
        found[kind] = path
    return found


def commit() -> str:
    """The commit of this checkout; the file COMMIT where there is no repository."""
    named = project_module.ROOT / "COMMIT"
    if named.exists():
        return named.read_text().strip()
    asked = subprocess.run(
        ["git", "-C", str(project_module.ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


@dataclasses.dataclass
class Record:
    """What the result file says; written anew after each scene, so that a cut run leaves one."""

    folder: Path
    cards: list[machine.Gpu]
    base_mib: int
    models: dict[str, Any]
    done: list[scenes.Scene] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)

    def write(self) -> list[Path]:
        """The paths of the JSON and of the readable form."""
        card = self.cards[0]
        versions = (*environment.PINNED, *environment.ALSO_TOLD)
        result = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": commit(),
            "seconds": round(time.monotonic() - self.began, 1),
            "gpu": dataclasses.asdict(card),
            "gpus": len(self.cards),
            "used_mib_before": self.base_mib,
            "used_mib_after": machine.used_mib(),
            "machine": machine.facts(),
            "versions": {name: environment.version(name) for name in versions},
            "serve_args": SERVE,
            "models": self.models,
            "limits": LIMITS,
            "scenes": [{**dataclasses.asdict(scene), "ok": scene.ok} for scene in self.done],
        }
        name = card.name.lower().removeprefix("nvidia ").replace(" ", "-")
        if any(scene.name == nodes.TITLE and not scene.skipped for scene in self.done):
            name = f"{len(nodes.NAMES)}-{name}"
        title = f"{result['date']}-{name}-sglang-{environment.version('sglang')}"
        return report.write(self.folder, title, result)


def play(options: argparse.Namespace) -> int:
    """The whole run; the exit code."""
    record = Record(options.out, machine.gpus(), machine.used_mib(), {})
    folders = make_models(options.models or options.work / "models", record.models)
    with (
        project_module.door(options.work / f"sshd-{os.getpid()}") as sshd,
        project_module.serving(folders) as hubs,
    ):
        box = project_module.Project(
            folder=options.work / "project",
            sshd=sshd,
            gpu=record.cards[0],
            key=f"sk-{secrets.token_hex(12)}",
            log=options.out / "deploy.log",
            models=folders,
            serve=SERVE,
            hubs=hubs,
            selection=("--from", options.first) if options.first else (),
        )
        box.write()
        for name in options.only:
            at = time.monotonic()
            try:
                scene = scenes.ALL[name](box, record.base_mib)
            except Exception as error:  # noqa: BLE001 - one scene's defect is told; the rest runs
                scene = scenes.Scene(name)
                scene.check("the scene came to its end", False, f"{type(error).__name__}: {error}")
            scene.figures["scene_seconds"] = round(time.monotonic() - at, 1)
            record.done.append(scene)
            show(scene)
            scenes.keep_logs(options.out / "logs", box.key)
            record.write()
        box.deploy("history", f"{project_module.HOST}/learned")
        for kind in project_module.KINDS:
            box.deploy("--yes", "down", f"{project_module.HOST}/{kind}")
    for path in record.write():
        print(path)
    told = [scene for scene in record.done if not scene.skipped]
    return 0 if told and all(scene.ok for scene in told) else 1


def show(scene: scenes.Scene) -> None:
    """A few lines a scene while it runs."""
    if scene.skipped:
        print(f"skip {scene.name}: {scene.skipped}")
        return
    print(f"{'ok  ' if scene.ok else 'FAIL'} {scene.name} ({scene.figures['scene_seconds']} s)")
    for check in scene.checks:
        if not check["ok"]:
            print(f"     not: {check['what']}; seen: {str(check['seen'])[:300]}")
    sys.stdout.flush()


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="a folder for all that is made")
    parser.add_argument("--out", type=Path, help="where the result goes (default: WORK/out)")
    parser.add_argument("--models", type=Path, help="checkpoints made earlier (WORK/models)")
    parser.add_argument("--only", default=",".join(scenes.ALL), help="scenes, with commas")
    parser.add_argument("--from", dest="first", metavar="STEP", help="passed on to `deploy up`")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.out = (options.out or options.work / "out").resolve()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(scenes.ALL):
        parser.error(f"no scene {', '.join(sorted(unknown))}; there are {', '.join(scenes.ALL)}")
    if lacks := wanting():
        print(f"this machine lacks: {', '.join(lacks)}", file=sys.stderr)
        return 2
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    return play(options)


if __name__ == "__main__":
    sys.exit(main())
