"""The driver step's scripts, by real shells, against trees like a host's and a guest's."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer import errors
from deployer.apt_texts import explain
from deployer.kernels import DkmsBuild, Kernel
from deployer.model import RunJob, Shell, Where
from deployer.nvidia_texts import api_mismatches, diagnose, standing
from deployer.remote.send import send_file
from deployer.steps import cuda_proof
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import (
    GuestDriver,
    HostDriver,
    HostKernels,
    HostSmi,
    Package,
)
from deployer.steps.driver_install import UNLOAD, apt_job, dkms_job
from deployer.steps.driver_probes import guest_probe, host_probes
from deployer.steps.harmless import HARMLESS
from tests.local_transport import LocalTransport, shell_path
from tests.unit.hoststeps import SHELLS, output, run_script, tool, write
from tests.unit.test_nvidia_texts import OLD as OLD_MISMATCH
from tests.unit.test_step_driver import ALL, WANTED, host, kernels, plan

BY_SHELL = pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: nodes and namespaces")
MODINFO = f"""case "$*" in
*nosuch*) exit 1 ;;
*"-F version"*) echo {WANTED} ;;
*6.8.12-2-pve*) exit 1 ;;
*) printf 'license:        Dual MIT/GPL\\nversion:        {WANTED}\\nsigner: DKMS\\n' ;;
esac
"""


def libraries(root: Path, version: str = WANTED) -> None:
    folder = root / "usr/lib/x86_64-linux-gnu"
    for name in ("libcuda.so", "libnvidia-ml.so"):
        write(folder / f"{name}.{version}", "")
        (folder / f"{name}.1").symlink_to(f"{name}.{version}")


def module(root: Path, name: str, references: int, *users: str) -> None:
    write(root / f"sys/module/{name}/refcnt", f"{references}\n")
    (root / f"sys/module/{name}/holders").mkdir()
    for user in users:
        (root / f"sys/module/{name}/holders/{user}").symlink_to(root / f"sys/module/{user}")


TEXTS = [
    line.split("\t")[3:]
    for line in (Path(__file__).parents[1] / "fixtures/driver/texts.tsv").read_text().splitlines()
]
STANDING = {
    text: cause.name
    for standing, text in TEXTS
    if standing == "yes"
    and not text.startswith("ERROR")
    and "\\n" not in text
    and (cause := diagnose(text))
}


@BY_SHELL
def test_trouble_is_not_pushed_out_of_the_kernel_log(tmp_path: Path, shell: list[str]) -> None:
    """Whatever holds until a reboot is seen below a hundred lines of chatter."""
    tools = tmp_path / "bin"
    lost = []
    texts = list(STANDING)
    for part in (texts[n : n + 20] for n in range(0, len(texts), 20)):
        lines = [f"[  1.0] {text}" for text in part]
        lines += [f"[  2.{n}] NVRM: GPU at PCI:0000:41:00: GPU-{n}" for n in range(100)]
        lines += OLD_MISMATCH.splitlines()
        (tmp_path / "log").write_text("\n".join(lines) + "\n")
        tool(tools, "dmesg", f"cat {tmp_path}/log\n")
        one = host_probes(str(tmp_path / "host"))[0]
        seen = one.parse(output(run_script(one.script, shell, tools)))
        assert isinstance(seen, HostDriver)
        lost += [text for text in part if f"[  1.0] {text}" not in seen.log]
        assert {STANDING[text] for text in part} == {one.name for one, _ in standing(seen.log)}
        assert len(api_mismatches("\n".join(seen.log))) == 1
    assert lost == []


@BY_SHELL
def test_look_at_a_host(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "host", tmp_path / "bin"
    nvrm = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {WANTED}  Release\n"
    write(root / "proc/driver/nvidia/version", nvrm + "GCC version: gcc\n")
    module(root, "nvidia", 5, "nvidia_uvm")
    module(root, "nvidia_uvm", 0)
    write(root / "sys/module/nvidia/version", WANTED + "\n")
    (root / "sys/module/nouveau").mkdir()
    secure = root / "sys/firmware/efi/efivars/SecureBoot-8be4df61"
    secure.parent.mkdir(parents=True)
    secure.write_bytes(b"\x06\0\0\0\x01")
    for address, vendor, kind in (
        ("0000:21:00.0", "0x10de", "0x030000"),
        ("0000:21:00.1", "0x10de", "0x040300"),
        ("0000:22:00.0", "0x8086", "0x030000"),
    ):
        folder = root / "sys/bus/pci/devices" / address
        for name, text in (("vendor", vendor), ("class", kind), ("device", "0x2230")):
            write(folder / name, text + "\n")
        (folder / "driver").symlink_to("../../drivers/nvidia")
    libraries(root)
    write(
        root / "etc/apt/apt.conf.d/20auto-upgrades",
        '// APT::Periodic::Unattended-Upgrade "0";\nAPT::Periodic::Unattended-Upgrade "1";\n',
    )
    write(root / "var/lib/dpkg/status", "")
    write(
        root / "etc/apt/apt.conf.d/50unattended-upgrades",
        'Unattended-Upgrade::Package-Blacklist {\n//  "nvidia-";\n};\n',
    )
    tool(tools, "modinfo", MODINFO)
    tool(tools, "nvidia-smi", "exit 0\n")
    tool(tools, "dmesg", "echo '[1.0] NVRM: loading'; echo '[2.0] usb 1-1'\n")
    tool(
        tools,
        "dpkg-query",
        "echo 'package libcuda1 580.126.09-1 hold installed'\n"
        "echo 'package nvidia-smi 1 deinstall config-files'\n",
    )
    one = host_probes(str(root))[0]
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, HostDriver)
    assert (seen.loaded, seen.on_disk, seen.flavour) == (WANTED, WANTED, "open")
    assert seen.rivals == ("nouveau",)
    assert seen.secure_boot is True
    assert seen.userspace.is_version(WANTED)
    assert seen.references == (("nvidia", 5, 1), ("nvidia_uvm", 0, 0))
    assert seen.busy == ("nvidia",)
    assert [(one.address, one.device, one.driver) for one in seen.gpus] == [
        ("0000:21:00.0", "0x2230", "nvidia")
    ]
    assert seen.log == ("[1.0] NVRM: loading",)
    assert seen.system.packages == (Package("libcuda1", "580.126.09-1", held=True),)
    assert seen.system.unattended
    assert {place for place, free, _ in seen.system.free if free > 0} == {"/usr", "/var"}
    write(
        root / "etc/apt/apt.conf.d/51mine",
        'Unattended-Upgrade::Package-Blacklist { \n  "libnvidia-";\n};\n',
    )
    kept = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(kept, HostDriver) and not kept.system.unattended


@BY_SHELL
def test_look_at_kernels(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "host", tmp_path / "bin"
    for name, image, headers in (
        ("6.8.12-1-pve", True, True),
        ("6.8.12-2-pve", True, False),
        ("6.5.1-1-pve", False, False),
    ):
        (root / "lib/modules" / name).mkdir(parents=True)
        if image:
            write(root / f"boot/vmlinuz-{name}", "")
        if headers:
            write(root / f"lib/modules/{name}/build/Makefile", "")
    write(root / "etc/kernel/proxmox-boot-pin", "6.8.12-1-pve\n")
    write(root / "etc/default/grub", '# GRUB_DEFAULT=7\nGRUB_DEFAULT="saved"\nGRUB_TIMEOUT=5\n')
    write(root / "etc/default/grub.d/x.cfg", "GRUB_DEFAULT='1>2'\n")
    write(root / "boot/grub/grubenv", "# GRUB\nsaved_entry=a>b c\n####\n")
    write(root / "var/lib/dkms/mok.pub", "")
    tool(tools, "modinfo", MODINFO)
    tool(tools, "uname", "echo 6.8.12-1-pve\n")
    tool(tools, "mokutil", 'echo "$2 is not enrolled"\n')
    tool(
        tools, "dkms", f'[ "$*" = status ] && echo "nvidia/{WANTED}, 6.8.12-1-pve, x86_64: built"\n'
    )
    one = host_probes(str(root))[2]
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, HostKernels)
    assert seen.kernels == (
        Kernel("6.5.1-1-pve", False, False, WANTED, "open"),
        Kernel("6.8.12-1-pve", True, True, WANTED, "open"),
        Kernel("6.8.12-2-pve", True, False),
    )
    assert (seen.choice.pin, seen.choice.grub_default) == ("6.8.12-1-pve", "1>2")
    assert seen.choice.saved_entry == "a>b c"
    assert seen.dkms == (DkmsBuild("nvidia", WANTED, "6.8.12-1-pve", "built"),)
    assert seen.has_dkms
    assert seen.mok_enrolled is False
    assert seen.signed == ("6.5.1-1-pve", "6.8.12-1-pve")
    assert seen.next_boot().kernel == "6.8.12-1-pve"


@BY_SHELL
def test_look_at_a_bare_host(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    tool(tools, "modinfo", "echo 'modinfo: ERROR: Module nvidia not found.' >&2; exit 1\n")
    tool(tools, "nvidia-smi", f"touch {tmp_path}/asked\n")
    bare, smi, kernel = host_probes(str(tmp_path))
    seen = bare.parse(output(run_script(bare.script, shell, tools)))
    assert isinstance(seen, HostDriver)
    assert (seen.loaded, seen.on_disk, seen.secure_boot) == ("", "", None)
    none = kernel.parse(output(run_script(kernel.script, shell, tools)))
    assert isinstance(none, HostKernels) and none.kernels == () and none.mok_enrolled is None
    asked = smi.parse(output(run_script(smi.script, shell, tools)))
    assert isinstance(asked, HostSmi)
    assert not asked.asked
    # Loaded, but a GPU has no node: nvidia-smi would make it.
    write(tmp_path / "proc/driver/nvidia/version", "x\n")
    write(tmp_path / "proc/driver/nvidia/gpus/0000:21:00.0/information", "Device Minor: \t 0\n")
    asked = smi.parse(output(run_script(smi.script, shell, tools)))
    assert isinstance(asked, HostSmi) and not asked.asked
    assert not (tmp_path / "asked").exists()


@BY_SHELL
def test_look_at_a_guest(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    libraries(tmp_path)
    nvrm = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\n"
    write(tmp_path / "proc/driver/nvidia/version", nvrm)
    tool(tools, "nvidia-smi", "exit 0\n")
    tool(tools, "systemd-detect-virt", 'echo "lxc"\n')
    one = guest_probe(str(tmp_path))
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, GuestDriver)
    assert seen.userspace.is_version(WANTED)
    assert (seen.kernel_module, seen.virt) == ("535.129.03", "lxc")


# --- CUDA asked, and nothing changed -------------------------------------------------------------


def nodes(root: Path, uvm: int = 511) -> None:
    """A tree whose nodes are devices of this machine's /dev/null and /dev/zero."""
    write(root / "proc/driver/nvidia/version", "x\n")
    write(root / "proc/devices", f"Character devices:\n195 nvidia\n{uvm:>3} nvidia-uvm\n\n")
    (root / "dev").mkdir()
    os.mknod(root / "dev/nvidiactl", 0o660 | 0o020000, os.makedev(1, 3))
    os.mknod(root / "dev/nvidia-uvm", 0o660 | 0o020000, os.makedev(1, 5))


def prove(script: str, shell: list[str], tools: Path | None = None) -> CudaProof:
    found = cuda_proof.parse(output(run_script(script, shell, tools)))
    assert isinstance(found, CudaProof)
    return found


@BY_SHELL
@NEEDS_ROOT
def test_cuda_is_asked_by_the_library_itself(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "guest", tmp_path / "bin"
    (root / "proc").mkdir(parents=True)
    probe = cuda_proof.probe(Where.GUEST, "/nowhere", str(root))
    assert prove(probe.script, shell).skipped == "the nvidia module is not loaded"
    (root / "proc").rmdir()
    nodes(root)
    assert prove(probe.script, shell).stale == (1, 511)
    write(root / "proc/devices", "  1 nvidia-uvm\n")
    library = prove(probe.script, shell)
    assert "libcuda.so.1" in library.library and library.cause is not None
    tool(tools, "python3", 'echo "cuinit 0 CUDA_SUCCESS"; echo "devices 2"; echo "cuda 13000"\n')
    good = prove(probe.script, shell, tools)
    assert good.good and (good.devices, good.cuda) == (2, (13, 0))
    tool(tools, "python3", "echo 'Killed' >&2; exit 139\n")
    assert prove(probe.script, shell, tools).skipped == "asking CUDA ended with 139: Killed"
    (root / "dev/nvidia-uvm").unlink()
    (root / "dev/nvidia-uvm").write_text("")
    assert prove(probe.script, shell).skipped == "/dev/nvidia-uvm is no device here"


@BY_SHELL
@NEEDS_ROOT
def test_what_is_asked_cannot_change_dev(tmp_path: Path, shell: list[str]) -> None:
    """As nvidia-smi and libcuda would: make a node, remove one, set modes, load a module."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here: root without CAP_SYS_ADMIN")
    # Its own name in the real /dev: only there does the private mount count.
    name = Path(f"/dev/deployer-test-{os.getpid()}")
    new = Path(f"{name}-new")
    os.mknod(name, 0o640 | 0o020000, os.makedev(1, 3))
    before = name.stat()
    try:
        harm = f"""
mknod {name}-new c 1 3 && echo made
rm -f {name} && echo removed
chmod 666 {name} && echo changed
echo written >{name} && echo opened
grep CapBnd /proc/self/status
"""
        tool(tmp_path / "bin", "harm", harm)
        done = run_script(HARMLESS + "cannot_harm harm\n", shell, tmp_path / "bin")
        said = done.stdout.decode().splitlines()
        assert said[:-1] == ["opened"]
        assert int(said[-1].split()[1], 16) & (1 << 27 | 1 << 16) == 0
        assert (name.stat().st_mode, name.stat().st_ino) == (before.st_mode, before.st_ino)
        assert not new.exists()
    finally:
        for path in (name, new):
            path.unlink(missing_ok=True)


# --- installing ----------------------------------------------------------------------------------


def moved(script: str, root: Path) -> str:
    """The script with our folder and the installer's log below `root`."""
    return script.replace("/var/lib/deployer", f"{root}/deployer").replace(
        "/var/log/", f"{root}/log/"
    )


def run_file(tmp_path: Path, text: str) -> tuple[Path, str]:
    package = tmp_path / "NVIDIA.run"
    package.write_text(text)
    return package, hashlib.sha256(package.read_bytes()).hexdigest()


def host_job(**package: Any) -> str:
    """The script that installs on a bare host."""
    missing = host(loaded="", on_disk="")
    decided = plan(missing, kernels(), **{**ALL, "package": package})
    action = decided.changes[-1].action
    assert isinstance(action, RunJob)
    return action.script


@BY_SHELL
@pytest.mark.parametrize("digest", ["right", "wrong"])
def test_a_package_runs_only_after_its_hash(tmp_path: Path, shell: list[str], digest: str) -> None:
    package, actual = run_file(tmp_path, f'echo "$@" >{tmp_path}/flags\ntest -d "$TMPDIR"\n')
    tool(tmp_path / "bin", "modinfo", MODINFO)
    script = host_job(file=str(package), sha256=actual if digest == "right" else "0" * 64)
    done = run_script(moved(f"cd {tmp_path}\n{script}", tmp_path), shell, tmp_path / "bin")
    ran = (tmp_path / "flags").exists()
    assert (done.returncode == 0, ran) == ((True, True) if digest == "right" else (False, False))
    assert digest == "right" or b"was not run" in done.stderr
    if ran:
        flags = (tmp_path / "flags").read_text()
        assert "--silent --dkms" in flags
        assert f"--tmpdir={tmp_path}/deployer/driver/tmp" in flags
    # The host's own file is never removed.
    assert package.exists()
    assert not (tmp_path / "deployer/driver/tmp").exists()


@BY_SHELL
def test_a_failed_installer_shows_the_end_of_its_log(tmp_path: Path, shell: list[str]) -> None:
    package, digest = run_file(
        tmp_path,
        f"mkdir -p {tmp_path}/log\n"
        f"echo 'ERROR: the module failed' >{tmp_path}/log/nvidia-installer.log\nexit 3\n",
    )
    script = moved(f"cd {tmp_path}\n" + host_job(file=str(package), sha256=digest), tmp_path)
    done = run_script(script, shell)
    assert done.returncode == 3
    assert b"nvidia-installer.log:\nERROR: the module failed" in done.stderr


@BY_SHELL
def test_an_installer_that_leaves_no_module_has_failed(tmp_path: Path, shell: list[str]) -> None:
    """dkms calls a skipped build a success."""
    package, digest = run_file(tmp_path, "exit 0\n")
    tool(tmp_path / "bin", "modinfo", "exit 1\n")
    tool(tmp_path / "bin", "dkms", "echo 'nvidia/580: added'\n")
    script = moved(f"cd {tmp_path}\n" + host_job(file=str(package), sha256=digest), tmp_path)
    done = run_script(script, shell, tmp_path / "bin")
    assert done.returncode == 1
    assert b"has nvidia module none after the installation" in done.stderr
    assert b"nvidia/580: added" in done.stderr


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server with NVIDIA.run that knows ranges; the second value: Range of each request."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Range", ""))
            data = (tmp_path / "NVIDIA.run").read_bytes()
            start = int(seen[-1].removeprefix("bytes=").rstrip("-") or 0)
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if seen[-1] else 200)
            self.send_header("Content-Length", str(len(data) - start))
            if seen[-1]:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            self.wfile.write(data[start:])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/NVIDIA.run", seen
    server.shutdown()
    thread.join()
    server.server_close()


NO_CURL = pytest.mark.skipif(not shutil.which("curl"), reason="no curl here (apt install curl)")


@pytest.mark.parametrize("client", [pytest.param("curl", marks=NO_CURL), "python3"])
def test_an_url_is_fetched_proven_and_removed(
    tmp_path: Path, mirror: tuple[str, list[str]], client: str
) -> None:
    package, digest = run_file(tmp_path, f"echo ran >{tmp_path}/ran\n" + "# filler\n" * 500)
    url, seen = mirror
    tools = tmp_path / "bin"
    tool(tools, "modinfo", MODINFO)
    script = moved(f"cd {tmp_path}\n" + host_job(url=url, sha256=digest), tmp_path)
    if client == "python3":
        script = script.replace("command -v curl", "false")
    else:
        # What an earlier attempt left is used.
        part = tmp_path / f"deployer/driver/NVIDIA-{WANTED}.run.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(package.read_bytes()[:100])
    done = run_script(script, ["dash"], tools)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "ran").exists()
    assert seen == (["bytes=100-"] if client == "curl" else [""])
    assert list((tmp_path / "deployer/driver").iterdir()) == []


def test_a_file_of_another_hash_is_thrown_away(
    tmp_path: Path, mirror: tuple[str, list[str]]
) -> None:
    run_file(tmp_path, f"echo ran >{tmp_path}/ran\n")
    script = moved(f"cd {tmp_path}\n" + host_job(url=mirror[0], sha256="1" * 64), tmp_path)
    done = run_script(script, ["dash"])
    assert done.returncode == 1
    assert b"was not run" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "deployer/driver").iterdir()) == []


@BY_SHELL
def test_apt_installs_exactly_and_holds(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    for name in ("apt-get", "apt-mark"):
        tool(tools, name, f'echo "{name} $*" >>{tmp_path}/calls\n')
    tool(tools, "modinfo", MODINFO)
    there = f"cd {tmp_path}\n"
    done = run_script(there + apt_job(["a=1-1", "b=2"], WANTED).script, shell, tools)
    assert done.returncode == 0, done.stderr.decode()
    update, install, hold = (tmp_path / "calls").read_text().splitlines()
    assert update.endswith(" update")
    assert install.endswith(" a=1-1 b=2")
    assert hold == "apt-mark hold a b"
    done = run_script(there + apt_job(["a=1-1"], "1.2.3").script, shell, tools)
    assert done.returncode == 1
    assert f"has nvidia module {WANTED} after the installation, not 1.2.3".encode() in done.stderr


@BY_SHELL
def test_apt_waits_for_another_and_forgives_a_repository(tmp_path: Path, shell: list[str]) -> None:
    """`apt-get update` waits for no lock by itself, and fails for one repository of many."""
    tools = tmp_path / "bin"
    tool(
        tools,
        "apt-get",
        f"""echo "$*" >>{tmp_path}/calls
case "$*" in *install*)
  [ -z "$FAIL" ] || {{ echo 'Error! no headers' | tee -a log; echo 'E: broken' >&2; exit 100; }}
  exit 0 ;;
esac
if [ "$(wc -l <{tmp_path}/calls)" -lt 3 ]; then
  echo 'E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt)' >&2
  exit 100
fi
echo 'E: Failed to fetch https://enterprise.proxmox.com/x  401  Unauthorized [IP: 1.2.3.4 443]' >&2
exit 100
""",
    )
    tool(tools, "apt-mark", "exit 0\n")
    tool(tools, "modinfo", MODINFO)
    tool(tools, "sleep", "exec /bin/sleep 0.01\n")
    there = f"cd {tmp_path}\n: >log\n"
    done = run_script(there + "FAIL=\n" + apt_job(["a=1"], WANTED).script, shell, tools)
    assert done.returncode == 0, done.stderr.decode()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line.split()[-1] for line in calls] == ["update", "update", "update", "a=1"]
    script = f"export FAIL=yes\n{there}{apt_job(['a=1'], WANTED).script}"
    failed = run_script(script, shell, tools)
    assert failed.returncode == 100
    said = failed.stderr.decode().splitlines()
    assert said[:3] == ["E: broken", "Error! no headers", "--- apt-get update had said:"]
    meaning = explain(said)
    assert meaning is not None and "https://enterprise.proxmox.com/x (401" in meaning.cause


@BY_SHELL
def test_dkms_is_believed_only_with_a_module(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    tool(tools, "dkms", f'echo "$*" >>{tmp_path}/calls\n')
    tool(tools, "modinfo", MODINFO)
    assert run_script(dkms_job(WANTED, "6.9").script, shell, tools).returncode == 0
    assert (tmp_path / "calls").read_text() == f"install nvidia/{WANTED} -k 6.9\n"
    skipped = run_script(dkms_job(WANTED, "nosuch").script, shell, tools)
    assert skipped.returncode == 1
    assert b"kernel nosuch has nvidia module none after dkms" in skipped.stderr


@BY_SHELL
def test_unloading_stops_at_a_module_in_use(tmp_path: Path, shell: list[str]) -> None:
    for name in ("nvidia", "nvidia_uvm"):
        (tmp_path / "sys/module" / name).mkdir(parents=True)
    script = UNLOAD.replace("/sys/module", str(tmp_path / "sys/module"))
    tools = tmp_path / "bin"
    remove = f'echo "$*" >>{tmp_path}/calls\nrmdir {tmp_path}/sys/module/$2\n'
    tool(tools, "modprobe", f"[ $2 != nvidia ] || exit 1\n{remove}")
    assert run_script(script, shell, tools).returncode == 1
    assert (tmp_path / "calls").read_text() == "-r nvidia_uvm\n"
    tool(tools, "modprobe", remove)
    assert run_script(script, shell, tools).returncode == 0
    assert not (tmp_path / "sys/module/nvidia").exists()


@BY_SHELL
def test_the_copy_is_checked_inside_the_guest(tmp_path: Path, shell: list[str]) -> None:
    package, digest = run_file(tmp_path, "exit 0\n")
    chosen = {"file": str(package), "sha256": digest}
    copy = plan(host(), GuestDriver(), package=chosen).changes[0].action
    assert isinstance(copy, Shell)
    script = copy.script.replace("/var/lib/deployer", str(tmp_path / "guest"))
    tools = tmp_path / "bin"
    tool(tools, "pct", '[ "$1 $2 $3" = "exec 129 --" ] || exit 9\nshift 3\nexec "$@"\n')
    done = run_script(script, shell, tools)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / f"guest/driver/NVIDIA-{WANTED}.run").read_text() == "exit 0\n"
    # A copy that lost bytes although everything exited 0.
    tool(tools, "pct", 'shift 3\n[ "$1" = sh ] && { "$@" </dev/null; exit 0; }\nexec "$@"\n')
    lost = run_script(script, shell, tools)
    assert lost.returncode == 1
    assert b"sha256" in lost.stderr


# --- a file of this machine ----------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["dash", "busybox"])
def test_a_file_is_sent_and_goes_on_where_it_stopped(tmp_path: Path, shell: str) -> None:
    door = LocalTransport(shell_path(shell, tmp_path))
    source, target = tmp_path / "N.run", tmp_path / "there/driver/N.run"
    source.write_bytes(os.urandom(10_000))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    told: list[tuple[int, int]] = []

    def cut(done: int, size: int) -> None:
        told.append((done, size))
        if done == 4096:
            raise errors.ConnectionLost("cut", where="there")

    with pytest.raises(errors.ConnectionLost):
        send_file(door, source, str(target), digest, cut, piece_bytes=2048)
    assert not target.exists()
    assert send_file(door, source, str(target), digest, piece_bytes=4096) == 10_000 - 4096
    assert target.read_bytes() == source.read_bytes()
    assert told == [(2048, 10_000), (4096, 10_000)]
    assert send_file(door, source, str(target), digest) == 0
    target.write_bytes(b"x" * 10_000)
    assert send_file(door, source, str(target), digest) == 10_000, "same size, other bytes"


def test_what_is_not_the_file_is_not_sent(tmp_path: Path) -> None:
    door = LocalTransport(shell_path("dash", tmp_path))
    source, target = tmp_path / "N.run", tmp_path / "there/N.run"
    with pytest.raises(errors.StepFailed, match="cannot be read"):
        send_file(door, source, str(target), "0" * 64)
    source.write_bytes(b"abc")
    with pytest.raises(errors.StepFailed, match="the playbook wants 000"):
        send_file(door, source, str(target), "0" * 64)
    assert door.runs == 0
    digest = hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/N.run.part").write_bytes(b"xy")
    with pytest.raises(errors.RemoteCommandFailed, match="is not the file that was sent"):
        send_file(door, source, str(target), digest)
    assert not target.exists()
    assert send_file(door, source, str(target), digest) == 3
