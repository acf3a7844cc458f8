"""Which processes are provably of a job: by their environment, or by the log that they write."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deployer.remote.job_marks import MARKED
from tests.local_transport import SHELLS, LocalTransport, shell_path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="others' processes are not seen")

WAITS = "import sys; print(flush=True); sys.stdin.read()"
Started = subprocess.Popen[bytes]


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, opened: Path | None = None, **env: str) -> Started:
    """A process with this environment that has `opened` open for writing."""
    keep = stack.enter_context(opened.open("ab")) if opened is not None else None
    one = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WAITS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        pass_fds=[keep.fileno()] if keep is not None else [],
    )
    stack.callback(one.communicate)
    assert one.stdout is not None
    one.stdout.readline()
    if keep is not None:
        keep.close()
    return one


def marked(shell: str, root: Path, folder: Path, inodes: str = "") -> set[str]:
    transport = LocalTransport(shell_path(shell, folder))
    answer = transport.run(MARKED + 'marked "$1" "$2" "$3"\n', args=[str(root), "server-a", inodes])
    assert answer.exit == 0
    return set(answer.stdout.decode().splitlines())


@pytest.mark.parametrize("shell", SHELLS)
def test_marks_and_sockets(shell: str, tmp_path: Path, processes: ExitStack) -> None:
    root = tmp_path / "jobs"
    for name in ("server-a/one", "server-a/two", "server-b/one"):
        (root / name).mkdir(parents=True)
    mark = {"DEPLOYER_JOBS": str(root), "DEPLOYER_JOB": "server-a/one"}
    by_mark = start(processes, **mark, TEXT="first\nDEPLOYER_JOB=server-a/other")
    by_log = start(processes, opened=root / "server-a/two/log")
    start(processes, opened=root / "server-b/one/log")
    start(processes, **{**mark, "DEPLOYER_JOBS": f"{root}/x"})
    start(processes, **{**mark, "DEPLOYER_JOB": "server-ab/one"})
    found = {f"{by_mark.pid} one", f"{by_log.pid} two"}
    assert marked(shell, root, tmp_path) == found
    listener = processes.enter_context(socket.create_server(("127.0.0.1", 0)))
    inode = os.fstat(listener.fileno()).st_ino
    assert marked(shell, root, tmp_path, f"1 {inode} ") == {*found, f"{os.getpid()} - -"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_name_with_newlines_marks_nobody_else(
    shell: str, tmp_path: Path, processes: ExitStack
) -> None:
    """What a file or a variable is called must not read as a line about another process."""
    root = tmp_path / "jobs"
    (root / "server-a/one").mkdir(parents=True)
    victim = start(processes)
    row = f"l-wx------ 1 root root 64 Nov 30 15:47 3 -> {root}/server-a/one/log"
    lie = f"/proc/{victim.pid}/fd:\n{row}"
    deep = tmp_path / f"x\n{lie}"
    deep.parent.mkdir(parents=True)
    start(processes, opened=deep)
    start(processes, DEPLOYER_JOB=f"server-b/x\n{lie}\n")
    assert marked(shell, root, tmp_path) == set()
