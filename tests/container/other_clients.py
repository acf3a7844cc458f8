"""Other people's downloaders in a target: the real `hf` and aria2c, killed in the middle."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from fetching import MODEL
from hub import Hub
from target import Target

HF = Path(sys.executable).with_name("hf")
PACKAGES = "/opt/test-venv/packages"
MOUNTS = (
    f"{sysconfig.get_path('purelib')}:{PACKAGES}:ro",
    f"{HF}:/opt/test-venv/hf:ro",
)
"""The test environment's huggingface_hub; the target's own Python runs it."""
HF_SETTINGS = {
    "PYTHONPATH": PACKAGES,
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HOME": "/root/hf-home",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
FIND = r"""
for folder in /proc/[0-9]*; do
  tr '\0' '\n' <"$folder/environ" 2>/dev/null | grep -qxF "TEST_MARK=$1" && echo "${folder##*/}"
done
"""


class HfDownload:
    """A started `hf download` of the whole repository into the model's folder."""

    def __init__(self, target: Target, hub: Hub, xet: bool = False) -> None:
        self.target = target
        self.mark = f"hf-{time.monotonic_ns()}"
        settings = {**HF_SETTINGS, "HF_ENDPOINT": hub.url, "TEST_MARK": self.mark}
        if not xet:
            settings["HF_HUB_DISABLE_XET"] = "1"
        words = ["env", *(f"{name}={value}" for name, value in settings.items())]
        words += ["python3", "/opt/test-venv/hf", "download", hub.repo.name, "--local-dir", MODEL]
        self.process = subprocess.Popen(
            target.exec(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def pids(self) -> list[int]:
        """Its processes, as the target numbers them."""
        return [int(word) for word in self.target.sh(FIND, self.mark).out.split()]

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        pids = self.pids()
        assert pids, f"hf download is over already: {self.said()}"
        self.target.sh('kill -9 "$@"', *map(str, pids)).ok()
        self.process.wait(20)
        assert not self.pids()

    def said(self) -> str:
        """All that it said, once it has ended."""
        out, _ = self.process.communicate(timeout=60)
        return out.decode("utf-8", "replace")


def await_sent(hub: Hub, process: subprocess.Popen[bytes], wanted: int) -> None:
    """Returns when the hub has sent so many bytes in all."""
    deadline = time.monotonic() + 60
    while int(hub.stats(log=False)["sent_total"]) < wanted:
        assert process.poll() is None, "the download ended before it could be killed"
        assert time.monotonic() < deadline, f"the hub has not sent {wanted} bytes in 60 s"
        time.sleep(0.01)


def aria2_killed(hub: Hub, folder: Path, name: str, wanted: int) -> None:
    """aria2c fetches one file into `folder` in four streams and dies when `wanted` bytes are sent.

    Its control file is saved every second, so it knows of nearly all that is there.
    """
    program = shutil.which("aria2c")
    assert program
    url = f"{hub.url}/{hub.repo.name}/resolve/main/{name}"
    options = ["-q", "-x4", "-s4", "-k1M", "--auto-save-interval=1", "--file-allocation=none"]
    with subprocess.Popen(
        [program, *options, "-d", str(folder), "-o", name, url],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "no_proxy": "*"},
    ) as process:
        try:
            await_sent(hub, process, wanted)
        finally:
            process.send_signal(signal.SIGKILL)


def put(target: Target, folder: Path) -> None:
    """Copies a folder's files into the model's folder; holes stay holes."""
    tar = subprocess.run(
        ["tar", "-C", str(folder), "-S", "-cf", "-", "."], capture_output=True, check=True
    ).stdout
    target.sh('mkdir -p "$1" && tar -C "$1" -xf -', MODEL, stdin=tar).ok()
