"""The rungs of the ladder: what each method runs, with which environment, and when it cannot."""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH100, PTH118, PTH123

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deployer.agents.fetch.common import DENIED, MALFORMED, MISMATCH, NOT_FOUND
from deployer.agents.fetch.manifest import PEER, Job

OLDEST_XET = (1, 5, 2)
"""Older ones hang (xet-core #850 and others)."""
ASK_VENV_S = 30.0
LEAST_BUFFERS_MB, MOST_BUFFERS_MB = 256, 2048
_ASK_VENV = """
import importlib.metadata as m
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return "-"
print("versions", version("huggingface_hub"), version("hf-xet"))
"""
_OF_ANOTHER_SOURCE = frozenset({DENIED, NOT_FOUND, MISMATCH, MALFORMED})


@dataclass(frozen=True)
class Method:
    """One way to get the files.

    `name` is how the log and the progress line call it. `obstacle` says why it cannot be used now,
    '' when it can; asked when its turn comes. `passing`: codes that end the job for the Hub itself,
    but say nothing about it when this source gives them.
    """

    name: str
    words: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    obstacle: Callable[[], str] = lambda: ""
    passing: frozenset[int] = frozenset()
    own_figures: bool = True
    """Its progress line tells `bytes`; else the supervisor looks at the disk."""


def agent(mode: str, *words: str, python: Sequence[str] | None = None) -> list[str]:
    """How this very agent is run in another mode."""
    return [*(python or (sys.executable, "-I", "-S")), os.path.abspath(sys.argv[0]), mode, *words]


def settle(environ: Mapping[str, str]) -> Method:
    """The child that has no network: hashes what is there, renames what is right."""
    return Method("settle", agent("settle"), environ)


def ladder(job: Job, token: str, environ: Mapping[str, str]) -> list[Method]:
    """The methods of the job, in its order; `mirror` is one method for each mirror.

    Only methods that speak to the job's own endpoint get the token.
    """
    plain = {name: text for name, text in environ.items() if name != "HF_TOKEN"}
    secret = {**plain, "HF_TOKEN": token} if token else plain
    found = []
    for name in job.methods:
        if name == "range":
            found.append(Method(name, agent("range"), secret))
        elif name == "hf-xet":
            found.append(_hf_xet(job, secret))
        elif name == "mirror":
            found += [
                Method(f"mirror {url}", agent("range", url), plain, passing=_OF_ANOTHER_SOURCE)
                for url in job.mirrors
            ]
            if not job.mirrors:
                found.append(Method(name, obstacle=lambda: "none is configured"))
        elif job.peer is not None and job.peer.lends:
            found.append(
                Method(
                    f"peer {job.peer.address}",
                    agent("range", PEER),
                    plain,
                    lambda: _lacking("ssh"),
                    _OF_ANOTHER_SOURCE,
                )
            )
        else:
            found.append(
                Method(
                    name,
                    agent("peer"),
                    plain,
                    lambda: _no_peer(job),
                    _OF_ANOTHER_SOURCE,
                    own_figures=False,
                )
            )
    return found


def _no_peer(job: Job) -> str:
    if job.peer is None:
        return "none is configured"
    return _lacking("rsync", "ssh")


def _lacking(*programs: str) -> str:
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not installed on this machine" if lacking else ""


def venv_python(job: Job) -> str:
    """The Python of the engine's venv."""
    return os.path.join(job.venv, "bin", "python")


def _hf_xet(job: Job, environ: Mapping[str, str]) -> Method:
    return Method(
        "hf-xet",
        agent("hf-child", python=(venv_python(job), "-I")),
        hf_environment(job, environ),
        lambda: _no_hf(job),
        own_figures=False,
    )


def hf_environment(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: nothing of the user's own settings, caches or tokens."""
    home = os.path.join(job.path, ".deployer", "hf", "home")
    buffers = xet_buffers_mb()
    kept = {
        name: text
        for name, text in environ.items()
        if not name.startswith(("HF_", "HUGGING_FACE_", "HUGGINGFACE_", "PYTHON"))
        or name == "HF_TOKEN"
    }
    kept.update(
        HF_HOME=home,
        HF_HUB_CACHE=os.path.join(home, "hub"),
        HF_XET_CACHE=os.path.join(home, "xet"),
        HF_ENDPOINT=job.endpoint,
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
        HF_HUB_DISABLE_UPDATE_CHECK="1",
        HF_HUB_VERBOSITY="error",
        HF_HUB_ETAG_TIMEOUT="15",
        HF_HUB_DOWNLOAD_TIMEOUT=str(max(1, round(job.limits.recv_timeout_s))),
        HF_XET_CLIENT_READ_TIMEOUT="30s",
        HF_XET_CLIENT_CONNECT_TIMEOUT="15s",
        HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE=f"{buffers // 4}mb",
        HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE=f"{buffers // 8}mb",
        HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT=f"{buffers}mb",
    )
    if job.proxy:
        kept.update(dict.fromkeys(("http_proxy", "https_proxy"), job.proxy))
        kept.update(dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), job.proxy))
    if job.ca_bundle:
        kept.update(SSL_CERT_FILE=job.ca_bundle, REQUESTS_CA_BUNDLE=job.ca_bundle)
    return kept


def xet_buffers_mb() -> int:
    """Most memory for hf_xet's buffers: a quarter of what is free; its own default is 8 GB."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            free = next(int(line.split()[1]) for line in stream if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return LEAST_BUFFERS_MB
    return max(LEAST_BUFFERS_MB, min(MOST_BUFFERS_MB, free // 4096))


def _no_hf(job: Job) -> str:
    """Why the venv's huggingface_hub cannot be used, in one line."""
    python = venv_python(job)
    if job.limits.bwlimit_bytes_per_s:
        return "it cannot be held to bwlimit_bytes_per_s"
    if not job.venv or not os.access(python, os.X_OK):
        return f"{python} is not there" if job.venv else "no venv is configured"
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK_VENV],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ASK_VENV_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{python} did not answer in {ASK_VENV_S:.0f} s"
    except OSError as error:
        return f"{python}: {error.strerror or error}"
    words = done.stdout.decode("utf-8", "replace").split()
    if done.returncode != 0 or words[:1] != ["versions"] or len(words) != 3:
        return f"{python} ended with {done.returncode}: {' '.join(words)[-200:]}"
    if words[1] == "-":
        return f"huggingface_hub is not installed in {job.venv}"
    if words[2] == "-":
        return f"hf_xet is not installed in {job.venv}"
    if version_of(words[2]) < OLDEST_XET:
        return f"hf_xet {words[2]} in {job.venv} is older than {'.'.join(map(str, OLDEST_XET))}"
    return ""


def version_of(text: str) -> tuple[int, ...]:
    """`1.8.0rc1` -> (1, 8, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
