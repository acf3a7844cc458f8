"""Builds a pure-Python wheel from a source tree with the standard library alone; no network.

    python wheel.py SOURCE_PACKAGE VERSION OUTDIR [REQUIREMENT...]

The same input gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path


def build(source: Path, version: str, out: Path, requires: list[str]) -> Path:
    """Returns the path of the wheel; the package's name is the folder's."""
    name = source.name
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    head = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: stand-in for {name} in the container lab",
        "Requires-Python: >=3.10",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    files[f"{info}/METADATA"] = ("\n".join(head) + "\n").encode()
    wheel = "Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/WHEEL"] = wheel.encode()
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
