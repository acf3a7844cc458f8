"""The agent as one file."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deployer.agents.bundle import fetch_agent
from deployer.agents.fetch.common import BAD_MANIFEST


def test_the_same_sources_make_the_same_bytes_and_need_no_zlib() -> None:
    data = fetch_agent()
    fetch_agent.cache_clear()
    assert fetch_agent() == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        rows = archive.infolist()
    assert {row.compress_type for row in rows} == {zipfile.ZIP_STORED}
    assert {"__main__.py", "deployer/__init__.py", "deployer/agents/fetch/main.py"} <= {
        row.filename for row in rows
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [([], "manifest.json"), (["range"], "manifest.json"), (["nonsense"], "mode 'nonsense'")],
)
def test_it_runs_on_a_bare_python_and_names_what_it_lacks(
    tmp_path: Path, words: list[str], text: str
) -> None:
    (tmp_path / "fetch.pyz").write_bytes(fetch_agent())
    done = subprocess.run(
        [sys.executable, "-I", "-S", "fetch.pyz", *words],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == BAD_MANIFEST and not done.stderr
    assert "error: " in done.stdout and text in done.stdout
