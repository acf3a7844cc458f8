"""Rehearses run.py without a GPU: the lab's SGLang look-alike in the place of the real engine.

    python3 tests/gpu/rehearse.py WORK

As root, with sshd and uv. It shows that the script works, and proves nothing about SGLang: no
result file of it is kept. The steps driver and gpus are left out (`--from venv`), and so is the
scene with a second process on the card. The checks that need a real card (`deploy fit`, the memory
that a server holds, `deploy rollback`, which begins with the driver), and that of the learned
model's own thoughts, cannot hold here; all others must.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCKER = HERE.parents[1] / "docker"
sys.path[:0] = [str(HERE), str(DOCKER / "hub")]

import environment  # noqa: E402
import tiny_model  # noqa: E402

SMI = """#!/usr/bin/env python3
import sys
CARDS = ("00000000:00:06.0", "00000000:00:07.0")
VALUES = {"index": "0", "name": "NVIDIA H200", "driver_version": "580.126.09",
          "memory.total": "143771", "memory.used": "0", "compute_cap": "9.0",
          "uuid": "GPU-00000000-1111-2222-3333-444444444444"}
for word in sys.argv[1:]:
    if word.startswith("--query-gpu="):
        for card in CARDS:
            row = {**VALUES, "pci.bus_id": card}
            print(", ".join(row.get(name, "[N/A]") for name in word.split("=", 1)[1].split(",")))
"""
SMI_PATH = Path("/usr/local/sbin/nvidia-smi")
"""`deploy` looks for tools in the standard folders only."""
SCENES = ("learned", "killed-serving", "killed-starting", "default-strategy", "nodes")


def prepare(work: Path) -> dict[str, str]:
    """The look-alike unpacked, a card that is none, two models; the environment for run.py."""
    site = work / "site"
    subprocess.run(["sh", str(DOCKER / "engine/build.sh"), str(work / "built")], check=True)
    for name in ("sglang-0.5.11", "torch-2.11.0"):
        with zipfile.ZipFile(work / f"built/{name}-py3-none-any.whl") as wheel:
            wheel.extractall(site)
    others = {"transformers": "5.6.0", "sglang-kernel": "0.4.2", "flashinfer-python": "0.6.8"}
    for name, release in others.items():
        with zipfile.ZipFile(environment.write_wheel(work / "built", name, release, {})) as wheel:
            wheel.extractall(site)
    dev = work / "dev"
    dev.mkdir(exist_ok=True)
    nodes = (("nvidia0", 195, 0), ("nvidiactl", 195, 255), ("nvidia-uvm", 238, 0))
    for name, major, minor in nodes:
        if not (dev / name).exists():
            os.mknod(dev / name, 0o600 | 0o020000, os.makedev(major, minor))
    for kind in ("random", "learned"):
        tiny_model.build(work / f"models/acme--tiny-{kind}", 3, 0.5)
    return {
        **os.environ,
        "PYTHONPATH": str(site),
        "SGLANG_LOOKALIKE_DEV": str(dev),
        "SGLANG_LOOKALIKE_SPEED": "20",
        "LAB_FAULTS": str(work / "faults"),
    }


def main() -> int:
    """Both halves: a bad server, then a good one."""
    work = Path(sys.argv[1]).resolve()
    environ = prepare(work)
    if SMI_PATH.exists():
        print(f"{SMI_PATH} is there already; a machine with a GPU needs no rehearsal")
        return 2
    SMI_PATH.write_text(SMI)
    SMI_PATH.chmod(0o755)
    try:
        return rehearse(work, environ)
    finally:
        SMI_PATH.unlink()


def rehearse(work: Path, environ: dict[str, str]) -> int:
    """The worse exit code of the two runs."""
    code = 0
    for fault, scenes in (("server-degenerate", ("rubbish",)), ("", SCENES)):
        (work / "faults").write_text(f"{fault}\n")
        argv = [sys.executable, str(HERE / "run.py"), "--work", str(work / "run"), "--from", "venv"]
        argv += ["--models", str(work / "models"), "--only", ",".join(scenes)]
        argv += ["--out", str(work / f"out-{scenes[0]}")]
        code = max(code, subprocess.run(argv, env=environ).returncode)
    return code


if __name__ == "__main__":
    sys.exit(main())
