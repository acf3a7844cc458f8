"""The engine that this Python can import, as wheels that the venv step installs.

`deploy` builds an environment from a lock, and a machine without a network has no wheels of torch.
So each pinned distribution becomes a wheel of its metadata alone, and one of them brings a path
file to where the packages lie. The lock, the build, the proof and the switch are the product's own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import shlex
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

PINNED = ("sglang", "torch", "transformers", "sglang-kernel", "flashinfer-python")
ALSO_TOLD = ("triton", "tokenizers", "safetensors", "huggingface_hub", "numpy", "fastapi")


def version(name: str) -> str:
    """The installed version, 'none' when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def missing() -> list[str]:
    """Which of PINNED this Python does not have."""
    return [name for name in PINNED if version(name) == "none"]


def folders() -> list[str]:
    """The folders that the pinned packages are imported from, in the order of sys.path."""
    used = set()
    for name in ("sglang", "torch", "transformers", "sgl_kernel", "flashinfer", "triton"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            used.add(str(Path(spec.origin).parent.parent))
    return [folder for folder in sys.path if folder in used]


def write_wheel(out: Path, name: str, release: str, files: Mapping[str, bytes]) -> Path:
    """A pure wheel of these files; no requirements, so that nothing else is resolved."""
    plain = name.replace("-", "_")
    info = f"{plain}-{release}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests/gpu\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    record = ""
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    content[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel = out / f"{plain}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    return wheel


def _brings(release: str) -> dict[str, bytes]:
    """The path file, and ninja, which a real installation has in its bin folder for the JIT."""
    path_file = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders())
    files = {"engine_path.pth": path_file.encode()}
    if ninja := shutil.which("ninja"):
        script = f'#!/bin/sh\nexec {shlex.quote(ninja)} "$@"\n'
        files[f"sglang-{release}.data/scripts/ninja"] = script.encode()
    return files


def make(out: Path) -> str:
    """Writes the wheels below `out`; the text of the lock."""
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in PINNED:
        # The public part: a local one (+cu130) is not what a lock names.
        release = version(name).partition("+")[0]
        write_wheel(out, name, release, _brings(release) if name == "sglang" else {})
        lines.append(f"{name}=={release}")
    return "\n".join(lines) + "\n"
