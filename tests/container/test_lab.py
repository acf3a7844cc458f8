"""The lab itself: what its stand-ins say must be what real machines said (field notes)."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml
from lab import ROOT, Lab, Machine, eventually, run
from project import hub

pytestmark = pytest.mark.container

FIRST, SECOND = "0000:21:00.0", "0000:41:00.0"
PCI = "/sys/bus/pci"
RUN_FILE = "/var/lib/vz/template/cache/NVIDIA-Linux-x86_64-580.126.09.run"
NODES = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")


def to_nvidia(host: Machine, address: str) -> None:
    """Override and unbind, up to the moment when a probe may take it."""
    host.sh(
        'echo nvidia >"$1/devices/$2/driver_override" && echo "$2" >"$1/devices/$2/driver/unbind"',
        PCI,
        address,
    ).ok()
    eventually(lambda: host.driver(address) == "", f"{address} has no driver")


def give_gpus(host: Machine) -> None:
    """GPUs on nvidia, nodes made, devices in the running guest."""
    to_nvidia(host, FIRST)
    to_nvidia(host, SECOND)
    host.sh("modprobe nvidia && nvidia-modprobe -u -c 0 -c 1").ok()
    for number, node in enumerate(NODES):
        host.sh('pct set 129 "$1" "$2"', f"--dev{number}", f"/dev/{node}").ok()


@pytest.fixture(scope="module")
def untouched(lab: Lab) -> Machine:
    """kpro5, pristine once for the tests that change nothing."""
    lab.reset("kpro5")
    return lab.hosts["kpro5"]


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("pct status 129", 0, "status: running"),
        ("pct status 130", 2, "Configuration file 'nodes/kpro5/lxc/130.conf' does not exist"),
        ("pct start 130", 255, "Configuration file 'nodes/kpro5/lxc/130.conf' does not exist"),
        ("pct stop 130", 255, "CT 130 not running"),
        ("pct start 129", 255, "CT 129 already running"),
        ("pct foo", 255, "ERROR: unknown command 'pct foo'"),
        ("pct exec 129 ls -l", 2, "400 unable to parse option"),
        ("pct exec 129 -- nosuch", 127, 'Failed to exec "nosuch"'),
        ("pct exec 129 -- /etc/hostname", 126, 'Failed to exec "/etc/hostname"'),
        ("pct exec 129 -- sh -c 'exit 7'", 7, ""),
        ("pct exec 129 -- sh -c 'kill -9 $$'", 137, ""),
        ("pct exec 129 -- echo 'a  b' '$HOME'", 0, "a  b $HOME"),
        ("pct set 129", 2, "no options specified"),
        ("pct set 129 --dev0 /dev/nosuch", 2, "Device /dev/nosuch does not exist"),
        ("pct set 129 --lxc.mount.entry x", 2, "Unknown option: lxc.mount.entry"),
        ("pct unlock 129", 255, "no lock found trying to remove any lock"),
        ("dpkg-query -W -f '${Version}' pve-container", 0, "6.1.10"),
        ("modprobe nvidia", 1, "could not insert 'nvidia': No such device"),
        ("modinfo -k $(uname -r) -F version nvidia", 0, "580.126.09"),
        ("nvidia-smi", 9, "couldn't communicate with the NVIDIA driver"),
    ],
)
def test_texts_and_exit_codes(untouched: Machine, script: str, code: int, text: str) -> None:
    result = untouched.sh(script)
    assert result.exit == code
    assert text in result.out + result.err


def test_pct_exec_environment_and_binary_stdin(untouched: Machine) -> None:
    host = untouched
    bare = host.sh("pct exec 129 --keep-env 0 -- env").ok().out.splitlines()
    assert sorted(bare) == [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "container=lxc",
    ]
    kept = host.sh("LEAK=1 pct exec 129 -- env").ok().out.splitlines()
    assert "LEAK=1" in kept
    assert "PATH=/sbin:/bin:/usr/sbin:/usr/bin" in kept
    data = bytes(range(256)) * 4096
    assert host.sh("pct exec 129 -- cat | cksum", stdin=data).out == host.sh(
        "cksum", stdin=data
    ).out.replace(" -", "")


def test_killed_client_leaves_the_inner_process(kpro5: Machine, guest5: Machine) -> None:
    client = subprocess.Popen(
        ["docker", "exec", "deployer-lab-kpro5", "pct", "exec", "129", "--", "sleep", "431"]
    )
    eventually(lambda: bool(guest5.pids("^sleep 431")), "the process runs in the guest")
    kpro5.sh("kill -9 $(pgrep -f '^nsenter.*sleep 431')")
    client.wait(10)
    assert guest5.pids("^sleep 431")
    assert kpro5.pids("^sleep 431"), "the host sees the guest's processes"


def test_pending_waits_for_a_restart(kpro5: Machine) -> None:
    kpro5.sh("pct set 129 --features nesting=1,keyctl=1").ok()
    assert "new features: nesting=1,keyctl=1" in kpro5.sh("pct pending 129").out
    assert "features: nesting=1,keyctl=1" in kpro5.sh("pct config 129").out
    assert "features: nesting=1\n" in kpro5.sh("pct config 129 --current").out
    kpro5.sh("pct reboot 129").ok()
    assert "new " not in kpro5.sh("pct pending 129").out
    assert "keyctl" in kpro5.sh("pct config 129 --current").out


def test_rebind_through_the_fifos(kpro5: Machine) -> None:
    assert kpro5.driver(FIRST) == "vfio-pci"
    # Without an override the device goes back to vfio-pci, whose ids still match.
    kpro5.sh('echo "$1" >/sys/bus/pci/drivers/vfio-pci/unbind', FIRST).ok()
    eventually(lambda: kpro5.driver(FIRST) == "", "unbound")
    kpro5.sh('echo "$1" >/sys/bus/pci/drivers_probe', FIRST).ok()
    eventually(lambda: kpro5.driver(FIRST) == "vfio-pci", "vfio-pci has it again")

    to_nvidia(kpro5, FIRST)
    kpro5.sh("modprobe nvidia").ok()
    assert kpro5.driver(FIRST) == "nvidia"
    assert kpro5.driver(SECOND) == "vfio-pci"
    assert "580.126.09" in kpro5.read("/proc/driver/nvidia/version")
    assert kpro5.read("/sys/module/nvidia/version") == "580.126.09\n"
    assert "195 nvidia\n" in kpro5.read("/proc/devices")

    to_nvidia(kpro5, SECOND)
    kpro5.sh('echo "$1" >/sys/bus/pci/drivers_probe', SECOND).ok()
    eventually(lambda: kpro5.driver(SECOND) == "nvidia", "the probe took it")
    listed = kpro5.sh("nvidia-smi -L").ok().out.splitlines()
    assert [line[:24] for line in listed] == [
        "GPU 0: NVIDIA RTX A6000 ",
        "GPU 1: NVIDIA RTX A6000 ",
    ]


def test_devices_and_driver_in_the_guest(kpro5: Machine, guest5: Machine) -> None:
    give_gpus(kpro5)
    assert guest5.sh("ls /dev/nvidia*").out.split() == [
        f"/dev/{n}" for n in sorted(NODES, key=lambda name: (name != "nvidia-uvm", name))
    ]
    assert guest5.sh("nvidia-smi").exit == 127
    kpro5.sh('pct exec 129 -- sh -c "cat >/tmp/driver.run" <"$1"', RUN_FILE).ok()
    assert guest5.sh("sh /tmp/driver.run --nosuch").exit == 1
    guest5.sh("sh /tmp/driver.run --silent --no-kernel-modules").ok()
    assert guest5.sh("nvidia-smi -L").ok().out.count("RTX A6000") == 2
    cuda = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    assert guest5.sh('python3 -c "$1"', cuda).ok().out == "0\n"
    # nvidia-smi does not need the uvm node; CUDA does.
    guest5.sh("rm /dev/nvidia-uvm").ok()
    guest5.sh("nvidia-smi -L").ok()
    assert guest5.sh('python3 -c "$1"', cuda).ok().out == "999\n"
    # The nodes come back with the container, from its configuration.
    kpro5.sh("pct reboot 129").ok()
    assert guest5.sh('python3 -c "$1"', cuda).ok().out == "0\n"


def test_missing_node_keeps_the_guest_from_starting(kpro5: Machine) -> None:
    kpro5.sh("pct stop 129 && printf 'dev0: /dev/nvidia0\\n' >>/etc/pve/lxc/129.conf").ok()
    result = kpro5.sh("pct start 129")
    assert result.exit == 255
    assert "Device /dev/nvidia0 does not exist" in result.err
    assert kpro5.sh("pct status 129").out == "status: stopped\n"


def test_raw_entry_of_a_missing_node_leaves_a_plain_file(kpro5: Machine, guest5: Machine) -> None:
    entry = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"
    kpro5.sh('printf "%s\\n" "$1" >>/etc/pve/lxc/129.conf && pct reboot 129', entry).ok()
    assert guest5.sh("stat -c '%F %a' /dev/nvidia0").out == "regular empty file 0\n"


def test_memory_of_a_server_is_seen_and_freed(kpro5: Machine, guest5: Machine) -> None:
    give_gpus(kpro5)
    hold = (
        "import os, time; os.open('/dev/nvidia0', os.O_PATH); "
        "open('/tmp/held', 'w').close(); time.sleep(600)"
    )
    # argv[0] is the title that the engine's scheduler gives itself.
    guest5.sh(
        'exec setsid python3 -c "import os, sys; os.execv(\\"/usr/bin/python3\\", '
        '[\\"sglang::scheduler_TP0\\", \\"-c\\", sys.argv[1]])" "$1" >/dev/null 2>&1 </dev/null &',
        hold,
    ).ok()
    eventually(lambda: guest5.sh("test -e /tmp/held").exit == 0, "the node is held")
    used = kpro5.sh("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").ok().out
    assert [int(line) > 40000 for line in used.split()] == [True, False]
    apps = "nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader"
    pid, name = kpro5.sh(apps).ok().out.strip().split(", ")
    assert name == "sglang::scheduler_TP0"
    kpro5.sh('kill -9 "$1"', pid).ok()
    eventually(lambda: kpro5.sh(apps).out == "", "the memory is free again")


def test_held_gpu(kpro5: Machine, lab: Lab) -> None:
    lab.fault("gpu-held")
    holders = kpro5.sh("fuser /dev/vfio/14 2>/dev/null")
    assert holders.exit == 0
    pid = holders.out.strip()
    assert "-id\x00101\x00" in kpro5.read(f"/proc/{pid}/cmdline")
    assert "101 windows              running" in kpro5.sh("qm list").out
    # The write blocks, and nothing changes.
    blocked = kpro5.sh(f"timeout 1 sh -c 'echo {FIRST} >{PCI}/drivers/vfio-pci/unbind'")
    assert blocked.exit == 124
    assert kpro5.driver(FIRST) == "vfio-pci"
    kpro5.sh("qm shutdown 101").ok()
    to_nvidia(kpro5, FIRST)


def test_old_server_comes_back_with_the_guest(kpro5: Machine, guest5: Machine, lab: Lab) -> None:
    def models() -> str:
        with urllib.request.urlopen("http://127.0.0.1:30105/v1/models", timeout=5) as answer:
            return str(json.load(answer)["data"][0]["id"])

    assert models() == "tiny-old"
    ready = "The server is fired up and ready to roll!"
    assert guest5.read("/root/sglang.log").rstrip().endswith(ready)
    kpro5.sh("pct reboot 129").ok()
    assert models() == "tiny-old"
    lab.fault("old-server", on=False)
    assert guest5.pids("sglang.launch_server") == []


def test_faults_on_and_off(kpro5: Machine, guest5: Machine, lab: Lab) -> None:
    # Of the hub's own faults one will do: tests/unit has them all.
    names = [name for name in lab.faults() if not name.startswith("hub-")] + ["hub-stall"]
    for name in names:
        lab.fault(name)
    mine = [fault for fault in hub("/_stats")["faults"] if fault.get("client") == "kpro5"]
    assert [fault["do"] for fault in mine] == ["stall"]
    assert guest5.sh("df -m --output=size /srv/models | tail -n 1").out.strip() == "8"
    assert kpro5.sh("modinfo -F version nvidia").exit == 1
    assert kpro5.sh("nvidia-smi").exit == 127
    assert "server-degenerate" in guest5.read("/etc/lab/faults").split("\n")
    changed = run(["sh", str(ROOT / "docker" / "lab.sh"), "ssh", "kpro5", "true"])
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in changed.err
    for name in names:
        lab.fault(name, on=False)
    assert not any(fault.get("client") == "kpro5" for fault in hub("/_stats")["faults"])
    assert kpro5.read("/etc/lab/faults") == ""
    assert kpro5.sh("modinfo -F version nvidia").out == "580.126.09\n"
    lab.reset("kpro5")
    lab.lab("ssh", "kpro5", "true")
    lab.lab("ssh", "kpro5-guest", "true")


def test_restart_of_a_host_is_a_reboot(kpro5: Machine, guest5: Machine, lab: Lab) -> None:
    unit = (
        "[Unit]\nBefore=pve-guests.service\n[Service]\nType=oneshot\n"
        "ExecStart=/bin/touch /run/before-guests\n"
    )
    give_gpus(kpro5)
    kpro5.sh("for n in 0 1 2 3; do pct set 129 --delete dev$n; done; pct reboot 129").ok()
    wants = "/etc/systemd/system/multi-user.target.wants"
    kpro5.sh('mkdir -p "$1" && cat >"$1/test.service"', wants, stdin=unit.encode()).ok()
    run(["docker", "restart", "-t", "1", "deployer-lab-kpro5"]).ok()
    lab.lab("up")
    assert kpro5.driver(FIRST) == "vfio-pci"
    assert kpro5.sh("ls /dev/nvidia*").exit == 2
    assert kpro5.sh("test -e /run/before-guests").exit == 0
    assert guest5.sh("hostname").out == "sglang\n"


def test_playbook_names_the_installer_that_is_there(lab: Lab) -> None:
    path = Path(ROOT / "docker" / "playbooks" / "tiny-hybrid.yaml")
    package = yaml.safe_load(path.read_text())["driver"]["package"]
    seen = lab.hosts["kpro5"].sh('sha256sum "$1"', package["file"]).ok().out.split()[0]
    assert seen == package["sha256"]


def test_only_loopback_is_published() -> None:
    text = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    for service in text["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert not service.get("privileged")
