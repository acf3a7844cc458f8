"""A container that the inventory describes and the host has not: made over SSH, from its template.

The tests of this file run in order on one host; the last ones kill the creation in its middle.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clones import OPTIONS
from lab import LAB, ROOT, Machine, eventually, run
from project import BUILD, Project

pytestmark = [pytest.mark.container, pytest.mark.long]

PREFIX = "deployer-create-"
CREATE: dict[str, Any] = {
    "template": "local:vztmpl/lab.tar",
    "storage": "local",
    "disk_gib": 8,
    "memory_mib": 4096,
    "hostname": "sglang-new",
    "unprivileged": False,
    "ssh_public_key_file": str(BUILD / "id_ed25519.pub"),
}
TEMPLATE = r"""
pct set 129 --onboot 0
pct shutdown 129 --timeout 5 --forceStop 1
cd /var/lib/lxc/129/rootfs
tar --exclude=./etc/ssh/ssh_host_'*' --exclude=./root/.ssh --exclude=./etc/lab/faults \
  -cf /var/lib/vz/template/cache/lab.tar .
"""


class Box:
    """A host of its own with a template and a stopped 129, and an inventory that wants 130."""

    def __init__(self, folder: Path) -> None:
        self.host = Machine("kpro5", prefix=PREFIX)
        self.host.sh(TEMPLATE, timeout_s=240).ok()
        self.new = Machine("kpro5", 130, PREFIX)
        self.project = Project(folder)
        ports = {inside: port_of(inside) for inside in (22, 2222)}
        self.known = folder / "known_hosts"
        public = (BUILD / "keys/kpro5/host/ssh_host_ed25519_key.pub").read_text().split()
        self.line = f"[127.0.0.1]:{ports[22]} {public[0]} {public[1]}\n"
        self.forget()
        described = self.project.hosts["kpro5"]
        self.entry = described["containers"].pop(129)
        for part, port in ((described, ports[22]), (self.entry, ports[2222])):
            part["ssh"].update(port=port, known_hosts=str(self.known))
        described["containers"][130] = self.entry
        described["deployments"]["tiny"]["container"] = 130
        self.want()

    def forget(self) -> None:
        """Only the host's key is known."""
        self.known.write_text(self.line)

    def want(self, **changes: Any) -> None:
        """Writes the inventory with these changes of `create`."""
        self.entry["create"] = {**CREATE, **changes}
        self.project.write()

    def begin(self) -> subprocess.Popen[bytes]:
        """`up --only container`, not waited for."""
        program = str(Path(sys.executable).parent / "deploy")
        folder = str(self.project.folder / "inventory")
        return subprocess.Popen(
            [program, "-i", folder, "up", "kpro5", "--only", "container", "--yes"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def unpacking(self) -> bool:
        """Whether pct has taken the id and is at its work."""
        held = self.host.sh("grep -q '^lock: create' /etc/pve/lxc/130.conf && ls /var/lib/lxc/130")
        return held.exit == 0 and bool(self.host.pids("^tar -xf"))

    def destroy(self) -> None:
        """No container 130."""
        self.host.sh("pct stop 130; pct destroy 130", timeout_s=30).ok()


def port_of(inside: int) -> int:
    """Where a port of the host is published."""
    said = run(["docker", "port", f"{PREFIX}kpro5", f"{inside}/tcp"]).ok().out
    return int(said.splitlines()[0].rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    if run(["docker", "version"]).exit != 0:
        pytest.skip("no Docker here")
    name, context = f"{PREFIX}kpro5", ROOT / "docker"
    if run(["docker", "image", "inspect", "deployer-lab-guest"]).exit != 0:
        run(["sh", str(LAB), "setup"], timeout_s=900).ok()
    # From this checkout, whatever the lab runs.
    build = ["docker", "build", "-q", "-t", f"{PREFIX}host", "-f", str(context / "host/Dockerfile")]
    run([*build, str(context)], timeout_s=600).ok()
    run(["docker", "rm", "-f", "-v", name])
    keys = f"{BUILD}/keys/kpro5:/etc/lab/keys:ro"
    begin = ["docker", "run", "-d", "--name", name, "--hostname", "kpro5", "-v", keys, *OPTIONS]
    try:
        run([*begin, f"{PREFIX}host"], timeout_s=120).ok()
        ready = ["docker", "exec", name, "test", "-e", "/run/lab/ready"]
        eventually(lambda: run(ready).exit == 0, "the host has booted", 120)
        made = Box(tmp_path_factory.mktemp("create"))
        for step in ("driver", "gpus"):
            made.project.deploy("up", "kpro5", "--only", step, "--yes").ok()
        yield made
    finally:
        run(["docker", "rm", "-f", "-v", name], timeout_s=120)
        run(["docker", "image", "rm", f"{PREFIX}host"])


@pytest.mark.parametrize(
    ("changes", "prepare", "told"),
    [
        ({"template": "local:vztmpl/none.tar"}, "", "has no template local:vztmpl/none.tar"),
        ({"template": "nfs9:vztmpl/x.tar"}, "", "storage 'nfs9' does not exist"),
        ({"storage": "nas"}, "", "has no active storage nas"),
        ({"ssh_public_key_file": "/nowhere/id.pub"}, "", "/nowhere/id.pub is not on this machine"),
        ({}, "touch /etc/pve/qemu-server/130.conf", "there is VM 130 on kpro5"),
        (
            {},
            "mkdir -p /etc/pve/nodes/kpro6/lxc; touch /etc/pve/nodes/kpro6/lxc/130.conf",
            "there is container 130 on kpro6",
        ),
    ],
)
def test_what_stands_in_the_way_is_told_before_anything_is_done(
    box: Box, changes: dict[str, Any], prepare: str, told: str
) -> None:
    box.want(**changes)
    box.host.sh(prepare or "true").ok()
    try:
        done = box.project.deploy("up", "kpro5", "--only", "container", "--yes")
    finally:
        box.host.sh("rm -rf /etc/pve/qemu-server/130.conf /etc/pve/nodes").ok()
    assert done.exit == 1, done.out + done.err
    assert told in done.out + done.err
    assert box.host.sh("test -e /etc/pve/lxc/130.conf").exit == 1


def test_it_is_made_started_and_reached_by_its_own_key(box: Box) -> None:
    box.want()
    plan = box.project.deploy("plan", "kpro5").ok()
    assert "create container 130 from local:vztmpl/lab.tar" in plan.out
    box.project.deploy("up", "kpro5", "--only", "container", "--yes").ok()
    conf = box.host.read("/etc/pve/lxc/130.conf")
    assert "lock" not in conf
    assert "hostname: sglang-new\n" in conf
    assert "dev0: /dev/nvidia0,mode=0666\n" in conf.partition("\n[")[0]
    assert box.new.sh("hostname").ok().out == "sglang-new\n"
    assert box.new.sh("stat -c %F /dev/nvidia0").ok().out == "character special file\n"
    known = box.known.read_text()
    assert box.new.read("/etc/ssh/ssh_host_ed25519_key.pub").split()[1] in known
    again = box.project.deploy("up", "kpro5", "--only", "container", "--yes").ok()
    assert "create container" not in again.out


@pytest.mark.parametrize("also", [False, True], ids=["here", "pct-too"])
def test_killed_in_the_middle_and_repeated(box: Box, also: bool) -> None:
    box.destroy()
    box.forget()
    begun = box.begin()
    try:
        eventually(box.unpacking, "pct unpacks the template", 60)
    finally:
        os.killpg(begun.pid, signal.SIGKILL)
        begun.wait()
    if also:
        for pid in (
            *box.host.pids("^/usr/bin/python3 .*pct create 130"),
            *box.host.pids("^tar -xf"),
        ):
            box.host.sh('kill -9 "$1"', str(pid))
        time.sleep(0.2)
        assert "lock: create" in box.host.read("/etc/pve/lxc/130.conf")
    done = box.project.deploy("up", "kpro5", "--only", "container", "--yes").ok()
    assert "lock" not in box.host.read("/etc/pve/lxc/130.conf"), done.out
    assert box.new.sh("hostname").ok().out == "sglang-new\n"
    assert box.host.sh("ls /var/lib/deployer/lxc/130").ok().out.find("creating") == -1
