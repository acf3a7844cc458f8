"""The download agent as one file that a Python on the target can run."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib import resources

PACKAGE = "deployer/agents/fetch"
NAME = "fetch.pyz"
_MAIN = "import sys\n\nfrom deployer.agents.fetch.main import main\n\nsys.exit(main())\n"


@functools.cache
def fetch_agent() -> bytes:
    """A zip application of `deployer.agents.fetch`: the same bytes for the same sources.

    Stored, not compressed: the target's Python may lack zlib. Run as `python3 -I -S fetch.pyz`.
    """
    buffer = io.BytesIO()
    sources = {"__main__.py": _MAIN, "deployer/__init__.py": "", "deployer/agents/__init__.py": ""}
    for entry in resources.files("deployer.agents").joinpath("fetch").iterdir():
        if entry.name.endswith(".py"):
            sources[f"{PACKAGE}/{entry.name}"] = entry.read_text(encoding="utf-8")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(sources):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), sources[name])
    return buffer.getvalue()
