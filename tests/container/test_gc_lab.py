"""`deploy gc` against the lab's guest, through its real sshd, on real files and live processes.

The tests of this file run in order and share one guest.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, Machine, Result, eventually
from project import Project, pristine

pytestmark = [pytest.mark.container, pytest.mark.long]

BUILDS = "/opt/deployer/venvs/tiny.builds"
MODELS = "/srv/models"
MAKE = r"""
set -e
build() {
  mkdir -p "$1/bin" "$1/lib"
  ln -s "$(readlink -f "$(command -v python3)")" "$1/bin/python"
  printf x >"$1/lib/a.py"
  : >"$1/complete"; printf '{"lock": "%s"}' "$1" >"$1/deployer.json"
  touch -d "@$2" "$1"
}
model() {
  mkdir -p "$1/.deployer"
  entry='{\n   "size": 1\n  }'
  printf '{\n "version": 1,\n "files": {\n  "%s": '"$entry"',\n  "%s": '"$entry"'\n }\n}\n' \
    a.safetensors b.safetensors \
    >"$1/.deployer/verified.json"
  head -c 300000 /dev/urandom >"$1/a.safetensors"
}
"""


@dataclass
class Box:
    """A project whose guest has builds, weights and processes of many kinds."""

    project: Project
    host: Machine
    guest: Machine
    holders: list[int] = field(default_factory=list)

    def make(self, script: str) -> None:
        """Runs it in the guest, after MAKE."""
        self.guest.sh(MAKE + script).ok()

    def hold(self, command: str) -> int:
        """A process in the guest that lives until the tests are over; its pid there."""
        out = self.guest.sh(f"setsid {command} >/dev/null 2>&1 </dev/null & echo $!").ok().out
        self.holders.append(int(out))
        return self.holders[-1]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Path -> row of the table."""
        told = json.loads(self.gc("--json").ok().out)
        return {row["path"]: row for row in told["deployments"]["kpro5/tiny"]}

    def gc(self, *words: str) -> Result:
        """`deploy gc kpro5`."""
        return self.project.deploy(*words, "gc", "kpro5")

    def there(self, folder: str) -> list[str]:
        """The names in a folder of the guest."""
        return self.guest.sh('ls -A "$1"', folder).ok().out.split()

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """`deploy --jsonl gc kpro5 --yes`, started."""
        program = str(Path(sys.executable).parent / "deploy")
        argv = [program, "-i", str(self.project.folder / "inventory"), "--jsonl", "gc", "kpro5"]
        return subprocess.Popen(
            [*argv, "--yes", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )


@pytest.fixture(scope="module")
def box(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    host, guest = pristine(lab)
    made = Box(Project(tmp_path_factory.mktemp("gc")), host, guest)
    made.make(f"""
for n in 1 2 3 4 5 6 7; do build {BUILDS}/b$n $n; done
ln -s {BUILDS}/b7 {BUILDS.removesuffix(".builds")}
mkdir {BUILDS}/theirs {BUILDS}/mounted
build {BUILDS}/mounted/x 1; : >{BUILDS}/mounted/complete
for m in tiny-hybrid old older good shared hub odd named; do model {MODELS}/$m; done
printf secret >{MODELS}/odd/notes.txt
mkdir -p {MODELS}/cache/blobs {MODELS}/cache/snapshots/1
ln {MODELS}/hub/a.safetensors {MODELS}/cache/blobs/0123
ln -s ../../blobs/0123 {MODELS}/cache/snapshots/1/a.safetensors
ln -s {MODELS}/cache/blobs/0123 {MODELS}/hub/b.safetensors
mkdir -p /var/lib/deployer/jobs/server-other/1
printf 'exec x --model-path {MODELS}/named\\n' >/var/lib/deployer/jobs/server-other/1/script
""")
    launches = [
        {
            **{"id": name, "variant": "mtp", "started": 1.0 + number, "verdict": "stopped"},
            "argv": ["py", "--model-path", f"{MODELS}/{name}"],
            "fingerprint": name,
            "venv": f"{BUILDS}/b1" if name == "good" else "",
        }
        for number, name in enumerate(("good", "older", "old", "shared", "hub", "odd", "named"))
    ]
    state = {
        **{"schema_version": 2, "host": "kpro5"},
        "deployments": {"tiny": {"launches": launches, "known_good": "good"}},
    }
    folder = made.project.folder / ".deploy" / "state"
    folder.mkdir(parents=True)
    (folder / "kpro5.json").write_text(json.dumps(state))
    made.hold(f"{BUILDS}/b2/bin/python -c 'import time; time.sleep(3600)'")
    made.hold(
        f"python3 -c \"import time; f = open('{MODELS}/shared/a.safetensors'); time.sleep(3600)\""
    )
    yield made
    guest.sh(f"kill -9 {' '.join(map(str, made.holders))}")


def test_what_goes_and_why_the_rest_stays(box: Box) -> None:
    eventually(
        lambda: box.rows()[f"{MODELS}/shared"]["why"] == "a process uses it", "it is held", 20
    )
    rows = box.rows()
    whys = {path.rpartition("/")[2]: (row["goes"], row["why"]) for path, row in rows.items()}
    assert whys["b7"] == (False, f"{BUILDS.removesuffix('.builds')} points to it")
    assert whys["b2"] == (False, "a process uses it")
    assert whys["b1"] == (False, "launch good ran in it: the known-good launch")
    assert whys["theirs"] == (False, "not known to be ours: it has no record of a build")
    for name in ("b3", "b4", "b5", "b6"):
        assert whys[name] == (True, "older than the newest 2 (keep.venvs)")
    assert whys["tiny-hybrid"] == (False, "the playbook's model")
    assert whys["good"] == (False, "launch good had these weights: the known-good launch")
    assert whys["odd"][1].endswith("1 files in it are not in the hash record")
    assert whys["named"][1] == "server-other, of another deployment, names it"
    assert [whys[name][0] for name in ("old", "older", "hub")] == [True] * 3
    hub = rows[f"{MODELS}/hub"]
    assert hub["frees"] < 100_000 < hub["bytes"], "the hub's cache has the same blob"
    shown = box.gc().ok()
    assert "nothing was freed: add --yes" in shown.err
    assert "of it have other names and stay" in shown.out


def test_a_file_system_mounted_in_a_build_keeps_it(box: Box) -> None:
    done = box.guest.sh(f"mount -t tmpfs none {BUILDS}/mounted/x")
    if done.exit != 0:
        pytest.skip(f"the guest may not mount: {done.err}")
    try:
        row = box.rows()[f"{BUILDS}/mounted"]
        assert (row["goes"], row["why"]) == (False, "something is mounted in it, or it elsewhere")
    finally:
        box.guest.sh(f"umount {BUILDS}/mounted/x").ok()


def test_a_kill_in_the_middle_a_second_gc_and_the_same_command_again(box: Box) -> None:
    box.make(f"cd {BUILDS}/b3 && seq 1 60000 | xargs touch && touch -d @3 .")
    dead = box.start()
    assert dead.stdout is not None
    for line in dead.stdout:
        event = json.loads(line)
        if event["event"] == "progress" and "b3" in event.get("detail", ""):
            break
    # It goes no further, and its lock stays: what runs in the guest runs on.
    dead.send_signal(signal.SIGSTOP)
    second = box.gc("--yes")
    assert second.exit == 4 and f"pid {dead.pid}" in second.err, second.err
    assert "\n  -> wait for it" in second.err
    dead.kill()
    dead.communicate()
    done = box.gc("--yes").ok()
    assert "took over the lock of a dead run" in done.err
    assert sorted(box.there(BUILDS)) == ["b1", "b2", "b7", "theirs"]
    assert sorted(box.there(MODELS)) == [
        *("cache", "good", "named", "odd", "shared", "tiny-hybrid"),
    ]
    assert box.guest.sh(f"cat {MODELS}/cache/snapshots/1/a.safetensors | wc -c").out.strip() == (
        "300000"
    )
    assert box.guest.sh("test -e /var/lib/deployer/lock").exit != 0
    assert box.host.sh("test -e /var/lib/deployer/lock").exit != 0
    assert "nothing to free" in box.gc("--yes").ok().err


def test_a_cut_connection_and_again(box: Box) -> None:
    box.make(f"build {BUILDS}/b4 4; cd {BUILDS}/b4 && seq 1 60000 | xargs touch; touch -d @4 .")
    run = box.start()
    assert run.stdout is not None
    for line in run.stdout:
        event = json.loads(line)
        if event["event"] == "progress" and "b4" in event.get("detail", ""):
            break
    # The guest's sshd of this session, by its number: the end of a TCP connection, no more.
    sessions = box.guest.pids("^sshd: root@notty")
    box.guest.sh(f"kill -9 {' '.join(map(str, sessions))}").ok()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 3, said
    assert b"deploy: " in said and b"\n  -> " in said
    box.gc("--yes").ok()
    assert sorted(box.there(BUILDS)) == ["b1", "b2", "b7", "theirs"]


def test_what_cannot_be_removed_is_told_with_what_to_do(box: Box) -> None:
    box.make(f"for n in 3 4; do build {BUILDS}/b$n $n; done")
    # As a disk that the kernel has made read-only after errors.
    box.guest.sh(f"mount --bind {BUILDS} {BUILDS} && mount -o remount,bind,ro {BUILDS}").ok()
    try:
        done = box.gc("--yes")
        assert done.exit == 1 and "2 of 2 folders were not removed" in done.err, done.err
        assert done.err.count("Read-only file system") == 2 and "\n  -> see why" in done.err
    finally:
        box.guest.sh(f"umount {BUILDS}").ok()
    box.gc("--yes").ok()
    assert sorted(box.there(BUILDS)) == ["b1", "b2", "b7", "theirs"]
