"""The driver on the lab: looking changes nothing, and installs run for real, as jobs.

The tests of this file run in order on one host.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import PREFIX, Lab, Machine, eventually, run
from project import Project, pristine
from test_lab import RUN_FILE, give_gpus

pytestmark = pytest.mark.container

WANTED, OLD = "580.126.09", "580.95.05"
NEWER = "6.99.1-1-pve"
PORT = 8123
LIMIT_S = 3.0
INSTALLER_LOG = "/var/log/nvidia-installer.log"
STATE = r"""
cut -d ' ' -f 1 /proc/modules | sort
find /dev -xdev \( -type c -o -type b -o -type f \) -printf '%p %y %m %U:%G %i\n' | grep -v /dev/shm
find /dev -xdev \( -type c -o -type b \) -exec stat -c '%n %t:%T %Z' {} + | grep nvidia
"""
JOBS = "ls -1 /var/lib/deployer/jobs/$1 | grep -v current; true"


@dataclass(frozen=True)
class Box:
    """A project and the machines of kpro5; `digest`: of the host's driver package."""

    project: Project
    host: Machine
    guest: Machine
    digest: str

    def wants(self, **driver: Any) -> None:
        """The playbook's driver section, changed."""
        self.project.playbook(driver=driver)

    def up(self) -> str:
        """`up --only driver`, which must succeed; its lines."""
        return self.project.deploy("up", "kpro5", "--only", "driver").ok().err

    def module(self, kernel: str = "$(uname -r)") -> str:
        """Version of the module on disk."""
        return self.host.sh(f"modinfo -k {kernel} -F version nvidia").out.strip()


@pytest.fixture(scope="module")
def box(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Pristine, with a web server that has the driver package."""
    host, guest = pristine(lab)
    digest = host.sh('sha256sum "$1"', RUN_FILE).ok().out.split()[0]
    folder = RUN_FILE.rpartition("/")[0]
    server = f"cd {folder} && exec python3 -m http.server {PORT} --bind 127.0.0.1"
    run(["docker", "exec", "-d", PREFIX + "kpro5", "sh", "-c", server]).ok()
    yield Box(Project(tmp_path_factory.mktemp("driver")), host, guest, digest)
    lab.reset("kpro5")


def url(box: Box, **more: Any) -> dict[str, Any]:
    """A package that the target fetches."""
    name = RUN_FILE.rpartition("/")[2]
    return {"url": f"http://127.0.0.1:{PORT}/{name}", "sha256": box.digest, **more}


def looked(box: Box) -> tuple[str, float, list[str]]:
    """What doctor says, how long it took, and what it changed."""
    before = [machine.sh(STATE).out for machine in (box.host, box.guest)]
    began = time.monotonic()
    said = box.project.deploy("doctor", "kpro5")
    seconds = time.monotonic() - began
    after = [machine.sh(STATE).out for machine in (box.host, box.guest)]
    assert all(text.count("\n") > 5 for text in before), "the state was really read"
    changed = [
        f"{mark} {line}"
        for old, new in zip(before, after, strict=True)
        for mark, line in (
            *(("-", line) for line in set(old.splitlines()) - set(new.splitlines())),
            *(("+", line) for line in set(new.splitlines()) - set(old.splitlines())),
        )
    ]
    assert said.exit in (0, 1), said.err
    return said.out, seconds, changed


def slowdown() -> float:
    """How much longer than its processor time a computation takes here now: others work too."""
    began, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.3:
        sum(range(10_000))
    return max(1.0, (time.monotonic() - began) / 0.3)


def test_doctor_changes_nothing_on_a_pristine_host(box: Box) -> None:
    text, seconds, changed = looked(box)
    assert changed == []
    times = [seconds]
    while min(times) >= LIMIT_S and len(times) < 3:
        times.append(looked(box)[1])
    assert min(times) < LIMIT_S * slowdown(), times
    lines = text.splitlines()
    assert len(lines) < 55, text
    assert any(
        line.split() == ["module", "loaded", "on", "kpro5", "none", "not", "loaded"]
        for line in lines
    ), text
    assert "CUDA in container 129: not asked: the nvidia module is not loaded" in text
    for words in ("libraries in kpro5", "libraries in container 129", "Secure Boot", "seen for"):
        assert words in text


def test_host_install_is_joined_after_a_kill(box: Box) -> None:
    """From a URL, in a job: the controller is killed in the middle, the next one joins."""
    host = box.host
    host.sh("/usr/lib/lab/fault no-driver on && echo 300 >/etc/lab/build-seconds").ok()
    box.wants(install="host-and-guest", package=url(box))
    program = str(Path(sys.executable).parent / "deploy")
    words = [
        program,
        "-i",
        str(box.project.folder / "inventory"),
        "up",
        "kpro5",
        "--only",
        "driver",
    ]
    first = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        eventually(
            lambda: "Kernel module type: open; dkms: yes" in host.sh(f"cat {INSTALLER_LOG}").out,
            "the installer builds",
            60,
        )
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert box.module() == ""
    second = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    told = ""
    for line in second.stderr:
        told += line
        if "joined running job driver-host" in line:
            host.sh("rm /etc/lab/build-seconds").ok()
    assert second.wait(30) == 0, told
    assert "joined running job driver-host" in told
    assert box.module() == WANTED
    assert host.sh(JOBS, "driver-host").out.split().__len__() == 1
    # The guest's libraries came from the same URL, of the same version, without a module.
    assert box.guest.sh("ls /usr/lib/x86_64-linux-gnu/libcuda.so." + WANTED).exit == 0
    assert box.guest.sh("ls /var/lib/deployer/driver/*.run").out == "", "our copy is gone"
    assert (
        "/var/lib/deployer/jobs/driver-userspace"
        in box.guest.sh("ls -d /var/lib/deployer/jobs/driver-userspace").out
    ), "the log is kept"


def test_again_nothing_to_do(box: Box) -> None:
    assert "nothing to do: module" in box.up()


def test_a_package_of_another_hash_is_not_run(box: Box) -> None:
    box.guest.sh("sh -c 'rm /usr/lib/x86_64-linux-gnu/libcuda.so*'").ok()
    box.wants(install="guest", package=url(box, sha256="1" * 64))
    done = box.project.deploy("up", "kpro5", "--only", "driver")
    assert done.exit == 1
    assert "it was not run" in done.err
    assert box.guest.sh("ls /usr/lib/x86_64-linux-gnu/libcuda.so." + WANTED).exit != 0
    assert box.guest.sh("ls /var/lib/deployer/driver").out == ""


def test_a_package_of_this_machine_goes_into_the_guest(box: Box, tmp_path: Path) -> None:
    package = tmp_path / "mine.run"
    text = run(["docker", "exec", PREFIX + "kpro5", "cat", RUN_FILE]).ok().out
    package.write_text(text)
    assert hashlib.sha256(package.read_bytes()).hexdigest() == box.digest
    box.wants(install="guest", package={"local": str(package), "sha256": box.digest})
    told = box.up()
    assert "send the driver package to container 129" in told
    assert box.guest.sh("ls /usr/lib/x86_64-linux-gnu/libcuda.so." + WANTED).exit == 0


def test_an_idle_old_module_is_replaced(box: Box) -> None:
    host = box.host
    host.sh(
        "rm -f /etc/lab/build-seconds; for ko in /lib/modules/$(uname -r)/updates/dkms/*.ko; "
        'do echo "$1" >"$ko"; done',
        OLD,
    ).ok()
    give_gpus(host)
    assert OLD in host.read("/proc/driver/nvidia/version")
    box.wants(install="host-and-guest", package={"file": RUN_FILE, "sha256": box.digest})
    told = box.up()
    assert f"unload the nvidia module {OLD} on kpro5" in told
    assert host.sh("ls /sys/module/nvidia").exit != 0
    assert box.module() == WANTED


def test_doctor_tells_what_the_next_boot_loses_and_up_builds_it(box: Box) -> None:
    box.host.sh(
        'mkdir -p "/lib/modules/$1/build" && : >"/lib/modules/$1/build/Makefile" && '
        'touch "/boot/vmlinuz-$1" "/boot/vmlinuz-$(uname -r)"',
        NEWER,
    ).ok()
    box.wants(install="guest")
    text, _, _ = looked(box)
    assert f"the next boot of kpro5 will lose the GPUs: kernel {NEWER} (the newest)" in text
    assert f"-> on kpro5: dkms install nvidia/{WANTED} -k {NEWER}" in text
    box.wants(install="host-and-guest")
    assert f"build the nvidia module {WANTED} for kernel {NEWER}" in box.up()
    assert box.module(NEWER) == WANTED


def test_doctor_changes_nothing_where_cuda_runs(box: Box) -> None:
    """CUDA answers in the guest, and neither host nor guest differs afterwards."""
    box.host.sh("modprobe nvidia && nvidia-modprobe -u -c 0 -c 1").ok()
    box.guest.sh("chmod 0600 /dev/nvidia*").ok()
    text, _, changed = looked(box)
    assert changed == []
    assert "CUDA in container 129: cuInit succeeds, " in text
    assert "GPUs: 10de:2230 Ampere" in text


def test_a_stale_uvm_is_told_by_its_numbers(box: Box) -> None:
    box.guest.sh("rm /dev/nvidia-uvm && mknod /dev/nvidia-uvm c 77 0").ok()
    text, _, changed = looked(box)
    assert changed == []
    assert "/dev/nvidia-uvm has major 77 here, the module has 509" in text
